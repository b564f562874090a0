"""Pins that a setting which does nothing is told before the run.

Without it somebody trains all weights for a day in place of the adapters that lora.alpha was set for.
"""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from rollouts_core.algorithms.presets import ALGORITHMS
from rollouts_core.checks.no_effect import find_settings_without_effect
from rollouts_core.config import Config
from rollouts_core.environments import Conversation, Reply
from rollouts_core.types import Sample

DATA = {"sft": "a", "prompts": "b", "selection": "c", "heldout": "d"}


class Answers:
    """An environment that is needed for the conversation, whoever grades it."""

    async def respond(self, conversation: Conversation) -> Reply:
        return Reply()

    def grade(self, sample: Sample) -> float:
        return 0.0


def find(**sections: Any) -> Sequence[str]:  # Any: settings of every type
    return find_settings_without_effect(Config.model_validate({"model": {"path": "m"}, "data": DATA, **sections}))


def test_usual_settings_all_do_something() -> None:
    assert find() == []


@pytest.mark.parametrize("stage", ["sft", "rl"])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optim": {"lr": 0.0}}, "optim.lr is 0, so the model does not change"),
        (
            {"num_steps": 5, "optim": {"num_warmup_steps": 5}},
            "optim.num_warmup_steps 5 are not below the number",
        ),
        ({"num_steps": 6, "optim": {"num_warmup_steps": 5}}, ""),
        ({"num_steps": 6, "checkpoint_every": 7}, "checkpoint_every 7 is above num_steps 6, so only the last step"),
        ({"num_steps": 6, "checkpoint_every": 6}, ""),
        ({"num_steps": 5}, ""),  # a short training, of which nobody said how often it saves
        ({"allow_changed": ["optim.lr"]}, "allow_changed does nothing without resume_from"),
        ({"allow_changed": ["optim.lr"], "resume_from": "step_000010"}, ""),
        ({"policy": {"lora": {"alpha": 16.0}}}, "policy.lora.alpha does nothing without lora.rank"),
        ({"policy": {"lora": {"rank": 8, "alpha": 16.0}}}, ""),
    ],
)
def test_a_setting_of_a_stage_without_effect_is_told_where_the_stage_runs(
    stage: str, settings: dict[str, Any], words: str
) -> None:
    expected = [True] * bool(words)
    assert [f"training.{stage}.{words}" in sentence for sentence in find(training={stage: settings})] == expected
    other = {"sft": "rl", "rl": "sft"}[stage]
    assert not any(f"training.{stage}.{words}" in sentence for sentence in find(training={stage: settings}, mode=other))


@pytest.mark.parametrize(
    ("mode", "sections", "told"),
    [
        ("rl", {}, ["data.sft"]),
        ("rl", {"training": {"sft": {"num_steps": 5}}}, ["training.sft", "data.sft"]),
        ("rl", {"training": {"rl": {"num_steps": 5}}, "data": DATA | {"sft": ""}}, []),
        ("rl", {"data": DATA | {"sft": "", "sft_eval": "e"}}, ["data.sft_eval"]),
        ("sft", {}, ["data.prompts"]),
        ("sft", {"training": {"rl": {"algorithm": "verl-grpo"}}}, ["training.rl", "data.prompts"]),
        ("sft", {"training": {"sft": {"num_steps": 5}}, "data": DATA | {"prompts": ""}}, []),
        ("sft", {"data": DATA | {"prompts": "", "rollouts": "r"}}, ["data.rollouts"]),
        ("sft+rl", {"training": {"sft": {"num_steps": 5}, "rl": {"num_steps": 5}}}, []),
    ],
)
def test_what_is_for_a_stage_that_the_mode_leaves_out_is_told(
    mode: str, sections: dict[str, Any], told: list[str]
) -> None:
    without = {"rl": "SFT", "sft": "RL", "sft+rl": ""}[mode]
    expected = [f'{name} does nothing: mode "{mode}" has no {without}' for name in told]
    assert find(mode=mode, **sections) == expected


def test_sampling_where_nothing_is_sampled_is_told() -> None:
    comparing = {"mode": "sft", "data": DATA | {"prompts": ""}, "rollout": {"sampling": {"max_new_tokens": 9}}}
    assert find(**comparing) == []  # checkpoints are compared by what they sample
    [told] = find(**comparing, evaluation={"metric": "loss"})
    assert told.startswith("rollout does nothing: ")


