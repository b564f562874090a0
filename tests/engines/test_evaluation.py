"""Pins that checkpoints are compared by what the run's engine completes, also those that no decoder of ours computes.

Without it selection would compute on the CPU whatever the settings say, and a Mistral could be trained by RL but not
evaluated.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w
import torch
import transformers
from transformers import PreTrainedModel

from rollouts_core.__main__ import main
from rollouts_core.config import EngineConfig, EngineKind, EvaluationConfig, ModelConfig, RolloutConfig, SamplingConfig
from rollouts_core.data.rows import digest_path
from rollouts_core.fingerprint import digest_model
from rollouts_core.job import EvalJob, InputFile, InputModel
from rollouts_core.metrics import read_json_lines
from rollouts_core.quickstart import SMALL_SIZE, build_character_tokenizer, write_quickstart_files
from tests.engines.models import SavedModel, make, save
from tests.engines.servers import engine_python
from tests.engines.test_pipeline import settings_of
from tests.flows.conftest import prefect_home, rollouts, served_home
from tests.kit.commands import Rollouts

__all__ = ["prefect_home", "rollouts", "served_home"]  # fixtures of another folder

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

MAX_NEW_TOKENS = 12


def make_mistral() -> PreTrainedModel:
    """A tiny model of a family that the own decoder does not know."""
    known = make(0).config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    shape = {name: getattr(known, name) for name in (*names, "head_dim", "vocab_size", "eos_token_id")}
    config = transformers.MistralConfig(**shape, max_position_embeddings=512, initializer_range=0.3)
    return transformers.MistralForCausalLM(config)


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "family"), [("sglang", "qwen3"), ("vllm", "mistral")])
def test_an_evaluation_asks_the_engine_for_what_the_model_says(kind: EngineKind, family: str, tmp_path: Path) -> None:
    saved = save(make(0) if family == "qwen3" else make_mistral(), tmp_path / "model")
    write_quickstart_files(tmp_path / "rows", size=SMALL_SIZE)
    rows, model = tmp_path / "rows/heldout.jsonl", ModelConfig(path=str(saved.directory))
    job = EvalJob(
        checkpoints=(InputModel(name="base", model=model, digest=digest_model(model)),),
        data=InputFile(path=str(rows), digest=digest_path(rows)),
        evaluation=EvaluationConfig(max_prompts=8),
        rollout=RolloutConfig(
            engine=EngineConfig(kind=kind, python=str(engine_python(kind)), dtype="float32"),
            environment="arithmetic",
            sampling=SamplingConfig(max_new_tokens=MAX_NEW_TOKENS),
        ),
    )
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval/job.json").write_text(job.model_dump_json())
    assert main(["eval", str(tmp_path / "eval/job.json")]) == 0
    samples = read_json_lines(tmp_path / "eval/samples/base.jsonl")
    assert len(samples) == 8
    for sample in samples:
        assert sample["tokens"] == complete(saved, sample["tokens"], num_prompt=sample["loss_mask"].index(1.0))


def complete(saved: SavedModel, tokens: list[int], *, num_prompt: int) -> list[int]:
    """What the model itself says after the prompt, always its likeliest token."""
    eos = build_character_tokenizer().eos_token_id
    completed = saved.model.generate(
        torch.tensor([tokens[:num_prompt]]), max_new_tokens=MAX_NEW_TOKENS, do_sample=False, eos_token_id=eos
    )
    found: list[int] = completed[0].tolist()
    return found


@pytest.mark.matrix
def test_rollouts_evaluate_scores_by_sglang(rollouts: Rollouts, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    settings = settings_of(folder, {"kind": "sglang", "python": str(engine_python("sglang"))})
    settings["evaluation"]["engine"] = "rollout"
    (folder / "small.toml").write_text(tomli_w.dumps(settings))
    code, output = rollouts.run("evaluate", str(folder / "small.toml"), "base")
    assert code == 0, output
    (stage,) = rollouts.store.glob("stages/evaluate-*")
    assert "sglang" in (stage / "engine-0.txt").read_text()
    [samples] = (stage / "samples").glob("*.jsonl")
    assert len(read_json_lines(samples)) == SMALL_SIZE.num_heldout_prompts
