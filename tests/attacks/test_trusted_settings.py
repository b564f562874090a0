"""Pins that a run which is asked for through Prefect names no program, code, machine or secret that is not trusted.

Everybody that knows a server's password may start runs. Without these tests, a new setting that names a program would
let them run it as the user that serves, and a variable with a cloud's key could be sent to any address.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from rollouts.flows.cancellation import release_for
from rollouts.flows.credential_variables import check_carried
from rollouts.flows.credentials import FIELDS, variables_in, variables_of
from rollouts.flows.deployments import Deployment, save_deployments
from rollouts.flows.evaluate_settings import EvaluateConfig
from rollouts.flows.form import RunOptions
from rollouts.flows.retrain_settings import RetrainConfig, ScheduleConfig
from rollouts.flows.store import STORE_VARIABLE
from rollouts.flows.trusted_code import OWN_MODULES, VARIABLE, check_trusted
from rollouts.infra.node import FurtherNode, InstanceNode, LocalNode, NodeSettings, RentedNode, SSHNode
from rollouts_core.config import Config
from rollouts_core.environments import ENVIRONMENTS
from rollouts_core.errors import ConfigError
from rollouts_core.filters import FILTERS
from rollouts_core.rewards import REWARDS
from rollouts_core.user_code.functions import resolve_function

DATA = {"sft": "sft.jsonl", "prompts": "p.jsonl", "selection": "s.jsonl", "heldout": "h.jsonl"}
SSH = {"kind": "ssh", "host": "me@box", "python": "/usr/bin/python3"}
RENTED = {"kind": "rented", "max_usd": 1.0}
JUDGE = {"kind": "judge", "model": "m", "api_key_variable": "AWS_SECRET_ACCESS_KEY"}

HARMLESS = {
    *("name", "store", "publish", "credentials", "register_as", "fresh", "report_to"),  # RunOptions
    *("model", "against", "data", "sources", "cron", "time_zone", "overlap"),  # EvaluateConfig, RetrainConfig, schedule
    *("kind", "root", "install", "key_file", "key_variable", "host_keys"),
    *("address", "instance", "gpu_types", "regions", "security", "min_cuda", "providers"),
    *(
        "mode",
        "path",
        "source",
        "revision",
        "split",
        "subset",
        "sft",
        "sft_eval",
        "prompts",
        "rollouts",
        "selection",
        "heldout",
    ),
    *("metric", "engine", "kind", "dtype", "weight_transfer", "router_url", "url", "label", "judge_prompt"),
    *("algorithm", "objective", "baseline", "train_on", "on_overlong", "attention", "backend", "precision"),
    *("allow_changed",),
    *("resume_from", "target_modules", "stop", "stop_regex", "settings", "columns"),
    *("chat_template_kwargs", "response_template"),
}
"""Fields with texts that start nothing, install nothing, and send no secret. A field of such a name was looked at."""


def fields_of(model: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[tuple[str, FieldInfo]]:
    """Every field of a record and of the records within, with the name of its record."""
    if model in seen:
        return
    seen.add(model)
    for name, field in model.model_fields.items():
        yield f"{model.__name__}.{name}", field
        for within in records_in(field.annotation):
            yield from fields_of(within, seen)


def records_in(annotation: Any) -> list[type[BaseModel]]:  # Any: a type
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [each for part in get_args(annotation) for each in records_in(part)]


def holds_text(annotation: Any) -> bool:  # Any: a type
    """Whether a value of the type may hold a text of the user's choice."""
    if annotation is str:
        return True
    return any(holds_text(part) for part in get_args(annotation) if not isinstance(part, str))


def test_every_setting_with_a_text_is_marked_or_known_to_be_harmless() -> None:
    seen: set[type[BaseModel]] = set()
    records = (Config, LocalNode, SSHNode, FurtherNode, InstanceNode, RentedNode, RunOptions)
    unknown = []
    for record in (*records, EvaluateConfig, RetrainConfig, ScheduleConfig):
        for place, field in fields_of(record, seen):
            is_marked = isinstance(field.json_schema_extra, dict) and "needs_trust" in field.json_schema_extra
            if holds_text(field.annotation) and not is_marked and place.rpartition(".")[2] not in HARMLESS:
                unknown.append(place)
    assert unknown == [], "mark these (rollouts_core/config/record.py), or add them to HARMLESS"


def check(node: dict[str, Any] | None = None, **rollout: Any) -> None:  # Any: settings
    config = Config.model_validate({"model": {"path": "/m"}, "data": DATA, "rollout": rollout})
    adapter: TypeAdapter[Any] = TypeAdapter(NodeSettings)
    check_trusted(config, node=adapter.validate_python(node or {"kind": "local"}))


