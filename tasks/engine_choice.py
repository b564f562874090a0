"""Choose an inference engine for `rollout.engine.kind = "auto"`, by the GPUs of the node and by the model.

    no GPU, or GPU memory in use by other programs ── the embedded engine, which computes on the CPU
    a free GPU ── SGLang if it supports the model, otherwise the embedded engine

The choice is stored, so that later attempts of the run use the same engine. The chosen kind enters job.json and the
fingerprint. The file that stores the choice also stores the planned GPUs. Not here: installing the engine
(engine_installs.py), planning the GPUs (gpu_placement.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts.infra.engine_environment import install_engine
from rollouts.infra.engines import CHECK_TIMEOUT_S
from rollouts.infra.gpu_state import GpuState, read_gpus
from rollouts.infra.node import FurtherNode, Node, NodeSettings
from rollouts.infra.session import Session
from rollouts.tasks.engine_installs import plan_engine_of
from rollouts.tasks.store_paths import ENGINES
from rollouts_core.checks.placement_plan import is_placement_open, with_placement
from rollouts_core.checks.resource_needs import engine_weight_bytes
from rollouts_core.config import Config, EngineConfig
from rollouts_core.engine_kinds.auto import CHOSEN_ON_NODE, FOR_GPUS, WITHOUT_GPUS
from rollouts_core.model.model_size import ModelSize
from rollouts_core.system.files import write_json

DIGEST_CHARS = 16
DEFAULTS_OF_OWN = ("python", "dtype", "extra_args", "requirements", "package_index", "wheels", "context_length")
"""Settings that only installed engines have. Choosing the embedded engine resets these settings to their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """The inference engine that `rollout.engine.kind = "auto"` chose."""

    kind: str
    reason: str
    """The end of a message "..., because <reason>"."""

    def __str__(self) -> str:
        return f"rollout.engine: auto chooses {self.kind}, because {self.reason}"

    def describe(self, engine: EngineConfig) -> str:
        """Text about the choice, which names the user's settings that the chosen engine does not use.

        Args:
            engine: the settings before the choice.
        """
        default = EngineConfig()
        unused = [name for name in DEFAULTS_OF_OWN if getattr(engine, name) != getattr(default, name)]
        return f"{self}; it does not use {' and '.join(unused)}" if unused and self.kind == WITHOUT_GPUS else f"{self}"


def is_open(config: Config) -> bool:
    """True if the run samples completions with `rollout.engine.kind = "auto"`, and no engine is chosen yet."""
    evaluation = config.evaluation
    samples = config.samples_for_training or (evaluation.metric == "accuracy" and evaluation.engine == "rollout")
    return samples and config.rollout.engine.kind == CHOSEN_ON_NODE


def with_kind(config: Config, kind: str) -> Config:
    """The configuration with the chosen kind of engine. Settings that this kind does not have get their defaults."""
    engine = config.rollout.engine.model_copy(update={"kind": kind})
    if engine.spec.is_own:
        own = EngineConfig()
        engine = engine.model_copy(update={name: getattr(own, name) for name in DEFAULTS_OF_OWN})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})


def choose_by_gpus(gpus: Sequence[GpuState], ranks: Sequence[int], needed_gb: float) -> EngineChoice:
    """Choose the engine for a node with these GPUs.

    Args:
        ranks: the GPUs of the engines; empty means the first GPU.
        needed_gb: memory in GB that the model's weights take on each GPU of an engine.
    """
    if not gpus:
        return EngineChoice(kind=WITHOUT_GPUS, reason="the node has no GPU")
    for rank in [each for each in (ranks or (0,)) if each < len(gpus)]:
        gpu = gpus[rank]
        if gpu.programs and gpu.free_gb < needed_gb:
            return EngineChoice(
                kind=WITHOUT_GPUS,
                reason=f"GPU {rank}, {gpu.name}, is used by {' and '.join(map(str, gpu.programs))} and has "
                f"{gpu.free_gb:.1f} GB free of the {needed_gb:.1f} GB that an engine needs",
            )
    return EngineChoice(kind=FOR_GPUS, reason=f"the node has {len(gpus)} x {gpus[0].name}")


