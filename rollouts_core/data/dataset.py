"""Convert rows to samples for SFT and to prompts for RL. Error messages name the row.

    demonstrations   {"messages": [...]} | {"prompt": ..., "completion": ...} | {"text": ...}  -> Sample
    prompts          {"prompt": ... | "messages": [...], "answer": ..., "id": ...}             -> Prompt

Rows are tokenized in chunks of `CHUNK_ROWS` rows, with one call of the tokenizer per chunk.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rollouts_core.config import DatasetConfig, SFTTrainingConfig
from rollouts_core.config.data import ColumnType
from rollouts_core.data.bad_rows import BadRows, noted_rows
from rollouts_core.data.chat import (
    Conversation,
    TokenizedConversation,
    TrainOn,
    compute_loss_mask,
    is_prefill,
    split_texts,
    tokenize_conversations,
    trained_turns,
)
from rollouts_core.data.conversations import Row, describe_keys, read_demonstration, read_messages
from rollouts_core.data.mixture import epoch_order
from rollouts_core.data.overlap import key_of_turns, said_by_user
from rollouts_core.data.rows import RowTable, load_rows, open_rows
from rollouts_core.data.source_text import TEXT_FIELDS, JsonText, as_text
from rollouts_core.data.turns import is_end
from rollouts_core.errors import DataError, DemonstrationError
from rollouts_core.types import Message, Prompt, Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

OnOverlong = Literal["cut", "cut_or_drop", "drop"]
CHUNK_ROWS = 512
MAX_LOGGED_DROPS = 10
PROMPT_FIELDS = ("messages", "prompt", *TEXT_FIELDS)
"""Fields of a row that become fields of its prompt. All other fields become the prompt's metadata."""
ROLLOUT_FIELDS = ("conversation", "outcomes")
"""Metadata keys that a rollout (`rollout/agent.py`) adds to its samples. A row of prompts must not use these names."""


RowSamples = tuple[Sample, ...]
"""The samples of a row, usually one. A row whose turns need separate texts (`chat.py`) has several samples. A dropped
row has an empty tuple."""


class SampleRules(NamedTuple):
    """Settings for converting a row to samples."""

    max_length: int
    """Highest number of tokens in a sample."""
    train_on: TrainOn = "all_assistant"
    """Which tokens enter the loss."""
    on_overlong: OnOverlong = "cut"
    """How to treat a sample longer than `max_length` tokens."""


def sample_rules(config: SFTTrainingConfig) -> SampleRules:
    return SampleRules(config.max_length, config.train_on, config.on_overlong)


def load_sft_dataset(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    train_on: TrainOn = "all_assistant",
    on_overlong: OnOverlong = "cut",
    max_rows: int | None = None,
    columns: Mapping[str, ColumnType] | None = None,
) -> list[Sample]:
    """Read demonstrations and tokenize them to samples of at most `max_length` tokens, in the order of the file.

    Args:
        on_overlong: treatment of longer samples. `cut` truncates, and raises an error if no trained token remains.
            `cut_or_drop` truncates, and drops the sample if no trained token remains. `drop` drops all longer samples.
        max_rows: highest number of rows to read.
        columns: types of CSV columns that are not text.

    Raises:
        DataError: a row lacks required fields or has nothing to train on. The message names the row.
    """
    rules = SampleRules(max_length, train_on, on_overlong)
    rows = iterate_samples(load_rows(path, columns=columns), str(path), tokenizer, rules, max_rows=max_rows)
    return list(itertools.chain.from_iterable(rows))


def iterate_samples(
    rows: Iterable[tuple[int, Row]],
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    rules: SampleRules,
    *,
    max_rows: int | None = None,
    bad: BadRows | None = None,
) -> Iterator[RowSamples]:
    """Yield the samples of each row, in order. Only one chunk of rows is in memory at a time.

    Args:
        source: name of the rows' origin for error messages.
        bad: collects the errors of invalid rows, which yield no sample. None raises the first error.

    Raises:
        DataError: a row lacks required fields or has nothing to train on.
    """
    stream = itertools.islice(rows, max_rows)
    while chunk := list(itertools.islice(stream, CHUNK_ROWS)):
        yield from _build_chunk(chunk, source, tokenizer, rules, bad)


