"""Pins: every preset is valid, its preparation makes the files it reads, it takes a training step, and it runs whole.

Without it a preset would break with a renamed setting, and the first to notice would be a person with a rented GPU.

Folders take the place of the hub: a few made-up rows with the public datasets' columns, and a model of the preset's own
family with a small vocabulary. REDUCED shrinks steps, batches and lengths. Everything else of a preset stays as it is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from typer.testing import CliRunner

from rollouts.flows.cli import app
from rollouts.flows.deployments import PRESETS
from rollouts.flows.form import load_pipeline, parse_pipeline
from rollouts.tasks.preparing import prepare_data
from rollouts_core.algorithms.loss import Metrics, create_cross_entropy_loss, create_policy_loss
from rollouts_core.backends.pytorch import create_pytorch_backend
from rollouts_core.checkpoint import step_directory
from rollouts_core.checks.validate import validate_config
from rollouts_core.config import Config, ModelConfig, read_settings
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.data.dataset import load_prompts_from_jsonl, load_sft_dataset
from rollouts_core.data.preparations import PREPARATIONS
from rollouts_core.data.preparing import find_source
from rollouts_core.data.rows import COMMIT
from rollouts_core.embedded.app import build_app
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.scheduler import Scheduler
from rollouts_core.engines import PublishTarget, SGLangEngine
from rollouts_core.model.loading import pad_token_id
from rollouts_core.quickstart import QuickstartSize, write_quickstart_files
from rollouts_core.rl import run_rl_training
from rollouts_core.rollout.generate import create_engine_generate_fn
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.sft import run_sft_training
from tests.flows.conftest import prefect_home, rollouts, served_home
from tests.kit.commands import Rollouts

__all__ = ["prefect_home", "rollouts", "served_home"]  # fixtures of another folder

Settings = dict[str, Any]  # Any: settings of every type
Rows = list[dict[str, Any]]  # Any: columns of every type

NAMES = sorted(path.stem for path in PRESETS.glob("*.toml"))
HUB_PRESETS = [name for name in NAMES if name != "quickstart"]
CHOSEN = "rollout.engine: auto chooses embedded, because the node has no GPU"
SIZES = {"num_train": 20, "num_selection": 6, "num_heldout": 8}
REDUCED: Settings = {
    "model": {"path": "./base_model"},
    "data": {"prepare": {"source": "./dataset", "settings": SIZES}},
    "training": {
        "sft": {"num_steps": 1, "batch_size": 2, "micro_batch_size": 1, "max_length": 256},
        "rl": {"num_steps": 1},
    },
    "rollout": {"batch_size": 2, "sampling": {"max_new_tokens": 32}},
}
NUM_ENGINE_SLOTS = 16
MAX_KL = 1e-6
"""Nats per token, between the engine's log-probs and the trainer's of the same weights: float32 rounding."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>")
FINAL_ANSWERS = (r"\boxed{1}", r"\boxed{2}")
"""One token each, so that an untrained model gives a right answer now and then, and a wrong one too."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_valid_and_says_how_it_is_run(name: str) -> None:
    path = PRESETS / f"{name}.toml"
    assert load_pipeline(path).run.name == name
    assert path.read_text().startswith("# "), "what it trains"
    assert name == "quickstart" or f"rollouts run --preset {name}\n" in path.read_text()


@pytest.mark.parametrize("name", HUB_PRESETS)
def test_a_preset_names_the_commits_of_its_model_and_dataset(name: str) -> None:
    config = load_pipeline(PRESETS / f"{name}.toml").config
    source, revision = find_source(config.data.prepare)
    assert source == PREPARATIONS[str(config.data.prepare.name)].source
    assert COMMIT.fullmatch(revision) and COMMIT.fullmatch(config.model.revision)


@pytest.mark.slow
def test_a_preset_is_printed_as_it_is_and_without_a_name_all_are_listed() -> None:
    listed = CliRunner().invoke(app, ["preset"])
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == NAMES
    assert "Supervised fine-tuning of Qwen2.5-0.5B-Instruct on conversations\n" in listed.stdout
    for name in NAMES:
        printed = CliRunner().invoke(app, ["preset", name])
        assert printed.exit_code == 0
        assert printed.stdout == (PRESETS / f"{name}.toml").read_text()
    refused = CliRunner().invoke(app, ["preset", "sft_quen"])
    assert refused.exit_code == 2
    assert "there is no preset sft_quen; did you mean sft_qwen?" in refused.stderr


@pytest.mark.parametrize("name", HUB_PRESETS)
def test_a_preset_takes_a_training_step(name: str, tmp_path: Path) -> None:
    write_folders_of_hub(name, tmp_path)
    config = prepare_data(reduce_preset(name, tmp_path), tmp_path / "store", lambda sentence: None)
    metrics = take_a_step_of_each_stage(config, tmp_path)
    for stage, numbers in metrics.items():
        assert numbers["grad_norm"] > 0, f"{stage} had nothing to learn from: {numbers}"
    if "rl" in metrics:
        assert abs(metrics["rl"]["kl_rollout_policy"]) < MAX_KL, "engine and trainer compute the same model"


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", HUB_PRESETS)
def test_a_reduced_preset_runs_to_its_report(name: str, rollouts: Rollouts, tmp_path: Path) -> None:
    write_folders_of_hub(name, tmp_path)
    changes = {
        "model.path": str(tmp_path / "base_model"),
        "model.revision": "",
        "data.prepare.source": str(tmp_path / "dataset"),
        **{f"data.prepare.settings.{key}": size for key, size in SIZES.items()},
        **{f"training.{stage}.{key}": 2 for stage in ("sft", "rl") for key in ("num_steps", "checkpoint_every")},
        **{"training.sft.batch_size": 2, "training.sft.micro_batch_size": 1, "training.sft.max_length": 256},
        **{"rollout.batch_size": 2, "rollout.sampling.max_new_tokens": 16},
        **{"rollout.filter_fn": "reasonable_length", "rollout.over_sampling_factor": 1.0},
        **{"evaluation.max_p_value": 1.0, "deployment.trainer_gpu_ranks": [], "deployment.trainer_processes": 1},
        **{"deployment.engine_gpu_ranks": [], "deployment.colocated": False},
        **{"deployment.engine_threads": 1, "node.min_free_gb": 0.1},
    }
    given = [f"{key}={json.dumps(value) if not isinstance(value, str) else value}" for key, value in changes.items()]
    code, output = rollouts.run("run", "--preset", name, *given)
    assert code == 0, output
    [report] = rollouts.store.glob("runs/*/report.html")
    assert "6 rows of selection" in output
    assert (CHOSEN in output) == load_pipeline(PRESETS / f"{name}.toml").config.is_graded
    prepare = read_settings(report.with_name("config.toml"))["data"]["prepare"]
    assert prepare["name"] == load_pipeline(PRESETS / f"{name}.toml").config.data.prepare.name


def test_the_quickstart_takes_a_training_step(tmp_path: Path) -> None:
    size = QuickstartSize(num_demonstrations=40, num_prompts=20, num_selection_prompts=6, num_heldout_prompts=8)
    write_quickstart_files(tmp_path / "files", size=size)
    metrics = take_a_step_of_each_stage(reduce_preset("quickstart", tmp_path / "files"), tmp_path)
    assert metrics["sft"]["grad_norm"] > 0
    assert metrics["rl"]["reward"] == 0, "an untrained model adds nothing up"


def reduce_preset(name: str, folder: Path) -> Config:
    """The preset at reduced width, as if it lay in `folder`."""
    settings = merge_settings(read_settings(PRESETS / f"{name}.toml"), REDUCED)
    return parse_pipeline(settings, folder / f"{name}.toml").config


def merge_settings(settings: Settings, changes: Settings) -> Settings:
    """`settings` with `changes` in their places."""
    merged = dict(settings)
    for key, value in changes.items():
        merged[key] = merge_settings(settings.get(key, {}), value) if isinstance(value, dict) else value
    return merged


def take_a_step_of_each_stage(config: Config, folder: Path) -> dict[str, Metrics]:
    """The metrics of the one step of each stage; RL starts where SFT ended, if the mode has both."""
    assert validate_config(config), "findings are reported"
    metrics: dict[str, Metrics] = {}
    start = config.model
    if config.mode != "rl":
        metrics["sft"] = take_sft_step(config, folder / "sft")
        start = config.model.model_copy(update={"path": str(step_directory(folder / "sft", 1))})
    if config.mode != "sft":
        metrics["rl"] = asyncio.run(take_rl_step(config, start, folder / "rl"))
    return metrics


def take_sft_step(config: Config, folder: Path) -> Metrics:
    """One step of `run_sft_training` on the preset's demonstrations."""
    sft = config.training.sft
    assert isinstance(config.data.sft, str)
    backend = create_pytorch_backend(
        config.model, sft.optim, create_cross_entropy_loss(), num_steps=sft.num_steps, device="cpu"
    )
    samples = load_sft_dataset(config.data.sft, backend.tokenizer, max_length=sft.max_length, train_on=sft.train_on)
    pad_id = pad_token_id(backend.tokenizer)
    [metrics] = asyncio.run(run_sft_training(backend, samples, sft, pad_id=pad_id, checkpoint_dir=folder))
    return metrics


