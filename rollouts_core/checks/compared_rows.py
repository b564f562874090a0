"""Check the rows on which models are compared: enough rows, without duplicates and without training data.

answers.py checks that the rows can be graded. comparison.py compares the models.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence

from rollouts_core.comparison import LEAST_P_VALUE, least_p_value, least_wins
from rollouts_core.config import Config, DataConfig, RolloutConfig
from rollouts_core.data.conversations import Row
from rollouts_core.data.held_out import MAX_NAMED, HeldOutRows, key_of_demonstration, key_of_prompt, key_of_task
from rollouts_core.data.overlap import said_by_user
from rollouts_core.data.rows import load_rows
from rollouts_core.environments import ENVIRONMENTS
from rollouts_core.errors import ConfigError, DataError
from rollouts_core.findings import Caution
from rollouts_core.rewards import REWARDS
from rollouts_core.types import Prompt


def check_num_rows(num_rows: int, max_p_value: float, *, source: str, setting: str) -> None:
    """Raise ConfigError if no comparison of models could be significant.

    The cause is too few rows, or a `max_p_value` below the smallest possible p-value.
    """
    if max_p_value < LEAST_P_VALUE:
        raise ConfigError(
            f"{setting} {max_p_value:g} accepts no result: no comparison has a p-value below {LEAST_P_VALUE:.2g}; "
            "raise it"
        )
    least = least_p_value(num_rows)
    if least > max_p_value:
        enough = next(more for more in itertools.count(num_rows) if least_p_value(more) <= max_p_value)
        raise ConfigError(
            f"{source} has only {num_rows} rows to compare models on: even a model that is better on all of them has "
            f"p = {least:.2g}, above {setting} {max_p_value:g}: provide {enough} rows or more, or raise {setting}"
        )


def check_promotion(config: Config, *, margin: float, max_p_value: float) -> list[str]:
    """Report how many rows of `data.heldout` a new model must win to be promoted. Returns an empty list if this number
    is not known.

    Raises:
        ConfigError: no result could lead to a promotion.
    """
    if max_p_value >= 1:  # every improvement leads to a promotion
        return []
    num_rows = sum(
        1
        for _ in itertools.islice(
            load_rows(config.data.heldout, columns=config.data.columns_of("heldout")), config.evaluation.max_prompts
        )
    )
    check_num_rows(num_rows, max_p_value, source="data.heldout", setting="retrain.max_p_value")
    if config.evaluation.metric == "loss" or not grades_between_0_and_1(config.rollout):
        return []
    if margin >= 1:
        raise ConfigError(
            f"retrain.margin {margin:g} would never promote a model: rewards are between 0 and 1, so no model can "
            "be better by more than 1: lower the margin"
        )
    num_wins = least_wins(num_rows, margin=margin, max_p_value=max_p_value)
    if num_wins == 0:
        return []
    return [
        f"retrain: to show a margin of {margin:g} with p <= {max_p_value:g}, a model must get at least {num_wins} of "
        f"{num_rows} held-out prompts right that the other model gets wrong, and more if it also loses some"
    ]


def grades_between_0_and_1(rollout: RolloutConfig) -> bool:
    """True if rewards are known to be between 0 and 1, because a built-in function or environment grades."""
    if rollout.rewards:
        return False
    if rollout.reward_fn != "":
        return rollout.reward_fn in REWARDS
    return rollout.environment_name in ENVIRONMENTS.keys() - {"verifiers"}  # tasksets of verifiers may give any reward


def check_other_rows(data: DataConfig) -> None:
    """Raise DataError if data.selection and data.heldout share a demonstration."""
    first, second = data.selection, data.heldout
    rows = load_rows(first, columns=data.columns_of("selection"))
    number_of = {key_of_demonstration(row): number for number, row in rows}
    for number, row in load_rows(second, columns=data.columns_of("heldout")):
        if (other := number_of.get(key_of_demonstration(row))) is not None:
            raise DataError(
                f"{second}, row {number} is also row {other} of {first}: "
                "a row for selecting a checkpoint must not also evaluate it; remove the row from one of the files"
            )


def check_held_out(
    held_out: Sequence[HeldOutRows], prompts: Sequence[Prompt] = (), *, source: str = ""
) -> list[Caution]:
    """Warn if held-out rows, at most `MAX_LEAKED_SHARE` of them, are in the training data.

    Args:
        held_out: the held-out rows. The caller has already compared these rows with the demonstrations of SFT.

    Raises:
        DataError: more than `MAX_LEAKED_SHARE` of the held-out rows are in the training data.
    """
    asked = [each for each in held_out if each.metric == "accuracy"]
    for each, prompt in itertools.product(asked, prompts):
        each.look_for([key_of_prompt(prompt), key_of_task(prompt)], source, prompt.row, said_by_user(prompt.messages))
    return [sentence for each in held_out for sentence in each.check()]


def warn_of_repeated_rows(config: Config) -> list[Caution]:
    """Warn if the rows on which models are compared contain duplicates.

    The p-value assumes independent rows. With four copies of each row, p = 0.34 becomes 0.08.
    """
    number_of: dict[bytes, int] = {}
    repeated: list[str] = []
    key_of = key_of_demonstration if config.evaluation.metric == "loss" else _all_but_id
    for number, row in itertools.islice(
        load_rows(config.data.heldout, columns=config.data.columns_of("heldout")), config.evaluation.max_prompts
    ):
        first = number_of.setdefault(key_of(row), number)
        if first != number:
            repeated.append(f"row {number} is row {first}")
    if not repeated:
        return []
    places = ", ".join(repeated[:MAX_NAMED]) + ", ..." * (len(repeated) > MAX_NAMED)
    return [
        Caution(
            f"data.heldout: {len(repeated)} of {len(number_of) + len(repeated)} rows are duplicates of an earlier row "
            f"({places}). Each duplicate counts as a further row, so the p-value gets too small: remove the duplicates"
        )
    ]


def _held_out_rows(config: Config) -> Iterator[tuple[int, Row]]:
    """The numbers and rows of data.heldout, up to `evaluation.max_prompts`."""
    rows = load_rows(config.data.heldout, columns=config.data.columns_of("heldout"))
    return itertools.islice(rows, config.evaluation.max_prompts)


def _all_but_id(row: Row) -> bytes:
    """A key that is equal for duplicate prompts: all fields but the id, because any field may affect the reward."""
    said = {name: value for name, value in row.items() if name != "id"}
    return json.dumps(said, sort_keys=True, default=str).encode()
