"""Check the store, the files, the ports, the machine and the settings before a run begins.

Not here: the checks of models and data (checks/validate.py), the checks during bootstrap (tasks/bootstrap.py).
This module must not import prefect, because it runs before Prefect's environment variables are set.
"""

from __future__ import annotations

import fcntl
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import httpx

from rollouts.flows.form import Pipeline, read_draft
from rollouts.flows.own_server.lend import check_path
from rollouts.flows.run_plan import describe_plan
from rollouts.infra.bootstrap import check_disk
from rollouts.infra.errors import PermanentInfraError, TransientInfraError
from rollouts.infra.gpu_state import GpuState, read_gpus
from rollouts.infra.node import (
    FurtherNode,
    InstanceNode,
    LocalNode,
    Node,
    NodeSettings,
    PackageSettings,
    RentedNode,
    settings_of_engines,
    settings_of_trainers,
    without_further_nodes,
)
from rollouts.infra.node_probe import LOCKLESS, NO_LOCKS
from rollouts.infra.offers import GPUQuery, Offer
from rollouts.infra.ports import check_port
from rollouts.infra.providers import open_session, provision_node
from rollouts.infra.providers.instance import find_instance
from rollouts.infra.providers.rented import describe_rentable, find_rentable
from rollouts.infra.session import LOOPBACK, LocalSession, Session
from rollouts.infra.stores.object_store import ObjectStore
from rollouts.infra.stores.publication import check_writable_store
from rollouts.tasks.engine_choice import choose_engine, is_open, with_kept_choice, with_kind
from rollouts.tasks.engine_installs import plan_engine_of, warn_of_busy_gpus
from rollouts.tasks.gpu_placement import has_open_placement, plan_on_gpus, read_usable_gpus
from rollouts.tasks.inputs import bring_inputs, has_inputs_to_bring, named_urls
from rollouts.tasks.installed_engines import check_router, leads_engines, stage_beside_installation
from rollouts.tasks.model_names import find_named_model, with_heldout
from rollouts.tasks.optional_packages import check_packages, check_sent_packages, needed_packages
from rollouts.tasks.plan_node import with_enough_memory
from rollouts.tasks.trackers import check_trackers
from rollouts.tasks.unit_keys import own_unit_key
from rollouts.tasks.watch import check_outside, check_sources, watched_sources
from rollouts_core.checks.needed_part import GIB, sum_bytes
from rollouts_core.checks.placement_plan import with_placement
from rollouts_core.checks.resource_needs import (
    check_kernels_without_gpu,
    checkpoint_disk_bytes,
    engine_warning,
    needed_disk,
    shared_gpu_warning,
    training_needs,
)
from rollouts_core.config import Config, DataConfig, ModelConfig
from rollouts_core.engine_kinds import ENGINES
from rollouts_core.engine_kinds.auto import FOR_GPUS, WITHOUT_GPUS
from rollouts_core.errors import ConfigError, DataError, InputError
from rollouts_core.findings import Caution
from rollouts_core.keys import key_header, read_key
from rollouts_core.mistakes import Mistakes
from rollouts_core.model.model_size import ModelSize, find_model_size
from rollouts_core.stages import kind_of
from rollouts_core.stages.kind import load
from rollouts_core.stages.planning import base_model
from rollouts_core.system.private_files import keep_private

ENGINE_ANSWER_TIMEOUT_S = 2.0
UNUSED_PORT = 1
PROBE_BYTES = 1 << 20
"""Size of the test write to the store. Prefect's database file grows in smaller steps, so it has room if the test
succeeds."""


def load_checkable(path: Path, assignments: Sequence[str] = (), *, reads_rows: bool = False) -> Pipeline:
    """Read a configuration file. If the file has invalid settings, also check the data files in its other settings.

    Args:
        assignments: `key=value` each; they replace settings of the file.
        reads_rows: if settings are invalid, also check models and rows, which loads torch. Without this check, a
            misspelt key is reported within a second.

    Raises:
        InputError: the file has mistakes. The error has a line per mistake.
    """
    mistakes = Mistakes()
    draft = read_draft(path, mistakes, assignments)
    if mistakes and draft.config is not None and not named_urls(draft.config):
        for name, given in draft.config.data:
            if given == "":  # a needed file without a path is a mistake already
                mistakes.leave_out(f"data.{name}")
        check_files(draft.config.data, mistakes)
        if reads_rows:
            check_training(_with_engine_here(draft.config, draft.node), mistakes, trains_here=False)
    mistakes.check()
    return draft.whole()