def open_datasets(datasets: Sequence[DatasetConfig]) -> list[RowTable]:
    """Open the row table of each dataset. Raises DataError if a dataset is missing or has no rows."""
    return [
        open_rows(each.path, split=each.split, subset=each.subset, revision=each.revision, columns=each.columns)
        for each in datasets
    ]


def count_used_rows(table: RowTable, dataset: DatasetConfig) -> int:
    """Number of rows that training uses from the start of the dataset (`max_samples` limits it).

    Raises:
        DataError: `repeat` is so small that an epoch would contain no row.
    """
    size = len(table) if dataset.max_samples is None else min(len(table), dataset.max_samples)
    if size * dataset.repeat < 1:
        raise DataError(f"{table.path}: repeat {dataset.repeat} of {size} rows is less than one row: raise repeat")
    return size


class SFTDataset:
    """The samples of several datasets, visited epoch by epoch in a seeded order.

    After the constructor has read all rows, all tokens stay in memory (5 bytes per token). With `streaming`, rows are
    read and tokenized at each visit, and only one chunk of rows is in memory. With and without `streaming`, the samples
    and their order are the same.

    Args:
        tables: the result of `open_datasets`.

    Raises:
        DataError: data cannot be read, `repeat` selects no row, a row has nothing to train on, or all rows are dropped.
            With `streaming`, an invalid row raises the error when it is visited.
    """

    def __init__(
        self,
        datasets: Sequence[DatasetConfig],
        tables: Sequence[RowTable],
        tokenizer: PreTrainedTokenizerBase,
        rules: SampleRules,
        *,
        streaming: bool = False,
    ) -> None:
        self._tables = tables
        self.sizes = [count_used_rows(table, each) for table, each in zip(tables, datasets, strict=True)]
        self._repeats = [each.repeat for each in datasets]
        self._tokenizer = tokenizer
        self._rules = rules
        self.num_dropped = 0
        """Number of rows dropped because they are too long. With `streaming`, number of visits to rows that are too
        long."""
        self.first_dropped: list[int] = []
        """Numbers of the first dropped rows. Numbering starts at 0 and continues through all datasets."""
        self._kept: _CompactSamples | None = None
        if not streaming:
            self._kept = _CompactSamples(self._read_chunk(chunk) for chunk in _chunks(range(len(self))))
            if self.num_dropped == len(self):
                raise DataError(f"all {len(self)} rows are longer than max_length {rules.max_length}: raise max_length")

    def __len__(self) -> int:
        """Number of rows in all datasets, including dropped rows."""
        return sum(self.sizes)

    def iterate_epoch(self, epoch: int, *, seed: int, start: int = 0) -> Iterator[RowSamples]:
        """Yield the samples of each visited row of an epoch, starting at visit number `start`."""
        order = epoch_order(self.sizes, self._repeats, seed=seed, epoch=epoch)
        if self._kept is not None:
            return map(self._kept.__getitem__, itertools.islice(order, start, None))
        return itertools.chain.from_iterable(map(self._read_chunk, _chunks(order, start)))

    def _read_chunk(self, numbers: Sequence[int]) -> list[RowSamples]:
        """The samples of the rows with these numbers. Numbering continues through all datasets."""
        samples: dict[int, RowSamples] = {}
        first_row = 0
        for table, size in zip(self._tables, self.sizes, strict=True):
            wanted = [number for number in dict.fromkeys(numbers) if first_row <= number < first_row + size]
            rows = table.read([number - first_row for number in wanted]) if wanted else []
            built = _build_chunk(rows, table.path, self._tokenizer, self._rules)
            for number, (row, _), outcome in zip(wanted, rows, built, strict=True):
                samples[number] = tuple(replace(sample, metadata={"row": number + 1}) for sample in outcome)
                if not outcome:
                    self._count_drop(f"{table.path}, row {row}", number)
            first_row += size
        return [samples[number] for number in numbers]

    def lengths(self) -> list[tuple[int, int]]:
        """(number of tokens, number of trained tokens) of each sample; an empty list with `streaming`."""
        return self._kept.lengths() if self._kept else []

    def _count_drop(self, row: str, number: int) -> None:
        self.num_dropped += 1
        if len(self.first_dropped) < MAX_LOGGED_DROPS:
            self.first_dropped.append(number)
        if self.num_dropped <= MAX_LOGGED_DROPS:
            logger.warning("left out %s: it has more tokens than max_length %d", row, self._rules.max_length)


