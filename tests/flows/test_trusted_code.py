"""Pins which code a run may name that was asked for through Prefect.

Without it whoever knows the password of a server, or writes deployments on a shared one, runs what he likes as the user
who serves.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rollouts.flows.check import check_settings
from rollouts.flows.deployments import Deployment, save_deployments
from rollouts.flows.evaluate_settings import EvaluateConfig
from rollouts.flows.form import RunOptions
from rollouts.flows.store import STORE_VARIABLE
from rollouts.flows.trusted_code import VARIABLE, check_trusted
from rollouts.infra.node import LocalNode, SSHNode
from rollouts_core.config import Config
from rollouts_core.errors import ConfigError

DATA = {"sft": "sft.jsonl", "prompts": "p.jsonl", "selection": "s.jsonl", "heldout": "h.jsonl"}


def settings(path: str = "/models/small", *, trust: bool = False, **rollout: Any) -> dict[str, Any]:  # Any: settings
    return {"model": {"path": path, "trust_remote_code": trust}, "data": DATA, "rollout": rollout}


def check(**changes: Any) -> None:  # Any: settings
    check_trusted(Config.model_validate(settings(**changes)))


NAMED: list[tuple[dict[str, Any], str]] = [
    ({"reward_fn": "team.rewards:score"}, "rollout.reward_fn names code of team.rewards"),
    ({"environment": "team.games:play"}, "rollout.environment names code of team.games"),
    ({"generate_fn": "os:system"}, "rollout.generate_fn names code of os"),
    ({"filter_fn": "team:keep"}, "rollout.filter_fn names code of team"),
    ({"rewards": [{"name": "exact_match"}, {"name": "team:s"}]}, "rollout.rewards.1.name names code of team"),
    ({"path": "/models/custom", "trust": True}, "model.trust_remote_code names code of /models/custom"),
    ({"engine": {"kind": "vllm", "python": "/models/custom"}}, "rollout.engine.python is /models/custom, which is not"),
    ({"engine": {"router_python": "/models/custom"}}, "rollout.engine.router_python is /models/custom, which is not"),
    (
        {"engine": {"kind": "vllm", "extra_args": ["0.5", "--trust-remote-code"]}},
        r"rollout\.engine\.extra_args\.1 is --trust-remote-code, which is not",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), NAMED)
def test_code_that_nobody_trusts_is_refused_by_its_setting(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check(**changes)


@pytest.mark.parametrize(("changes", "sentence"), NAMED)
def test_what_the_environment_lists_may_be_named(
    changes: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "team, os,/models/custom,--trust-remote-code,")
    check(**changes)


def test_a_name_that_only_begins_like_a_trusted_one_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "team.rewards")
    for name in ("team.rewards_of_others:score", "team:score", "team.games:play"):
        with pytest.raises(ConfigError, match="is not trusted in a run"):
            check(reward_fn=name)
    check(reward_fn="team.rewards.strict:score")


@pytest.mark.parametrize("path", ["/models/small.5", "/models/small.d/evil", "rollouts_core", "rollouts_core.evil"])
def test_a_model_is_trusted_by_its_own_path_alone(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of models have dots, as Qwen2.5 has, and what lies behind one is no part of the model before it."""
    monkeypatch.setenv(VARIABLE, "/models/small")
    with pytest.raises(ConfigError, match=f"trust_remote_code names code of {path}"):
        check(path=path, trust=True)
    check(path="/models/small", trust=True)


def check_evaluated(store: Path, **named: str) -> None:
    config = Config.model_validate(settings(trust=True))
    check_trusted(config, EvaluateConfig(**{"model": "base", **named}), store)


