"""Read demonstrations and prompts from files, check every row, and name the row that does not fit.

Not here: the order in which they are used (data_buffer.py, sft.py), token tensors (batch.py).

    demonstrations   {"messages": [...]} | {"prompt": ..., "completion": ...} | {"text": ...}  -> Sample
    prompts          {"prompt": ... | "messages": [...], "answer": ..., "id": ...}             -> Prompt
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts_core.chat import TrainOn, Turn, compute_loss_mask, tokenize_conversation, tokenize_whole_conversation
from rollouts_core.errors import DataError
from rollouts_core.messages import first_line
from rollouts_core.types import Message, Prompt, Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, Any]  # Any: JSON values of a user's file
HASH_BLOCK_BYTES = 1 << 20
PARQUET_MAGIC = b"PAR1"


def load_rows(path: str | Path) -> Iterator[tuple[int, Row]]:
    """Rows of a JSONL or Parquet file or of a Hugging Face dataset, each with its number from 1 (its line in JSONL).

    Raises:
        DataError: no such file, a line that is no JSON object, or no row at all.
    """
    is_empty = True
    for number, row in _read_rows(Path(path)):
        is_empty = False
        yield number, row
    if is_empty:
        raise DataError(f"{path} is empty: expected at least one row")


def load_sft_dataset(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    train_on: TrainOn = "all_assistant",
) -> list[Sample]:
    """Demonstrations as samples of at most `max_length` tokens, in the order of the file.

    Raises:
        DataError: a row without the needed fields, or whose loss mask is all 0, named by its number.
    """
    samples: list[Sample] = []
    for number, row in load_rows(path):
        try:
            samples.append(_build_sft_sample(row, tokenizer, max_length=max_length, train_on=train_on))
        except DataError as error:
            raise DataError(f"{path}, row {number}: {error}") from error
    return samples


def load_prompts_from_jsonl(path: str | Path, *, max_rows: int | None = None) -> list[Prompt]:
    """Prompts of a JSONL file (or another format that `load_rows` reads), at most `max_rows` from its start.

    Raises:
        DataError: a row without `prompt` or `messages`, named by its number, or an id that occurs twice.
    """
    prompts: list[Prompt] = []
    row_of_id: dict[str, int] = {}
    for number, row in load_rows(path):
        if max_rows is not None and len(prompts) == max_rows:
            break
        try:
            prompt = _build_prompt(row, default_id=f"{Path(path).stem}-{number}")
        except DataError as error:
            raise DataError(f"{path}, row {number}: {error}") from error
        if prompt.id in row_of_id:
            raise DataError(f"{path}, row {number}: id {prompt.id!r} is also that of row {row_of_id[prompt.id]}")
        row_of_id[prompt.id] = number
        prompts.append(prompt)
    return prompts


def digest_path(path: str | Path) -> str:
    """sha256 of a file, or of the names and contents of all files below a folder, as hex.

    A hub id (no such path) has no content here; its digest is that of its name.
    """
    root = Path(path)
    if root.is_file():
        return _digest_file(root)
    total = hashlib.sha256()
    if not root.is_dir():
        total.update(f"hub:{path}".encode())
        return total.hexdigest()
    for file in sorted(p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        total.update(f"{file.relative_to(root).as_posix()}\0{_digest_file(file)}\n".encode())
    return total.hexdigest()


def check_disjoint(first: Sequence[Prompt], second: Sequence[Prompt], *, names: tuple[str, str]) -> None:
    """Raise DataError when a prompt's conversation is in both lists."""
    seen = {_conversation(prompt): prompt.id for prompt in first}
    for prompt in second:
        if (other := seen.get(_conversation(prompt))) is not None:
            raise DataError(
                f"prompt {prompt.id!r} of {names[1]} is also prompt {other!r} of {names[0]}: "
                "what chooses a checkpoint must not also grade it; remove it from one of them"
            )


def _conversation(prompt: Prompt) -> tuple[tuple[str, str], ...]:
    return tuple((message["role"], message["content"]) for message in prompt.messages)


def _read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    if path.suffix in (".jsonl", ".json"):
        yield from _read_jsonl(path)
        return
    import datasets  # heavy, and only for Parquet and hub data

    if path.suffix == ".parquet":
        _check_parquet(path)
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train")
    elif path.is_file():
        raise DataError(f"{path} is neither JSONL nor Parquet by its name: it must end in .jsonl or .parquet")
    elif path.is_absolute() and not path.exists():
        raise DataError(f"{path} does not exist: give a JSONL or Parquet file, or a folder of `save_to_disk`")
    else:
        rows = _load_dataset(path)
    yield from enumerate(rows, start=1)


