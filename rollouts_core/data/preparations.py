"""Built-in preparations: functions that make data files from the rows of a public dataset.

    rows of the dataset ── read(split, subset) ──> function ──> rows of each file: {"sft": ..., "heldout": ...}

Users can write their own function `def prepare(read, **settings)` and name it as `package.module:function`.
`preparing.py` reads and writes the rows. `tasks/preparing.py` decides when a preparation runs.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rollouts_core.environments.math import final_answer

Row = dict[str, Any]  # Any: columns of every type
GSM8K_ASK = "\n\nThink step by step, and end with #### and the number."
MATH_ASK = "\n\nReason step by step, and put the final answer within \\boxed{}."
CALCULATION = re.compile(r"<<.*?>>")
"""Matches the calculator annotations in GSM8K's solutions, such as <<2*3=6>>."""
MAX_MATH_PROMPT_CHARS = 2000
MAX_OPENING_CHARS = 6000
"""Highest number of characters of a conversation's first two messages. Longer ones would fill a whole training row."""


class ReadRows(Protocol):
    """Reads the rows of a dataset."""

    def __call__(self, split: str, subset: str = "") -> Iterator[Row]:
        """Yield the rows of a split, in order. Rows of a hub dataset are downloaded as they are read."""
        ...


PrepareFn = Callable[..., Mapping[str, Iterable[Row]]]
"""Function (read, **settings) -> rows of each data file. The name of a data file is a setting of the section `data`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """A function that makes data files from a public dataset, with the dataset's name and commit."""

    title: str
    """Description of the dataset in a few words."""
    prepare: PrepareFn
    source: str
    """Name of the dataset on the hub."""
    revision: str
    """Commit of the dataset for which the function was written."""


def prepare_gsm8k(
    read: ReadRows, *, num_train: int = 7000, num_selection: int = 473, num_heldout: int = 1319
) -> dict[str, list[Row]]:
    """GSM8K: worked solutions as demonstrations, and questions with the final number as the answer."""
    train = map(_gsm8k_row, read("train", "main"))
    rows = list(itertools.islice(train, num_train))
    selection = list(itertools.islice(train, num_selection))
    heldout = list(map(_gsm8k_row, itertools.islice(read("test", "main"), num_heldout)))
    return {
        "sft": _with_columns(rows, "prompt", "completion"),
        "prompts": _with_columns(rows, "prompt", "answer"),
        "selection": _with_columns(selection, "prompt", "answer"),
        "heldout": _with_columns(heldout, "prompt", "answer"),
    }


def _gsm8k_row(row: Row) -> Row:
    solution = CALCULATION.sub("", row["answer"])
    answer = solution.partition("####")[2].strip()
    return {"prompt": row["question"] + GSM8K_ASK, "completion": solution, "answer": answer}


def prepare_math(
    read: ReadRows, *, num_train: int = 7500, num_selection: int = 200, num_heldout: int = 5000, seed: int = 0
) -> dict[str, list[Row]]:
    """MATH: problems whose final answer is an integer, in a seeded order."""
    train, test = ([row for each in read(split) if (row := _math_row(each))] for split in ("train", "test"))
    order = random.Random(seed)
    order.shuffle(train)
    order.shuffle(test)
    return {
        "selection": train[:num_selection],
        "prompts": train[num_selection:][:num_train],
        "heldout": test[:num_heldout],
    }


def _math_row(row: Row) -> Row | None:
    """Convert a problem to a row. Returns None if its answer is not an integer or its text is too long."""
    answer = final_answer(row["solution"]) or ""
    prompt = row["problem"] + MATH_ASK
    is_kept = answer.removeprefix("-").isdigit() and len(prompt) < MAX_MATH_PROMPT_CHARS
    return {"prompt": prompt, "answer": answer} if is_kept else None


def prepare_conversations(
    read: ReadRows, *, num_train: int = 30_000, num_selection: int = 500, num_heldout: int = 500
) -> dict[str, list[Row]]:
    """smol-smoltalk: conversations whose first two messages are not too long."""
    train, test = (filter(_has_short_opening, read(split)) for split in ("train", "test"))
    taken = {"sft": (train, num_train), "selection": (test, num_selection), "heldout": (test, num_heldout)}
    return {
        name: _with_columns(itertools.islice(rows, num_rows), "messages") for name, (rows, num_rows) in taken.items()
    }


def _has_short_opening(row: Row) -> bool:
    return sum(len(message["content"]) for message in row["messages"][:2]) < MAX_OPENING_CHARS


def prepare_web_text(
    read: ReadRows, *, num_train: int = 50_000, num_selection: int = 500, num_heldout: int = 500
) -> dict[str, list[Row]]:
    """OpenWebText: its first documents as plain texts."""
    documents = read("train", "plain_text")
    sizes = {"heldout": num_heldout, "selection": num_selection, "sft": num_train}
    return {name: _with_columns(itertools.islice(documents, size), "text") for name, size in sizes.items()}


def _with_columns(rows: Iterable[Row], *names: str) -> list[Row]:
    return [{name: row[name] for name in names} for row in rows]


PREPARATIONS: Mapping[str, Preparation] = {
    "gsm8k": Preparation(
        title="grade-school mathematics, with worked solutions",
        prepare=prepare_gsm8k,
        source="openai/gsm8k",
        revision="740312add88f781978c0658806c59bc2815b9866",
    ),
    "math": Preparation(
        title="competition mathematics with integer answers",
        prepare=prepare_math,
        source="DigitalLearningGmbH/MATH-lighteval",
        revision="0530c78699ea5e8eb5530600900e1f328b48acad",
    ),
    "smol_smoltalk": Preparation(
        title="conversations",
        prepare=prepare_conversations,
        source="HuggingFaceTB/smol-smoltalk",
        revision="f73fe857d519ff6ac5af2ea67c4d3834da7b8bcc",
    ),
    "openwebtext": Preparation(
        title="plain web text",
        prepare=prepare_web_text,
        source="Skylion007/openwebtext",
        revision="79d93d786212f7344586290adb811d4ae6a1762c",
    ),
}
"""Built-in preparations by name; `data.prepare.name` selects one."""