@pytest.mark.parametrize(
    ("node", "setting"),
    [
        ({"kind": "local", "python": "/tmp/evil.sh"}, "node.python"),
        (SSH | {"host": "me@localhost"}, "node.host"),
        (SSH | {"python": "/tmp/evil.sh"}, "node.python"),
        (SSH | {"package_index": "http://evil.example/simple"}, "node.package_index"),
        (SSH | {"requirements": "/tmp/evil.txt"}, "node.requirements"),
        (SSH | {"proxy_jump": "me@evil.example"}, "node.proxy_jump"),
        (SSH | {"host_key": f"SHA256:{'e' * 43}"}, "node.host_key"),
        (SSH | {"known_hosts": "/tmp/evil"}, "node.known_hosts"),
        (SSH | {"trust_first_use": True}, "node.trust_first_use"),
        (SSH | {"trainer_nodes": [{"host": "me@10.0.0.9", "python": "/usr/bin/python3"}]}, "node.trainer_nodes.0.host"),
        ({"kind": "instance", "instance": "runpod:a", "python": "/tmp/evil.sh"}, "node.python"),
        (RENTED | {"setup": ["true", "curl evil.example"]}, "node.setup.1"),
        (RENTED | {"image": "evil/image"}, "node.image"),
        (RENTED | {"package_index": "http://evil.example/simple"}, "node.package_index"),
    ],
)
def test_a_machine_runs_nothing_that_is_not_trusted(
    node: dict[str, Any], setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "me@box,true")
    with pytest.raises(
        ConfigError, match=f"^{setting} is .*which is not trusted in a run that was requested through Prefect"
    ):
        check(node)


@pytest.mark.parametrize("number", ["1e5", "nan", "0x10", "7"])
def test_a_program_named_like_a_number_needs_trust(number: str) -> None:
    for name in ("python", "wheels", "requirements"):
        with pytest.raises(ConfigError, match=rf"rollout\.engine\.{name} is {number}, which is not trusted in a run"):
            check(engine={"kind": "sglang", name: number})
    check(engine={"kind": "sglang", "extra_args": ["0.7"]})


def test_a_node_that_was_changed_after_the_check_is_not_used_to_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every user of Prefect may change a run's parameters and cancel it."""
    released: list[str] = []

    def release(place: str, *_: object) -> str:
        released.append(place)
        return ""

    monkeypatch.setattr("rollouts.flows.cancellation.release_leases", partial(release, "node"))
    monkeypatch.setattr("rollouts.flows.cancellation.release_without_settings", partial(release, "here"))
    for node in ({"kind": "local"}, {"kind": "local", "python": "/tmp/evil.sh"}, SSH):
        parameters = {"config": {}, "node": node, "run": {"name": "a", "store": str(tmp_path)}}
        release_for(FlowRun(flow_id=uuid4(), deployment_id=uuid4(), parameters=parameters))
    assert released == ["node", "here", "here"]


def test_machines_of_the_providers_own_kind_need_no_trust() -> None:
    for node in ({"kind": "local"}, RENTED, {"kind": "instance", "instance": "runpod:a"}):
        check(node)


def test_a_secret_goes_to_the_address_that_was_trusted_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"rewards\.0\.api_key_variable is AWS_SECRET_ACCESS_KEY@http://evil"):
        check(rewards=[JUDGE | {"url": "http://evil.example/v1"}])
    monkeypatch.setenv(VARIABLE, "AWS_SECRET_ACCESS_KEY,AWS_SECRET_ACCESS_KEY@https://judge.example/v1")
    with pytest.raises(ConfigError, match=r"rewards\.0\.api_key_variable is AWS_SECRET_ACCESS_KEY@http://evil"):
        check(rewards=[JUDGE | {"url": "http://evil.example/v1"}])
    check(rewards=[JUDGE | {"url": "https://judge.example/v1"}])
    monkeypatch.delenv(VARIABLE)
    given = {"model": {"path": "/m"}, "data": DATA, "rollout": {"rewards": [JUDGE | {"url": "https://judge.example"}]}}
    (tmp_path / "prefect").mkdir()
    deployment = Deployment(name="mine", description="", parameters={"config": given, "node": SSH})
    save_deployments(tmp_path / "prefect", [deployment])
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path))
    check(SSH, rewards=[JUDGE | {"url": "https://judge.example"}])
    with pytest.raises(ConfigError, match=r"node\.host is me@other"):
        check(SSH | {"host": "me@other"}, rewards=[JUDGE | {"url": "https://judge.example"}])


