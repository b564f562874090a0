"""Pins what each named algorithm is: its system's numbers, and settings that survive files and forms.

Without it a preset named after a system would be our reading of it.

Not here: the pieces by themselves, against the same recorded numbers (test_peer_losses.py, test_peer_advantages.py).
"""

import itertools
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from rollouts_core.algorithms.advantages import batch_advantages, whiten
from rollouts_core.algorithms.loss import TokenScores, policy_loss
from rollouts_core.algorithms.presets import ALGORITHMS, AlgorithmName
from rollouts_core.config import (
    LossConfig,
    MismatchConfig,
    RLTrainingConfig,
    RolloutConfig,
    algorithm_preset,
)
from rollouts_core.fingerprint import affecting_settings
from tests.rollouts_core.algorithms.recorded import (
    ALL_CASES,
    INPUTS,
    PEERS,
    SYSTEMS,
    UNSUPPORTED,
    close,
    is_unsupported,
    make_batch,
    select,
    tensor,
)
from tests.rollouts_core.algorithms.test_peer_advantages import CREDIT
from tests.rollouts_core.algorithms.test_peer_losses import VALUE_LOSSES

PRESETS: dict[AlgorithmName, tuple[str, str]] = {
    "slime-grpo": ("slime-advantage_grpo", "slime-policy_loss_default"),
    "slime-gspo": ("slime-advantage_grpo", "slime-policy_loss_gspo"),
    "verl-grpo": ("verl-advantage_grpo_ragged", "verl-policy_loss_vanilla_token_mean"),
    "verl-dr-grpo": (
        "verl-advantage_grpo_mean_only_ragged",
        "verl_release-policy_loss_vanilla_seq_mean_token_sum_norm",
    ),
    "verl-rloo": ("verl-advantage_rloo_ragged", "verl-policy_loss_vanilla_token_mean"),
    "verl-gspo": ("verl-advantage_grpo_ragged", "verl-policy_loss_gspo"),
    "verl-dapo": ("verl-advantage_grpo_ragged", "verl-policy_loss_dapo"),
    "trl-dapo": ("trl-advantage_group", "trl-mismatch_sequence_mask"),
    "trl-grpo": ("trl-advantage_group", "trl-policy_loss_grpo"),
    "trl-dr-grpo": ("trl-advantage_none", "trl-policy_loss_dr_grpo"),
    "trl-cispo": ("trl-advantage_group", "trl-policy_loss_cispo"),
    "openrlhf-rloo": ("openrlhf-advantage_rloo", "openrlhf-policy_loss_default"),
    "openrlhf-group-norm": ("openrlhf-advantage_group_norm", "openrlhf-policy_loss_default"),
    "openrlhf-reinforce-baseline": ("openrlhf-advantage_reinforce_baseline", "openrlhf-policy_loss_default"),
    "skyrl-grpo": ("skyrl-advantage_grpo_ragged", "skyrl-policy_loss_token_mean"),
    "skyrl-maxrl": ("skyrl-advantage_maxrl", "skyrl-policy_loss_token_mean"),
    "nemo-loo": ("nemo_rl-advantage_default_ragged", "nemo_rl-policy_loss_default"),
    "open-instruct": ("open_instruct-advantage_centered", "open_instruct-policy_loss_default"),
    "nanochat": ("nanochat-advantage_default", "nanochat-policy_loss_default"),
    "torchtitan-grpo": ("torchtitan-advantage_default_ragged", "torchtitan-policy_loss_grpo"),
    "torchtitan-dapo": ("torchtitan-advantage_default_ragged", "torchtitan-policy_loss_dapo"),
    "prime-rl": ("prime_rl-advantage_grpo_ragged", "prime_rl-policy_loss_default"),
}
"""Each preset with the cases that record its advantages and its loss."""
DIFFERENT: dict[AlgorithmName, dict[str, Any]] = {
    "slime-gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "verl-grpo": {"kl_coef": 0.0},
    "verl-dr-grpo": {"constant_length": 7},
    "verl-dapo": {"dual_clip": 3.0},
    "trl-grpo": {"mismatch": {}},
    "trl-dr-grpo": {"mismatch": {}, "constant_length": 7},
    "trl-cispo": {"mismatch": {}},
    "skyrl-grpo": {"kl_coef": 0.0},
    "skyrl-maxrl": {"kl_coef": 0.0},
}
"""What the recorded loss leaves out or sets otherwise than the preset; each piece is recorded by itself."""


def test_every_preset_is_compared() -> None:
    assert set(PRESETS) == set(ALGORITHMS) == set(get_args(AlgorithmName)) - {""}


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_gives_the_advantages_of_its_system(name: AlgorithmName) -> None:
    case = ALL_CASES[PRESETS[name][0]]
    config = algorithm_preset(name).advantage
    found = list(itertools.chain(*batch_advantages(INPUTS[case["inputs"][0]], config)))
    if config.whiten:
        found = whiten(found, [1.0] * len(found), config.std)
    assert close(found, list(itertools.chain(*case["outputs"]["advantages_groups"])))


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_gives_the_loss_of_its_system(name: AlgorithmName) -> None:
    case = ALL_CASES[PRESETS[name][1]]
    preset = algorithm_preset(name).loss
    config = LossConfig.model_validate({**preset.model_dump(), **DIFFERENT.get(name, {})})
    batch = make_batch(case, count_untrained=config.count_untrained)
    logprobs_BT = tensor("policy_logprobs_BT").requires_grad_()
    loss, _ = policy_loss(TokenScores(logprobs_BT=logprobs_BT), batch, config)
    loss.backward()
    assert close(loss.detach(), case["outputs"]["loss"])
    assert close(logprobs_BT.grad, case["outputs"]["gradient_policy_logprobs_BT"])