def _with_engine_here(config: Config, node: NodeSettings | None) -> Config:
    """The configuration with the embedded engine if `auto` certainly chooses this engine, because this machine has no
    GPU."""
    if not isinstance(node, LocalNode) or not is_open(config) or read_gpus(LocalSession(sys.executable)):
        return config
    return with_kind(config, WITHOUT_GPUS)


def check_pipeline(pipeline: Pipeline, store: Path) -> list[str]:
    """Check a pipeline without starting any stage, and return facts and warnings.

    Models and data at URLs are downloaded into the store, because their content can only be checked there.

    Raises:
        InputError, PermanentInfraError: there are mistakes. The error has a line per mistake, in the file's order.
        TransientInfraError: a machine or an object store does not answer, and there are no mistakes.
    """
    mistakes = _mistakes_of(pipeline)
    findings: list[str] = []
    _check_run(pipeline, store, mistakes, findings)
    if mistakes.has("run.store") and has_inputs_to_bring(pipeline.config):  # downloads need the store
        mistakes.check()
    config = bring_inputs(pipeline.config, store, findings.append, mistakes)
    if config.missing_data:  # data.prepare failed, and the other checks would read its files
        mistakes.check()
    check_files(config.data, mistakes)
    gpus: list[GpuState] = []
    if not mistakes.has("run.store"):
        with mistakes.at("node"):
            config, gpus = _choose_on_node(pipeline.node, config, store, findings)
        with mistakes.at("node"):
            findings += _check_node(pipeline.node, config, store, mistakes)
    findings += check_training(config, mistakes, trains_here=isinstance(pipeline.node, LocalNode))
    with mistakes.at("deployment"):
        check_own_gpus(pipeline.config, pipeline.node)  # bootstrap checks planned placements
    with mistakes.at("retrain"):
        findings += check_retrain(pipeline, config, store)
    mistakes.check()
    return [*findings, *describe_plan(pipeline, config, store, gpus)]


def _choose_on_node(
    settings: NodeSettings, config: Config, store: Path, findings: list[str], *, trains: bool = True
) -> tuple[Config, list[GpuState]]:
    """Choose the engine and the GPU placement as a run would choose them now.

    Returns the configuration with the choices, and the known GPUs of the node. Adds the choices to `findings`.
    """
    kept = with_kept_choice(config, settings, store)
    node = None if isinstance(settings, RentedNode) else reach_node(settings, store, findings)
    if node is None:
        if not is_open(kept):
            return kept, []
        findings.append(f"rollout.engine: auto chooses {FOR_GPUS} if the machine has a free GPU")
        return with_kind(kept, FOR_GPUS), []
    with open_session(node) as session:
        gpus = read_usable_gpus(session)
    said: list[str] = []
    placed = _place_on(gpus, kept, said) if trains and has_open_placement(kept, settings) else kept
    if not is_open(kept):
        findings += said
        return placed, gpus
    own, own_settings = next(iter(zip(node.engine_nodes, settings_of_engines(settings), strict=True)), (node, settings))
    with open_session(own) as session, as_config_errors():
        choice = choose_engine(session, own, own_settings, placed, find_model_size(config.model), installs=False)
    findings.append(choice.describe(kept.rollout.engine))
    if ENGINES[choice.kind].is_own:
        return with_kind(kept, choice.kind), gpus
    findings += said
    return with_kind(placed, choice.kind), gpus


def _place_on(gpus: Sequence[GpuState], config: Config, findings: list[str]) -> Config:
    """Plan which of these GPUs train and which serve engines. Returns the configuration with this plan, and adds the
    plan, or the reason why no plan fits, to the findings."""
    try:
        plan = plan_on_gpus(gpus, config, find_model_size(config.model)) if gpus else None
    except ConfigError as error:
        findings.append(Caution(str(error)))
        return config
    if plan is None:
        return config
    findings.append(str(plan))
    return with_placement(config, plan.settings)


def _mistakes_of(pipeline: Pipeline) -> Mistakes:
    mistakes = Mistakes(InputError, PermanentInfraError, TransientInfraError)
    parts = {**pipeline.config.model_dump(), "node": pipeline.node.model_dump(), "run": pipeline.run.model_dump()}
    mistakes.order_by(pipeline.settings or parts)
    return mistakes