async def take_rl_step(config: Config, start: ModelConfig, folder: Path) -> Metrics:
    """One step of `run_rl_training` against an embedded engine in this process, spoken to over its HTTP interface."""
    rl, rollout = config.training.rl, config.rollout
    backend = create_pytorch_backend(
        start,
        rl.optim,
        create_policy_loss(rl.loss),
        num_steps=rl.num_steps,
        temperature=rollout.sampling.temperature,
        device="cpu",
    )
    data_buffer = DataBuffer(load_prompts_from_jsonl(config.data.prompts), seed=rollout.seed)
    context_length = rollout.max_prompt_tokens + rollout.sampling.max_new_tokens + 1
    decoder = Decoder(Path(start.path), num_slots=NUM_ENGINE_SLOTS, context_length=context_length)
    target = PublishTarget(weights_dir=folder, model_config=Path(start.path) / "config.json", prefix="preset")
    with Scheduler(decoder, model_dir=Path(start.path)) as scheduler:
        engine = SGLangEngine("http://engine", transport=httpx.ASGITransport(build_app(scheduler)))
        generate_fn = create_engine_generate_fn([engine], backend.tokenizer, rollout)
        async with AsyncRolloutManager(data_buffer, rollout, generate_fn=generate_fn) as manager:
            pad_id = pad_token_id(backend.tokenizer)
            [metrics] = await run_rl_training(backend, data_buffer, manager, [engine], rl, target=target, pad_id=pad_id)
        assert await engine.weight_version() == f"preset-{backend.weight_version}"
        await engine.aclose()
    return metrics


