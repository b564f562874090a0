"""Compute fingerprints. A fingerprint identifies work by a hash of everything that can change its result.

The hash covers the settings that differ from their defaults, digests of the inputs, and SEMANTICS_VERSION. Paths,
ports, threads and log intervals do not change results, so their fields are marked PLACEMENT and left out. A value that
gives the same result as the default (`ALIKE`) is left out, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rollouts_core.checkpoint import MANIFEST, find_checkpoint, load_manifest
from rollouts_core.config import PLACEMENT, SELECTION, FunctionName, ModelConfig, Record, name_of_function
from rollouts_core.config.record import ALIKE
from rollouts_core.data.rows import digest_files, digest_path
from rollouts_core.errors import ConfigError
from rollouts_core.plugins import ENTRY_POINTS
from rollouts_core.user_code.functions import IS_MISSING
from rollouts_core.user_code.own_files import OwnCode, find_code, own_code

SEMANTICS_VERSION = 12
"""Version of the results that the code computes. Increase the version if the same settings and data give another result
after a code change."""

FINGERPRINT_CHARS = 16

NO_RESULT = tuple(PLACEMENT)
NO_WEIGHTS = tuple(SELECTION)
"""Marks of fields in config/. NO_RESULT marks fields that cannot change any result; NO_WEIGHTS marks fields that cannot
change the trained weights."""


def fingerprint_job(stage: str, job: BaseModel, *, salt: str = "", semantics: int = SEMANTICS_VERSION) -> str:
    """Return the fingerprint of a stage's job: 16 hex digits.

    Args:
        salt: any text. Another salt gives another fingerprint, so that the same work is done again.
        semantics: the SEMANTICS_VERSION of the code that does the work.
    """
    content = {"stage": stage, "semantics": semantics, "salt": salt, "job": affecting_settings(job)}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:FINGERPRINT_CHARS]


def training_settings(record: BaseModel) -> dict[str, Any]:  # Any: JSON
    """The settings that can change the trained weights, by dotted names: `{"batch_size": 4, "optim.lr": 0.001}`."""
    return _flatten(affecting_settings(_with_names(record), unless_marked=(*NO_RESULT, *NO_WEIGHTS)))


def _with_names(record: BaseModel) -> BaseModel:
    """Replace functions by their names, including functions that a configuration file cannot name."""
    named: dict[str, Any] = {}  # Any: settings of every type
    for name, value in record:
        if isinstance(value, tuple):
            named[name] = tuple(_with_names(each) if isinstance(each, BaseModel) else each for each in value)
        elif callable(value) or hasattr(value, "grade"):  # `value` is a function or an environment
            named[name] = name_of_function(value)
    return record.model_copy(update=named)


def flat_settings(record: BaseModel) -> dict[str, Any]:  # Any: JSON
    """Return `affecting_settings` as one flat dict with dotted names."""
    return _flatten(affecting_settings(record))


def affecting_settings(
    record: BaseModel, default: BaseModel | None = None, *, unless_marked: Collection[str] = NO_RESULT
) -> dict[str, Any]:  # Any: JSON
    """The fields of a record that can change a result and whose values differ from the defaults, as JSON values.

    Args:
        default: the record's default in the section that contains the record, which may differ from the default of the
            record's type.
        unless_marked: fields with one of these marks are left out.
    """
    record = record.without_places() if isinstance(record, Record) else record
    as_json = record.model_dump(mode="json")
    chosen: dict[str, Any] = {}  # Any: JSON
    for name, field in type(record).model_fields.items():
        value, usual = getattr(record, name), _default_of(field, name, default)
        if _is_marked(field, unless_marked) or value == usual or _is_like_default(field, value):
            continue
        if isinstance(value, BaseModel):
            section = affecting_settings(
                value, usual if isinstance(usual, BaseModel) else None, unless_marked=unless_marked
            )
            if section or usual is PydanticUndefined:
                chosen[name] = section
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            chosen[name] = [affecting_settings(item, unless_marked=unless_marked) for item in value]
        else:
            chosen[name] = as_json[name]
    return chosen


def _default_of(field: FieldInfo, name: str, default: BaseModel | None) -> Any:  # Any: a setting of any type
    if default is not None:
        return getattr(default, name)
    return PydanticUndefined if field.is_required() else field.get_default(call_default_factory=True)


def _is_like_default(field: FieldInfo, value: Any) -> bool:  # Any: a setting of any type
    extra = field.json_schema_extra
    return isinstance(extra, dict) and ALIKE in extra and value == extra[ALIKE]


def _is_marked(field: FieldInfo, marks: Collection[str]) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and any(extra.get(mark) is False for mark in marks)


def _flatten(settings: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
    flat: dict[str, Any] = {}  # Any: JSON
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": item for inner, item in _flatten(value).items()}
        else:
            flat[name] = value
    return flat


def digest_model(model: ModelConfig) -> str:
    """The digest of a model's content, from its manifest if the model is a checkpoint of this project; otherwise from
    its files.
    """
    path = Path(model.path)
    if (path / MANIFEST).is_file():
        return load_manifest(path).digest
    return digest_path(model.path if path.exists() else f"{model.path}@{model.revision}")


def digest_datasets(datasets: Sequence[BaseModel]) -> str:
    """One digest of several datasets, over the content and the share of each dataset."""
    return hashlib.sha256(json.dumps([affecting_settings(each) for each in datasets]).encode()).hexdigest()


def digest_checkpoint(path: str) -> str:
    """The digest of a checkpoint including the trainer's state; "" if `path` is empty.

    Raises:
        CheckpointError: there is no checkpoint at the path.
    """
    return load_manifest(find_checkpoint(Path(path))).content_digest if path else ""


def digest_plugins(*names: FunctionName) -> str:
    """One digest over the code of the user's functions: the packages in `package.module:function` names, and the user's
    packages that are imported by them.

    Names without a colon are built in. If all names are built in, the digest is "".

    Raises:
        ConfigError: a package cannot be found.
    """
    digests, packages = [], []
    for name in names:
        module, colon, _ = name_of_function(name).partition(":")
        if not colon:
            continue
        package = module.partition(".")[0]
        code = find_code(package)
        if code is None:
            raise ConfigError(f"{name}: the package {package!r} cannot be found{IS_MISSING}")
        packages.append(package)
        digests.append(_digest_code(code))
    digests += [_digest_code(code) for code in own_code(packages) if code.name not in packages]
    return hashlib.sha256("".join(digests).encode()).hexdigest() if digests else ""


def _digest_code(code: OwnCode) -> str:
    """The digest of the importable files of a package, folder or file. Hidden files, such as files of editors, do not
    count.

    For an installed package, the digest includes the file with the package's entry points.
    """
    digest = _digest_files(code)
    points = [digest_path(path) for path in code.about.values() if path.name == ENTRY_POINTS]
    return hashlib.sha256("".join([digest, *points]).encode()).hexdigest() if points else digest


def _digest_files(code: OwnCode) -> str:
    if code.file:
        return digest_path(code.file)
    if code.package:
        return digest_files({Path(name).relative_to(code.name): path for name, path in code.files.items()})
    files = "".join(f"{name}\0{digest_path(path)}\n" for name, path in sorted(code.files.items()))
    return hashlib.sha256(files.encode(errors="surrogateescape")).hexdigest()
