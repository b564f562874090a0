"""Pins that a function named in a configuration is found, or that its absence is one sentence.

Without it a misspelt reward would surface as a traceback on a rented machine.
"""

from pathlib import Path

import pytest

from rollouts_core.errors import ConfigError
from rollouts_core.rewards import REWARDS, RewardFn, exact_match, last_number
from rollouts_core.user_code.functions import resolve_function


def resolve(name: str | RewardFn) -> RewardFn:
    """The reward that a configuration means."""
    return resolve_function(name, REWARDS, setting="rollout.reward_fn")


def test_a_known_name_is_found() -> None:
    assert resolve("last_number") is last_number


def test_a_function_stands_for_itself() -> None:
    assert resolve(exact_match) is exact_match


def test_a_function_of_a_package_is_found_by_module_and_name() -> None:
    assert resolve("rollouts_core.rewards:exact_match") is exact_match


def test_a_users_own_module_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards_for_this_test.py").write_text("def length(sample):\n    return len(sample.response)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve("own_rewards_for_this_test:length").__name__ == "length"


@pytest.mark.parametrize("statement", ["raise RuntimeError('broken')", "import sys; sys.exit(3)", "def f(:"])
def test_a_users_module_that_breaks_at_import_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    (tmp_path / "broken_rewards_of_this_test.py").write_text(statement + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="'broken_rewards_of_this_test' cannot be imported") as caught:
        resolve("broken_rewards_of_this_test:length")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("statement", ["import no_such_package", "from json import no_such_name"])
def test_a_users_module_that_imports_what_is_not_there_is_not_sought_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    """Without it somebody whose file was found looks for it, and not for the package that is not installed."""
    (tmp_path / "importing_rewards_of_this_test.py").write_text(f"\n{statement}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        resolve("importing_rewards_of_this_test:length")
    assert "(importing_rewards_of_this_test.py, line 2): install the missing package, or repair the import" in str(
        caught.value
    )
    assert "PYTHONPATH" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("exact_mach", r"unknown name 'exact_mach'; did you mean exact_match\?$"),
        ("zzz", "unknown name 'zzz'; known are exact_match, last_number, or give package.module:function$"),
        ("own_rewards.length", r"known are exact_match, last_number, or give package\.module:function$"),
        (
            "no_such_package:f",
            r"'no_such_package' cannot be imported \(.*\); is it beside the configuration, .*\?",
        ),
        ("rollouts_core.no_such_module:f", "cannot be imported"),
        ("rollouts_core.rewards:no_such_function", "module 'rollouts_core.rewards' has no 'no_such_function'"),
        ("rollouts_core.rewards:", "has no ''"),
        ("rollouts_core.rewards:exact_mach", r"has no 'exact_mach'; did you mean exact_match\?"),
        ("rollouts_core.rewards:NUMBER", "is not a function"),
        (":exact_match", "has no module name"),
        (
            "./own.py:length",
            r"'./own\.py:length' is a file name .* \(own:length\), with its folder beside the configuration .*$",
        ),
        ("rewards/own:length", r"is a file name .*import statement \(own:length\)"),
        ("own.py", r"is a file name .*import statement \(own:function\)"),
        (".rewards:exact_match", r"is a file name .*import statement \(rewards:exact_match\)"),
    ],
)
def test_a_name_that_is_no_function_is_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"^rollout\.reward_fn: .*{sentence}"):
        resolve(name)
