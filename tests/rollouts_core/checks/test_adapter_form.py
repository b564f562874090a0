"""Pins what `validate` says about the way of adapters to the engines, and which identity a run has by it.

Without it a run would sample from rounded weights, or reuse the stage of a run that did.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollouts_core.checks.adapter_form import describe_adapter_form, sends_adapters
from rollouts_core.config import Config
from rollouts_core.findings import Caution

DATA = {"sft": "a", "prompts": "b", "selection": "c", "heldout": "d"}


def config_of(path: Path | str = "some/model", *, rank: int = 8, **settings: Any) -> Config:  # Any: of every type
    training = {"rl": {"policy": {"lora": {"rank": rank}}}}
    return Config.model_validate(
        {"mode": "sft+rl", "model": {"path": str(path)}, "data": DATA, "training": training, **settings}
    )


@pytest.mark.parametrize("kind", ["embedded", "sglang", "vllm", "auto"])
def test_adapters_are_sent_as_adapters_by_default(kind: str) -> None:
    config = config_of(rollout={"engine": {"kind": kind}})
    [said] = describe_adapter_form(config)
    assert said.startswith("training.rl.policy.lora: adapters are sent to the engines as adapters")
    assert ("without a GPU" in said) == (kind in ("sglang", "auto"))
    assert sends_adapters(config.training.rl, config.rollout, config.deployment)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rollout": {"engine": {"kind": "vllm", "weight_transfer": "gloo"}}}, "sends only merged weights"),
        ({"rollout": {"engine": {"kind": "sglang"}, "in_flight": "continue"}}, "cannot switch to another adapter"),
        ({"rollout": {"engine": {"kind": "sglang", "router_url": "http://127.0.0.1:1"}}}, "cannot name an adapter"),
        ({"rollout": {"engine": {"kind": "vllm"}}, "rank": 600}, "up to rank 512"),
    ],
)
def test_merging_is_said_with_its_reason(settings: dict[str, Any], reason: str) -> None:
    config = config_of(**settings)
    [said] = describe_adapter_form(config)
    assert isinstance(said, Caution)
    assert "merged into the weights" in said and reason in said
    assert not sends_adapters(config.training.rl, config.rollout, config.deployment)


def test_the_embedded_engine_takes_adapters_in_every_way() -> None:
    config = config_of(rollout={"engine": {"kind": "embedded", "weight_transfer": "gloo"}, "in_flight": "continue"})
    [said] = describe_adapter_form(config)
    assert not isinstance(said, Caution)


def test_a_model_of_another_family_gets_merged_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MixtralForCausalLM"]}')
    [said] = describe_adapter_form(config_of(tmp_path, rollout={"engine": {"kind": "vllm"}}))
    assert "vLLM is not known to support adapters for MixtralForCausalLM" in said


def test_nothing_is_said_without_adapters() -> None:
    config = config_of(rank=0)
    assert describe_adapter_form(config) == []
    assert not sends_adapters(config.training.rl, config.rollout, config.deployment)