@pytest.mark.parametrize(
    ("rollout", "is_told"),
    [
        ({"environment": "math"}, True),
        ({"environment": "math", "reward_fn": "exact_match"}, True),
        ({"environment": "calculator"}, False),
        ({"environment": f"{__name__}:Answers", "reward_fn": "exact_match"}, False),
    ],
)
def test_limits_of_conversations_that_nobody_answers_are_told(rollout: dict[str, Any], is_told: bool) -> None:
    told = [each for each in find(rollout=rollout | {"multi_turn": {"max_turns": 3}}) if "never replies" in each]
    assert told == ['rollout.multi_turn does nothing: the environment "math" never replies to the policy'] * is_told
    assert not any("multi_turn" in each for each in find(rollout=rollout))


@pytest.mark.parametrize(
    ("evaluation", "environment", "is_told"),
    [
        ({"samples_per_prompt": 4}, "", True),
        ({"samples_per_prompt": 4}, "math", True),
        ({"samples_per_prompt": 4}, f"{__name__}:Answers", False),  # it may answer otherwise the next time
        ({"samples_per_prompt": 4, "temperature": 0.7}, "", False),
        ({"samples_per_prompt": 4, "metric": "loss"}, "", False),
    ],
)
def test_several_greedy_completions_of_a_prompt_are_told(
    evaluation: dict[str, Any], environment: str, is_told: bool
) -> None:
    """Without it an evaluation that was to be surer takes four times as long and is as sure as before."""
    found = find(mode="sft", evaluation=evaluation, rollout={"environment": environment})
    assert any("evaluation.samples_per_prompt 4 only takes longer" in sentence for sentence in found) is is_told


def test_limits_of_conversations_without_an_environment_are_told() -> None:
    [told] = find(rollout={"reward_fn": "exact_match", "multi_turn": {"max_turns": 3}})
    assert told == "rollout.multi_turn does nothing without a rollout.environment that replies to the policy"


@pytest.mark.parametrize("name", ["drift_mask", "ratio_penalty"])
@pytest.mark.parametrize(
    ("ratio_base", "num_minibatches", "is_told"), [("old", 1, True), ("old", 2, False), ("rollout", 1, False)]
)
def test_a_term_of_a_ratio_that_is_always_1_is_told(
    name: str, ratio_base: str, num_minibatches: int, is_told: bool
) -> None:
    loss = {"ratio_base": ratio_base, name: 0.1}
    found = find(training={"rl": {"num_minibatches": num_minibatches, "loss": loss}})
    assert [f"training.rl.loss.{name} does nothing" in sentence for sentence in found] == [True] * is_told


@pytest.mark.parametrize(
    ("settings", "with_its_part"),
    [
        ({"advantage": {"baseline": 0.5}}, {"advantage": {"estimator": "constant", "baseline": 0.5}}),
        ({"advantage": {"gamma": 0.9}}, {"advantage": {"estimator": "gae", "gamma": 0.9}}),
        ({"advantage": {"gae_lambda": 0.9}}, {"advantage": {"estimator": "gae", "gae_lambda": 0.9}}),
        ({"loss": {"value_coef": 0.5}}, {"loss": {"value_coef": 0.5}, "advantage": {"estimator": "gae"}}),
        ({"loss": {"value_clip": 0.5}}, {"loss": {"value_clip": 0.5}, "advantage": {"estimator": "gae"}}),
        ({"loss": {"objective": "reinforce", "clip_low": 0.1}}, {"loss": {"objective": "dppo", "clip_low": 0.1}}),
        ({"loss": {"objective": "reinforce", "clip_high": 0.1}}, {"loss": {"objective": "ppo", "clip_high": 0.1}}),
        ({"loss": {"objective": "cispo", "dual_clip": 3.0}}, {"loss": {"objective": "gspo", "dual_clip": 3.0}}),
        (
            {"loss": {"constant_length": 512}},
            {"loss": {"constant_length": 512, "aggregation": "constant_length"}},
        ),
        (
            {"reward_shaping": {"max_response_tokens": 512}},
            {"reward_shaping": {"max_response_tokens": 512, "overlong_buffer_tokens": 64}},
        ),
        (
            {"reward_shaping": {"overlong_penalty": 0.5}},
            {
                "reward_shaping": {
                    "overlong_penalty": 0.5, "max_response_tokens": 512, "overlong_buffer_tokens": 64,
                }
            },
        ),
        ({"optim": {"min_lr_ratio": 0.0}}, {"optim": {"min_lr_ratio": 0.0, "schedule": "linear"}}),
    ],
)  # fmt: skip
def test_a_number_of_a_part_that_the_algorithm_lacks_is_told(
    settings: dict[str, Any], with_its_part: dict[str, Any]
) -> None:
    [told] = find(training={"rl": settings})
    [(section, values)] = settings.items()
    name = list(values)[-1]
    assert told.startswith(f"training.rl.{section}.{name} {values[name]:g} does nothing with")
    assert find(training={"rl": with_its_part}) == []