def _check_run(pipeline: Pipeline, store: Path, mistakes: Mistakes, findings: list[str]) -> None:
    """Check the store and the run's settings, and whether the node's settings suit the configuration."""
    config, node, run = pipeline.config, pipeline.node, pipeline.run
    with mistakes.at("node"):
        check_trainer_nodes(config, node)
    with mistakes.at("node"):
        check_engine_nodes(config, node)
    with mistakes.at("rollout.engine.weight_transfer"):
        check_weight_transfer(config, node)
    _check_store(store, mistakes)
    with mistakes.at("run.report_to"):
        check_trackers(run.report_to)
    with mistakes.at("node"):
        check_copied_packages(config, node)
    if run.publish:
        with mistakes.at("run.publish"):
            check_writable_store(ObjectStore(f"{run.publish}/{run.name}"))
            findings.append(f"{run.publish}: can be written")


def _check_store(store: Path, mistakes: Mistakes) -> None:
    try:
        check_writable(store)
        keep_private(store)
    except InputError as error:
        mistakes.note("run.store", error, names_place=True)


def _check_node(settings: NodeSettings, config: Config, store: Path, mistakes: Mistakes) -> list[str]:
    """Check the node. Returns findings about the node, or about the current offers if the node is rented."""
    findings: list[str] = []
    if isinstance(settings, RentedNode):  # the other checks need a machine, and renting one costs money
        size = find_model_size(config.model)
        with mistakes.at("node.query"):
            check_query(settings.query, config, size, sends_weights=settings.num_engine_nodes > 0)
        fitting = with_enough_memory(settings, config, size)
        offers = find_rentable(fitting)
        if has_open_placement(config, settings):
            config = _place_on(_gpus_on_offer(fitting, offers), config, findings)
        return [*findings, *describe_memory(fitting, config, size, offers), describe_rentable(fitting, offers)]
    node = reach_node(settings, store, findings)
    if node is None:
        return findings
    with mistakes.at("node"):
        findings += check_installed_engines(config, settings, node)
    with mistakes.at("node"):
        check_installed_packages(config, settings, node)
    with mistakes.at("node"):
        check_own_disk(config, settings, node)
    if config.samples_for_training:
        with mistakes.at("deployment"):
            check_engine_ports(config, node, store)
    return findings


def _gpus_on_offer(node: RentedNode, offers: Sequence[Offer]) -> list[GpuState]:
    """The GPUs of the offered machine with the smallest GPUs (empty if no offer states its GPUs' memory)."""
    smallest = min((offer for offer in offers if offer.vram_gb), key=lambda offer: offer.vram_gb, default=None)
    if smallest is None:
        return []
    size_gb = smallest.vram_gb * GIB / 1e9
    return [GpuState(name=smallest.gpu_type, total_gb=size_gb, free_gb=size_gb, driver="")] * node.query.gpu_count


def check_evaluation(pipeline: Pipeline, store: Path) -> list[str]:
    """Check an evaluation without scoring any model, and return facts and warnings.

    Raises:
        InputError, PermanentInfraError: there are mistakes. The error has a line per mistake, in the file's order.
        TransientInfraError: a machine or an object store does not answer, and there are no mistakes.
    """
    evaluate, run = pipeline.evaluate, pipeline.run
    assert evaluate is not None, "a pipeline without [evaluate] names no model"
    mistakes = _mistakes_of(pipeline)
    if run.publish or run.register_as:
        sentence = "an evaluation makes no checkpoint: leave run.publish and run.register_as empty"
        mistakes.note("run", ConfigError(sentence), names_place=True)
    _check_store(store, mistakes)
    if mistakes.has("run.store"):  # the checks below look up models in the store
        mistakes.check()
    with mistakes.at("node"):
        check_copied_packages(pipeline.config, pipeline.node, trains=False)
    findings: list[str] = []
    config = pipeline.config.model_copy(update={"data": DataConfig(heldout=pipeline.config.data.heldout)})
    with mistakes.at("evaluate.data" if evaluate.data else "data.heldout"):
        config = with_heldout(pipeline.config, evaluate.data, store, findings.append)
    models: list[ModelConfig] = []
    for setting, given in (("model", evaluate.model), ("against", evaluate.against)):
        if given:
            with mistakes.at(f"evaluate.{setting}"):
                models.append(find_named_model(given, pipeline.config, store, findings.append).model)
    with mistakes.at("node"):
        config, _ = _choose_on_node(without_further_nodes(pipeline.node), config, store, findings, trains=False)
    with mistakes.at("node"):
        findings += _check_evaluating_node(pipeline.node, config, store, mistakes)
    from rollouts_core.checks.validate import validate_evaluation  # loads torch and transformers

    findings += validate_evaluation(config, models, mistakes)
    mistakes.check()
    return findings


