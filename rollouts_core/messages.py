"""Turn a pydantic validation error into one sentence that says which key, what was found and what to do."""

from __future__ import annotations

import difflib
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

MAX_SHOWN_CHARS = 80


def explain_validation_error(error: ValidationError, model: type[BaseModel], *, source: str) -> str:
    """The first problem of `error` as one sentence; further ones are counted.

    Args:
        model: the record that was being filled, for the names a misspelt key may have meant.
        source: the file or form, named at the start of the sentence.
    """
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    problem = problems[0]
    path = [str(part) for part in problem["loc"]]
    key = ".".join(path)
    if problem["type"] == "extra_forbidden":
        sentence = f"unknown key {key}{_suggestion(path, model)}"
    elif problem["type"] == "missing":
        sentence = f"{key} is missing"
    elif problem["type"] == "value_error":
        sentence = f"{key}: {problem['ctx']['error']}" if key else str(problem["ctx"]["error"])
    else:
        sentence = f"{key}: {_lower_first(problem['msg'])}, found {_show(problem['input'])}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{source}: {sentence}{more}"


def closest_name(name: str, known: list[str]) -> str:
    """`; did you mean X?` for the known name nearest to `name`, else the list of known names."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(sorted(known))}"


def _suggestion(path: list[str], model: type[BaseModel]) -> str:
    section: type[BaseModel] | None = model
    for part in path[:-1]:
        section = _section(section, part) if section else None
    return closest_name(path[-1], list(section.model_fields)) if section else ""


def _section(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    if name not in model.model_fields:
        return None
    annotation = model.model_fields[name].annotation
    candidates = [annotation, *get_args(annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _show(value: Any) -> str:  # Any: whatever the user wrote
    shown = repr(value)
    return shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + "..."


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