@pytest.mark.parametrize(
    ("limits", "part"),
    [({"weight_high": 5.0}, "weight"), ({"weight_low": 0.5}, "weight"), ({"mask_high": 2.0}, "mask")],
)
def test_limits_of_a_correction_that_is_not_asked_for_are_told(limits: dict[str, float], part: str) -> None:
    """Whoever takes the limits for the correction trains without it, and with no word of that."""
    [told] = find(training={"rl": {"loss": {"ratio_base": "old", "mismatch": limits}}})
    assert told.startswith(f"training.rl.loss.mismatch.{next(iter(limits))} ")
    assert told.endswith(f"does nothing without loss.mismatch.{part}")
    assert find(training={"rl": {"loss": {"ratio_base": "old", "mismatch": {**limits, part: "token"}}}}) == []


@pytest.mark.parametrize(
    ("section", "name", "value", "part"),
    [
        ("reward_shaping", "kl_estimator", "k3", {"kl_coef": 0.1}),
        ("reward_shaping", "kl_credit", "token", {"kl_coef": 0.1}),
        ("reward_shaping", "overlong_capped", False, {"overlong_buffer_tokens": 4, "max_response_tokens": 8}),
        ("loss", "kl_estimator", "k1", {"kl_coef": 0.1}),
        ("loss", "kl_weight", "on_policy", {"kl_coef": 0.1}),
        ("loss", "kl_input_clamp", 5.0, {"kl_coef": 0.1}),
        ("loss", "kl_output_clamp", 0.0, {"kl_coef": 0.1}),
    ],
)
def test_how_a_part_is_computed_that_the_algorithm_lacks_is_told(
    section: str, name: str, value: str | float, part: dict[str, float]
) -> None:
    """Whoever chooses an estimator of the divergence expects one to be there."""
    rollout = {"sampling": {"max_new_tokens": 8}}
    [told] = find(training={"rl": {section: {name: value}}}, rollout=rollout)
    shown = f"{value:g}" if isinstance(value, float) else json.dumps(value)
    assert told.startswith(f"training.rl.{section}.{name} {shown} does nothing without ")
    assert find(training={"rl": {section: {name: value, **part}}}, rollout=rollout) == []


def test_what_becomes_of_weights_that_there_are_not_is_told() -> None:
    """Whoever asks for IcePop's zeros without its weights trains without it."""
    mismatch = {"outside": "zero", "mask": "token", "mask_high": 2.0}
    [told] = find(training={"rl": {"loss": {"ratio_base": "old", "mismatch": mismatch}}})
    assert told == 'training.rl.loss.mismatch.outside "zero" does nothing without loss.mismatch.weight'


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_setting_of_a_named_algorithm_does_something(name: str) -> None:
    rl = {"algorithm": name}
    shape = {"batch_size": 16, "sampling": {"max_new_tokens": 20480}}
    assert find(training={"rl": rl}, rollout=shape) == []


@pytest.mark.parametrize(("eval_every", "sft_eval", "is_told"), [(50, "", True), (50, "e", False), (100, "", False)])
def test_evaluations_of_demonstrations_that_there_are_not_are_told(
    eval_every: int, sft_eval: str, is_told: bool
) -> None:
    found = find(data={**DATA, "sft_eval": sft_eval}, training={"sft": {"eval_every": eval_every}})
    assert found == [f"training.sft.eval_every {eval_every} does nothing without data.sft_eval"] * is_told


@pytest.mark.parametrize(
    ("rollout", "is_told"),
    [
        ({"environment": "math", "reward_fn": "exact_match"}, True),
        ({"environment": "math", "rewards": [{"name": "exact_match"}]}, True),
        ({"environment": "math", "rewards": [{"name": "exact_match"}, {}]}, False),
        ({"environment": "math"}, False),
        ({"reward_fn": "exact_match"}, False),
        ({"environment": "calculator", "reward_fn": "exact_match"}, False),
        ({"environment": f"{__name__}:Answers", "reward_fn": "exact_match"}, False),
    ],
)
def test_an_environment_that_neither_answers_nor_grades_is_told(rollout: dict[str, Any], is_told: bool) -> None:
    told = [each for each in find(rollout=rollout) if 'environment "math" does nothing' in each]
    assert len(told) == is_told