@pytest.mark.parametrize("key", ["model", "against"])
def test_a_model_to_score_brings_no_code_that_nobody_trusts(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loaded with the trust that the start model has; only what runs of the store made needs none of its own."""
    store, foreign = tmp_path / "store", tmp_path / "foreign"
    for folder in (store / "runs/mine-01234567", store / "inputs/0123", foreign / "runs/mine-01234567"):
        folder.mkdir(parents=True)
    monkeypatch.setenv(VARIABLE, "/models/small")
    made = ("production", "small-3", "mine-01234567", str(store / "runs/mine-01234567"), "base")
    for given in made:
        check_evaluated(store, **{key: given})
    for given in (str(foreign), "../../foreign", str(store / "inputs/0123"), "s3://bucket/model"):
        with pytest.raises(ConfigError, match=f"evaluate.{key} names code of"):
            check_evaluated(store, **{key: given})
    monkeypatch.setenv(STORE_VARIABLE, str(store))
    check_evaluated(store, **{key: "mine-01234567"})
    with pytest.raises(ConfigError, match=f"evaluate.{key} names code of mine-01234567"):
        check_evaluated(foreign, **{key: "mine-01234567"})
    monkeypatch.setenv(VARIABLE, f"/models/small,{foreign}")
    check_evaluated(store, **{key: str(foreign)})


def test_a_run_that_scores_is_refused_with_a_model_that_brings_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "/models/small")
    config, run = Config.model_validate(settings(trust=True)), RunOptions(store=str(tmp_path / "store"))
    with pytest.raises(ConfigError, match=re.escape(f"evaluate.model names code of {tmp_path}")):
        check_settings.fn(config, LocalNode(), run, EvaluateConfig(model=str(tmp_path)))


def test_a_configuration_of_openssh_that_nobody_trusts_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may name commands, which are run on this machine to find out what applies (Match exec)."""
    further = {"host": "me@10.0.0.2", "python": "/usr/bin/python3", "ssh_config": "/home/other/config"}
    node = SSHNode.model_validate({"host": "box", "python": "/usr/bin/python3", "trainer_nodes": [further]})
    monkeypatch.setenv(VARIABLE, "box,me@10.0.0.2")
    config = Config.model_validate(settings())
    with pytest.raises(ConfigError, match=r"node\.trainer_nodes\.0\.ssh_config is /home/other/config, which is not"):
        check_trusted(config, node=node)
    machine = {"host": "box", "python": "/usr/bin/python3", "ssh_config": "/home/other/config"}
    given = {"config": settings(), "node": {"kind": "ssh", **machine}}
    (tmp_path / "prefect").mkdir()
    save_deployments(tmp_path / "prefect", [Deployment(name="mine", description="", parameters=given)])
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path))
    check_trusted(config, node=node)


def test_every_value_without_trust_is_named_at_once() -> None:
    node = SSHNode.model_validate({"host": "me@box", "python": "/opt/python"})
    config = Config.model_validate(settings(trust=True, reward_fn="team.rewards:score", filter_fn="team:keep"))
    with pytest.raises(ConfigError) as refused:
        check_trusted(config, node=node)
    named = ("rollout.reward_fn", "rollout.filter_fn", "node.host", "node.python", "model.trust_remote_code")
    assert sorted(line.split()[0] for line in str(refused.value).splitlines()) == sorted(named)


def test_what_the_library_has_needs_no_trust() -> None:
    check(reward_fn="exact_match")
    check(reward_fn="rollouts_core.rewards:exact_match")
    check(path="/models/custom")


def test_what_was_given_to_up_may_be_named_by_any_run_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = {"kind": "vllm", "python": "/vllm/bin/python", "extra_args": ["--gpu-memory-utilization", "0.5"]}
    given = settings(reward_fn="team.rewards:score", engine=engine)
    older = {**given, "gone": 1, "rollout": {"reward_fn": "others:score"}}
    (tmp_path / "prefect").mkdir()
    save_deployments(
        tmp_path / "prefect",
        [
            Deployment(name=name, description="", parameters={"config": config}, is_preset=False)
            for name, config in (("mine", given), ("older", older))
        ],
    )
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path))
    check(reward_fn="team.rewards:lenient", engine={**engine, "extra_args": ["--gpu-memory-utilization", "0.7"]})
    with pytest.raises(ConfigError, match=r"extra_args\.0 is --middleware"):
        check(engine={**engine, "extra_args": ["--middleware", "os.system"]})
    scored = Deployment(
        name="scored",
        description="",
        parameters={"config": settings(trust=True), "evaluate": {"model": "/models/other"}},
    )
    save_deployments(tmp_path / "prefect", [scored])
    check_evaluated(tmp_path, model="/models/other")
    for name in ("team.games:play", "others:score"):
        with pytest.raises(ConfigError, match="give a configuration that names it to rollouts up"):
            check(reward_fn=name)