def _check_evaluating_node(settings: NodeSettings, config: Config, store: Path, mistakes: Mistakes) -> list[str]:
    if isinstance(settings, RentedNode):
        return [describe_rentable(settings, find_rentable(settings))]
    alone, findings = without_further_nodes(settings), list[str]()
    if node := reach_node(alone, store, findings):
        with mistakes.at("node"):
            findings += check_installed_engines(config, alone, node, trains=False)
        with mistakes.at("node"):
            check_installed_packages(config, alone, node, trains=False)
        with mistakes.at("node"):
            check_own_disk(config, alone, node, trains=False)
    return findings


def reach_node(settings: NodeSettings, store: Path, findings: list[str]) -> Node | None:
    """Log in to the node, and return it (None for a machine that is still starting; a run would wait for it)."""
    if isinstance(settings, InstanceNode):
        instance = find_instance(settings.instance)
        if not instance.has_address:
            findings.append(f"node: {settings.instance} is {instance.status}: the machine is checked after its start")
            return None
    return provision_node(settings, store)


def check_training(config: Config, mistakes: Mistakes, *, trains_here: bool) -> list[str]:
    """Check models and data. Returns findings, and collects errors in `mistakes`.

    Args:
        trains_here: whether the training runs on this machine.
    """
    from rollouts_core.checks.resumed import check_resumed_inputs  # loads torch and transformers
    from rollouts_core.checks.validate import validate_config

    findings = validate_config(config, mistakes, trains_here=trains_here)
    if mistakes:  # the checks below compute digests of large data, which takes long
        return findings
    first = next(iter(config.trainings), "")
    for name, training in config.trainings.items():
        if training.resume_from:
            with mistakes.at(f"training.{name}.resume_from"):
                job = load(kind_of(name).plan)(base_model(config), config)
                check_resumed_inputs(job, knows_model=name == first)
    return findings


def check_retrain(pipeline: Pipeline, config: Config, store: Path) -> list[str]:
    """Check [retrain], and describe the rule by which a retraining promotes a model (empty without [retrain]).

    Args:
        config: the pipeline's configuration with local inputs.

    Raises:
        ConfigError: with this rule and these data, no model could ever be promoted.
        DataError: a watched path does not exist, or contains the store.
    """
    from rollouts_core.checks.compared_rows import check_promotion  # loads torch and transformers

    retrain = pipeline.retrain
    if retrain is None:
        return []
    watched = watched_sources(pipeline.config, retrain.sources)
    check_sources(watched)
    check_outside(watched, store)
    return check_promotion(config, margin=retrain.margin, max_p_value=retrain.max_p_value)


def describe_memory(node: RentedNode, config: Config, size: ModelSize, offers: Sequence[Offer]) -> list[str]:
    """Describe the memory that each training needs on a GPU, and warn if the smallest offered GPU may be too small.

    Args:
        node: a node whose query requires the memory that the training needs.
        offers: the offers that match the node's query.
    """
    if size.problem:
        return [Caution(size.describe_problem(config.model.path))]
    shares_cpu = config.deployment.shares_cpu
    stages = [] if shares_cpu else training_needs(config, size, num_machines=node.num_trainer_nodes)
    said = [str(stage) for stage in stages]
    if node.query.min_vram_gb:
        said.append(f"node: GPUs with at least {node.query.min_vram_gb:.1f} GB")
    if not node.num_engine_nodes and (shared := shared_gpu_warning(config)):
        said.append(Caution(shared))
    smallest = min((offer for offer in offers if offer.vram_gb), key=lambda offer: offer.vram_gb, default=None)
    if smallest is None:
        return said
    gpu, num_bytes = f"the smallest GPU on offer, {smallest.gpu_type},", smallest.vram_gb * GIB
    warnings = [stage.warning(gpu, num_bytes) for stage in stages]
    warnings.append(engine_warning(config, size, num_bytes, num_machines=node.num_trainer_nodes))
    larger = "; raise node.query.min_vram_gb to rent larger GPUs"
    return [*said, *(Caution(f"node: {warning}{larger}") for warning in warnings if warning)]


