"""Encode rollouts for a page: compact JSON per group, and columns for the table of samples.

    {"turns": [["user", "1+1=?"]], "answer": "2", "prefix": "'*3*7$(", "samples": [
      {"t": "+$", "m": [1, 2], "l": "2#", "v": 7}, ...]}

    turns    the prompt; missing if the prompt is one user turn and the preview shows it whole
    prefix   the tokens that all samples of the group begin with; arrays of a sample cover only the tokens after it
    t        the sample's tokens
    m        the loss mask as pairs (value, count); missing if it is 1 throughout
    l, e     log-probs of the engine and of the trainer, to two digits
    a        the advantage of each token; missing if all tokens have the same advantage
    v        the weight version of all tokens, or spans with positions in the whole sample
    text     the completion; missing if the tokens decode to it

Token ids and log-probs are strings with a character per number, which take half the room of JSON lists. `join_columns`
turns the groups of a chunk into columns, which saves a further fifth.

Not here: the choice of the groups (embedded.py), the decoding in the page (viewer.js).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollouts_core.report.vocabulary import Vocabulary

STATUSES = ("pending", "completed", "truncated", "aborted", "failed", "invalid")
"""Statuses by their numbers in the column `status`. The page's index appends statuses that this list lacks."""
SHOWN_ELSEWHERE = {"prompt_id", "answer", "conversation", "reward_terms"}
"""Names of metadata that the page shows separately from other metadata."""
MAX_PREVIEW_CHARS = 120
JsonObject = dict[str, Any]  # Any: JSON objects have no better type at this edge


class Row(NamedTuple):
    """One row of the table of all samples."""

    reward: float | None
    advantage: float | None
    length: int
    """Number of tokens that the policy sampled."""
    status: str
    version: int | None
    """The newest weight version that sampled any of the tokens."""
    terms: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedGroup:
    """The encoded samples of one prompt at one step."""

    group: int
    prompt: str
    """A string that identifies the prompt."""
    preview: str
    """The start of the prompt."""
    reward: float
    """The group's mean reward; 0 without rewards."""
    text: str
    """The group as JSON."""
    rows: tuple[Row, ...]
    tokens: frozenset[int]


def encode_group(records: Sequence[JsonObject], scores: Sequence[JsonObject], vocabulary: Vocabulary) -> EncodedGroup:
    """Encode the records of one group from a file of samples.

    Args:
        scores: the training's record of each sample (advantage, trainer log-probs); {} if the record is unknown.
    """
    first, metadata = records[0], records[0].get("metadata") or {}
    turns = prompt_turns(first["prompt"])
    preview = _preview(turns)
    length = _shared_length(records)
    known = scores or [{} for _ in records]
    encoded = {
        **({} if turns == [["user", preview]] else {"turns": turns}),
        **({"answer": str(metadata["answer"])} if metadata.get("answer") not in (None, "") else {}),
        "prefix": numbers_text(first["tokens"][:length]),
        "samples": [
            _encode_sample(record, score, length, vocabulary) for record, score in zip(records, known, strict=True)
        ],
    }
    rewards = [record["reward"] for record in records if record.get("reward") is not None]
    return EncodedGroup(
        group=int(first["group_index"]),
        prompt=f"{metadata.get('prompt_id', '')}\n{json.dumps(turns)}",
        preview=preview,
        reward=sum(rewards) / len(rewards) if rewards else 0.0,
        text=json.dumps(_finite(encoded), separators=(",", ":"), ensure_ascii=True),
        rows=tuple(_row(record, score) for record, score in zip(records, known, strict=True)),
        tokens=frozenset(itertools.chain(*(record["tokens"] for record in records))),
    )


def prompt_turns(prompt: str | Sequence[JsonObject]) -> list[list[Any]]:  # Any: JSON
    """The turns of a prompt as [role, content]. A third entry has a turn's other fields, such as tool calls."""
    if isinstance(prompt, str):
        return [["user", prompt]]
    return [_turn(message) for message in prompt]


def _turn(message: JsonObject) -> list[Any]:  # Any: JSON
    others = {name: value for name, value in message.items() if name not in ("role", "content") and value}
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content)
    return [str(message.get("role", "")), text, *([others] if others else [])]


def _encode_sample(record: JsonObject, score: JsonObject, length: int, vocabulary: Vocabulary) -> JsonObject:
    tokens, mask = record["tokens"][length:], record["loss_mask"][length:]
    metadata = record.get("metadata") or {}
    sample: JsonObject = {"t": numbers_text(tokens)}
    if not all(weight == 1 for weight in mask):
        sample["m"] = mask_runs(mask)
    if (logprobs := record.get("rollout_log_probs")) is not None:
        sample["l"] = numbers_text(map(logprob_level, logprobs[length:]))
    if (by_trainer := score.get("logprobs")) is not None:
        sample["e"] = numbers_text(map(logprob_level, by_trainer[length:]))
    if isinstance(advantages := score.get("advantage"), list):
        sample["a"] = [round(each, 3) for each in advantages[length:]]
    if versions := record.get("policy_versions"):
        is_whole = len(versions) == 1 and list(versions[0][1:]) == [length, len(record["tokens"])]
        sample["v"] = versions[0][0] if is_whole else versions
    response = record.get("response", "")
    trained = [token for token, weight in zip(tokens, mask, strict=True) if weight]
    if response != vocabulary.decode(trained):
        is_told = response == vocabulary.decode_raw(trained)
        sample |= {"raw": 1} if is_told else {"text": response}
    if "conversation" in metadata:
        num_asked = 1 if isinstance(record["prompt"], str) else len(record["prompt"])
        sample["turns"] = [_turn(message) for message in metadata["conversation"][num_asked:]]
    notes = {name: value for name, value in metadata.items() if name not in SHOWN_ELSEWHERE}
    notes |= {name: record[name] for name in ("turn",) if record.get(name) is not None}
    if record.get("finish_reason") not in (None, "", "stop", "length"):
        notes["finish_reason"] = record["finish_reason"]
    return sample | ({"notes": notes} if notes else {})


