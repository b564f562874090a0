"""Pins which engine `auto` takes on which machine, that the choice is kept, and what of it enters an identity.

Without it a machine of 80 GB would sample on its CPU, or a retried run would train on with another engine.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollouts.flows.form import load_pipeline, parse_pipeline
from rollouts.infra.engine_environment import EngineInstallation
from rollouts.infra.gpu_state import GpuProgram, GpuState
from rollouts.infra.node import LocalNode, Node
from rollouts.infra.providers import provision_node
from rollouts.infra.session import LocalSession, Session
from rollouts.tasks.bootstrap import bootstrap
from rollouts.tasks.engine_choice import (
    EngineChoice,
    choice_file,
    choose_by_gpus,
    choose_by_model,
    choose_engine,
    is_open,
    keep_choice,
    with_choice_of,
    with_kept_choice,
    with_kind,
)
from rollouts.tasks.plan import plan_training
from rollouts.tasks.records import RunScope
from rollouts_core.config import Config, EngineConfig
from rollouts_core.model.model_size import find_model_size
from rollouts_core.stages.planning import base_model
from tests.kit.small_pipeline import small_settings, write_small_pipeline

H100 = GpuState(name="NVIDIA H100 80GB HBM3", total_gb=85.5, free_gb=84.9, driver="580.95.05")
L4 = GpuState(name="NVIDIA L4", total_gb=24.1, free_gb=23.6, driver="580.95.05")
PYTHON = GpuProgram(pid=4242, name="python3", used_gb=80.0)
FULL = dataclasses.replace(H100, free_gb=4.9, programs=(PYTHON,))
SHARED = dataclasses.replace(H100, free_gb=60.0, programs=(PYTHON,))


@pytest.mark.parametrize(
    ("gpus", "ranks", "needed_gb", "kind"),
    [
        ([], (), 1.0, "embedded"),
        ([], (), 0.0, "embedded"),
        ([H100], (), 3.0, "sglang"),
        ([H100], (0,), 3.0, "sglang"),
        ([L4], (0,), 3.0, "sglang"),
        ([L4], (0,), 60.0, "sglang"),  # too small for anybody: the memory check of the settings refuses it
        ([FULL], (0,), 3.0, "sglang"),
        ([FULL], (), 16.0, "embedded"),
        ([FULL], (0,), 16.0, "embedded"),
        ([SHARED], (0,), 16.0, "sglang"),
        ([SHARED], (0,), 61.0, "embedded"),
        ([H100, FULL], (0,), 16.0, "sglang"),
        ([H100, FULL], (1,), 16.0, "embedded"),
        ([FULL, H100], (), 16.0, "embedded"),
        ([FULL, H100], (1,), 16.0, "sglang"),
        ([H100, H100, FULL, H100], (0, 1), 16.0, "sglang"),
        ([H100, H100, FULL, H100], (1, 2), 16.0, "embedded"),
        ([H100] * 8, (4, 5, 6, 7), 64.0, "sglang"),
        ([H100] * 7 + [FULL], (4, 5, 6, 7), 64.0, "embedded"),
        ([H100] * 7 + [FULL], (0, 1, 2, 3), 64.0, "sglang"),
    ],
)
def test_the_engine_is_that_of_the_machine(
    gpus: Sequence[GpuState], ranks: Sequence[int], needed_gb: float, kind: str
) -> None:
    assert choose_by_gpus(gpus, ranks, needed_gb).kind == kind


def test_the_reason_names_the_gpu_and_the_program() -> None:
    choice = choose_by_gpus([], (), 16.0)
    assert choice.describe(EngineConfig()) == str(choice)
    given = EngineConfig(extra_args=("--mem-fraction-static", "0.6"), dtype="bfloat16")
    assert choice.describe(given) == f"{choice}; it does not use dtype and extra_args"
    with_gpu = choose_by_gpus([H100], (), 16.0)
    assert with_gpu.describe(given) == str(with_gpu)
    assert str(choose_by_gpus([H100, FULL], (1,), 16.0)) == (
        "rollout.engine: auto chooses embedded, because GPU 1, NVIDIA H100 80GB HBM3, is used by python3 (pid 4242, "
        "80.0 GB) and has 4.9 GB free of the 16.0 GB that an engine needs"
    )


@pytest.mark.parametrize(
    ("architectures", "known", "kind"),
    [
        (["Qwen3ForCausalLM"], {"Qwen3ForCausalLM"}, "sglang"),
        (["NewForCausalLM"], {"Qwen3ForCausalLM"}, "embedded"),
        (["NewForCausalLM"], set(), "sglang"),  # it does not tell
        ([], {"Qwen3ForCausalLM"}, "sglang"),
    ],
)
def test_a_model_that_the_engine_does_not_know_falls_back(architectures: list[str], known: set[str], kind: str) -> None:
    choice = choose_by_model(EngineChoice(kind="sglang", reason="r"), architectures, known, title="SGLang")
    assert choice.kind == kind
    if kind == "embedded":
        assert choice.reason == "SGLang does not know the model's NewForCausalLM"


def config_of(folder: Path, **settings: Any) -> Config:  # Any: settings of every type
    return load_pipeline(write_small_pipeline(folder, **settings)).config


def fingerprint_of(config: Config, tmp_path: Path) -> str:
    scope = RunScope(run_id="1" * 32, run_name="r", store=str(tmp_path / "store"))
    node = provision_node(LocalNode(), tmp_path / "store")
    return plan_training("rl", base_model(config), config, scope, node).fingerprint


def test_the_resolved_kind_is_the_identity(tmp_path: Path) -> None:
    named = config_of(tmp_path / "a", mode="rl")
    left_open = config_of(tmp_path / "b", mode="rl", rollout__engine__kind="auto")
    assert fingerprint_of(with_kind(left_open, "embedded"), tmp_path) == fingerprint_of(named, tmp_path)
    assert fingerprint_of(with_kind(left_open, "sglang"), tmp_path) != fingerprint_of(named, tmp_path)


def test_the_default_is_chosen_on_the_node_and_has_the_identity_of_the_embedded_engine(tmp_path: Path) -> None:
    settings = small_settings(mode="rl")
    del settings["rollout"]["engine"]
    named = config_of(tmp_path / "a", mode="rl")
    default = parse_pipeline(settings, tmp_path / "a/small.toml").config
    assert is_open(default)
    node = dataclasses.replace(provision_node(LocalNode(), tmp_path / "store"), engine_kind="embedded")
    assert with_choice_of(default, node) == named
    assert fingerprint_of(default, tmp_path) == fingerprint_of(named, tmp_path)


def test_a_run_that_uses_no_engine_of_rollout_chooses_none(tmp_path: Path) -> None:
    config = config_of(tmp_path / "a", mode="sft", rollout__engine__kind="auto", evaluation__engine="embedded")
    node = provision_node(LocalNode(), tmp_path / "store")
    assert not is_open(config) and with_choice_of(config, node).rollout.engine.kind == "embedded"


def test_settings_of_installed_engines_are_dropped_for_the_engine_of_this_project(tmp_path: Path) -> None:
    engine = {"kind": "auto", "extra_args": ["--mem-fraction-static", "0.5"], "dtype": "bfloat16"}
    config = config_of(tmp_path / "a", rollout__engine=engine)
    own = with_kind(config, "embedded").rollout.engine
    assert (own.extra_args, own.dtype) == ((), "auto")
    assert with_kind(config, "sglang").rollout.engine.extra_args == ("--mem-fraction-static", "0.5")


def test_later_attempts_keep_the_choice(tmp_path: Path) -> None:
    config, store = config_of(tmp_path / "a", rollout__engine__kind="auto"), tmp_path / "store"
    assert is_open(with_kept_choice(config, LocalNode(), store))
    keep_choice(choice_file(store, config, LocalNode()), EngineChoice(kind="sglang", reason="r"))
    assert with_kept_choice(config, LocalNode(), store).rollout.engine.kind == "sglang"
    other = LocalNode(root="/elsewhere")
    assert is_open(with_kept_choice(config, other, store))


@pytest.mark.parametrize(("architecture", "is_installed"), [("Qwen3ForCausalLM", False), ("NewForCausalLM", True)])
def test_the_choice_installs_the_engine_only_to_ask_about_a_rare_model(
    architecture: str, is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[EngineInstallation] = []

    def install(session: Session, node: Node, wanted: EngineInstallation) -> str:
        installed.append(wanted)
        return ""

    monkeypatch.chdir(tmp_path)  # away from .engines of this repository
    monkeypatch.setattr("rollouts.tasks.engine_choice.read_gpus", lambda session: [H100])
    monkeypatch.setattr("rollouts.tasks.engine_installs.check_room", lambda *_: None)
    monkeypatch.setattr("rollouts.tasks.engine_choice.install_engine", install)
    config, node = (
        config_of(tmp_path / "a", rollout__engine__kind="auto"),
        provision_node(LocalNode(), tmp_path / "store"),
    )
    size = dataclasses.replace(find_model_size(config.model), settings={"architectures": [architecture]})
    choice = choose_engine(LocalSession(sys.executable), node, LocalNode(), config, size)
    assert (choice.kind, bool(installed)) == ("sglang", is_installed)


@pytest.mark.slow
def test_the_node_chooses_and_the_choice_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollouts.tasks.engine_choice.read_gpus", lambda session: [])
    store = tmp_path / "store"
    config, node = config_of(tmp_path / "a", rollout__engine__kind="auto"), provision_node(LocalNode(), store)
    file = choice_file(store, config, LocalNode())
    ready = bootstrap.fn(node, config, LocalNode(), kept_choice=file)
    assert ready.engine_kind == "embedded"
    assert with_choice_of(config, ready).rollout.engine.kind == "embedded"
    assert with_kept_choice(config, LocalNode(), store).rollout.engine.kind == "embedded"


@pytest.mark.engine
def test_the_installed_sglang_tells_which_models_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engines.servers import engine_python

    monkeypatch.setattr("rollouts.tasks.engine_choice.read_gpus", lambda session: [H100])
    engine = {"kind": "auto", "python": str(engine_python("sglang"))}
    config = config_of(tmp_path / "a", rollout__engine=engine)
    node = Node(name="here", kind="local", root=str(tmp_path), python=sys.executable)
    size = find_model_size(config.model)
    found = choose_engine(LocalSession(sys.executable), node, LocalNode(), config, size)
    assert found == EngineChoice(kind="sglang", reason="the node has 1 x NVIDIA H100 80GB HBM3")
    unknown = dataclasses.replace(size, settings={"architectures": ["NewForCausalLM"]})
    assert choose_engine(LocalSession(sys.executable), node, LocalNode(), config, unknown).kind == "embedded"
