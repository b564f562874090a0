"""Jobs that score completions start the engines that complete prompts, and nothing of these outlives the job.

Without these tests checkpoints could be compared by the completions of one of them, an engine that cannot start could
let a job wait for ever, and one of a job that was killed could keep its GPU.

A program of the test stands in for the interpreter of SGLang's environment: it becomes the embedded engine, which
answers as SGLang does. The real ones are asked in tests/engines/test_evaluation.py.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from rollouts_core.__main__ import main
from rollouts_core.config import (
    DeploymentConfig,
    EngineConfig,
    EvaluationConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
)
from rollouts_core.data.rows import digest_path
from rollouts_core.errors import EngineError, EngineUnavailableError
from rollouts_core.fingerprint import digest_model
from rollouts_core.job import EvalJob, InputFile, InputModel
from rollouts_core.metrics import read_json_lines
from rollouts_core.quickstart import build_untrained_model
from tests.kit.waiting import wait_until
from tests.rollouts_core.make import TINY_SIZE

if sys.platform != "linux":
    pytest.skip("processes that end with the one that started them are Linux's", allow_module_level=True)

EMBEDDED = """
import argparse, os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from rollouts_core.embedded.server import serve
parser = argparse.ArgumentParser()
for name in ("model-path", "port", "context-length"):
    parser.add_argument("--" + name)
known, _ = parser.parse_known_args()
print("GPUs", os.environ.get("CUDA_VISIBLE_DEVICES"), "of", known.model_path, "process", os.getpid(), flush=True)
{before}
serve(Path(known.model_path), port=int(known.port), context_length=int(known.context_length))
"""
DYING = """
from rollouts_core.embedded.scheduler import Scheduler
def die(*arguments, **named):
    print("torch.OutOfMemoryError: CUDA out of memory", flush=True)
    os._exit(1)
Scheduler.submit = die
"""
ROOT = Path(__file__).parents[3]


@pytest.fixture
def write_engine(tmp_path: Path) -> Callable[[str], EngineConfig]:
    """Makes an engine of a shell script, which gets SGLang's arguments."""

    def write(script: str) -> EngineConfig:
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return EngineConfig(kind="sglang", python=str(program), start_timeout_s=120)

    return write


@pytest.fixture
def embedded(tmp_path: Path, write_engine: Callable[[str], EngineConfig]) -> EngineConfig:
    """An engine that answers."""
    (tmp_path / "engine.py").write_text(EMBEDDED.format(root=str(ROOT), before=""))
    return write_engine(f'exec {sys.executable} {tmp_path}/engine.py "$@"')