def _row(record: JsonObject, score: JsonObject) -> Row:
    advantage = score.get("advantage")
    if isinstance(advantage, list):  # with an advantage per token, show the mean over the trained tokens
        trained = [each for each, weight in zip(advantage, record["loss_mask"], strict=True) if weight]
        advantage = sum(trained) / len(trained) if trained else 0.0
    spans = record.get("policy_versions") or []
    return Row(
        reward=_rounded(record.get("reward")),
        advantage=_rounded(advantage),
        length=sum(map(bool, record["loss_mask"])),
        status=str(record.get("status", "")),
        version=max((span[0] for span in spans), default=None),
        terms={
            name: rounded
            for name, term in ((record.get("metadata") or {}).get("reward_terms") or {}).items()
            if (rounded := _rounded(term)) is not None
        },
    )


def _shared_length(records: Sequence[JsonObject]) -> int:
    """The number of tokens that all records share before their first sampled token; 0 if the prefixes differ."""
    first = records[0]["tokens"]
    untrained = [next((i for i, each in enumerate(r["loss_mask"]) if each), len(r["tokens"])) for r in records]
    length = min(untrained)
    if any(record["tokens"][:length] != first[:length] for record in records):
        return 0
    return length


def mask_runs(mask: Sequence[float]) -> list[float]:
    """The mask as a flat list of (value, count) pairs."""
    pairs = ((value, sum(1 for _ in run)) for value, run in itertools.groupby(mask))
    return [number for value, count in pairs for number in (int(value) if value == int(value) else value, count)]


def logprob_level(logprob: float | None) -> int:
    """The index of a log-prob in the list of levels 0, -0.01 ... -0.99, -1.0 ... -9.9, -10, -11 ...

    A missing or non-finite log-prob counts as 0.
    """
    size = -logprob if logprob is not None and math.isfinite(logprob) else 0.0
    if size < 0.995:
        return max(0, round(100 * size))
    return 90 + round(10 * size) if size < 9.95 else 180 + round(size)


def numbers_text(numbers: Iterable[int]) -> str:
    """A string with one character per number. No character is a surrogate or needs an escape in JSON."""
    return "".join(map(_character, numbers))


def _character(number: int) -> str:
    code = number + 35
    if code >= ord("\\"):
        code += 1
    return chr(code if code < 0xD800 else code + 0x800)


def join_columns(groups: Sequence[JsonObject]) -> JsonObject:
    """The groups of a chunk as columns. Some columns have an entry per group, others an entry per sample."""
    samples = [sample for group in groups for sample in group["samples"]]
    columns: JsonObject = {name: [group.get(name) for group in groups] for name in ("turns", "answer", "prefix")}
    of_samples = ("t", "l", "m", "v")
    columns |= {name: [sample.get(name) for sample in samples] for name in of_samples}
    rest = [{name: value for name, value in sample.items() if name not in of_samples} for sample in samples]
    return {**columns, "sizes": [len(group["samples"]) for group in groups], "rest": [each or None for each in rest]}


def _rounded(number: float | None) -> float | None:
    """The number rounded to four decimals; None if the value is not a finite number."""
    if not isinstance(number, int | float) or not math.isfinite(number):
        return None
    rounded = round(number, 4)
    return int(rounded) if rounded == int(rounded) else rounded


def _preview(turns: Sequence[Sequence[Any]]) -> str:
    """The start of the last non-empty turn, as one line."""
    text = next((str(turn[1]) for turn in reversed(turns) if turn[1]), "")
    line = " ".join(text[: 4 * MAX_PREVIEW_CHARS].split())
    return line if len(line) <= MAX_PREVIEW_CHARS else f"{line[:MAX_PREVIEW_CHARS]}…"


def _finite(value: Any) -> Any:  # Any: JSON
    """The value, with None in place of NaN and infinite numbers, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list) and not (value and isinstance(value[0], int)):
        return [_finite(each) for each in value]
    return value


def group_records(
    lines: Sequence[tuple[JsonObject, JsonObject]],
) -> Iterator[tuple[list[JsonObject], list[JsonObject]]]:
    """The records of each group with their scores. Groups keep the order of their first appearance."""
    groups: dict[int, list[tuple[JsonObject, JsonObject]]] = {}
    for record, score in lines:
        groups.setdefault(int(record["group_index"]), []).append((record, score))
    for members in groups.values():
        yield [record for record, _ in members], [score for _, score in members]