class _CompactSamples:
    """Tokens and masks of many samples in flat arrays, which need less memory than Python lists."""

    def __init__(self, chunks: Iterable[Sequence[RowSamples]]) -> None:
        self._tokens = array("i")
        self._mask = bytearray()
        self._ends = array("q", [0])
        self._is_cut = bytearray()
        self._row_ends = array("q", [0])
        """For each row, the number of samples up to and including this row."""
        for samples in itertools.chain.from_iterable(chunks):
            for sample in samples:
                self._tokens.extend(sample.tokens)
                self._mask.extend(map(int, sample.loss_mask))
                self._is_cut.append(sample.status is Status.TRUNCATED)
                self._ends.append(len(self._tokens))
            self._row_ends.append(len(self._is_cut))

    def __getitem__(self, row: int) -> RowSamples:
        return tuple(self._sample(number, row) for number in range(self._row_ends[row], self._row_ends[row + 1]))

    def lengths(self) -> list[tuple[int, int]]:
        bounds = itertools.pairwise(self._ends)
        return [(end - start, end - start - self._mask.count(0, start, end)) for start, end in bounds]

    def _sample(self, number: int, row: int) -> Sample:
        start, end = self._ends[number], self._ends[number + 1]
        return Sample(
            tokens=self._tokens[start:end].tolist(),
            loss_mask=list(map(float, self._mask[start:end])),
            status=Status.TRUNCATED if self._is_cut[number] else Status.COMPLETED,
            metadata={"row": row + 1},
        )


def load_prompts_from_jsonl(
    path: str | Path,
    *,
    max_rows: int | None = None,
    columns: Mapping[str, ColumnType] | None = None,
    bad: BadRows | None = None,
) -> list[Prompt]:
    """Read prompts from a JSONL file, or from another format that `load_rows` reads.

    Args:
        max_rows: highest number of rows to read, from the start of the file.
        columns: types of CSV columns that are not text.
        bad: collects the errors of invalid rows, which are left out. None raises the errors together at the end.

    Raises:
        DataError: a row has neither `prompt` nor `messages`, or an id occurs twice. The message names the rows.
        DemonstrationError: the first invalid row is a demonstration instead of a prompt.
    """
    prompts: list[Prompt] = []
    row_of_id: dict[str, int] = {}
    with noted_rows(str(path), bad) as noted:
        for number, row in itertools.islice(load_rows(path, columns=columns, bad=noted), max_rows):
            noted.num_rows = number
            with noted.at(number):
                prompt = build_prompt(row, number, default_id=f"{Path(path).stem}-{number}")
                if prompt.id in row_of_id:
                    raise DataError(f"id {prompt.id!r} also occurs in row {row_of_id[prompt.id]}: ids must be unique")
                row_of_id[prompt.id] = number
                prompts.append(prompt)
    return prompts


def check_disjoint(first: Sequence[Prompt], second: Sequence[Prompt], *, names: tuple[str, str]) -> None:
    """Check that no prompt occurs in both lists. Two prompts are equal if their user turns are equal.

    If several prompts share their user turns but differ in their answers, as in games, whole rows are compared instead.

    Args:
        names: names of the two lists for the error message.

    Raises:
        DataError: a prompt occurs in both lists.
    """
    openings = find_openings(first) | find_openings(second)

    def key_of(prompt: Prompt) -> str:
        conversation = _conversation(prompt)
        return conversation + describe_task(prompt) if conversation in openings else conversation

    seen = {key_of(prompt): prompt.id for prompt in first}
    for prompt in second:
        if (other := seen.get(key_of(prompt))) is not None:
            raise DataError(
                f"prompt {prompt.id!r} of {names[1]} is also prompt {other!r} of {names[0]}: "
                "selection and evaluation need different prompts; remove the prompt from one of the files"
            )


