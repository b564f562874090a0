"""Pins which rows of other systems are recognised, and that a converted row is one that training reads.

Without it a conversation could lose its system message, or an answer be learned that belongs to the grader.
"""

from __future__ import annotations

from typing import Any

import pytest

from rollouts_core.data.chat import Conversation
from rollouts_core.data.conversations import read_demonstration
from rollouts_core.data.dataset import build_prompt
from rollouts_core.data.foreign_rows import find_json_columns, find_shape, with_json
from rollouts_core.errors import DataError

ASKED, SAID = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
SHAREGPT = {
    "system": "Be brief.",
    "conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}],
}
VERL = {"data_source": "math", "prompt": [ASKED], "reward_model": {"style": "rule", "ground_truth": "2"}}


@pytest.mark.parametrize(
    ("row", "name", "is_read"),
    [
        ({"messages": [ASKED, SAID]}, "OpenAI's messages", True),
        ({"prompt": "1+1?", "completion": "2"}, "TRL's prompts and completions", True),
        ({"prompt": [ASKED], "completion": [SAID]}, "TRL's prompts and completions", True),
        (SHAREGPT, "ShareGPT's conversations", False),
        ({"instruction": "1+1?", "input": "", "output": "2"}, "Alpaca's instructions", False),
        ({"prompt": "1+1?", "chosen": "2", "rejected": "3"}, "TRL's preference pairs", False),
        ({"chosen": [ASKED, SAID], "rejected": [ASKED]}, "TRL's preference pairs", False),
        ({"question": "1+1?", "answer": "2"}, "questions and answers", False),
    ],
)
def test_a_demonstration_is_recognised_and_says_the_same_after_the_conversion(
    row: dict[str, Any], name: str, is_read: bool
) -> None:
    shape = find_shape(row, for_rewards=False)
    assert shape is not None and shape.name.startswith(name) and shape.is_demonstration
    assert (shape.convert is None) == is_read
    read = read_demonstration(row if shape.convert is None else shape.convert(row))
    assert isinstance(read, Conversation)
    said = [(each["role"], each["content"]) for each in read.messages]
    assert said[-2:] == [("user", "1+1?"), ("assistant", "2")]
    assert (("system", "Be brief.") in said) == (row is SHAREGPT)


@pytest.mark.parametrize(
    ("row", "name", "is_read", "answer"),
    [
        ({"prompt": "1+1?", "answer": "2"}, "prompts with answers", True, "2"),
        ({"prompt": "1+1?"}, "prompts without answers", True, ""),
        (VERL, "verl's prompts", False, "2"),
        ({"prompt": "1+1?", "label": "2"}, "slime's prompts", False, "2"),
        ({"messages": [ASKED], "label": "2"}, "slime's prompts", False, "2"),
        ({"prompt": [ASKED], "solution": "2"}, "TRL's prompts", False, "2"),
        ({"messages": [ASKED, SAID]}, "OpenAI's messages", False, "2"),
        (SHAREGPT, "ShareGPT's conversations", False, "2"),
        ({"question": "1+1?", "answer": "2"}, "questions and answers", False, "2"),
    ],
)
def test_a_prompt_is_recognised_and_has_its_answer_after_the_conversion(
    row: dict[str, Any], name: str, is_read: bool, answer: str
) -> None:
    shape = find_shape(row, for_rewards=True)
    assert shape is not None and shape.name.startswith(name) and shape.is_prompt
    assert (shape.convert is None) == is_read
    prompt = build_prompt(row if shape.convert is None else shape.convert(row), 1, default_id="p")
    assert (prompt.messages[-1]["role"], prompt.messages[-1]["content"], prompt.answer) == ("user", "1+1?", answer)


def test_other_rows_have_no_shape_and_are_not_guessed() -> None:
    assert find_shape({"image": "a", "caption": "b"}, for_rewards=False) is None
    shape = find_shape({"conversations": [{"from": "alien", "value": "?"}]}, for_rewards=False)
    assert shape is not None and shape.convert is not None
    with pytest.raises(DataError, match="a turn of `conversations` must have `from`"):
        shape.convert({"conversations": [{"from": "alien", "value": "?"}]})


def test_cells_with_json_text_get_a_type() -> None:
    row = {"messages": '[{"role": "user", "content": "1+1?"}]', "prompt": "[sic] text", "level": "3"}
    columns = find_json_columns(row)
    assert columns == {"messages": "json"}
    assert with_json(row, columns)["messages"] == [ASKED]
