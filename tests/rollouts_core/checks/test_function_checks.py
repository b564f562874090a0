"""Pins that functions of the user's, and who grades, are tried before a run, and what is said of them then.

Without it a reward that raises, or cannot tell right from wrong, is found after hours of SFT on a rented machine.
"""

from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rollouts_core.checks import validate
from rollouts_core.checks.function_checks import check_functions, one_of_each_shape
from rollouts_core.config import AdvantageConfig, RewardConfig, RolloutConfig
from rollouts_core.environments import Conversation, Reply
from rollouts_core.errors import ConfigError, InputError, RewardError, RolloutsError
from rollouts_core.findings import Caution
from rollouts_core.rollout.resolve import resolve_reward_fn
from rollouts_core.types import Sample
from tests.rollouts_core.checks.configurations import with_rollout
from tests.rollouts_core.make import make_prompts


def fails_for_text(sample: Sample) -> float:
    return 1 / len(sample.tokens) if not sample.response else float(sample.response.index("="))


@pytest.mark.parametrize(("answer", "tried"), [("-713", "-713"), ("", "It is 2.")])
def test_a_reward_that_fails_for_a_usual_completion_is_found_before_the_run(
    answer: str, tried: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = replace(make_prompts(1)[0], answer=answer)
    with pytest.raises(RewardError, match=rf"raised ValueError: .*; it graded the completion '{tried}'$"):
        check_functions(with_rollout(reward_fn=f"{__name__}:fails_for_text"), [prompt], tokenizer)


def scores_texts_alone(sample: Sample) -> float | None:
    return float(len(sample.response)) if sample.response else None


TEXTS_ALONE = f"{__name__}:scores_texts_alone"


@pytest.mark.parametrize(
    ("mode", "end"), [("rl", r'number, or training\.rl\.advantage\.unscored = "exclude" if .*'), ("sft", "number")]
)
def test_of_several_rewards_the_one_without_a_score_is_named(
    mode: str, end: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    rewards = (RewardConfig(name="last_number"), RewardConfig(name=TEXTS_ALONE))
    config = with_rollout(rewards=rewards).model_copy(update={"mode": mode})
    with pytest.raises(RewardError, match=rf"^reward function {TEXTS_ALONE} on an empty .*: expected a finite {end}$"):
        check_functions(config, make_prompts(1), tokenizer)


def test_that_an_evaluation_needs_scores_which_rl_does_without_is_warned_of(tokenizer: PreTrainedTokenizerBase) -> None:
    config = with_rollout(reward_fn=TEXTS_ALONE)
    excluding = AdvantageConfig(unscored="exclude")
    rl = config.training.rl.model_copy(update={"advantage": excluding})
    config = config.model_copy(update={"mode": "rl", "training": config.training.model_copy(update={"rl": rl})})
    [warning] = [said for said in check_functions(config, make_prompts(1), tokenizer) if isinstance(said, Caution)]
    assert "an evaluation on data.selection or data.heldout fails" in warning


def reads_the_level(sample: Sample) -> float:
    return float(sample.response == sample.metadata["answer"]) * sample.metadata["level"]


def test_a_field_that_only_some_rows_lack_is_found_before_the_run(tokenizer: PreTrainedTokenizerBase) -> None:
    complete, lacking = (replace(prompt, metadata={"level": 2}) for prompt in make_prompts(2)), make_prompts(4)[2:]
    prompts = one_of_each_shape([*complete, *lacking])
    assert [prompt.id for prompt in prompts] == ["p0", "p2"]
    with pytest.raises(RewardError, match=r"on prompt 'p2' raised KeyError: 'level'"):
        check_functions(with_rollout(reward_fn=f"{__name__}:reads_the_level"), prompts, tokenizer)


def test_what_a_function_of_the_user_gave_is_said(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = replace(make_prompts(1)[0], answer="12", metadata={"level": 2})
    [said] = check_functions(with_rollout(reward_fn=f"{__name__}:reads_the_level"), [prompt], tokenizer)
    assert said.endswith("reads_the_level: reward 0.0 for an empty completion of prompt 'p0', 2.0 for '12'")


@pytest.mark.parametrize(
    ("rollout", "graders", "right"),
    [
        ({"environment": "math"}, "math", "'\\\\boxed{12}'"),
        ({"environment": "arithmetic"}, "arithmetic", "':12'"),
        ({"environment": "math", "reward_fn": "last_number"}, "last_number", "'12'"),
    ],
)
def test_who_grades_and_what_they_take_for_right_is_said_of_those_that_ship_too(
    rollout: dict[str, Any], graders: str, right: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = replace(make_prompts(1)[0], answer="12")
    [said] = check_functions(with_rollout(**rollout), [prompt], tokenizer)
    assert said == f"graded by {graders}: reward 0.0 for an empty completion of prompt 'p0', 1.0 for {right}"


def one(sample: Sample) -> float:
    return 1.0


def nothing(sample: Sample) -> float:
    return 0.0


def one_for_tags(sample: Sample) -> float:
    return float(f"<answer>{sample.metadata['answer']}</answer>" in sample.response)


class NeverRight:
    """An environment that is decided by what was done before the last turn."""

    async def respond(self, conversation: Conversation) -> Reply:
        return Reply()

    def grade(self, sample: Sample) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("rollout", "answer", "is_warned"),
    [
        ({"reward_fn": f"{__name__}:one"}, "12", True),
        ({"reward_fn": f"{__name__}:one"}, "", True),  # nothing is worth 1.0 if an empty completion is
        ({"reward_fn": f"{__name__}:nothing"}, "12", True),
        ({"reward_fn": f"{__name__}:nothing"}, "", False),  # perhaps nothing that was tried is right
        ({"reward_fn": f"{__name__}:one_for_tags"}, "12", False),
        ({"environment": f"{__name__}:NeverRight"}, "12", False),
        ({"environment": "countdown"}, "12", False),  # it looks at other fields
        ({"environment": "math"}, "12", False),
        ({"environment": "arithmetic"}, "12", False),
    ],
)
def test_a_reward_that_does_not_tell_right_from_wrong_is_warned_of(
    rollout: dict[str, Any], answer: str, is_warned: bool, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompts = [replace(p, answer=answer, metadata={"numbers": [1], "target": 1}) for p in make_prompts(2)]
    said = check_functions(with_rollout(**rollout), prompts, tokenizer)
    cautions = [each for each in said if isinstance(each, Caution)]
    assert ["gave every test completion the reward of an empty completion" in each for each in cautions] == (
        [True] * is_warned
    )


def test_rewards_that_differ_for_one_prompt_alone_are_no_reason_to_warn(tokenizer: PreTrainedTokenizerBase) -> None:
    odd, usual = replace(make_prompts(1)[0], answer=""), replace(make_prompts(2)[1], answer="12")
    said = check_functions(with_rollout(reward_fn="exact_match"), [odd, usual], tokenizer)
    assert not any(isinstance(each, Caution) for each in said)


def ends_with_answer(sample: Sample) -> float:
    """Right for whatever is said where there is no answer."""
    return float(sample.response.endswith(sample.metadata["answer"]))


def wrong_without_answer(sample: Sample) -> float:
    return ends_with_answer(sample) if sample.metadata["answer"] else -1.0


@pytest.mark.parametrize(("name", "is_warned"), [("ends_with_answer", True), ("wrong_without_answer", False)])
def test_a_reward_that_takes_whatever_is_said_to_a_row_without_answer_for_right_is_warned_of(
    name: str, is_warned: bool, tokenizer: PreTrainedTokenizerBase
) -> None:
    usual, odd = (replace(prompt, answer=answer) for prompt, answer in zip(make_prompts(2), ("12", ""), strict=True))
    said = check_functions(with_rollout(reward_fn=f"{__name__}:{name}"), [usual, odd], tokenizer)
    cautions = [each for each in said if isinstance(each, Caution)]
    assert [f"every completion of prompt {odd.id!r}, which has no `answer`" in each for each in cautions] == (
        [True] * is_warned
    )


@pytest.mark.parametrize("rollout", [{}, {"rewards": (RewardConfig(), RewardConfig(name="exact_match"))}])
def test_without_a_grader_nothing_is_graded_and_those_that_ship_are_named(rollout: dict[str, Any]) -> None:
    """A grader that is taken in silence gives every answer of another form 0, to the last step."""
    with pytest.raises(
        InputError, match=r"rollout\.environment to a built-in environment \(arithmetic, calculator, .*math"
    ):
        validate.validate_config(with_rollout(**rollout))
    with pytest.raises(ConfigError, match=r"or set rollout\.reward_fn or rollout\.rewards"):
        resolve_reward_fn(RolloutConfig(**rollout))
    with pytest.raises(InputError, match="no reward is configured"):
        validate.validate_evaluation(with_rollout(**rollout), [])


class ReadsTheConversation:
    """As docs/environments.md says that a grade may."""

    async def respond(self, conversation: Conversation) -> Reply:
        return Reply()

    def grade(self, sample: Sample) -> float:
        assert sample.metadata["conversation"][-1] == {"role": "assistant", "content": sample.response}
        return float(len(sample.metadata["outcomes"]))


def test_the_tried_completions_of_a_conversation_have_what_a_rollout_writes(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    check_functions(with_rollout(environment=f"{__name__}:ReadsTheConversation"), make_prompts(1), tokenizer)


class Answers(ReadsTheConversation):
    """An environment whose answers its subclasses give."""

    def grade(self, sample: Sample) -> float:
        return float(len(sample.response))


class AnswersText(Answers):
    async def respond(self, conversation: Conversation) -> Any:
        return "again"


class AnswersBareText(Answers):
    async def respond(self, conversation: Conversation) -> Reply:
        return Reply(messages=("again",))  # type: ignore[arg-type]  # the mistake


class LooksForAnotherField(Answers):
    async def respond(self, conversation: Conversation) -> Reply:
        return Reply(messages=conversation.sample.metadata["hint"])


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        (
            AnswersText,
            r"^environment AnswersText on prompt .* answered 'again': expected a Reply .*; the assistant's ",
        ),
        (
            LooksForAnotherField,
            r"raised KeyError: 'hint' \(test_function_checks.py, line \d+\); the assistant's message ",
        ),
        (AnswersBareText, r"answered Reply\(messages=\('again',\).*: expected a Reply whose messages have role"),
    ],
)
def test_an_environment_whose_answers_cannot_be_used_is_found_before_the_run(
    environment: type, problem: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(RolloutsError, match=problem):
        check_functions(with_rollout(environment=f"{__name__}:{environment.__name__}"), make_prompts(1), tokenizer)


class IsAway(Answers):
    async def respond(self, conversation: Conversation) -> Reply:
        raise ConnectionRefusedError("nobody listens")


def test_an_environment_that_cannot_be_reached_is_warned_of(tokenizer: PreTrainedTokenizerBase) -> None:
    said = check_functions(with_rollout(environment=f"{__name__}:IsAway"), make_prompts(1), tokenizer)
    assert isinstance(said[-1], Caution)
    assert said[-1].startswith("environment IsAway on prompt '") and "failed: nobody listens; if it also" in said[-1]