def find_openings(prompts: Sequence[Prompt]) -> set[str]:
    """Conversations (as JSON) that several prompts share although their answers differ.

    Example: every game of an environment begins with the same words, whatever its solution. For prompts without an
    answer, the other fields of the row are compared.
    """
    tasks: dict[str, set[str]] = {}
    for prompt in prompts:
        tasks.setdefault(_conversation(prompt), set()).add(prompt.answer or describe_task(prompt))
    return {conversation for conversation, of_it in tasks.items() if len(of_it) > 1}


def is_opening(prompt: Prompt, openings: set[str]) -> bool:
    """True if the prompt's conversation is in `openings`, a result of `find_openings`."""
    return _conversation(prompt) in openings


def describe_task(prompt: Prompt) -> str:
    """The answer and metadata of a prompt as JSON: the row's content apart from its conversation and id."""
    return json.dumps([prompt.answer, dict(prompt.metadata)], sort_keys=True, default=str)


def _conversation(prompt: Prompt) -> str:
    return key_of_turns(said_by_user(prompt.messages))


def _chunks(numbers: Sequence[int], start: int = 0) -> Iterator[Sequence[int]]:
    return (numbers[i : i + CHUNK_ROWS] for i in range(start, len(numbers), CHUNK_ROWS))


def _build_chunk(
    rows: Sequence[tuple[int, Row]],
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    rules: SampleRules,
    bad: BadRows | None = None,
) -> list[RowSamples]:
    """The samples of each row of a chunk. The error of an invalid row is raised, or collected if `bad` is given."""
    read: list[Conversation | str | DataError] = []
    for _, row in rows:
        try:
            read.append(read_demonstration(row))
        except DataError as error:
            read.append(error)
    conversations = [each for each in read if isinstance(each, Conversation)]
    texts = [each for each in read if isinstance(each, str)]
    tokenized = iter(tokenize_conversations(tokenizer, conversations, train_on=rules.train_on))
    encoded = iter(_encode_plain_texts(tokenizer, texts))
    samples: list[RowSamples] = []
    for (number, _), each in zip(rows, read, strict=True):
        try:
            if isinstance(each, Conversation):
                samples.append(_conversation_samples(each, next(tokenized), rules))
            elif isinstance(each, str):
                tokens = next(encoded)
                sample = _build_sample(tokens, [1.0] * len(tokens), rules, prompt=(), response=each)
                samples.append(() if sample is None else (sample,))
            else:
                raise each
        except DataError as error:
            located = DataError(f"{source}, row {number}: {error}")
            if bad is None:
                raise located from error
            bad.note(number, located)
            samples.append(())
    return samples


def _encode_plain_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Token ids of plain texts, each with the tokenizer's beginning-of-sequence token and one end-of-sequence token."""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(texts, return_attention_mask=False)["input_ids"]
    return [_begin_and_end_once(tokenizer, tokens) for tokens in ids]