def check_query(query: GPUQuery, config: Config, size: ModelSize, *, sends_weights: bool = False) -> None:
    """Raise ConfigError if the query requires fewer GPUs or less disk space than the stages need."""
    ranks = (*config.deployment.trainer_gpu_ranks, *config.deployment.engine_gpu_ranks)
    if ranks and max(ranks) >= query.gpu_count:
        raise ConfigError(
            f"deployment uses GPU {max(ranks)}, but with node.query.gpu_count {query.gpu_count} the last GPU is "
            f"{query.gpu_count - 1}: raise the count, or use other GPUs"
        )
    parts = needed_disk(config, size, sends_weights=sends_weights)
    disk_gb = sum_bytes(parts) / 1e9
    if disk_gb > query.disk_gb:
        shown = " and ".join(f"{part.name} take {part.num_bytes / 1e9:.1f} GB" for part in parts)
        raise ConfigError(
            f"{shown}, but node.query.disk_gb is {query.disk_gb}: raise it, or "
            "keep fewer checkpoints (training.*.keep_checkpoints)"
        )


def check_own_gpus(config: Config, node: NodeSettings) -> None:
    """Raise ConfigError if the stages run on this machine, but the machine has fewer GPUs than the settings need."""
    ranks = {*config.deployment.trainer_gpu_ranks, *config.deployment.engine_gpu_ranks}
    needs_gpu = any(training.policy.needs_gpu for training in config.trainings.values())
    if not (ranks or needs_gpu) or not isinstance(node, LocalNode) or node.python:
        return
    from rollouts_core.model.loading import count_gpus  # the checks of models have loaded torch

    num_gpus = count_gpus()
    if needs_gpu and not num_gpus:
        check_kernels_without_gpu(config)
    if len(ranks) > num_gpus:
        raise ConfigError(
            f"deployment names {len(ranks)} GPUs (trainer_gpu_ranks, engine_gpu_ranks), this machine has {num_gpus}: "
            "name other GPUs, leave these settings out to train without GPUs, or set another machine in node"
        )


def check_own_disk(config: Config, settings: NodeSettings, node: Node, *, trains: bool = True) -> None:
    """Raise ConfigError if the stages run on this machine, but need more disk space than the machine has free.

    If the store already has checkpoints, no space for further checkpoints is required, because this run may resume from
    these checkpoints. Bootstrap checks the space for the other inputs.
    """
    if not isinstance(settings, LocalNode):
        return
    is_here = trains and Path(config.model.path).is_dir()  # the size of a model of the hub is unknown here
    size = find_model_size(config.model) if is_here else ModelSize()
    has_trained = any(Path(node.root).glob("stages/*/checkpoints/*"))
    needed_gb = max(settings.min_free_gb, 0 if has_trained else checkpoint_disk_bytes(config, size) / 1e9)
    with as_config_errors():
        check_disk(node.root, shutil.disk_usage(node.root).free / 1e9, needed_gb)


def check_trainer_nodes(config: Config, node: NodeSettings) -> None:
    """Raise ConfigError if the node has further machines for training, but a training supports only one process."""
    if not settings_of_trainers(node):
        return
    setting = "node.num_trainer_nodes" if isinstance(node, RentedNode) else "node.trainer_nodes"
    for name, training in config.trainings.items():
        if training.policy.backend != "pytorch":
            raise ConfigError(
                f'{setting}: training.{name}.policy.backend "{training.policy.backend}" trains in one process: '
                'leave the nodes out, or set backend = "pytorch"'
            )


def check_engine_nodes(config: Config, node: NodeSettings) -> None:
    """Raise ConfigError if engines have their own nodes, but other settings do not allow engines there."""
    if not settings_of_engines(node):
        return
    setting = "node.num_engine_nodes" if isinstance(node, RentedNode) else "node.engine_nodes"
    engine = config.rollout.engine
    if not config.samples_for_training:
        what = "data.rollouts" if config.is_graded else f'mode "{config.mode}"'
        raise ConfigError(f"{setting}: {what} samples nothing, so there are no engines: leave the nodes out")
    if config.deployment.colocated:
        raise ConfigError(
            f"{setting}: with deployment.colocated, engines and trainer share GPUs, which is impossible on "
            "different nodes: leave one of these settings out"
        )
    if engine.spec.is_local_only:
        others = " or ".join(name for name, each in ENGINES.items() if not each.is_local_only)
        raise ConfigError(
            f"{setting}: engines on other nodes are reached over the network, but the development endpoints of "
            f"{engine.spec.title}, which replace weights and run code, must not be: choose the kind "
            f"{others}, or leave the nodes out"
        )
    if engine.weight_transfer == "tensors":
        raise ConfigError(
            f'{setting}: rollout.engine.weight_transfer "tensors" shares memory with the trainer, which is on '
            'another node: leave it out, or choose "gloo" or "nccl"'
        )
    if engine.router_url and not engine.api_key_variable:
        raise ConfigError(
            f"{setting}: engines on other nodes require a key, and the router at rollout.engine.router_url must "
            "send it: set rollout.engine.api_key_variable to the variable with the key"
        )


