"""The form of a pipeline run: the core's settings, the node's, and the run's own, and how a file becomes them.

Not here: what the settings mean (rollouts_core/config.py, infra/node.py).

A file is the core's `Config` at its top level, with two tables more:

    mode = "sft+rl"        [model] [data] [training.sft] [rollout] ...     -> Config
    [node] provider = "local"                                             -> NodeSettings
    [run]  name = "quickstart"                                            -> RunOptions
"""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from infra.node import LocalNode, NodeSettings
from rollouts_core.config import Config, Record, parse_config, read_settings, resolve_paths
from rollouts_core.errors import ConfigError
from rollouts_core.messages import closest_name

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class RunOptions(Record):
    """What is said about the run itself."""

    name: str = Field("pipeline", pattern=NAME_PATTERN)
    """What the run is called in the UI, in the store and in the report."""
    store: str = ".rollouts"
    """Folder that keeps everything: stages, runs, Prefect's database. Relative to where the command is given."""
    fresh: tuple[str, ...] = ()
    """Stages that are done anew although an earlier run finished the same: sft, select-sft, rl, select-rl, evaluate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Everything that a run of the pipeline is asked to do."""

    config: Config
    node: NodeSettings
    run: RunOptions


def load_pipeline(path: Path) -> Pipeline:
    """The pipeline that a TOML, JSON or Python file describes; a Python file defines `config`.

    Raises:
        ConfigError: one sentence with the file, the key and what to do.
    """
    settings = _run_python_file(path) if path.suffix == ".py" else read_settings(path)
    if isinstance(settings, Pipeline):
        return settings
    if isinstance(settings, Config):
        return Pipeline(config=settings, node=LocalNode(), run=RunOptions(name=path.stem))
    return parse_pipeline(settings, path)


def parse_pipeline(settings: dict[str, Any], path: Path) -> Pipeline:  # Any: unchecked file content
    """The pipeline of a file's content; data paths are relative to the file's folder."""
    sections = dict(settings)
    node, run = sections.pop("node", {}), sections.pop("run", {})
    known = [*Config.model_fields, "node", "run"]
    for key in sections:
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key}{closest_name(key, known)}")
    for section, name, model in ((node, "node", LocalNode), (run, "run", RunOptions)):
        for key in section if isinstance(section, dict) else ():
            if key not in model.model_fields:
                raise ConfigError(f"{path}: unknown key {name}.{key}{closest_name(key, list(model.model_fields))}")
    return Pipeline(
        config=parse_config(Config, resolve_paths(sections, path.parent), source=str(path)),
        node=parse_config(LocalNode, node, source=f"{path}, table node"),
        run=parse_config(RunOptions, {"name": path.stem, **run}, source=f"{path}, table run"),
    )


def _run_python_file(path: Path) -> Any:  # Any: whatever the user's file calls config
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: give the path of a configuration")
    try:
        names = runpy.run_path(str(path))
    except Exception as error:
        raise ConfigError(f"{path} raised {type(error).__name__}: {error}") from error
    if not isinstance(names.get("config"), Pipeline | Config | dict):
        raise ConfigError(f"{path} must define `config`, a Config, a Pipeline or a dict of settings")
    return names["config"]
