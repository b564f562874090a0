"""Pins which series of metrics each rule warns of, that no other rule does, and that a healthy run is silent.

Without it a run that collapsed goes on for days, or a warning that comes too often is read by nobody.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from rollouts_core.config import rl, sft
from rollouts_core.errors import NoSignalError, StoppedByRuleError
from rollouts_core.metrics import EventLog, read_json_lines
from rollouts_core.signal_watch import SignalWatch
from rollouts_core.warning_rules import NO_SIGNAL_RULE, RL_RULES, SFT_RULES, Rule, WarningWatch

RECORDED = Path(__file__).parent / "recorded/quickstart_rl.jsonl"
"""The metrics of RL in a run of the quickstart."""


def healthy(num_steps: int) -> list[dict[str, float]]:
    """Steps of a run with noise in which nothing is wrong."""
    draw = random.Random(0)
    return [
        {
            "reward": min(1.0, 0.3 + step / 200 + draw.gauss(0, 0.05)),
            "reward_std": 0.45,
            "entropy": 0.6 + draw.gauss(0, 0.05),
            "grad_norm": draw.lognormvariate(0, 0.5),
            "truncated_share": draw.choice((0.0, 0.2, 0.9)),
            "mismatch_kl": draw.uniform(0, 0.02),
            "staleness_mean": draw.uniform(0, 3),
            "parse_failure_share": draw.choice((0.0, 0.5, 0.95)),
            "update_arrived_share": 0.95,
            "weights_changed_share": 0.9,
            "signal_share": 0.5,
            "skipped": 0.0,
            "num_nonfinite": 0.0,
        }
        for step in range(num_steps)
    ]


def collapsing(name: str) -> list[dict[str, float]]:
    """A run that is healthy for 60 steps, and then has the trouble of a rule."""
    steps = healthy(120)
    changes: dict[str, Mapping[str, float]] = {
        "no_signal": {"skipped": 1.0, "signal_share": 0.0, "reward": 0.5, "reward_std": 0.5},
        "reward_halved": {"reward": 0.1},
        "entropy_collapse": {"entropy": 0.01},
        "all_truncated": {"truncated_share": 1.0},
        "gradient_spikes": {"grad_norm": 50.0},
        "engine_mismatch": {"mismatch_kl": 0.2},
        "staleness": {"staleness_mean": 9.0},
        "unparsed_calls": {"parse_failure_share": 1.0},
        "rounded_updates": {"update_arrived_share": 0.3},
    }
    return [{**line, **changes[name]} if place >= 60 else line for place, line in enumerate(steps)]


def warnings_of(steps: list[dict[str, float]], folder: Path, *, stop_on: tuple[str, ...] = ()) -> list[tuple[str, int]]:
    """The rules that warned, with the steps at which they did."""
    with EventLog(folder / "events.jsonl") as events:
        watch = WarningWatch(SignalWatch(0), stop_on)
        for step, metrics in enumerate(steps, start=1):
            watch.after_step(step, metrics, events)
    return [(line["rule"], line["step"]) for line in read_json_lines(folder / "events.jsonl")]


@pytest.mark.parametrize("name", [rule.name for rule in RL_RULES])
def test_each_rule_warns_of_its_trouble_and_no_other_rule_does(name: str, tmp_path: Path) -> None:
    told = warnings_of(collapsing(name), tmp_path)
    assert {rule for rule, _ in told} == {name}
    assert 60 < told[0][1] <= 72, "within twelve steps"
    message = read_json_lines(tmp_path / "events.jsonl")[0]["message"]
    assert message.startswith(f"step {told[0][1]}: ")
    rule = next(rule for rule in RL_RULES if rule.name == name)
    assert ("more completions per prompt" if name == NO_SIGNAL_RULE.name else rule.remedy) in message


def test_a_healthy_run_and_the_quickstart_are_silent(tmp_path: Path) -> None:
    assert warnings_of(healthy(500), tmp_path) == []
    recorded = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    assert len(recorded) == 40 and recorded[-1]["reward"] > 0.9
    assert warnings_of(recorded, tmp_path) == []


def test_a_task_that_is_solved_is_no_collapse(tmp_path: Path) -> None:
    solved = [{**line, "entropy": 0.001, "reward_std": 0.05, "reward": 0.99} for line in healthy(60)]
    assert warnings_of([*healthy(60), *solved], tmp_path) == []


def test_a_warning_comes_once_until_the_bound_was_kept_again(tmp_path: Path) -> None:
    trouble = [{**line, "truncated_share": 1.0} for line in healthy(10)]
    assert warnings_of([*trouble, *healthy(1), *trouble], tmp_path) == [("all_truncated", 3), ("all_truncated", 14)]


def test_a_metric_that_is_missing_or_not_finite_is_no_trouble(tmp_path: Path) -> None:
    bare = [{"skipped": 0.0, "num_nonfinite": 0.0, "signal_share": 1.0}] * 50
    odd = [{**line, "entropy": float("nan"), "grad_norm": float("inf")} for line in healthy(50)]
    assert warnings_of([*bare, *odd, *bare], tmp_path) == []


def test_only_a_rule_that_the_settings_name_ends_a_run() -> None:
    steps = collapsing("all_truncated")
    watch = WarningWatch(SignalWatch(50), ("all_truncated", "staleness"))
    for step, metrics in enumerate(steps[:62], start=1):
        watch.after_step(step, metrics)
        assert not watch.is_over
    watch.check()
    watch.after_step(63, steps[62])
    assert watch.is_over
    with pytest.raises(StoppedByRuleError, match=r"step 63: all completions .* take all_truncated out of training\.rl"):
        watch.check()
    warned = WarningWatch(SignalWatch(50), ("staleness",))
    for step, metrics in enumerate(steps, start=1):
        warned.after_step(step, metrics)
    assert not warned.is_over


def test_a_rule_rolls_a_training_back_and_without_a_best_checkpoint_ends_the_run() -> None:
    watch = WarningWatch(SignalWatch(50), (), ("staleness", "all_truncated"))
    for step, metrics in enumerate(collapsing("all_truncated")[:63], start=1):
        assert (watch.is_over, watch.roll_back_rule) == (False, "")
        watch.after_step(step, metrics)
    assert (watch.is_over, watch.roll_back_rule) == (True, "all_truncated")
    watch.check(is_rolled_back=True)
    remedy = r"Lower training\.rl\.checkpoint_every, or take all_truncated out of training\.rl\.roll_back_on"
    with pytest.raises(
        StoppedByRuleError, match=rf"step 63: all completions .* no checkpoint has a score yet.* {remedy}"
    ):
        watch.check()


def test_a_run_stops_if_rules_of_both_settings_warn_in_the_same_step() -> None:
    steps = [{**line, "parse_failure_share": line["truncated_share"]} for line in collapsing("all_truncated")]
    watch = WarningWatch(SignalWatch(50), ("unparsed_calls",), ("all_truncated",))
    for step, metrics in enumerate(steps[:63], start=1):
        watch.after_step(step, metrics)
    assert (watch.is_over, watch.roll_back_rule) == (True, "")
    with pytest.raises(StoppedByRuleError, match=r"take unparsed_calls out of training\.rl\.stop_on"):
        watch.check()


def test_steps_without_signal_end_a_run_by_their_own_limit() -> None:
    watch = WarningWatch(SignalWatch(12))
    for step, metrics in enumerate(collapsing("no_signal")[:72], start=1):
        watch.after_step(step, metrics)
    with pytest.raises(NoSignalError, match="step 72: 12 steps in a row"):
        watch.check()


def sft_steps(**late: float) -> list[dict[str, float]]:
    """120 steps of SFT whose loss falls with noise; after step 60 with the trouble of a rule."""
    draw = random.Random(0)
    steps = [
        {"loss": 2.0 * 0.99**step + abs(draw.gauss(0, 0.3)), "grad_norm": draw.lognormvariate(0, 0.5)}
        for step in range(120)
    ]
    return [{**line, **late} if step >= 60 else line for step, line in enumerate(steps)]


@pytest.mark.parametrize(
    ("late", "told"),
    [({}, set()), ({"loss": 4.0}, {"loss_risen"}), ({"grad_norm": 50.0}, {"gradient_spikes"})],
)
def test_sft_is_warned_of_a_loss_that_rose_and_of_gradient_spikes(
    late: dict[str, float], told: set[str], tmp_path: Path
) -> None:
    watch = WarningWatch(None, tuple(told), rules=SFT_RULES, section="training.sft")
    with EventLog(tmp_path / "events.jsonl") as events:
        for step, metrics in enumerate(sft_steps(**late), start=1):
            watch.after_step(step, metrics, events)
    lines = read_json_lines(tmp_path / "events.jsonl")
    assert {line["rule"] for line in lines} == told and all(60 < line["step"] <= 72 for line in lines)
    assert watch.is_over == bool(told)
    if told:
        with pytest.raises(StoppedByRuleError, match=r"take \w+ out of training\.sft\.stop_on"):
            watch.check()


@pytest.mark.parametrize(("rules", "config"), [(RL_RULES, rl), (SFT_RULES, sft)])
def test_the_settings_and_the_page_have_the_rules_of_the_table(rules: tuple[Rule, ...], config: ModuleType) -> None:
    assert {*get_args(config.StopRule)} == {rule.name for rule in rules} - {NO_SIGNAL_RULE.name}
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    for rule in rules:
        assert f"| `{rule.name}` | {rule.measures} | {rule.bound} | {rule.remedy} |" in page
