"""Find rows that are trained on among those that models and checkpoints are compared on.

Not here: whether selection and evaluation have rows in common (dataset.py, validate.py).

    compared by          a row that is held out is trained on when there is
    accuracy             its prompt among those of RL, or before an answer of a demonstration; where several rows begin
                         alike and have other answers, as games do, the same row among those of RL
    loss                 a demonstration that says the same as a whole

Rows of data.sft_eval are compared by their loss, whatever the metric of the evaluation is. What is compared here is
text, word for word. Of the training data nothing is kept.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from rollouts_core.data.chat import Conversation
from rollouts_core.data.conversations import Row, read_demonstration
from rollouts_core.data.dataset import describe_task, find_openings, is_opening, load_prompts_from_jsonl
from rollouts_core.data.rows import load_rows
from rollouts_core.errors import DataError
from rollouts_core.findings import Caution
from rollouts_core.types import Message, Prompt

Metric = Literal["accuracy", "loss"]
MAX_LEAKED_SHARE = 0.01
"""Crawled data repeat themselves: so few of the rows change a mean score by no more than this."""
MAX_NAMED = 3


class HeldOutRows:
    """The rows of one file that models are compared on, and which of them were found in training data.

    Args:
        name: the setting that names the file.
        metric: what is compared on them.
        number_of: the number of each row, by its key.
    """

    def __init__(self, name: str, metric: Metric, number_of: dict[bytes, int]) -> None:
        self.name = name
        self.metric = metric
        self._number_of = number_of
        self._found: dict[int, str] = {}

    def look_for(self, keys: Iterable[bytes], source: str, number: int) -> None:
        """Note which of these rows the keys of a row that is trained on are."""
        for key in keys:
            if (held_out := self._number_of.get(key)) is not None:
                self._found.setdefault(held_out, f"row {number} of {source}")

    def check(self) -> list[Caution]:
        """A sentence where a few of these rows are trained on.

        Raises:
            DataError: more than a few are.
        """
        if not self._found:
            return []
        places = [f"row {number} is {place}" for number, place in sorted(self._found.items())]
        more = ", ..." if len(places) > MAX_NAMED else ""
        sentence = (
            f"{len(self._found)} of {len(self._number_of)} rows of {self.name} are also trained on "
            f"({', '.join(places[:MAX_NAMED])}{more}): what a model has learnt by heart says nothing about other rows; "
            "remove them from one of the files"
        )
        if len(self._found) > MAX_LEAKED_SHARE * len(self._number_of):
            raise DataError(sentence)
        return [Caution(sentence)]


def read_held_out(name: str, path: str, metric: Metric, *, max_rows: int | None = None) -> HeldOutRows:
    """The rows of a file that models are compared on: all of them, or the first `max_rows`.

    Raises:
        DataError: a row that is no prompt, or no demonstration.
    """
    if metric == "accuracy":
        prompts = load_prompts_from_jsonl(path, max_rows=max_rows)
        openings = find_openings(prompts)
        keys = ((key_of_task if is_opening(prompt, openings) else key_of_prompt)(prompt) for prompt in prompts)
        return HeldOutRows(name, metric, {key: prompt.row for key, prompt in zip(keys, prompts, strict=True)})
    number_of: dict[bytes, int] = {}
    for number, row in itertools.islice(load_rows(path), max_rows):
        try:
            number_of[key_of_demonstration(row)] = number
        except DataError as error:
            raise DataError(f"{path}, row {number}: {error}") from error
    return HeldOutRows(name, metric, number_of)


def watch_rows(
    rows: Iterable[tuple[int, Row]], source: str, held_out: Sequence[HeldOutRows]
) -> Iterator[tuple[int, Row]]:
    """The same rows of demonstrations, after each was looked for among those that are held out."""
    metrics = {each.metric for each in held_out}
    for number, row in rows:
        keys = {metric: _keys_of_row(row, metric) for metric in metrics}
        for each in held_out:
            each.look_for(keys[each.metric], source, number)
        yield number, row


def key_of_prompt(prompt: Prompt) -> bytes:
    """What two prompts have in common that say the same."""
    return list(_keys_of_beginnings(prompt.messages))[-1]


def key_of_task(prompt: Prompt) -> bytes:
    """What two prompts have in common that say and ask the same, where their conversations do not tell."""
    return hashlib.sha256(key_of_prompt(prompt) + describe_task(prompt).encode()).digest()


def key_of_demonstration(row: Row) -> bytes:
    """What two demonstrations have in common that say the same, whatever else their rows hold.

    Raises:
        DataError: the row is none.
    """
    return _whole_of(read_demonstration(row))


def _keys_of_row(row: Row, metric: Metric) -> list[bytes]:
    """Those of a demonstration; one that cannot be read has none."""
    try:
        read = read_demonstration(row)
    except DataError:
        return []
    return [_whole_of(read)] if metric == "loss" else _prompts_of(read)


def _whole_of(read: Conversation | str) -> bytes:
    if isinstance(read, str):
        return hashlib.sha256(read.encode(errors="surrogatepass")).digest()
    return list(_keys_of_beginnings(read.messages))[-1]


def _prompts_of(read: Conversation | str) -> list[bytes]:
    """What stands before each answer that may be trained on; a plain text has no prompt."""
    if isinstance(read, str):
        return []
    keys = list(_keys_of_beginnings(read.messages))
    answers = range(max(read.num_given, 1), len(read.messages))
    return [keys[i - 1] for i in answers if read.messages[i]["role"] == "assistant"]


def _keys_of_beginnings(messages: Sequence[Message]) -> Iterator[bytes]:
    """A key of the first message, of the first two, and so on."""
    digest = hashlib.sha256()
    for message in messages:
        said = [message["role"], message["content"], message.get("tool_calls")]
        digest.update(json.dumps(said, sort_keys=True, default=str).encode() + b"\n")
        yield digest.digest()