def write_folders_of_hub(name: str, folder: Path) -> None:
    """Write the folders `base_model` and `dataset`, which take the place of the model and the dataset of a preset."""
    config = load_pipeline(PRESETS / f"{name}.toml").config
    write_tiny_model(folder / "base_model", family=config.model.path)
    (folder / "dataset").mkdir()
    for split in ("train", "test"):
        rows = MADE_UP_ROWS[str(config.data.prepare.name)](split)
        (folder / f"dataset/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def conversations(split: str) -> Rows:
    """Rows of HuggingFaceTB/smol-smoltalk: conversations of one and of two exchanges."""

    def exchange(i: int) -> Rows:
        return [{"role": "user", "content": f"{split} {i}?"}, {"role": "assistant", "content": "This and that."}]

    return [{"messages": exchange(i) * (1 + i % 2), "source": "made up"} for i in range(30)]


def documents(split: str) -> Rows:
    """Rows of Skylion007/openwebtext."""
    return [{"text": f"Document {i}, which is long enough to be read."} for i in range(60)]


def competition_problems(split: str) -> Rows:
    """Rows of DigitalLearningGmbH/MATH-lighteval, every third without a number as its answer."""
    answers = ["1", "2", r"\frac{1}{2}"]
    return [
        {
            "problem": f"{split} problem {i}?",
            "level": "Level 1",
            "solution": rf"It is $\boxed{{{answers[i % 3]}}}$.",
            "type": "Algebra",
        }
        for i in range(60)
    ]


def word_problems(split: str) -> Rows:
    """Rows of openai/gsm8k."""
    return [
        {"question": f"{split} problem {i}?", "answer": f"It is 1*{1 + i % 2} = <<1*1=1>>.\n#### {1 + i % 2}"}
        for i in range(30)
    ]


MADE_UP_ROWS: dict[str, Callable[[str], Rows]] = {
    "smol_smoltalk": conversations,
    "openwebtext": documents,
    "math": competition_problems,
    "gsm8k": word_problems,
}


def write_tiny_model(folder: Path, *, family: str) -> None:
    """An untrained model of the family of a hub id, with tied embeddings as its small members have, and a tokenizer."""
    tokenizer = build_tokenizer()
    shape: Settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    is_qwen3 = "Qwen3" in family
    model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=16)) if is_qwen3 else Qwen2ForCausalLM(Qwen2Config(**shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable character and per final answer, and the chat form of the Qwen models."""
    characters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *FINAL_ANSWERS, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{[12]\}|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>", unk_token="<|unk|>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = CHAT_TEMPLATE
    return fast
