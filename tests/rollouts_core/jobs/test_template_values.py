"""Pins that `model.chat_template_kwargs` reaches SFT, RL, evaluation and the served model.

Without it a model would be trained without thoughts, and evaluated and served with them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pytest

from rollouts_core.config import EvaluationConfig, ModelConfig, RLTrainingConfig, SFTTrainingConfig
from rollouts_core.fingerprint import digest_model
from rollouts_core.job import EngineAddress, EvalJob, InputDataset, InputModel, RLJob, SFTJob
from rollouts_core.metrics import read_json_lines
from rollouts_core.model.loading import load_tokenizer
from rollouts_core.types import sample_from_json
from tests.rollouts_core.jobs.test_job_kinds import ONE_THREAD, ROLLOUT, do, rows
from tests.rollouts_core.served_engine import engine_url

MARKED_TEMPLATE = (
    "{% set begin = '<|assistant|>' + (mark if mark is defined else '') %}{% for message in messages %}"
    "{{ begin if message['role'] == 'assistant' else '<|user|>' }}{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ begin }}{% endif %}"
)
MARKED = "<|assistant|>=="


def input_model(folder: Path, **settings: object) -> InputModel:
    model = ModelConfig.model_validate({"path": str(folder), **settings})
    return InputModel(name="model", model=model, digest=digest_model(model))


@pytest.mark.slow
def test_values_for_the_template_reach_every_stage_and_the_served_model(
    base_model: ModelConfig, quickstart_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "base"
    shutil.copytree(base_model.path, folder)
    plain = load_tokenizer(base_model)
    plain.chat_template = MARKED_TEMPLATE
    plain.save_pretrained(folder)

    sft_rows = rows(quickstart_dir, "sft")
    job = SFTJob(
        model=input_model(folder, chat_template_kwargs={"mark": "=="}),
        data=(InputDataset(path=sft_rows.path, digest=sft_rows.digest),),
        training=SFTTrainingConfig(num_steps=1, batch_size=2),
        deployment=ONE_THREAD,
    )
    do(job, tmp_path / "sft")
    described = json.loads((tmp_path / "sft/rows.json").read_text())
    trained = [row["tokens"] for row in described["rows"]]

    # The later stages are told the checkpoint alone.
    tuned = input_model(tmp_path / "sft/checkpoints/step_000001")
    prompts = rows(quickstart_dir, "prompts")
    with engine_url(Path(tuned.model.path)) as url:
        rl = RLJob(
            model=tuned,
            prompts=prompts,
            training=RLTrainingConfig(num_steps=1),
            rollout=ROLLOUT.model_copy(update={"batch_size": 2}),
            engines=(EngineAddress(url=url, lease_file=str(tmp_path / "lease")),),
            deployment=ONE_THREAD,
        )
        do(rl, tmp_path / "rl")
        asked = {"messages": [{"role": "user", "content": "1+1"}]}
        seen_by_clients = httpx.post(f"{url}/tokenize", json=asked).json()["tokens"]
    evaluation = EvalJob(
        checkpoints=(tuned,), data=prompts, evaluation=EvaluationConfig(), rollout=ROLLOUT, deployment=ONE_THREAD
    )
    do(evaluation, tmp_path / "evaluation")
    sampled = [*(tmp_path / "rl/samples").glob("step_*.jsonl"), *(tmp_path / "evaluation/samples").glob("*.jsonl")]
    samples = [sample_from_json(line) for path in sampled for line in read_json_lines(path)]
    assert len(sampled) == 2 and samples and trained
    for tokens in [*trained, seen_by_clients, *(sample.tokens for sample in samples)]:
        assert MARKED in plain.decode(tokens, clean_up_tokenization_spaces=False)
