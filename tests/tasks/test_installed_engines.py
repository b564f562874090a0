"""Pins that a machine without the engine is refused before its first stage.

Without it a machine that was rented would fine-tune for hours before a run finds that nothing there can sample.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollouts.flows.form import load_pipeline
from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.node import FurtherNode, LocalNode, Node, SSHNode
from rollouts.infra.providers import provision_node
from rollouts.tasks.bootstrap import bootstrap
from rollouts.tasks.installed_engines import leads_engines
from rollouts_core.config import Config
from tests.kit.small_pipeline import write_small_pipeline

ELSEWHERE: dict[str, Any] = {"rollout__engine__kind": "sglang", "evaluation__engine": "embedded"}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return provision_node(LocalNode(), tmp_path / "store")


def config_of(tmp_path: Path, **settings: Any) -> Config:  # Any: settings of every type
    return load_pipeline(write_small_pipeline(tmp_path / "small", **settings)).config


def with_engine_node(node: Node) -> Node:
    return replace(node, engine_nodes=(replace(node, name="second", address="127.0.0.1"),))


@pytest.mark.parametrize(
    ("settings", "trains", "has_engine_nodes", "expected"),
    [
        ({"mode": "sft"}, True, False, True),
        ({"mode": "sft", "evaluation__metric": "loss"}, True, False, False),
        ({"mode": "sft", "evaluation__engine": "embedded"}, True, False, False),
        ({"evaluation__engine": "embedded"}, True, False, True),
        ({"evaluation__engine": "embedded"}, True, True, False),
        ({}, True, True, True),
        ({}, False, False, True),
        ({"evaluation__engine": "embedded"}, False, False, False),
    ],
)
def test_an_engine_is_needed_where_rl_or_an_evaluation_samples(
    tmp_path: Path, node: Node, settings: dict[str, Any], trains: bool, has_engine_nodes: bool, expected: bool
) -> None:
    config = config_of(tmp_path, rollout__engine__kind="sglang", **settings)
    place = with_engine_node(node) if has_engine_nodes else node
    assert leads_engines(config, place, trains=trains) == expected


@pytest.mark.slow
def test_a_machine_without_the_engine_is_refused_before_its_first_stage(tmp_path: Path, node: Node) -> None:
    python = f"{sys.prefix}/bin/python"
    config = config_of(tmp_path, rollout__engine__kind="sglang", rollout__engine__python=python)
    with pytest.raises(PermanentInfraError, match=r"has no sglang, which this rollout\.engine\.kind needs: install"):
        bootstrap.fn(node, config, LocalNode())
    bootstrap.fn(node, config_of(tmp_path), LocalNode())


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "is_refused"), [({"mode": "rl"}, True), ({"mode": "sft"}, False)])
def test_a_machine_without_the_router_is_refused_where_rl_would_start_it(
    tmp_path: Path, node: Node, settings: dict[str, Any], is_refused: bool
) -> None:
    config = config_of(tmp_path, rollout__engine__router_python=sys.executable, **settings)
    with pytest.raises(PermanentInfraError, match="has no sglang_router") if is_refused else nullcontext():
        bootstrap.fn(node, config, LocalNode())


@pytest.mark.slow
def test_a_machine_of_engines_without_one_is_named(tmp_path: Path, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # .engines of this repository is not beside it
    further = FurtherNode(host="me@127.0.0.1:1", python=sys.executable)
    settings = SSHNode(host="me@127.0.0.1", python=sys.executable, engine_nodes=(further,))
    with pytest.raises(PermanentInfraError, match=r"^node\.engine_nodes, second: .* has no sglang,"):
        bootstrap.fn(with_engine_node(node), config_of(tmp_path, **ELSEWHERE), settings)