@pytest.fixture
def other_model(base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> ModelConfig:
    """Other weights of the same shapes."""
    folder = tmp_path / "other"
    build_untrained_model(tokenizer, TINY_SIZE, seed=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ModelConfig(path=str(folder))


def write_job(
    run_dir: Path, engine: EngineConfig, models: list[ModelConfig], rows: Path, deployment: DeploymentConfig
) -> Path:
    """An evaluation of the models, in a directory of its own."""
    job = EvalJob(
        checkpoints=tuple(
            InputModel(name=f"model-{number}", model=model, digest=digest_model(model))
            for number, model in enumerate(models)
        ),
        data=InputFile(path=str(rows), digest=digest_path(rows)),
        evaluation=EvaluationConfig(samples_per_prompt=2, temperature=1.0),
        rollout=RolloutConfig(environment="arithmetic", engine=engine, sampling=SamplingConfig(max_new_tokens=8)),
        deployment=deployment,
    )
    run_dir.mkdir()
    (run_dir / "job.json").write_text(job.model_dump_json())
    return run_dir / "job.json"


ONE_THREAD = DeploymentConfig(trainer_threads=1)


@pytest.mark.slow
def test_each_checkpoint_is_completed_by_engines_of_its_own(
    embedded: EngineConfig, base_model: ModelConfig, other_model: ModelConfig, quickstart_dir: Path, tmp_path: Path
) -> None:
    models, rows = [base_model, other_model], quickstart_dir / "heldout.jsonl"
    two_engines = ONE_THREAD.model_copy(update={"num_engines": 2, "engine_gpu_ranks": (3, 5), "colocated": True})
    assert main(["eval", str(write_job(tmp_path / "here", EngineConfig(), models, rows, ONE_THREAD))]) == 0
    assert main(["eval", str(write_job(tmp_path / "asked", embedded, models, rows, two_engines))]) == 0
    for name in ("model-0", "model-1"):
        here, asked = (
            [sample["tokens"] for sample in read_json_lines(tmp_path / folder / f"samples/{name}.jsonl")]
            for folder in ("here", "asked")
        )
        assert here == asked
    scores = [json.loads((tmp_path / each / "result.json").read_text())["checkpoints"] for each in ("here", "asked")]
    assert scores[0] == scores[1]
    logs = [(tmp_path / f"asked/engine-{index}.txt").read_text() for index in (0, 1)]
    for log, rank in zip(logs, (3, 5), strict=True):
        started = [line.split() for line in log.splitlines() if line.startswith("GPUs")]
        assert [(words[1], words[3]) for words in started] == [(str(rank), model.path) for model in models]
        assert not any(Path(f"/proc/{words[-1]}").exists() for words in started)
    assert list((tmp_path / "asked/weights").iterdir()) == []


@pytest.mark.slow
def test_an_engine_that_cannot_start_is_one_sentence(
    write_engine: Callable[[str], EngineConfig],
    base_model: ModelConfig,
    quickstart_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = quickstart_dir / "heldout.jsonl"
    missing = EngineConfig(kind="sglang", python=str(tmp_path / "nowhere/python"))
    assert main(["eval", str(write_job(tmp_path / "missing", missing, [base_model], rows, ONE_THREAD))]) == 2
    assert "nowhere/python cannot be started (No such file or directory)" in capsys.readouterr().err.splitlines()[-1]

    full = write_engine("echo torch.OutOfMemoryError: CUDA out of memory; exit 1")
    with pytest.raises(EngineError, match=r"model-0 ended by itself: it ran out of memory(.|\n)*CUDA out"):
        main(["eval", str(write_job(tmp_path / "full", full, [base_model], rows, ONE_THREAD))])

    # In the log of an earlier start a reason is no reason.
    write_engine("echo bye; exit 3")
    with pytest.raises(EngineError, match=r"model-0 ended by itself: exit code 3\nThe last lines of .*:\nbye$"):
        main(["eval", str(tmp_path / "full/job.json")])

    silent = write_engine("echo loading; exec sleep 600").model_copy(update={"start_timeout_s": 20})
    with pytest.raises(EngineUnavailableError, match=r"did not answer within 20 s .*engine-0\.txt is 'loading'"):
        main(["eval", str(write_job(tmp_path / "silent", silent, [base_model], rows, ONE_THREAD))])


@pytest.mark.slow
def test_an_engine_that_ends_while_it_is_asked_says_why(
    embedded: EngineConfig, base_model: ModelConfig, quickstart_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "engine.py").write_text(EMBEDDED.format(root=str(ROOT), before=DYING))
    rows = quickstart_dir / "heldout.jsonl"
    with pytest.raises(EngineError, match=r"model-0 ended by itself: it ran out of memory"):
        main(["eval", str(write_job(tmp_path / "asked", embedded, [base_model], rows, ONE_THREAD))])


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize(("value", "how"), [(math.nan, "ends at its start"), (3e38, "answers that it has no numbers")])
def test_a_checkpoint_whose_engine_has_no_numbers_is_left_out_of_a_selection(
    embedded: EngineConfig, base_model: ModelConfig, quickstart_dir: Path, tmp_path: Path, value: float, how: str
) -> None:
    shutil.copytree(base_model.path, tmp_path / "diverged")
    weights = load_file(tmp_path / "diverged/model.safetensors")
    weights["model.norm.weight"][2:] = value
    save_file(weights, tmp_path / "diverged/model.safetensors", metadata={"format": "pt"})
    models = [ModelConfig(path=str(tmp_path / "diverged")), base_model]
    path = write_job(tmp_path / "select", embedded, models, quickstart_dir / "heldout.jsonl", ONE_THREAD)
    path.write_text(json.dumps({**json.loads(path.read_text()), "is_selection": True}))
    assert main(["eval", str(path)]) == 0, how
    result = json.loads((tmp_path / "select/result.json").read_text())
    assert ([entry["name"] for entry in result["checkpoints"]], result["best"]) == (["model-1"], "model-1")
    assert re.match(
        r"model-0 has no score and cannot be chosen: the weights at .*/diverged give no finite numbers",
        result["warning"],
    )


@pytest.mark.matrix
@pytest.mark.slow
def test_an_engine_ends_with_the_job_that_was_killed(
    write_engine: Callable[[str], EngineConfig], base_model: ModelConfig, quickstart_dir: Path, tmp_path: Path
) -> None:
    silent = write_engine(f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; exec sleep 600")
    path = write_job(tmp_path / "killed", silent, [base_model], quickstart_dir / "heldout.jsonl", ONE_THREAD)
    with subprocess.Popen([sys.executable, "-m", "rollouts_core", "eval", str(path)], cwd=ROOT) as job:
        wait_until((tmp_path / "pid").exists, timeout_s=60)
        job.send_signal(signal.SIGKILL)
    status = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/status")
    wait_until(lambda: has_ended(status), timeout_s=60)


def has_ended(status: Path) -> bool:
    """Whether the process of this status is gone, or only waits to be taken note of."""
    try:
        return "\nState:\tZ" in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