def choose_by_model(
    choice: EngineChoice, architectures: Sequence[str], known: AbstractSet[str], *, title: str
) -> EngineChoice:
    """Return `choice` if the chosen engine supports the model, otherwise the embedded engine.

    Args:
        architectures: the architectures in the model's config.json.
        known: the architectures that the chosen engine supports; empty if the engine cannot list them.
    """
    if not known or not architectures or not known.isdisjoint(architectures):
        return choice
    return EngineChoice(kind=WITHOUT_GPUS, reason=f"{title} does not know the model's {' or '.join(architectures)}")


def choose_engine(
    session: Session,
    node: Node,
    settings: NodeSettings | FurtherNode,
    config: Config,
    size: ModelSize,
    *,
    installs: bool = True,
) -> EngineChoice:
    """Choose the inference engine for a node, by its GPUs and by the model's architecture.

    Args:
        installs: whether to install a missing engine if the model's architecture is rare. Only an installed engine can
            list the architectures that it supports. Preflight passes False.

    Raises:
        PermanentInfraError: the engine for GPUs is not installed and cannot be installed.
    """
    gpus = read_gpus(session)
    chosen = with_kind(config, FOR_GPUS)
    ranks = {"engine_gpu_ranks": config.deployment.engine_gpu_ranks or (0,)}
    placed = chosen.model_copy(update={"deployment": config.deployment.model_copy(update=ranks)})
    needed_gb = engine_weight_bytes(placed, size) / 1e9
    choice = choose_by_gpus(gpus, config.deployment.engine_gpu_ranks, needed_gb)
    if choice.kind == WITHOUT_GPUS:
        return choice
    engine = chosen.rollout.engine
    architectures = [str(each) for each in size.settings.get("architectures") or ()]
    is_rare = not set(architectures) <= set(engine.spec.adapted_architectures)
    plan = plan_engine_of(session, node, settings, engine, gpus)
    python = plan.python
    if plan.wanted is not None and (plan.is_there or (installs and is_rare)):
        python = install_engine(session, node, plan.wanted)
    known = known_architectures(session, engine, python) if python else frozenset[str]()
    return choose_by_model(choice, architectures, known, title=engine.spec.title)


def known_architectures(session: Session, engine: EngineConfig, python: str) -> frozenset[str]:
    """The model architectures that an installed engine supports. Empty if the engine cannot list its architectures."""
    program = [python, "-c", engine.spec.list_architectures]
    listed = session.run(program, timeout_s=CHECK_TIMEOUT_S, check=False, may_repeat=True)
    return frozenset(listed.stdout.decode(errors="replace").split()) if listed.exit_code == 0 else frozenset()


def choice_file(store: Path, config: Config, settings: NodeSettings) -> Path:
    """The file that stores the chosen engine and the planned GPUs, for all attempts with these settings."""
    place = settings.model_dump(mode="json", exclude={"query"})  # excluded, because a run changes the query
    content = json.dumps([config.model_dump(mode="json"), place], sort_keys=True)
    return store / ENGINES / f"auto-{hashlib.sha256(content.encode()).hexdigest()[:DIGEST_CHARS]}.json"


def keep_choice(file: Path, choice: EngineChoice | None, placement: str = "") -> None:
    """Save the chosen engine and the planned GPUs for later attempts of the run.

    Args:
        choice: None if the settings name the engine.
        placement: the planned GPUs, as JSON (`Node.placement`); empty without a plan.
    """
    kept: dict[str, Any] = {} if choice is None else {"kind": choice.kind, "reason": choice.reason}  # Any: JSON
    if placement:
        kept["placement"] = json.loads(placement)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, kept)


def with_kept_choice(config: Config, settings: NodeSettings, store: Path) -> Config:
    """The configuration with the engine and the GPUs that an earlier attempt of the run chose, if any."""
    if not is_open(config) and not is_placement_open(config):
        return config
    try:
        kept = json.loads(choice_file(store, config, settings).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return config
    chosen = with_kind(config, str(kept["kind"])) if "kind" in kept and is_open(config) else config
    return with_placement(chosen, kept.get("placement", {}))


def with_choice_of(config: Config, node: Node) -> Config:
    """The configuration with the engine and the GPUs that `bootstrap` chose on the node, if it chose any."""
    if config.rollout.engine.kind == CHOSEN_ON_NODE and not is_open(config):
        return with_kind(config, WITHOUT_GPUS)  # nothing uses the engine
    chosen = with_kind(config, node.engine_kind) if is_open(config) and node.engine_kind else config
    return with_placement(chosen, json.loads(node.placement)) if node.placement else chosen