def _begin_and_end_once(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[int]:
    """The tokens of a plain text with at most one beginning-of-sequence token and exactly one end token.

    A text from a chat template may already contain both tokens, with a line break after the end token. Some tokenizers
    also add an end token.
    """
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    has_begun_twice = begin is not None and tokens[:2] == [begin, begin]
    body = tokens[1:] if has_begun_twice else tokens
    num_ends = next((i for i, token in enumerate(reversed(body)) if token != end), len(body))
    body = body[: len(body) - num_ends]
    last = next((i for i in reversed(range(len(body))) if tokenizer.decode(body[i : i + 1]).strip()), None)
    has_ended = last is not None and is_end(tokenizer, body[last])
    return body if has_ended or end is None else [*body, end]


def _conversation_samples(
    conversation: Conversation, tokenized: TokenizedConversation | DataError, rules: SampleRules
) -> RowSamples:
    """The samples of a conversation, one per text.

    If truncation removes all trained tokens of a text, the text gives no sample. If no other text gives a sample,
    `on_overlong` decides: the row is dropped or an error is raised.
    """
    if isinstance(tokenized, DataError):
        raise tokenized
    messages = conversation.messages
    texts = split_texts(tokenized)
    numbers = [] if len(texts) == 1 else trained_turns(conversation, rules.train_on)
    samples: list[Sample] = []
    num_turns = 0
    for text in texts:
        num_turns += len(text.turns)
        last = numbers[num_turns - 1] if numbers else len(messages) - 1
        loss_mask = compute_loss_mask(text.turns, len(text.tokens), rules.train_on)
        if any(loss_mask[1 : rules.max_length]) or (text is texts[-1] and not samples):
            prompt, response = tuple(messages[:last]), messages[last]["content"]
            sample = _build_sample(text.tokens, loss_mask, rules, prompt=prompt, response=response)
            samples += [] if sample is None else [sample]
    return tuple(samples)


def _build_sample(
    tokens: list[int], loss_mask: list[float], rules: SampleRules, *, prompt: tuple[Message, ...], response: str
) -> Sample | None:
    max_length = rules.max_length
    is_overlong = len(tokens) > max_length
    if is_overlong and rules.on_overlong == "drop":
        return None
    # The first token of a sample cannot be trained on: no context precedes it.
    if not any(loss_mask[1:max_length]):
        if is_overlong and rules.on_overlong == "cut_or_drop" and any(loss_mask[1:]):
            return None
        reason = f"within the first {max_length} of its {len(tokens)} tokens" if any(loss_mask) else "at all"
        raise DataError(f"nothing to train on {reason}: raise max_length, or change train_on, on_overlong or the row")
    return Sample(
        prompt=prompt,
        response=response,
        tokens=tokens[:max_length],
        loss_mask=loss_mask[:max_length],
        status=Status.TRUNCATED if is_overlong else Status.COMPLETED,
    )


def build_prompt(row: Row, number: int, *, default_id: str) -> Prompt:
    """Convert a row to a prompt.

    Args:
        number: number of the row.
        default_id: id of the prompt if the row has no field `id`.

    Raises:
        DataError: the row has no valid prompt, or uses a reserved field name.
        DemonstrationError: the row is a demonstration instead of a prompt.
    """
    for name in ROLLOUT_FIELDS:
        if name in row:
            raise DataError(f"the field `{name}` is reserved for rollouts: rename it in the data")
    if row.get("messages") is not None:
        messages = read_messages(row["messages"])
    elif isinstance(row.get("prompt"), list):
        messages = read_messages(row["prompt"], key="prompt")
    elif isinstance(row.get("prompt"), str):
        messages = [Message(role="user", content=row["prompt"])]
    elif row.get("prompt") is not None:
        raise DataError(f"`prompt` must be text or a list of messages, found {type(row['prompt']).__name__}")
    else:
        wrong = DemonstrationError if isinstance(row.get("text"), str) else DataError
        raise wrong(f"expected `prompt` or `messages`; found {describe_keys(row)}")
    is_begun = is_prefill(messages) and row.get("messages") is None
    if messages[-1]["role"] == "assistant" and not is_begun:
        raise DemonstrationError(
            "the prompt ends with an assistant turn, but the policy must write this turn: remove it, or move it to "
            "`answer` for graders. If the policy is to continue the turn, name the field `prompt`"
        )
    answer, own_id = (as_text(row.get(name)) for name in TEXT_FIELDS)
    return Prompt(
        id=default_id if own_id is None else str(own_id),
        messages=tuple(_as_json(messages, "messages")),
        answer=answer or "",
        has_json_answer=isinstance(answer, JsonText),
        metadata={k: _as_json(v, k) for k, v in row.items() if k not in PROMPT_FIELDS and v is not None},
        row=number,
    )


def _as_json(value: Any, key: str) -> Any:  # Any: a value of a table's column; JSON
    """Convert a value for JSON. Dates, times and decimal numbers of tables become text.

    Raises:
        DataError: the value has no JSON or text form.
    """
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, dict):
        return {name: _as_json(each, key) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each, key) for each in value]
    if isinstance(value, date | time | timedelta | Decimal):
        return str(value)
    found = value if isinstance(value, float) else type(value).__name__
    raise DataError(f"the field `{key}` holds {found}, which JSON cannot store: drop the column, or make it text")
