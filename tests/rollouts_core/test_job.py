"""Pins that a job read from its file is the job that was written, and that any other file is refused.

Without it the orchestrator and the machine could disagree about what is trained.
"""

import json
from pathlib import Path

import pytest

from rollouts_core.config import (
    DeploymentConfig,
    EngineConfig,
    EvaluationConfig,
    ModelConfig,
    RLTrainingConfig,
    RolloutConfig,
    SFTTrainingConfig,
)
from rollouts_core.errors import ConfigError
from rollouts_core.job import (
    EngineAddress,
    EvalJob,
    GenerateJob,
    InputDataset,
    InputFile,
    InputModel,
    Job,
    RLJob,
    ServeJob,
    SFTJob,
    load_job,
)
from rollouts_core.rewards import exact_match

BASE = InputModel(name="base", model=ModelConfig(path="base"), digest="m", step=3)
DATASET = InputDataset(path="rows.jsonl", digest="d", max_samples=3, repeat=0.5)
ROWS = InputFile(path="rows.jsonl", digest="d")
EMBEDDED = EngineConfig(kind="embedded")
BY_EMBEDDED = RolloutConfig(engine=EMBEDDED)
JOBS = [
    SFTJob(model=BASE, data=(DATASET,), training=SFTTrainingConfig(num_steps=3)),
    RLJob(
        model=BASE,
        prompts=ROWS,
        training=RLTrainingConfig(),
        rollout=RolloutConfig(reward_fn="exact_match", engine=EMBEDDED),
        engines=(EngineAddress(url="http://127.0.0.1:1", lease_file="lease"),),
        deployment=DeploymentConfig(trainer_gpu_ranks=(0,)),
    ),
    EvalJob(checkpoints=(BASE, BASE), data=ROWS, evaluation=EvaluationConfig(max_prompts=3), rollout=BY_EMBEDDED),
    GenerateJob(model=BASE, prompts=ROWS, rollout=BY_EMBEDDED),
    ServeJob(model=BASE, port=0, context_length=128, engine=EMBEDDED),
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.kind)
def test_a_job_comes_back_unchanged_from_its_file(tmp_path: Path, job: Job) -> None:
    (tmp_path / "job.json").write_text(job.model_dump_json())
    assert load_job(tmp_path / "job.json") == job


@pytest.mark.parametrize("job", JOBS[2:], ids=lambda job: job.kind)
def test_a_job_without_a_kind_of_engine_uses_the_embedded_engine(tmp_path: Path, job: Job) -> None:
    settings = job.model_dump(mode="json")
    del (settings if job.kind == "serve" else settings["rollout"])["engine"]
    (tmp_path / "job.json").write_text(json.dumps(settings))
    assert load_job(tmp_path / "job.json") == job


def test_a_function_travels_by_name(tmp_path: Path) -> None:
    job = GenerateJob(model=BASE, prompts=ROWS, rollout=RolloutConfig(reward_fn=exact_match))
    (tmp_path / "job.json").write_text(job.model_dump_json())
    loaded = load_job(tmp_path / "job.json")
    assert isinstance(loaded, GenerateJob)
    assert loaded.rollout.reward_fn == "rollouts_core.rewards:exact_match"


def test_a_job_that_an_earlier_version_wrote_names_the_kind_of_its_engines_provider() -> None:
    former = {"provider": "vllm", "url": "http://127.0.0.1:1", "lease_file": "lease"}
    assert EngineAddress.model_validate(former).kind == "vllm"


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"kind": "dance"}', '{"kind": "sft"}', JOBS[0].model_dump_json()[:-1] + ', "extra": 1}'],
)
def test_a_file_that_is_no_job_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "job.json").write_text(content)
    with pytest.raises(ConfigError, match=r"job\.json( is not valid JSON| must contain a table| has the kind|: )"):
        load_job(tmp_path / "job.json")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_job(tmp_path / "job.json")


def test_an_evaluation_needs_a_checkpoint() -> None:
    with pytest.raises(ValueError, match="at least 1 item"):
        EvalJob(checkpoints=(), data=ROWS, evaluation=EvaluationConfig())


def test_an_evaluation_tells_its_checkpoints_apart_by_their_names() -> None:
    """Else the second one is scored by what the first one said: completions lie under the name."""
    last_of_rl = BASE.model_copy(update={"digest": "another"})
    with pytest.raises(ValueError, match="two different checkpoints are called base"):
        EvalJob(checkpoints=(BASE, last_of_rl), data=ROWS, evaluation=EvaluationConfig())