def check_weight_transfer(config: Config, node: NodeSettings) -> None:
    """Raise ConfigError if `weight_transfer` cannot send weights from the trainer's GPU to engines on the same machine.

    The first process of the trainer sends the weights from its GPU.
    """
    deployment, way = config.deployment, config.rollout.engine.weight_transfer
    if not config.samples_for_training or settings_of_engines(node):
        return
    sender = next(iter(deployment.trainer_gpu_ranks), 0)
    of_engines = [deployment.of_engine(index).engine_gpu_ranks for index in range(deployment.num_engines)]
    # An engine without `engine_gpu_ranks` sees all GPUs, and uses the first one.
    if way == "tensors" and (apart := [ranks for ranks in of_engines if ranks and sender not in ranks]):
        raise ConfigError(
            f'rollout.engine.weight_transfer "tensors" shares memory with the trainer on GPU {sender}, but '
            f"an engine has only GPUs {', '.join(map(str, apart[0]))}: also give each engine the trainer's GPU, or "
            'choose "auto", "gloo" or "nccl"'
        )
    if way == "nccl" and any(sender in (ranks or (0,)) for ranks in of_engines):
        raise ConfigError(
            f'rollout.engine.weight_transfer "nccl" needs processes on different GPUs, but an engine also uses GPU '
            f"{sender}, from which the trainer sends: give engines other GPUs (deployment.engine_gpu_ranks), or choose "
            '"auto" or "gloo"'
        )


def check_engine_ports(config: Config, node: Node, store: Path) -> None:
    """Raise ConfigError if another program uses a port of the inference engines of RL."""
    key = read_key(config.rollout.engine.api_key_variable, "rollout.engine")
    own_key = own_unit_key(store) if node.engine_nodes and not key else ""
    with open_session(node) as trainer:
        for each in node.engine_nodes or (node,):
            with open_session(each) as session:
                for port in config.deployment.engine_ports:
                    check_engine_port(session, port, each, trainer=trainer, api_key=key or own_key)


def check_installed_engines(config: Config, settings: NodeSettings, node: Node, *, trains: bool = True) -> list[str]:
    """Check the engine on each machine. Returns a sentence per engine to install, and a warning per GPU that other
    programs use.

    Raises:
        ConfigError: a machine has no engine, and the run cannot install it.
    """
    engine, findings = config.rollout.engine, list[str]()
    if engine.router_python:
        with open_session(node) as session, as_config_errors():
            check_router(session, config, trains=trains)
    if leads_engines(config, node, trains=trains):
        findings += check_installed_engine(settings, node, config, trains=trains)
    for own_settings, each in zip(settings_of_engines(settings), node.engine_nodes, strict=True):
        findings += check_installed_engine(own_settings, each, config)
    return findings


def check_copied_packages(config: Config, settings: NodeSettings, *, trains: bool = True) -> None:
    """Raise ConfigError if the run installs packages on a machine, but not a package that the stages need there."""
    for each in (settings, *(settings_of_trainers(settings) if trains else ())):
        if is_installed_by_run(each):
            with as_config_errors():
                check_sent_packages(each, config, trains=trains)


def check_installed_packages(config: Config, settings: NodeSettings, node: Node, *, trains: bool = True) -> None:
    """Raise ConfigError if a machine lacks a package that the stages need, and the run installs no packages there."""
    if not needed_packages(config, trains=trains):
        return
    places = [(settings, node), *zip(settings_of_trainers(settings), node.trainer_nodes, strict=True)]
    for own_settings, each in places:
        if not is_installed_by_run(own_settings):
            with open_session(each) as session, as_config_errors():
                check_packages(session, each, config, trains=trains)


