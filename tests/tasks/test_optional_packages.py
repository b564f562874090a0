"""Pins that a package which only some settings need is missed before anything is rented or trained.

Without it a run would fine-tune and select for hours before its RL finds that nothing there can make adapters.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.node import LocalNode, RentedNode, SSHNode
from rollouts.infra.providers import open_session, provision_node
from rollouts.tasks.bootstrap import bootstrap
from rollouts.tasks.optional_packages import check_packages, check_sent_packages, needed_packages
from tests.flows.refusals import assert_refused, write_config
from tests.kit.small_pipeline import write_small_pipeline
from tests.tasks.finished_stages import config_at

LORA: dict[str, Any] = {"training": {"rl": {"policy": {"lora": {"rank": 4}}}}}
JAX: dict[str, Any] = {"training": {"sft": {"policy": {"backend": "jax"}}}}
FLASH: dict[str, Any] = {
    "training": {"rl": {"policy": {"attention": "flash_attention_2", "precision": "bfloat16"}}},
}
SSH: dict[str, Any] = {"host": "me@box", "python": "/usr/bin/python3", "install": "uv"}


def interpreter_without(folder: Path, module: str) -> str:
    """This interpreter, for which a module is not installed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules[{module!r}] = None\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder}:$PYTHONPATH exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


