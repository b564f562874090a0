"""Pins that engines are installed while other stages run, and that a failed installation fails the stage that waits.

Without it every first run would wait for an installation of many minutes before SFT, or RL would start without engine.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollouts.flows.form import load_pipeline
from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.node import FurtherNode, LocalNode, Node, SSHNode
from rollouts.tasks.engines_beside import EnginePlace, engine_places, engines_installed_beside
from rollouts.tasks.installed_engines import stage_beside_installation
from rollouts_core.config import Config
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.threads import join_threads

INSTALL = "rollouts.tasks.engines_beside.install_planned"
THREAD = "installation of engines"
NODE = Node(name="here", kind="local", root="/nowhere", python=sys.executable)
PLACE = EnginePlace(node=NODE, ready=NODE, settings=LocalNode())
WAIT_S = 30.0


def config_of(folder: Path, **settings: Any) -> Config:  # Any: settings of every type
    return load_pipeline(write_small_pipeline(folder, rollout__engine__kind="vllm", **settings)).config


def test_the_block_runs_during_the_installation_and_wait_returns_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []
    is_trained = threading.Event()

    def install(*_: object, say: Any, **__: object) -> None:  # Any: a callback
        assert is_trained.wait(WAIT_S), "the installation precedes the block"
        order.append("installed")
        say("the engine is installed")

    monkeypatch.setattr(INSTALL, install)
    with engines_installed_beside([PLACE], config_of(tmp_path)) as wait:
        order.append("trained")
        is_trained.set()
        wait("select-sft")
        wait("rl")
        order.append("sampled")
    assert order == ["trained", "installed", "sampled"]
    assert "the engine is installed" in capsys.readouterr().err


def test_a_failed_installation_is_shown_at_once_and_raised_by_the_stage_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermanentInfraError("pip could not install the packages")

    monkeypatch.setattr(INSTALL, fail)
    named = replace(PLACE, setting="node.engine_nodes")
    with engines_installed_beside([named], config_of(tmp_path)) as wait:
        join_threads(THREAD)
        assert "the installation failed; the run ends when a stage needs the engine" in capsys.readouterr().err
        with pytest.raises(PermanentInfraError, match=r"^node\.engine_nodes, here: pip could not install"):
            wait("rl")


def test_an_interrupted_run_waits_for_no_installation_and_hears_no_more_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_over = threading.Event()

    def install(*_: object, say: Any, **__: object) -> None:  # Any: a callback
        assert is_over.wait(WAIT_S), "the end of the block waits for the installation"
        say("the engine is installed")

    monkeypatch.setattr(INSTALL, install)
    with pytest.raises(KeyboardInterrupt), engines_installed_beside([PLACE], config_of(tmp_path)):
        raise KeyboardInterrupt
    is_over.set()
    join_threads(THREAD)
    assert "is installed" not in capsys.readouterr().err


def test_engines_are_installed_where_the_run_serves_them(tmp_path: Path) -> None:
    further = replace(NODE, name="second", address="127.0.0.1")
    apart = replace(NODE, engine_nodes=(further,))
    ssh = FurtherNode(host="me@127.0.0.1:1", python=sys.executable)
    settings = SSHNode(host="me@127.0.0.1", python=sys.executable, engine_nodes=(ssh,))
    embedded = {"evaluation__engine": "embedded"}

    def places(node: Node, settings: LocalNode | SSHNode, **changes: Any) -> list[str]:  # Any: settings
        config = config_of(tmp_path, **changes)
        return [place.node.name for place in engine_places(node, node, settings, config, trains=True)]

    assert places(NODE, LocalNode()) == ["here"]
    assert places(NODE, LocalNode(), **embedded) == ["here"]
    assert places(NODE, LocalNode(), mode="sft", **embedded) == []
    assert places(apart, settings) == ["here", "second"]
    assert places(apart, settings, **embedded) == ["second"]
    own = load_pipeline(write_small_pipeline(tmp_path)).config
    assert engine_places(apart, apart, settings, own, trains=True) == []


@pytest.mark.parametrize(
    ("mode", "trains", "expected"),
    [("sft+rl", True, "sft"), ("sft", True, "sft"), ("rl", True, ""), ("sft", False, "")],
)
def test_only_sft_runs_during_the_installation(mode: str, trains: bool, expected: str, tmp_path: Path) -> None:
    assert stage_beside_installation(config_of(tmp_path, mode=mode), trains=trains) == expected
