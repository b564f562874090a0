"""Pins: every preset of flows/presets/ is valid, its recipe makes the files it reads, and it takes a training step.

Without it a preset would break with a renamed setting, and the first to notice would be a person with a rented GPU.

The hub is replaced by a few made-up rows with the public datasets' columns, the model by one of its own family with a
small vocabulary, and REDUCED shrinks steps, batches and lengths. Everything else of a preset stays as it is.
"""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets
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
from rollouts_core.algorithms.loss import Metrics, create_cross_entropy_loss, create_policy_loss
from rollouts_core.backends.pytorch import create_pytorch_backend
from rollouts_core.checkpoint import step_directory
from rollouts_core.checks.validate import validate_config
from rollouts_core.config import Config, ModelConfig, read_settings
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.data.dataset import load_prompts_from_jsonl, load_sft_dataset
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

Settings = dict[str, Any]  # Any: settings of every type
Rows = list[dict[str, Any]]  # Any: columns of every type

NAMES = sorted(path.stem for path in PRESETS.glob("*.toml"))
HUB_PRESETS = [name for name in NAMES if name != "quickstart"]
REDUCED: Settings = {
    "model": {"path": "./base_model"},
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
    assert name == "quickstart" or f"rollouts run {name}.toml" in path.read_text()


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
def test_a_preset_takes_a_training_step(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load_made_up_dataset)
    exec(compile(read_recipe(PRESETS / f"{name}.toml"), f"{name}.toml", "exec"), {})
    write_tiny_model(tmp_path / "base_model", family=load_pipeline(PRESETS / f"{name}.toml").config.model.path)
    metrics = take_a_step_of_each_stage(reduce_preset(name, tmp_path), tmp_path)
    for stage, numbers in metrics.items():
        assert numbers["grad_norm"] > 0, f"{stage} had nothing to learn from: {numbers}"
    if "rl" in metrics:
        assert abs(metrics["rl"]["kl_rollout_policy"]) < MAX_KL, "engine and trainer compute the same model"


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


def read_recipe(preset: Path) -> str:
    """The code in the preset's comment that makes its files."""
    comment = preset.read_text().partition(" by:\n")[2].partition("\n\n")[0]
    return textwrap.dedent("\n".join(line.removeprefix("#") for line in comment.splitlines()))


def load_made_up_dataset(
    name: str, config: str | None = None, *, split: str | None = None, streaming: bool = False
) -> datasets.Dataset | datasets.DatasetDict | Iterable[dict[str, Any]]:
    """What `datasets.load_dataset` would give, with rows that no other split has."""
    build_rows = MADE_UP_ROWS[name]
    if split is None:
        return datasets.DatasetDict({part: datasets.Dataset.from_list(build_rows(part)) for part in ("train", "test")})
    rows = datasets.Dataset.from_list(build_rows(split))
    return rows.to_iterable_dataset() if streaming else rows


def conversations(split: str) -> Rows:
    """Rows of HuggingFaceTB/smol-smoltalk: conversations of one and of two exchanges."""
    exchange = [{"role": "user", "content": f"{split}, what?"}, {"role": "assistant", "content": "This and that."}]
    return [{"messages": exchange * (1 + i % 2), "source": "made up"} for i in range(30)]


def documents(split: str) -> Rows:
    """Rows of Skylion007/openwebtext: enough for two evaluation files of 500, and a few to train on."""
    return [{"text": f"Document {i}."} for i in range(1030)]


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
        for i in range(330)
    ]


def word_problems(split: str) -> Rows:
    """Rows of openai/gsm8k."""
    return [
        {"question": f"{split} problem {i}?", "answer": f"It is 1*{1 + i % 2} = <<1*1=1>>.\n#### {1 + i % 2}"}
        for i in range(30)
    ]


MADE_UP_ROWS: dict[str, Callable[[str], Rows]] = {
    "HuggingFaceTB/smol-smoltalk": conversations,
    "Skylion007/openwebtext": documents,
    "DigitalLearningGmbH/MATH-lighteval": competition_problems,
    "openai/gsm8k": word_problems,
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