@pytest.mark.parametrize("name", ["skyrl-grpo", "skyrl-maxrl"])
def test_a_preset_makes_as_many_updates_as_its_system(name: AlgorithmName) -> None:
    usual = ALL_CASES["skyrl-defaults_TrainerConfig"]["outputs"]
    per_pass = usual["train_batch_size"] // usual["policy_mini_batch_size"]
    preset = algorithm_preset(name)
    assert (preset.num_minibatches, preset.num_epochs) == (per_pass, usual["update_epochs_per_batch"])


def test_what_is_given_wins_over_the_preset() -> None:
    config = RLTrainingConfig(algorithm="verl-dapo", loss=LossConfig(clip_high=0.2), num_minibatches=2)
    assert (config.loss.clip_high, config.loss.dual_clip, config.num_minibatches) == (0.2, 10.0, 2)


def test_a_file_may_name_a_preset_and_change_a_setting_deep_inside() -> None:
    settings = {"algorithm": "trl-dapo", "loss": {"mismatch": {"weight_high": 5.0}}}
    config = RLTrainingConfig.model_validate(settings)
    assert config.loss.mismatch == MismatchConfig(weight="sequence", weight_high=5.0, outside="zero")
    assert config.loss.ratio_base == "old"


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_preset_is_the_settings_that_it_stands_for(name: AlgorithmName) -> None:
    config = algorithm_preset(name)
    assert config.algorithm == ""
    spelled_out = RLTrainingConfig.model_validate(dict(ALGORITHMS[name].settings))
    assert config == spelled_out
    assert affecting_settings(config) == affecting_settings(spelled_out)
    assert RLTrainingConfig.model_validate(config.model_dump(mode="json")) == config
    assert RLTrainingConfig.model_validate(config.model_dump(mode="json", exclude_defaults=True)) == config


def test_overriding_a_preset_with_a_default_survives_writing_and_reading() -> None:
    config = RLTrainingConfig(algorithm="verl-dapo", loss=LossConfig(clip_high=0.2))
    assert RLTrainingConfig.model_validate(config.model_dump(mode="json", exclude_defaults=True)) == config


def test_a_form_that_sends_every_default_still_takes_the_preset() -> None:
    form = RLTrainingConfig().model_dump(mode="json")
    form["algorithm"], form["loss"]["clip_low"] = "verl-dapo", 0.1
    config = RLTrainingConfig.model_validate(form)
    assert (config.loss.clip_low, config.loss.clip_high, config.num_minibatches) == (0.1, 0.28, 16)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValidationError, match="verl-dapo"):
        algorithm_preset("verl-dappo")  # type: ignore[arg-type]


def test_a_misspelt_setting_beside_a_preset_is_refused() -> None:
    with pytest.raises(ValidationError, match="clip_hihg"):
        RLTrainingConfig.model_validate({"algorithm": "verl-dapo", "loss": {"clip_hihg": 0.2}})


def test_the_rollout_settings_of_a_preset_are_settings_of_rollouts() -> None:
    for preset in ALGORITHMS.values():
        RolloutConfig.model_validate(dict(preset.rollout))


def test_presets_with_one_update_ask_for_no_extra_forward_pass() -> None:
    free = {name for name in get_args(AlgorithmName) if not algorithm_preset(name).needs_old_scores}
    assert {"slime-grpo", "trl-dapo", "nemo-loo", "open-instruct", "prime-rl"} <= free
    assert not {"verl-dapo", "openrlhf-rloo"} & free


def test_the_documentation_has_every_preset_and_the_commit_of_its_source() -> None:
    text = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    for name, preset in ALGORITHMS.items():
        repository, commit = preset.source.partition(":")[0].split()
        assert f"| `{name}` |" in text
        assert f"| {repository} | {commit} |" in text
        recorded = {json.loads((PEERS / f"{system}.json").read_text())["commit"][:8] for system in SYSTEMS}
        assert commit in recorded


@pytest.mark.parametrize("name", list(UNSUPPORTED))
def test_what_is_not_supported_is_recorded(name: str) -> None:
    assert name in ALL_CASES


def test_every_recorded_case_is_compared_or_named_as_unsupported() -> None:
    compared = {
        *select("policy_loss"),
        *select("mismatch"),
        *select("kl"),
        *select("reward_overlong"),
        *select("defaults"),
        *(name for name in select("advantage") if "advantages_groups" in ALL_CASES[name]["outputs"]),
        *(name for name in select("gae") if "token_rewards_BT" in ALL_CASES[name]["inputs"]),
        *CREDIT,
        *VALUE_LOSSES,
    }
    assert [name for name in ALL_CASES if name not in compared and not is_unsupported(name)] == []
