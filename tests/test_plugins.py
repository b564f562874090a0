"""Pins: an installed package adds an objective, an environment, a reward and a tracker by entry points.

Without it a user's own would need a fork of this repository, its edits would not start a stage anew, and one broken
package would break commands that do not need it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts.flows.form import RunOptions
from rollouts.flows.trusted_code import find_marked, is_trusted
from rollouts_core import plugins
from rollouts_core.algorithms.objectives import ALL_OBJECTIVES, OBJECTIVES
from rollouts_core.checks.loss_checks import check_loss_fn
from rollouts_core.config import LossConfig, RLTrainingConfig, RolloutConfig
from rollouts_core.environments import ALL_ENVIRONMENTS
from rollouts_core.errors import ConfigError
from rollouts_core.rewards import ALL_REWARDS
from rollouts_core.rollout.resolve import resolve_environment, resolve_reward_fn
from rollouts_core.stages.planning import plugin_digest
from rollouts_core.user_code.own_files import find_code, own_code
from tests.example_plugin import MODULE, importable, install_example, write_package
from tests.infra.ssh_server import running_server
from tests.kit.commands import clean_environment
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.ssh_nodes import node_settings

TIMEOUT_S = 300
SOURCES = Path(__file__).parents[1] / "src"
RL = RLTrainingConfig.model_validate({"loss": {"objective": "ppo"}})

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_example(tmp_path_factory.mktemp("plugin"))


@pytest.fixture
def site(installed: Path, tmp_path: Path) -> Path:
    """A copy that the test may edit."""
    return shutil.copytree(installed, tmp_path / "site")


def call(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line beside what is installed in the folder."""
    environment = clean_environment() | {"PYTHONPATH": f"{site}{os.pathsep}{SOURCES}"}
    command = [sys.executable, "-m", "rollouts.flows.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


def soft_gate() -> RLTrainingConfig:
    return RLTrainingConfig.model_validate({"loss": {"objective": "soft_gate"}})


@pytest.mark.matrix
def test_a_run_on_another_machine_uses_an_installed_package_and_its_edit_is_another_stage(
    site: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with running_server(tmp_path / "sshd") as server:
        config = write_small_pipeline(
            tmp_path / "small",
            mode="rl",
            node=node_settings(server, tmp_path / "node"),
            rollout__environment="nearness",
            training__rl__num_steps=2,
            training__rl__loss__objective="soft_gate",
            run__report_to=["text"],
        )
        checked = call(site, "validate", str(config))
        assert checked.returncode == 0, checked.stderr
        ended = call(site, "run", str(config), "--store", str(store))
        assert ended.returncode == 0, ended.stderr
        assert f"{MODULE} (3 files" in ended.stdout + ended.stderr
        [stage] = (store / "stages").glob("rl-*")
        job = json.loads((stage / "job.json").read_text())
        assert (job["training"]["loss"]["objective"], job["rollout"]["environment"]) == ("soft_gate", "nearness")
        [shown] = (store / "text").glob("*-rl.txt")
        assert [line.split()[0] for line in shown.read_text().splitlines()] == ["1", "2"]

        module = site / f"{MODULE}.py"
        module.write_text(module.read_text().replace("STEEPNESS = 1.0", "STEEPNESS = 2.0"))
        ended = call(site, "run", str(config), "--store", str(store))
        assert ended.returncode == 0, ended.stderr
    assert len([*(store / "stages").glob("rl-*")]) == 2


def test_settings_know_the_names_and_forms_show_them(installed: Path) -> None:
    with pytest.raises(ValueError, match=r"'ppo', .* or 'reinforce'"):
        soft_gate()
    with importable(installed):
        assert soft_gate().objective_spec.has_ratio and not soft_gate().objective_spec.is_clipped
        assert check_loss_fn(soft_gate()) == []
        assert LossConfig.model_json_schema()["properties"]["objective"]["enum"] == [*OBJECTIVES, "soft_gate"]
        assert RunOptions.model_json_schema()["properties"]["report_to"]["items"]["enum"][-1] == "text"
        graded = RolloutConfig(environment="nearness", reward_fn="nearness")
        assert type(resolve_environment(graded)).__module__ == resolve_reward_fn(graded).__module__ == MODULE
        with pytest.raises(ConfigError, match="unknown name 'nearnes'; did you mean nearness"):
            resolve_environment(RolloutConfig(environment="nearnes"))


def test_an_edit_of_the_package_or_its_entry_points_changes_the_identity(site: Path) -> None:
    with importable(site):
        named = RolloutConfig(environment="nearness")
        before, of_objective = plugin_digest(named), plugin_digest(RolloutConfig(), soft_gate())
        assert before == plugin_digest(named, RL) != ""
        assert plugin_digest(RolloutConfig(environment="arithmetic", reward_fn="exact_match"), RL) == ""
        with (site / f"{MODULE}.py").open("a") as file:
            file.write("# edited\n")
        edited = plugin_digest(named)
        assert edited != before and plugin_digest(RolloutConfig(), soft_gate()) != of_objective
        [about] = site.glob("*.dist-info")
        with (about / "METADATA").open("a") as file:
            file.write("edited\n")
        assert plugin_digest(named) == edited
        with (about / "entry_points.txt").open("a") as file:
            file.write("[rollouts.rewards2]\n")
        assert plugin_digest(named) != edited


def test_another_machine_finds_the_entry_points_in_what_is_sent(installed: Path, tmp_path: Path) -> None:
    with importable(installed):
        named = {**RolloutConfig(environment="nearness").modules_named, **soft_gate().modules_named}
        assert {*named.values()} == {MODULE}
        [code] = own_code(named.values())
        for name, path in code.sent.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            shutil.copy(path, tmp_path / name)
    assert {Path(name).name for name in code.sent} == {f"{MODULE}.py", "entry_points.txt", "METADATA"}
    program = (
        "from rollouts_core.config import RLTrainingConfig\n"
        "from rollouts_core.environments import ALL_ENVIRONMENTS\n"
        "print(RLTrainingConfig.model_validate({'loss': {'objective': 'soft_gate'}}).objective_spec.loss)\n"
        "print(ALL_ENVIRONMENTS['nearness'].__module__)\n"
    )
    environment = clean_environment() | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCES}"}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [f"{MODULE}:soft_gate", MODULE]


def test_a_process_that_names_built_in_objects_reads_nothing_that_is_installed(installed: Path) -> None:
    with importable(installed):
        assert RL.objective_spec is OBJECTIVES["ppo"] and RL.modules_named == {}
        named = RolloutConfig(environment="arithmetic", reward_fn="exact_match")
        resolve_environment(named)
        resolve_reward_fn(named)
        assert named.modules_named == {} and plugins._packages.cache_info().currsize == 0
        assert MODULE not in sys.modules


def test_a_broken_package_and_a_taken_name_are_left_out_and_listed(site: Path, tmp_path: Path) -> None:
    write_package(site, "broken_rewards", "rollouts.rewards", "broken = broken_rewards:score", "raise SystemExit(3)\n")
    write_package(site, "second_ppo", "rollouts.objectives", "ppo = second_ppo:PPO", "PPO = 1\n")
    write_package(site, "no_objective", "rollouts.objectives", "none = no_objective:NONE", "NONE = 1\n")
    listed = call(site, "plugins", "--json")
    assert listed.returncode == 0, listed.stderr
    rows = [json.loads(line) for line in listed.stdout.splitlines()]
    found = {(row["group"], row["name"]): (row["package"], row["version"], row["problem"]) for row in rows}
    example = ("rollouts-example-plugin", "1.0", "")
    assert found == {
        ("rollouts.objectives", "soft_gate"): example,
        ("rollouts.environments", "nearness"): example,
        ("rollouts.rewards", "nearness"): example,
        ("rollouts.trackers", "text"): example,
        ("rollouts.rewards", "broken"): ("broken_rewards", "1.0", "SystemExit(3)"),
        ("rollouts.objectives", "ppo"): ("second_ppo", "1.0", "the built-in objective has this name"),
        ("rollouts.objectives", "none"): ("no_objective", "1.0", "expected an Objective, found 1"),
    }
    assert "the reward broken of the package broken_rewards is left out (SystemExit(3))" in listed.stderr
    table = call(site, "plugins").stdout.splitlines()
    assert table[0].split() == ["GROUP", "NAME", "PACKAGE", "VERSION", "STATE"] and len(table) == 1 + len(rows)
    other = call(site, "status", "--store", str(tmp_path / "store"))
    assert "Traceback" not in other.stderr and "broken_rewards" not in other.stderr
    with importable(site):
        assert ALL_OBJECTIVES["ppo"] is OBJECTIVES["ppo"] and "none" not in ALL_OBJECTIVES
        assert [*ALL_REWARDS][-1] == "nearness" and "broken" not in ALL_REWARDS
        assert ALL_ENVIRONMENTS.locate("arithmetic") == "arithmetic"


def test_a_run_from_prefect_may_use_installed_names_and_no_other_function_of_the_package(installed: Path) -> None:
    with importable(installed):
        assert find_marked(RolloutConfig(environment="nearness", reward_fn="nearness")) == []
        [other] = find_marked(RolloutConfig(reward_fn=f"{MODULE}:nearness"))
        assert other.value == MODULE and not is_trusted(other, set())


def test_other_installed_packages_stay_on_this_machine(installed: Path) -> None:
    with importable(installed):
        assert own_code(["pydantic"]) == []
        code = find_code(MODULE)
        assert code is not None and code.about
