"""Read a configuration file, or the values of Prefect's form, into the settings of a pipeline run.

Not here: the definitions of most settings (rollouts_core/config/, infra/node.py).

The top level of a file holds the settings of `Config`. Five further tables have their own records:

    mode = "sft+rl"        [model] [data] [training.sft] [rollout] ...     -> Config
    [node] kind = "local" | "ssh" | "instance" | "rented"             -> NodeSettings
    [run]  name = "quickstart"                                            -> RunOptions
    [retrain], [schedule]: for `rollouts up`, not for a single run        -> RetrainConfig, ScheduleConfig
    [evaluate] model = "production"                                       -> EvaluateConfig, for `rollouts evaluate`
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from rollouts.flows.assignments import ALGORITHM, COMMAND_LINE, assign, forget_algorithm, key_of
from rollouts.flows.evaluate_settings import EvaluateConfig
from rollouts.flows.retrain_settings import LINE_PATTERN, RetrainConfig, ScheduleConfig, check_retraining
from rollouts.flows.store import with_store
from rollouts.infra.clouds import cloud_names, reached_through
from rollouts.infra.node import NODE_TYPES, LocalNode, NodeSettings
from rollouts.infra.offers import GPUQuery
from rollouts.infra.stores.object_store import check_url
from rollouts.tasks.trackers import TrackerName
from rollouts_core.config import (
    Config,
    DataConfig,
    ModelConfig,
    Record,
    name_of_function,
    read_settings,
    resolve_paths,
)
from rollouts_core.config.files import leave_out_meant, read_record
from rollouts_core.config.messages import closest_choice, closest_name, dotted, reason_of, suggest_key
from rollouts_core.errors import ConfigError, InputError
from rollouts_core.mistakes import Mistakes
from rollouts_core.stages import STAGE_NAMES
from rollouts_core.user_code.code_folders import add_code_folders
from rollouts_core.user_code.failures import describe_raised
from rollouts_core.user_code.functions import resolve_function

RecordT = TypeVar("RecordT", bound=BaseModel)
OWN_TABLES = ("node", "run", "retrain", "schedule", "evaluate")
"""Tables of a file that are not part of `Config`."""
NODE_FILES = ("key_file", "known_hosts", "requirements", "ssh_config")
"""Settings of nodes whose values are paths of files on this machine."""
FORMER_KEY, FORMER_KINDS = "provider", {"provision": "rented"}
"""The former name of the setting `node.kind`, and its former values, each with the current value."""
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
CREDENTIALS_PATTERN = r"^([a-z0-9][a-z0-9-]{0,63})?$"
"""Matches names that Prefect accepts for blocks, and the empty text, which means no credentials."""
if TYPE_CHECKING:
    StageName = str
else:
    StageName = Literal[STAGE_NAMES]


def with_present_kind(node: dict[str, Any]) -> dict[str, Any]:  # Any: unchecked input
    """The settings of a node with the current name and value of `kind`, even if an earlier version wrote them."""
    if FORMER_KEY not in node or "kind" in node:
        return node
    former = node[FORMER_KEY]
    others = {key: value for key, value in node.items() if key != FORMER_KEY}
    return {"kind": FORMER_KINDS.get(former, former), **others}


def without_stale(settings: Any) -> Any:  # Any: unchecked input
    """Remove values of a node's form that belong to the tab of another kind of node.

    Several kinds have fields with the same name, and Prefect's form posts the fields of all tabs that were open. A
    value is removed if it equals another kind's default, and either is empty or comes with fields that only the other
    kind has.
    """
    if not isinstance(settings, dict):
        return settings
    settings = {"kind": "local", **with_present_kind(settings)}  # an HTTP request may omit `kind`
    if settings["kind"] not in NODE_TYPES:
        return settings
    own = NODE_TYPES[settings["kind"]].model_fields
    stale: set[str] = set()
    for node_type in NODE_TYPES.values():
        other = node_type.model_fields
        was_open = not settings.keys().isdisjoint(other.keys() - own.keys())
        stale |= {
            key
            for key in settings.keys() & other.keys() & own.keys() - {"kind"}
            if settings[key] == other[key].default != own[key].default and (was_open or settings[key] == "")
        }
    return {key: value for key, value in settings.items() if key not in stale and key in own}


def node_in_sentences(settings: Any, validate: ValidatorFunctionWrapHandler) -> Any:  # Any: unchecked input
    """Validate a node that Prefect's form posted. Keys of all kinds are accepted, because the form has a tab per kind.

    Raises:
        ValueError: a sentence per mistake.
    """
    if not isinstance(settings, dict | BaseModel):
        raise ValueError(f"the form: node: expected a table of settings, found {settings!r}")
    known = {FORMER_KEY, *(key for node_type in NODE_TYPES.values() for key in node_type.model_fields)}
    unknown = {key: settings[key] for key in settings if key not in known} if isinstance(settings, dict) else {}
    try:
        if not unknown:
            return validate(settings)
    except ValidationError:
        if isinstance(settings, BaseModel):
            raise
    mistakes = Mistakes()
    mistakes.order_by({"node": settings})
    _read_node({**without_stale(settings), **unknown}, Path("the form"), mistakes)
    raise ValueError(_said(mistakes, of_other_version=bool(unknown)))


def in_sentences(
    record: type[BaseModel],
    table: str,
    settings: Any,  # Any: unchecked input
    validate: ValidatorFunctionWrapHandler,
) -> Any:  # Any: the record
    """Validate settings from Prefect's form as a record.

    Raises:
        ValueError: a sentence per mistake, with the same words as for a file.
    """
    try:
        return validate(settings)
    except ValidationError as error:
        of_other_version = any(each["type"] in ("extra_forbidden", "missing") for each in error.errors())
        mistakes = Mistakes()
        mistakes.order_by({table: settings} if table else settings)
        read_record(record, settings, mistakes, source="the form", table=table)
        raise ValueError(_said(mistakes, of_other_version=of_other_version)) from error


def check_names(given: Collection[str], known: Mapping[str, bool]) -> None:
    """Raise ConfigError if parameters of a run do not fit its flow, with a sentence per mistake.

    Args:
        given: the names of the run's parameters.
        known: the names of the flow's parameters, each with whether it is required.
    """
    mistakes = Mistakes(ConfigError)
    said = [f"unknown key {name}{closest_name(name, list(known))}" for name in given if name not in known]
    said += [f"{name} is missing" for name, is_required in known.items() if is_required and name not in given]
    for each in said:
        mistakes.note("", ConfigError(f"the form: {each}"))
    if mistakes:
        raise ConfigError(_said(mistakes, of_other_version=True))


def _said(mistakes: Mistakes, *, of_other_version: bool) -> str:
    said = mistakes.describe()
    return said + (("\n" if "\n" in said else " ") + f"({OTHER_VERSION})") * of_other_version


OTHER_VERSION = (
    "if another version made the deployment, make it again: rollouts down and rollouts up CONFIG, or on a shared "
    "server rollouts prefect-yaml and prefect deploy --all"
)

HeldNode = Annotated[NodeSettings, BeforeValidator(without_stale)]
"""The node settings of an existing run, which an earlier version may have written."""
FormNode = Annotated[HeldNode, WrapValidator(node_in_sentences)]
"""A node's settings from Prefect's form. The form, unlike a file, may also send values of other kinds of node."""
FormConfig = Annotated[Config, WrapValidator(partial(in_sentences, Config, ""))]


class RunOptions(Record):
    """Settings of the run as a whole: name, store, restarts, publication."""

    name: str = Field("pipeline", pattern=NAME_PATTERN)
    """The run's name in the UI, in the store and in the report."""
    store: str = ".rollouts"
    """Folder for stages, runs, checkpoints and Prefect's database. A relative path starts in the current folder of the
    command."""
    fresh: tuple[StageName, ...] = ()
    """Stages to run again, even if an earlier run finished the same stage."""
    report_to: tuple[TrackerName, ...] = ()
    """Also send the metrics of SFT and RL to TensorBoard, Trackio or Weights & Biases (`wandb`), during training."""
    restarts: int = Field(2, ge=0, le=10)
    """Number of automatic restarts of a run whose process was killed (by kill -9, or because its machine died). Needs
    `rollouts up` or `rollouts watch`."""
    stop_timeout_s: float = Field(600.0, gt=0)
    """Maximum seconds for a training to save its last step after the run was cancelled, interrupted or ran out of
    money. A training gets 1.5 times its longest recent step and save, at least 30 s. On a rented machine it gets at
    most half of the machine's remaining time."""
    publish: str = ""
    """URL in an object store, for example s3://bucket/folder. The final checkpoint and the report are uploaded to a
    folder with the run's name there. Empty: nothing is uploaded."""

    publish_checkpoints: bool = False
    """Also upload checkpoints during training, with everything that a resume needs. Uploaded checkpoints are never
    removed."""
    credentials: str = Field("", pattern=CREDENTIALS_PATTERN)
    """Name of saved credentials (`rollouts credentials`) with API keys for providers, machines and object stores.
    Empty: the environment variables of the process that starts the run."""
    register_as: str = Field("", pattern=LINE_PATTERN)
    """Name under which the final checkpoint is registered as a candidate, for `rollouts models promote`. Empty: the
    checkpoint is not registered."""

    _find_store = model_validator(mode="before")(with_store)

    @field_validator("publish")
    @classmethod
    def _check_publish(cls, value: str) -> str:
        return check_url(value) if value else value

    def _broken_rules(self) -> Iterator[str]:
        if self.publish_checkpoints and not self.publish:
            yield "publish_checkpoints needs publish, the URL to upload the checkpoints to"