def is_installed_by_run(settings: NodeSettings | FurtherNode) -> TypeGuard[PackageSettings]:
    """Whether a run installs the Python packages of its stages on a machine with these settings."""
    return isinstance(settings, PackageSettings) and settings.install != "nothing"


def check_engine_port(session: Session, port: int, node: Node, *, trainer: Session, api_key: str = "") -> None:
    """Raise ConfigError if a program other than an engine of an earlier run listens on the node's port.

    Args:
        trainer: a session on the trainer's node, from which the connection is made.
    """
    with as_config_errors():
        if is_own_engine(trainer, port, node, api_key=api_key):
            return
    try:
        check_port(session, port, node.address or LOOPBACK)
    except PermanentInfraError as error:
        raise ConfigError(f"deployment.engine_port: {error}") from error


def check_installed_engine(
    settings: NodeSettings | FurtherNode, node: Node, config: Config, *, trains: bool = True
) -> list[str]:
    """Check the engine of one machine, as in `check_installed_engines`.

    An engine that is among the node's packages is not checked, because the run installs these packages later.
    """
    engine = config.rollout.engine
    is_among_packages = is_installed_by_run(settings) and (settings.requirements or engine.install == "never")
    if engine.spec.is_own or (is_among_packages and not engine.python):
        return []
    with open_session(node) as session, as_config_errors():
        gpus = read_gpus(session)
        plan = plan_engine_of(session, node, settings, engine, gpus)
    said = plan.describe(engine, first_stage=stage_beside_installation(config, trains=trains))
    busy = warn_of_busy_gpus(gpus, config.deployment.engine_gpu_ranks)
    return [*filter(None, [said]), *map(Caution, busy)]


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Convert a PermanentInfraError of the block to a ConfigError, because the user must change the configuration."""
    try:
        yield
    except PermanentInfraError as error:
        raise ConfigError(str(error)) from error


def check_writable(store: Path) -> None:
    """Raise ConfigError if the store cannot be written, and ServerError if Prefect cannot use the store's path."""
    check_path(store)
    try:
        store.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=store) as probe:
            probe.write(bytes(PROBE_BYTES))
            fcntl.flock(probe, fcntl.LOCK_EX)
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        if error.errno in LOCKLESS:
            reason = NO_LOCKS
        raise ConfigError(f"the store {store} cannot be written ({reason}): choose another with --store") from error


def check_files(data: DataConfig, mistakes: Mistakes) -> None:
    """Add a mistake for each missing data file. Names of hub datasets are checked when the datasets are loaded."""
    given = {
        f"data.{name}": getattr(data, name) for name in ("sft_eval", "prompts", "rollouts", "selection", "heldout")
    }
    if isinstance(data.sft, str):
        given["data.sft"] = data.sft
    else:
        given |= {f"data.sft.{index}": dataset.path for index, dataset in enumerate(data.sft)}
    for setting, path in given.items():
        if Path(path).is_absolute() and not Path(path).exists():
            mistakes.note(setting, DataError(f"{setting}: {path} does not exist"))


def is_own_engine(trainer: Session, port: int, node: Node, *, api_key: str = "") -> bool:
    """True if the engine of an earlier run of this store answers on the node's port. A run may attach to this engine.

    Raises:
        PermanentInfraError: the trainer's machine does not forward connections to the node.
    """
    with trainer.forward(port or UNUSED_PORT, node.address or LOOPBACK) as local_port:
        if port == 0:
            return False
        served = served_model(f"http://{LOOPBACK}:{local_port}", api_key=api_key)
    return served is not None and served.is_relative_to(node.root)


MODEL_PATHS: Mapping[str, Callable[[Any], str]] = {  # Any: JSON
    "/model_info": lambda answer: answer["model_path"],  # the embedded engine and SGLang use this path
    "/v1/models": lambda answer: answer["data"][0]["root"],  # vLLM
}
"""URL paths at which engines report the folder of their model, with a function that reads the folder from the JSON."""


def served_model(url: str, *, api_key: str = "") -> Path | None:
    """The folder of the model that an engine of any kind serves (None if no engine answers)."""
    for path, find in MODEL_PATHS.items():
        try:
            answer = httpx.get(
                f"{url}{path}", timeout=ENGINE_ANSWER_TIMEOUT_S, trust_env=False, headers=key_header(api_key)
            )
            return Path(find(answer.json()))
        except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError):
            continue
    return None