def hide(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let a package that is installed here count as missing."""
    find = metadata.distribution

    def find_others(wanted: str) -> metadata.Distribution:
        if wanted == name:
            raise metadata.PackageNotFoundError(wanted)
        return find(wanted)

    monkeypatch.setattr(metadata, "distribution", find_others)


def write_requirements(folder: Path, *lines: str) -> str:
    (folder / "lock.txt").write_text("".join(f"{line}\n" for line in lines))
    return str(folder / "lock.txt")


@pytest.mark.parametrize(
    ("settings", "trains", "needed"),
    [
        ({}, True, {}),
        (LORA, True, {"training.rl.policy.lora": "peft"}),
        (LORA, False, {}),
        (LORA | {"mode": "sft"}, True, {}),
        (JAX, True, {'training.sft.policy.backend "jax"': "jax"}),
        (JAX | {"mode": "rl"}, True, {}),
        (FLASH, True, {'training.rl.policy.attention "flash_attention_2"': "flash_attn"}),
        (FLASH | {"mode": "sft"}, True, {}),
        ({"rollout": {"environment": "math_verify"}}, False, {'rollout.environment "math_verify"': "math_verify"}),
        ({"rollout": {"environment": "math_verify"}, "mode": "sft", "evaluation": {"metric": "loss"}}, True, {}),
    ],
)
def test_packages_are_needed_where_a_stage_imports_them(
    settings: dict[str, Any], trains: bool, needed: dict[str, str], tmp_path: Path
) -> None:
    found = needed_packages(config_at(tmp_path, **settings), trains=trains)
    assert {setting: package.module for setting, package in found.items()} == needed


def test_an_interpreter_without_a_package_is_named(tmp_path: Path) -> None:
    config = config_at(tmp_path / "inputs", **LORA)
    node = provision_node(LocalNode(python=interpreter_without(tmp_path / "own", "peft")), tmp_path / "store")
    with open_session(node) as session, pytest.raises(PermanentInfraError) as caught:
        check_packages(session, node, config)
    assert f"training.rl.policy.lora needs peft, which {node.python} does not have: run" in str(caught.value)
    assert "pip install 'rollouts[lora]' there" in str(caught.value)
    here = provision_node(LocalNode(), tmp_path / "store")
    with open_session(here) as session:
        check_packages(session, here, config)
    with open_session(node) as session:
        check_packages(session, node, config, trains=False)


@pytest.mark.slow
def test_a_machine_without_a_package_is_refused_before_its_first_stage(tmp_path: Path) -> None:
    settings = LocalNode(python=interpreter_without(tmp_path / "own", "peft"), min_free_gb=0.1)
    config = config_at(tmp_path / "inputs", **LORA)
    with pytest.raises(PermanentInfraError, match=r"^training\.rl\.policy\.lora needs peft, which "):
        bootstrap.fn(provision_node(settings, tmp_path / "store"), config, settings)


def test_a_package_that_is_missing_here_is_missed_where_a_run_copies_those_of_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_at(tmp_path, **LORA)
    check_sent_packages(SSHNode(**SSH), config)
    hide(monkeypatch, "peft")
    with pytest.raises(PermanentInfraError, match=r"training\.rl\.policy\.lora needs peft, .* 'rollouts\[lora\]' here"):
        check_sent_packages(SSHNode(**SSH), config)


def test_a_file_of_versions_without_a_package_is_named(tmp_path: Path) -> None:
    config = config_at(tmp_path, **LORA)
    file = write_requirements(tmp_path, "torch==2.9.0")
    with pytest.raises(
        PermanentInfraError, match=r"needs peft, which .*lock\.txt \(node\.requirements\) does not list"
    ):
        check_sent_packages(SSHNode(**SSH, requirements=file), config)
    write_requirements(tmp_path, "torch==2.9.0", "PEFT==0.18.0")
    check_sent_packages(SSHNode(**SSH, requirements=file), config)


def test_flash_attention_is_missed_before_sft_unless_its_package_or_the_one_that_fetches_its_kernel_is_there(
    tmp_path: Path,
) -> None:
    config = config_at(tmp_path / "inputs", **FLASH)
    node = provision_node(LocalNode(), tmp_path / "store")
    sentence = r'training\.rl\.policy\.attention "flash_attention_2" needs flash-attn or kernels, which '
    with open_session(node) as session:
        with pytest.raises(PermanentInfraError, match=rf"{sentence}.* does not have: install one there, or name"):
            check_packages(session, node, config)
        for module in ("flash_attn", "kernels"):
            python = tmp_path / module / "python"
            python.parent.mkdir()
            (python.parent / f"{module}.py").touch()
            python.write_text(f'#!/bin/sh\nPYTHONPATH={python.parent} exec {sys.executable} "$@"\n')
            python.chmod(0o755)
            check_packages(session, replace(node, python=str(python)), config)
    for listed in ((), ("flash-attn==2.8.3",), ("kernels==0.12.0",)):
        file = write_requirements(tmp_path, "torch==2.9.0", *listed)
        refused = pytest.raises(
            PermanentInfraError, match=rf"{sentence}.*lock\.txt \(node\.requirements\) does not list"
        )
        with nullcontext() if listed else refused:
            check_sent_packages(SSHNode(**SSH, requirements=file), config)


def test_jax_is_not_installed_by_a_run_unless_a_file_lists_its_build(tmp_path: Path) -> None:
    config = config_at(tmp_path, **JAX)
    with pytest.raises(PermanentInfraError, match=r'backend "jax" needs jax, which a run does not install, because'):
        check_sent_packages(SSHNode(**SSH), config)
    file = write_requirements(tmp_path, "jax==0.7.2")
    check_sent_packages(SSHNode(**SSH, requirements=file), config)
    with pytest.raises(
        PermanentInfraError, match="lists the CPU build of JAX, which would leave the rented GPU unused"
    ):
        check_sent_packages(RentedNode(max_usd=1.0, install="uv", requirements=file), config)
    for lines in (["jax[cuda12]==0.7.2"], ["jax==0.7.2", "jax-cuda12-plugin==0.7.2"]):
        write_requirements(tmp_path, *lines)
        check_sent_packages(RentedNode(max_usd=1.0, install="uv", requirements=file), config)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_small_pipeline(tmp_path / "small").parent


def test_validate_and_run_name_a_package_that_the_stages_lack(folder: Path, tmp_path: Path) -> None:
    python = interpreter_without(tmp_path / "own", "peft")
    policy = {"training__rl__policy": {"lora": {"rank": 4}}}
    assert_refused(write_config(folder, node__python=python, **policy), "training.rl.policy.lora needs peft, which ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "node",
    [
        {"kind": "rented", "max_usd": 1.0, "install": "uv"},
        {"kind": "ssh", **SSH},
        {"kind": "instance", "instance": "runpod:abc123"},
    ],
)
def test_jax_is_refused_before_a_machine_is_asked_for(folder: Path, node: dict[str, Any]) -> None:
    config = write_config(folder, node=node, training__sft__policy={"backend": "jax"})
    assert_refused(config, 'training.sft.policy.backend "jax" needs jax, which a run does not install')
