"""Find rows of evaluation files (held-out rows) that also occur in the training data.

    metric       a held-out row counts as trained on if
    accuracy     its prompt is an RL prompt, or precedes an answer in a demonstration. If several rows share a
                 prompt but have different answers, as in games, the whole RL row must be equal
    loss         a demonstration has the same content

Rows of data.sft_eval are always compared by the rule for loss. Two prompts are equal if their user turns are equal;
system messages, case, spaces and closing punctuation do not count. A plain text contains a prompt if one of its lines,
or its text between two tags, equals the prompt. Rows that only share a long run of words cause a warning, because
similar texts share such runs by chance. The training data are streamed, not kept in memory.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Literal

from rollouts_core.config.data import ColumnType
from rollouts_core.data.chat import Conversation
from rollouts_core.data.conversations import Row, read_demonstration
from rollouts_core.data.dataset import describe_task, find_openings, is_opening, load_prompts_from_jsonl
from rollouts_core.data.overlap import LongPhrases, fold, key_of_turns, said_by_user, turns_of_text
from rollouts_core.data.rows import load_rows
from rollouts_core.errors import DataError
from rollouts_core.findings import Caution
from rollouts_core.types import Prompt

Metric = Literal["accuracy", "loss"]
MAX_LEAKED_SHARE = 0.01
"""Permitted share of held-out rows that are trained on. Crawled data contain repetitions. A share of 1 % changes a
mean score by at most 1 %."""
MAX_NAMED = 3
MAX_SHOWN_CHARS = 80
TOLD_FIRST = ("system", "developer")
"""Roles of messages that instruct the model but ask no question. The comparison of demonstrations ignores them."""


class HeldOutRows:
    """The rows of one held-out file, with the training rows that equal or resemble them.

    Args:
        name: name of the setting that names the file, for messages.
        metric: metric of the evaluation, which selects the rule of comparison in the table above.
        number_of: number of the held-out row for each comparison key.
        texts: texts of each held-out row, by row number.
    """

    def __init__(
        self, name: str, metric: Metric, number_of: dict[bytes, int], texts: Mapping[int, Sequence[str]]
    ) -> None:
        self.name = name
        self.metric = metric
        self._number_of = number_of
        self._num_rows = len(texts)
        self._shown = {number: " ".join(said)[:MAX_SHOWN_CHARS] for number, said in texts.items()}
        self._found: dict[int, str] = {}
        self._alike: dict[int, tuple[str, str]] = {}
        """Number of a held-out row -> (training row, shared words), for rows that share a long run of words."""
        self._phrases = LongPhrases()
        for number, said in texts.items():
            for text in said:
                self._phrases.add(number, text)

    def look_for(self, keys: Iterable[bytes], source: str, number: int, texts: Iterable[str] = ()) -> None:
        """Compare one training row with all held-out rows, and record matches.

        Args:
            keys: comparison keys of the training row.
            source, number: origin and number of the training row, for messages.
            texts: texts of the training row, searched for long runs of words.
        """
        place = f"row {number} of {source}"
        for key in keys:
            if (held_out := self._number_of.get(key)) is not None:
                self._found.setdefault(held_out, place)
        for text in texts:
            for held_out, words in self._phrases.find(text).items():
                self._alike.setdefault(held_out, (place, words))

    def check(self) -> list[Caution]:
        """Return warnings about held-out rows that are trained on or share a long run of words with a training row.

        Raises:
            DataError: more than `MAX_LEAKED_SHARE` of the held-out rows are trained on.
        """
        return [*self._check_found(), *self._warn_of_alike()]

    def _warn_of_alike(self) -> list[Caution]:
        alike = {number: each for number, each in self._alike.items() if number not in self._found}
        if not alike:
            return []
        number, (place, words) = min(alike.items())
        return [
            Caution(
                f"{len(alike)} of {self._num_rows} rows of {self.name} ({len(alike) / self._num_rows:.0%}) share a "
                f"long run of words with a training row: row {number} and {place} both have {words!r}. Check if both "
                "rows ask the same question; such rows are still used"
            )
        ]

    def _check_found(self) -> list[Caution]:
        if not self._found:
            return []
        first = min(self._found)
        places = [f"row {number} is {place}" for number, place in sorted(self._found.items())]
        more = ", ..." if len(places) > MAX_NAMED else ""
        sentence = (
            f"{len(self._found)} of {self._num_rows} rows of {self.name} are also trained on "
            f"({', '.join(places[:MAX_NAMED])}{more}): {len(self._found) / self._num_rows:.0%} of them, for example "
            f"{self._shown[first]!r}. Scores on memorized rows do not predict scores on other rows: remove the rows "
            "from one of the files"
        )
        if len(self._found) > MAX_LEAKED_SHARE * self._num_rows:
            raise DataError(sentence)
        return [Caution(sentence)]


def read_held_out(
    name: str,
    path: str,
    metric: Metric,
    *,
    max_rows: int | None = None,
    columns: Mapping[str, ColumnType] | None = None,
) -> HeldOutRows:
    """Read a held-out file for the comparison with training rows.

    Args:
        name: name of the setting that names the file.
        max_rows: highest number of rows to read.
        columns: types of CSV columns that are not text.

    Raises:
        DataError: a row is not a prompt (`accuracy`) or not a demonstration (`loss`).
    """
    number_of: dict[bytes, int] = {}
    texts: dict[int, list[str]] = {}
    if metric == "accuracy":
        prompts = load_prompts_from_jsonl(path, max_rows=max_rows, columns=columns)
        openings = find_openings(prompts)
        for prompt in prompts:
            number_of[(key_of_task if is_opening(prompt, openings) else key_of_prompt)(prompt)] = prompt.row
            texts[prompt.row] = said_by_user(prompt.messages)
        return HeldOutRows(name, metric, number_of, texts)
    for number, row in itertools.islice(load_rows(path, columns=columns), max_rows):
        try:
            read = read_demonstration(row)
        except DataError as error:
            raise DataError(f"{path}, row {number}: {error}") from error
        number_of[_whole_of(read)] = number
        texts[number] = _texts_of(read)
    return HeldOutRows(name, metric, number_of, texts)


def watch_rows(
    rows: Iterable[tuple[int, Row]], source: str, held_out: Sequence[HeldOutRows]
) -> Iterator[tuple[int, Row]]:
    """Yield demonstrations unchanged, and compare each with the held-out rows on the way."""
    for number, row in rows:
        with suppress(DataError):  # the caller reads the row again and reports the error
            read = read_demonstration(row) if held_out else ""
            for each in held_out:
                keys = [_whole_of(read)] if each.metric == "loss" else _prompts_of(read)
                each.look_for(keys, source, number, _texts_of(read))
        yield number, row


def key_of_prompt(prompt: Prompt) -> bytes:
    """Comparison key of a prompt. Prompts with the same user turns have equal keys."""
    return _digest(key_of_turns(said_by_user(prompt.messages)))


def key_of_task(prompt: Prompt) -> bytes:
    """Comparison key of a prompt's whole row. Prompts with the same user turns, answer and metadata have equal keys."""
    return hashlib.sha256(key_of_prompt(prompt) + describe_task(prompt).encode()).digest()