@pytest.mark.parametrize(
    "name",
    [
        "rollouts_core.environments.sandbox:os.abort",
        "rollouts_core.environments.sandbox:Path.unlink",
        "rollouts_core.environments.sandbox:Path",
        "rollouts_core.config:Record.model_construct",
        "rollouts_core.system.files:os.remove",
        "rollouts_core.rewards:Sample.__class__",
        "rollouts_core.rewards:__class__",
        "rollouts_core.rewards:__loader__.get_data",
        "rollouts_core.rewards:__builtins__.eval",
        "rollouts_core.rewards:call_within",
        "rollouts_core.rewards:gather",
        "rollouts_core.environments.code:run_program",
        "rollouts_core.rewards:Decimal",
        "rollouts_core.rewards:partial",
        "rollouts_core.config:Config.parse_file",
        "rollouts_core.config:Config.model_validate_json",
    ],
)
def test_a_trusted_module_lends_no_trust_to_what_it_imports(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is not defined in rollouts_core[a-z_.]* but in|has no"):
        resolve_function(name, {}, setting="reward_fn")


def test_an_object_or_inner_function_of_another_package_is_not_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "foreign_shell.py").write_text(
        "import os\n\nclass Run:\n    def __call__(self, sample):\n        os.abort()\n\nrun = Run()\n"
        "def make():\n    def inner(sample):\n        os.abort()\n    return inner\n\ninner = make()\n"
    )
    (tmp_path / "team_rewards.py").write_text(
        "from foreign_shell import Run, inner, make, run\n\nown = Run()\nown_inner = make()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("run", "inner", "Run", "make"):
        with pytest.raises(ConfigError, match="is not defined in team_rewards but in foreign_shell"):
            resolve_function(f"team_rewards:{name}", {}, setting="reward_fn")
    for name in ("own", "own_inner"):
        assert callable(resolve_function(f"team_rewards:{name}", {}, setting="reward_fn"))


@pytest.mark.parametrize(
    "name",
    [
        *("rollouts_core.__main__:main", "rollouts_core.system.files:remove_directory", "rollouts_core:exact_match"),
        *("rollouts_core.environments.sandbox_child:main", "rollouts_core.backends.launch:main", "rollouts_core.rl:f"),
        *("rollouts_core.rewards.x:f", "rollouts_core.environments:f", "rollouts_core.user_code.functions:_import"),
    ],
)
def test_of_this_project_only_modules_that_grade_need_no_trust(name: str) -> None:
    for settings in ({"reward_fn": name}, {"environment": name}, {"filters": [{"name": name, "settings": {"a": 1}}]}):
        with pytest.raises(ConfigError, match="is not trusted in a run"):
            check(**settings)


def test_a_function_that_prepares_data_and_a_mirror_need_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"prepare": {"name": "evil_prepare:main"}}
    config = Config.model_validate({"model": {"path": "/m"}, "data": data})
    with pytest.raises(ConfigError, match=r"data\.prepare\.name names code of evil_prepare, which is not trusted"):
        check_trusted(config)
    monkeypatch.setenv(VARIABLE, "evil_prepare")
    check_trusted(config)
    named = {"model": {"path": "/m"}, "data": {"prepare": "gsm8k"}}
    check_trusted(Config.model_validate(named))
    mirror = Config.model_validate(named | {"hub": {"url": "http://evil.example", "token_variable": "MY_TOKEN"}})
    with pytest.raises(
        ConfigError, match=r"hub\.url is http://evil\.example, which is not trusted in a run"
    ) as refused:
        check_trusted(mirror)
    assert "hub.token_variable is MY_TOKEN@http://evil.example" in str(refused.value)


def test_a_taskset_that_rows_name_needs_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "math-tasks")
    with pytest.raises(ConfigError, match=r"rollout\.tasksets\.1 is evil, which is not trusted in a run"):
        check(environment="verifiers", tasksets=["math-tasks", "evil"])
    check(environment="verifiers", tasksets=["math-tasks"])


def test_modules_that_grade_are_those_of_the_named_graders() -> None:
    named = {*REWARDS.values(), *FILTERS.values(), *ENVIRONMENTS.values()} - {ENVIRONMENTS["verifiers"]}
    assert set(OWN_MODULES) == {each.__module__ for each in named}


@pytest.mark.parametrize(
    "variable",
    [
        *("ROLLOUTS_TRUSTED_CODE", "ROLLOUTS_STORE_KEY", "PREFECT_API_KEY", "PREFECT_API_URL", "PYTHONPATH"),
        *("PYTHONSTARTUP_KEY", "LD_PRELOAD", "LD_X_KEY", "PATH", "HOME", "BASH_ENV", "AWS_CONFIG_FILE", "http_proxy"),
        *("SSL_CERT_FILE", "key", "A=KEY", "GIT_SSH_COMMAND", "TMPDIR", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_credentials_carry_nothing_that_steers_a_process(variable: str) -> None:
    with pytest.raises(ConfigError, match="the credentials team may not contain"):
        check_carried("team", variable)


@pytest.mark.parametrize("variable", [*FIELDS, "JUDGE_KEY", "WANDB_API_KEY", "TEAM_SSH_KEY", "AWS_SESSION_TOKEN"])
def test_credentials_carry_keys(variable: str) -> None:
    check_carried("team", variable)


def test_a_block_that_steers_a_process_is_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    block = {"more": {"JUDGE_KEY": "k", "ROLLOUTS_TRUSTED_CODE": "os"}}
    monkeypatch.setattr("rollouts.flows.credentials.find_credentials", lambda: {"team": variables_in(block)})
    with pytest.raises(ConfigError, match="the credentials team may not contain 'ROLLOUTS_TRUSTED_CODE'"):
        variables_of("team")