FormRun = Annotated[RunOptions, WrapValidator(partial(in_sentences, RunOptions, "run"))]
FormRetrain = Annotated[RetrainConfig, WrapValidator(partial(in_sentences, RetrainConfig, "retrain"))]
FormEvaluate = Annotated[EvaluateConfig, WrapValidator(partial(in_sentences, EvaluateConfig, "evaluate"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The settings of a pipeline, from a file, a preset or a deployment."""

    config: Config
    node: NodeSettings
    run: RunOptions
    retrain: RetrainConfig | None = None
    """The watched data and the rules for a promotion (None for a pipeline without [retrain])."""
    schedule: ScheduleConfig | None = None
    evaluate: EvaluateConfig | None = None
    """The models to score (None for a pipeline without [evaluate])."""
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)  # Any: unchecked file content
    """The file's content. Messages list mistakes in the order of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The sections of a configuration file as pydantic records. A section with mistakes is None."""

    config: Config | None
    node: NodeSettings | None
    run: RunOptions | None
    retrain: RetrainConfig | None = None
    schedule: ScheduleConfig | None = None
    evaluate: EvaluateConfig | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # Any: unchecked file content

    def whole(self) -> Pipeline:
        """The pipeline. Call this only if the file has no mistakes."""
        assert self.config is not None and self.node is not None and self.run is not None, "mistakes were raised"
        return Pipeline(**{each.name: getattr(self, each.name) for each in fields(self)})


def load_pipeline(path: Path, assignments: Sequence[str] = ()) -> Pipeline:
    """The pipeline that a TOML, JSON or Python file describes. A Python file must define `config`.

    Args:
        assignments: `key=value` each; they replace settings of the file. The last assignment to a key counts.

    Raises:
        ConfigError: the file has mistakes. The error has a line per mistake, with the file, the key and the remedy.
    """
    mistakes = Mistakes(ConfigError, InputError)
    draft = read_draft(path, mistakes, assignments)
    mistakes.check()
    return draft.whole()


def read_draft(path: Path, mistakes: Mistakes, assignments: Sequence[str] = ()) -> Draft:
    """Read a TOML, JSON or Python file, replace settings by the assignments, and collect invalid settings in
    `mistakes`.

    Raises:
        ConfigError: the file cannot be read, or an assignment does not have the form `key=value`.
    """
    add_code_folders([path.parent, Path.cwd()])
    if path.suffix != ".py":
        return _read_tables(read_settings(path), path, mistakes, assignments)
    settings = _run_python_file(path)
    if assignments and not isinstance(settings, dict):
        settings = _tables_of(settings)
        if ALGORITHM in map(key_of, assignments):
            forget_algorithm(settings)
    if isinstance(settings, dict):
        draft = _read_tables(settings, path, mistakes, assignments)
    elif isinstance(settings, Config):
        draft = Draft(config=_beside(settings, path.parent), node=LocalNode(), run=RunOptions(name=name_of(path)))
    else:
        retrain = settings.retrain and settings.retrain.beside(path.parent)
        evaluate = settings.evaluate and settings.evaluate.beside(path.parent)
        draft = Draft(
            config=_beside(settings.config, path.parent),
            node=_node_beside(settings.node, path.parent),
            run=settings.run,
            retrain=retrain,
            schedule=settings.schedule,
            evaluate=evaluate,
            settings=settings.settings,
        )
        _check_retraining(draft, path, mistakes)
    if draft.config is not None:
        _check_importable(draft.config, path, mistakes)
    return draft


def parse_pipeline(
    settings: dict[str, Any],  # Any: unchecked file content
    path: Path,
    assignments: Sequence[str] = (),
) -> Pipeline:
    """The pipeline that a file's content describes. Relative paths start in the folder of `path`.

    Args:
        assignments: `key=value` each; they replace settings of the file.

    Raises:
        ConfigError: the settings have mistakes. The error has a line per mistake, with file, key and remedy.
    """
    mistakes = Mistakes(ConfigError, InputError)
    draft = _read_tables(settings, path, mistakes, assignments)
    mistakes.check()
    return draft.whole()


def _tables_of(given: Config | Pipeline) -> dict[str, Any]:  # Any: values of settings
    """Convert the records of a Python file to tables, as in a TOML file. Functions and objects are not converted."""

    def table(record: BaseModel) -> dict[str, Any]:  # Any: values of settings
        values = {name: getattr(record, name) for name in type(record).model_fields if name in record.model_fields_set}
        return {name: table(value) if isinstance(value, BaseModel) else value for name, value in values.items()}

    if isinstance(given, Config):
        return table(given)
    others = {name: record for name in OWN_TABLES if (record := getattr(given, name)) is not None}
    return {**table(given.config), **{name: table(record) for name, record in others.items()}}


def _resolve_tables(tables: dict[str, Any]) -> dict[str, Any]:  # Any: unchecked input
    """Make paths in settings of the command line absolute. Relative paths start in the current folder."""
    here = Path.cwd()

    def absolute(value: Any) -> Any:  # Any: unchecked input
        is_path = isinstance(value, str) and value and "://" not in value
        return str((here / value).resolve()) if is_path else value

    resolved = resolve_paths(tables, here)
    if isinstance(node := tables.get("node"), dict):
        resolved["node"] = resolve_node_paths(node, here)
    if isinstance(scored := tables.get("evaluate"), dict):
        relative = {key for key, value in scored.items() if key == "data" or str(value).startswith(".")}
        resolved["evaluate"] = {key: absolute(value) if key in relative else value for key, value in scored.items()}
    if isinstance(again := tables.get("retrain"), dict) and isinstance(again.get("sources"), list):
        resolved["retrain"] = {**again, "sources": [absolute(each) for each in again["sources"]]}
    return resolved


def _read_tables(
    given: dict[str, Any],  # Any: unchecked file content
    path: Path,
    mistakes: Mistakes,
    assignments: Sequence[str] = (),
) -> Draft:
    """Replace settings in a file's content by the assignments, and read the tables."""
    settings = _copied(given) if assignments else given
    for assignment in assignments:
        assign(settings, assignment, resolve=_resolve_tables)
    draft = _read_settings(settings, path, mistakes)
    added = [name for key in map(key_of, assignments) for name in _added(given, key.split("."))]
    mistakes.rename_source(added, str(path), COMMAND_LINE)
    return draft


def _added(given: dict[str, Any], path: Sequence[str]) -> Iterator[str]:  # Any: unchecked file content
    """The dotted names of the setting at this path, and of the tables around it that the file does not have."""
    section: object = given
    for depth, name in enumerate(path, start=1):
        section = section.get(name) if isinstance(section, dict) else None
        if section is None or depth == len(path):
            yield ".".join(path[:depth])


def _copied(tables: dict[str, Any]) -> dict[str, Any]:  # Any: unchecked file content
    """Copy the tables, but not their values, which may be objects of a Python file."""
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in tables.items()}


def _read_settings(settings: dict[str, Any], path: Path, mistakes: Mistakes) -> Draft:  # Any: unchecked file content
    sections = dict(settings)
    mistakes.order_by(settings)
    given = {name: sections.pop(name) for name in OWN_TABLES if name in sections}
    known = [*Config.model_fields, *OWN_TABLES]
    for key in [key for key in sections if key not in known]:
        hint = suggest_key([str(key)], known, Config, others=_settings_beside())
        mistakes.note(str(key), ConfigError(f"{path}: unknown key {key}{hint}"), names_place=True)
        leave_out_meant(mistakes, [str(key)], hint)
        del sections[key]
    for name, section in list(given.items()):
        if not isinstance(section, dict) and (section is not None or name in ("node", "run")):
            error = ConfigError(f"{path}: {name}: expected a table of settings, found {section!r}")
            mistakes.note(name, error, names_place=True)
            del given[name]

    def read(name: str, model: type[RecordT], table: dict[str, Any]) -> RecordT | None:  # Any: unchecked file content
        return read_record(model, table, mistakes, source=str(path), table=name)

    options = _known_keys("run", given.get("run", {}), RunOptions, path, mistakes)
    evaluate, retrain, schedule = (given.get(name) for name in ("evaluate", "retrain", "schedule"))
    scored = None if evaluate is None else read("evaluate", EvaluateConfig, evaluate)
    again = None if retrain is None else read("retrain", RetrainConfig, retrain)
    draft = Draft(
        config=_read_config(sections, path, mistakes),
        node=_read_node(given.get("node", {}), path, mistakes),
        run=read("run", RunOptions, {"name": name_of(path), **options}),
        retrain=again and again.beside(path.parent),
        schedule=None if schedule is None else read("schedule", ScheduleConfig, schedule),
        evaluate=scored and scored.beside(path.parent),
        settings=settings,
    )
    if not mistakes:
        _check_retraining(draft, path, mistakes)
    return draft


def _check_retraining(draft: Draft, path: Path, mistakes: Mistakes) -> None:
    """Collect contradictions between [schedule], [retrain] and the data, as mistakes of the table `schedule`."""
    if draft.config is not None:
        with mistakes.at("schedule"):
            check_retraining(draft.config, draft.retrain, draft.schedule, source=str(path))


def _read_config(settings: dict[str, Any], path: Path, mistakes: Mistakes) -> Config | None:  # Any: unchecked
    resolved: dict[str, Any] | None = None  # Any: unchecked file content
    with mistakes.at(""):
        resolved = resolve_paths(settings, path.parent)
    return None if resolved is None else read_record(Config, resolved, mistakes, source=str(path))


def _read_node(settings: dict[str, Any], path: Path, mistakes: Mistakes) -> NodeSettings | None:  # Any: unchecked
    if FORMER_KEY in settings:
        former = settings[FORMER_KEY]
        now = FORMER_KINDS.get(former, former) if isinstance(former, str) else "local"
        error = ConfigError(f'{path}: node.{FORMER_KEY} is now node.kind: write kind = "{now}"')
        mistakes.note(f"node.{FORMER_KEY}", error, names_place=True)
        settings = {"kind": now} | {key: value for key, value in settings.items() if key != FORMER_KEY}
    kind = settings.get("kind", "local")
    if not isinstance(kind, str) or kind not in NODE_TYPES:
        error = ConfigError(f"{path}: node.kind is {kind!r}: {_expected_kind(kind)}")
        mistakes.note("node.kind", error, names_place=True)
        return None
    node_type = NODE_TYPES[kind]
    known = _known_keys("node", settings, node_type, path, mistakes, hint=partial(_suggest_node_key, kind=kind))
    resolved = resolve_node_paths(known, path.parent)
    node: NodeSettings | None = read_record(node_type, resolved, mistakes, source=str(path), table="node")
    return node


def _known_keys(
    table: str,
    settings: dict[str, Any],  # Any: unchecked file content
    model: type[BaseModel],
    path: Path,
    mistakes: Mistakes,
    *,
    hint: Callable[[str], str] = lambda _: "",
) -> dict[str, Any]:  # Any: unchecked file content
    """The settings of a table that the table's record has. Unknown keys become mistakes with a suggestion.

    Args:
        hint: returns the suggestion for a key; if it is empty, the closest known key is suggested.
    """
    for key in [key for key in settings if key not in model.model_fields]:
        said = hint(str(key)) or suggest_key([table, str(key)], list(model.model_fields), Config)
        mistakes.note(f"{table}.{key}", ConfigError(f"{path}: unknown key {table}.{key}{said}"), names_place=True)
        leave_out_meant(mistakes, [table, str(key)], said)
    return {key: value for key, value in settings.items() if key in model.model_fields}


def _settings_beside() -> list[str]:
    """The dotted names of the settings in tables that are not part of `Config`."""
    records: list[tuple[str, type[BaseModel]]] = [("run", RunOptions), ("retrain", RetrainConfig)]
    records += [("schedule", ScheduleConfig), *(("node", each) for each in NODE_TYPES.values())]
    return list(dict.fromkeys(f"{table}.{name}" for table, record in records for name in record.model_fields))


def _suggest_node_key(key: str, *, kind: str) -> str:
    """A hint if an unknown key of [node] is a setting of `node.query` or of another node kind (otherwise empty)."""
    others = [name for name, node_type in NODE_TYPES.items() if key in node_type.model_fields]
    is_of_query = not others and key in GPUQuery.model_fields
    if is_of_query and kind == "rented":
        return f"; did you mean node.query.{key}?"
    wanted = " or ".join(f'"{name}"' for name in (["rented"] if is_of_query else others))
    setting = f"node.query.{key}" if is_of_query else "that"
    return f'; {setting} is a setting of node.kind = {wanted}, this one is "{kind}"' if wanted else ""


def _expected_kind(given: object) -> str:
    """The end of the error about an unknown `node.kind`: the valid kinds, and a hint if the value is a provider."""
    expected = f"expected one of {', '.join(NODE_TYPES)}{closest_choice(given, list(NODE_TYPES))}"
    cloud = given if given in cloud_names() else reached_through(given)
    if not cloud:
        return expected
    return (
        f'{expected}; to let the run rent a machine there, set node.kind = "rented" and node.query.providers = '
        f'["{cloud}"]; for a machine that you rented, set node.kind = "instance"'
    )


def resolve_node_paths(node: dict[str, Any], base: Path) -> dict[str, Any]:  # Any: unchecked file content
    """Make the paths of local files in a node's settings absolute, also in the settings of its further machines.

    Relative paths start in `base`.
    """
    resolved = dict(node)
    for key, value in node.items():
        if key in NODE_FILES and isinstance(value, str) and value and not value.startswith("~"):
            resolved[key] = str((base / value).resolve())
        if key in ("trainer_nodes", "engine_nodes") and isinstance(value, list | tuple):
            resolved[key] = [resolve_node_paths(each, base) if isinstance(each, dict) else each for each in value]
    return resolved


def _run_python_file(path: Path) -> Any:  # Any: the value of `config` in the user's file
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: give the path of a configuration")
    try:
        names = runpy.run_path(str(path))
    except ValidationError as error:
        raise ConfigError("\n".join(_tell_misfits(error, path))) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path} {describe_raised(error)}{_name_moved(error)}") from error
    if not isinstance(names.get("config"), Pipeline | Config | dict):
        raise ConfigError(f"{path} must define `config`, a Config, a Pipeline or a dict of settings")
    return names["config"]


def _tell_misfits(error: ValidationError, path: Path) -> Iterator[str]:
    """A sentence for each mistake in a record that a Python configuration created."""
    for problem in error.errors():
        place = dotted([error.title, *map(str, problem["loc"])])
        yield from (f"{path}: {place}: {line}" for line in reason_of(problem).splitlines())


def _name_moved(error: BaseException) -> str:
    """A hint with the new name of a module, if a configuration imports its former name, such as `infra.node`
    (otherwise empty)."""
    name = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    return f": import from rollouts.{name} instead" if name.partition(".")[0] in ("flows", "tasks", "infra") else ""


def name_of(path: Path) -> str:
    """The default name of a run: the name of its file, with dashes for characters that a run's name cannot have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("._-")[:64] or "pipeline"


def _beside(config: Config, folder: Path) -> Config:
    """The configuration with absolute paths. Relative paths start in `folder`."""
    training, rewards = config.training, config.rollout.rewards
    given = {
        "model": config.model.model_dump(),
        "data": config.data.model_dump(),
        "training": {name: {"resume_from": stage.resume_from} for name, stage in training},
        "rollout": {"rewards": [each.model_dump(include={"kind", "url", "model"}) for each in rewards]},
    }
    resolved = resolve_paths(given, folder)
    models = [each["model"] for each in resolved["rollout"]["rewards"]]
    graders = tuple(each.model_copy(update={"model": model}) for each, model in zip(rewards, models, strict=True))
    resumed = {name: stage.model_copy(update=resolved["training"][name]) for name, stage in training}
    return config.model_copy(
        update={
            "model": ModelConfig.model_validate(resolved["model"]),
            "data": DataConfig.model_validate(resolved["data"]),
            "training": training.model_copy(update=resumed),
            "rollout": config.rollout.model_copy(update={"rewards": graders}),
        }
    )


def _node_beside(node: NodeSettings, folder: Path) -> NodeSettings:
    """The node's settings with absolute paths of files. Relative paths start in `folder`."""
    return type(node).model_validate(resolve_node_paths(node.model_dump(exclude_unset=True), folder))


def _check_importable(config: Config, path: Path, mistakes: Mistakes) -> None:
    """Add a mistake for each function of the configuration that jobs, which are other processes, cannot import."""
    rollout = config.rollout
    functions = {name: getattr(rollout, name) for name in ("generate_fn", "reward_fn", "filter_fn", "buffer_filter_fn")}
    functions |= {f"rewards.{index}.name": each.name for index, each in enumerate(rollout.rewards)}
    functions |= {f"filters.{index}.name": each.name for index, each in enumerate(rollout.filters)}
    named = {f"rollout.{name}": function for name, function in functions.items()}
    others = {"training.rl.loss_fn": config.training.rl.loss_fn, "data.prepare.name": config.data.prepare.name}
    for setting, function in {**named, **others}.items():
        if isinstance(function, str):
            continue
        called = getattr(function, "__qualname__", f"a {type(function).__qualname__}")
        try:
            if not hasattr(function, "__qualname__"):
                raise ConfigError(f"{function!r} has no name")
            resolve_function(name_of_function(function), {}, setting=setting)
        except ConfigError as error:
            located = ConfigError(
                f"{path}: {setting}: the jobs, which are other processes, cannot import {called}: put it into a "
                'module beside the configuration and name it "module:function"'
            )
            located.__cause__ = error
            mistakes.note(setting, located, names_place=True)