def key_of_demonstration(row: Row) -> bytes:
    """Comparison key of a demonstration's messages or text. Other fields of the row are ignored.

    Raises:
        DataError: the row is not a demonstration.
    """
    return _whole_of(read_demonstration(row))


def _whole_of(read: Conversation | str) -> bytes:
    if isinstance(read, str):
        return _digest(fold(read))
    said = [[each["role"], fold(each["content"]), each.get("tool_calls")] for each in read.messages]
    return _digest(json.dumps([each for each in said if each[0] not in TOLD_FIRST], sort_keys=True, default=str))


def _prompts_of(read: Conversation | str) -> list[bytes]:
    """Comparison keys of the prompts in a demonstration: the user turns before each answer that may be trained on.

    For a plain text, each part that may be a user turn gives a key.
    """
    if isinstance(read, str):
        return [_digest(key_of_turns([turn])) for turn in dict.fromkeys(turns_of_text(read))]
    answers = range(max(read.num_given, 1), len(read.messages))
    return [
        _digest(key_of_turns(said_by_user(read.messages[:i])))
        for i in answers
        if read.messages[i]["role"] == "assistant"
    ]


def _texts_of(read: Conversation | str) -> list[str]:
    return [read] if isinstance(read, str) else [message["content"] for message in read.messages]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()