def _load_dataset(path: Path) -> Iterable[Row]:
    import datasets

    try:
        found: Iterable[Row] = (  # datasets has no types
            datasets.load_from_disk(str(path)) if path.is_dir() else datasets.load_dataset(str(path), split="train")
        )
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} is no dataset ({first_line(error)}): give a JSONL or Parquet file, or a folder of `save_to_disk`"
        ) from error
    if isinstance(found, dict):
        raise DataError(f"{path} has the splits {', '.join(sorted(found))}: give the folder of one of them")
    return found


def _check_parquet(path: Path) -> None:
    """Raise DataError when a file is missing or was cut: a whole one begins and ends with its magic number."""
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    with path.open("rb") as file:
        head = file.read(len(PARQUET_MAGIC))
        file.seek(max(0, path.stat().st_size - len(PARQUET_MAGIC)))
        tail = file.read()
    if head != PARQUET_MAGIC or tail != PARQUET_MAGIC:
        raise DataError(f"{path} is not a Parquet file, or was cut: write it again")


def _read_jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}, row {number}: not valid JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, row {number}: expected a JSON object, found {type(row).__name__}")
            yield number, row


def _build_sft_sample(row: Row, tokenizer: PreTrainedTokenizerBase, *, max_length: int, train_on: TrainOn) -> Sample:
    if "text" in row:
        tokens = list(tokenizer(_text(row, "text"))["input_ids"])
        if tokenizer.eos_token_id is not None:
            tokens.append(tokenizer.eos_token_id)
        prompt: tuple[Message, ...] = ()
        response, loss_mask = row["text"], [1.0] * len(tokens)
    else:
        messages = _demonstration_messages(row)
        if train_on == "everything":
            tokens = tokenize_whole_conversation(tokenizer, messages)
            turns: list[Turn] = []
        else:
            tokens, turns = tokenize_conversation(tokenizer, messages)
        loss_mask = compute_loss_mask(turns, len(tokens), train_on)
        prompt, response = tuple(messages[:-1]), messages[-1]["content"]
    # The first token of a row has nothing before it to be predicted from.
    if not any(loss_mask[1:max_length]):
        reason = f"within the first {max_length} of its {len(tokens)} tokens" if any(loss_mask) else "at all"
        raise DataError(f"nothing to train on {reason}: raise max_length or change train_on or the row")
    return Sample(
        prompt=prompt,
        response=response,
        tokens=tokens[:max_length],
        loss_mask=loss_mask[:max_length],
        status=Status.COMPLETED if len(tokens) <= max_length else Status.TRUNCATED,
    )


def _demonstration_messages(row: Row) -> list[Message]:
    if "messages" in row:
        return _messages(row)
    completion = "completion" if "completion" in row else "response"
    if "prompt" in row and completion in row:
        asked = _messages({"messages": row["prompt"]}) if isinstance(row["prompt"], list) else None
        return [
            *(asked or [Message(role="user", content=_text(row, "prompt"))]),
            Message(role="assistant", content=_text(row, completion)),
        ]
    raise DataError(f"expected `messages`, or `prompt` and `completion`, or `text`; found {_keys(row)}")


def _build_prompt(row: Row, *, default_id: str) -> Prompt:
    if "messages" in row:
        messages = _messages(row)
    elif isinstance(row.get("prompt"), list):
        messages = _messages({"messages": row["prompt"]})
    elif "prompt" in row:
        messages = [Message(role="user", content=_text(row, "prompt"))]
    else:
        raise DataError(f"expected `prompt` or `messages`; found {_keys(row)}")
    return Prompt(
        id=default_id if row.get("id") is None else str(row["id"]),
        messages=tuple(messages),
        answer="" if row.get("answer") is None else str(row["answer"]),
        metadata={k: v for k, v in row.items() if k not in ("id", "messages", "prompt", "answer")},
    )


def _messages(row: Row) -> list[Message]:
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise DataError("`messages` must be a list with at least one message")
    for i, message in enumerate(messages):
        fits = isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))
        if not fits:
            raise DataError(f"message {i} must have `role` and `content`, both text; found {str(message)[:80]}")
    return messages


def _text(row: Row, key: str) -> str:
    if not isinstance(row[key], str):
        raise DataError(f"`{key}` must be text, found {type(row[key]).__name__}")
    return str(row[key])


def _keys(row: Row) -> str:
    return ", ".join(sorted(row)) or "no field at all"


def _digest_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
