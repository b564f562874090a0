"""Check a machine before a run's first stage: Python, torch, engine, GPUs and disk. Install requested packages.

Without these early checks, the run would detect a missing inference engine only after SFT. Not here: installing the
engine (engines_beside.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from rollouts.infra.bootstrap import (
    NO_MODULES,
    NodeNeeds,
    NodeReport,
    check_alike,
    check_imports,
    check_node,
    probe_node,
)
from rollouts.infra.environment import ensure_environment, installed_requirements, read_requirements
from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.node import FurtherNode, LocalNode, Node, NodeSettings, settings_of_engines, settings_of_trainers
from rollouts.infra.providers import open_session
from rollouts.infra.reach import check_both_ways
from rollouts.infra.session import Session
from rollouts.tasks.engine_choice import EngineChoice, choose_engine, is_open, keep_choice, with_choice_of
from rollouts.tasks.engine_installs import with_planned_engine
from rollouts.tasks.gpu_placement import has_open_placement, plan_on_gpus, read_usable_gpus
from rollouts.tasks.installed_engines import check_router, leads_engines, stage_beside_installation
from rollouts.tasks.optional_packages import check_packages
from rollouts.tasks.progress import StageProgress
from rollouts.tasks.upload_inputs import place_code
from rollouts_core.checks.needed_part import describe_parts
from rollouts_core.checks.placement_plan import with_placement
from rollouts_core.checks.resource_needs import (
    check_kernels_without_gpu,
    checkpoint_disk_bytes,
    engine_warning,
    engine_weight_bytes,
    shared_gpu_warning,
    training_needs,
)
from rollouts_core.config import Config, PolicyConfig
from rollouts_core.engine_kinds import ENGINES
from rollouts_core.errors import ConfigError
from rollouts_core.keys import key_variables
from rollouts_core.model.model_size import ModelSize, find_model_size
from rollouts_core.run_directory import RunDirectory

DISK_USE_TIMEOUT_S = 120.0


@task(name="bootstrap", cache_policy=NO_CACHE)
def bootstrap(
    node: Node,
    config: Config,
    settings: NodeSettings,
    *,
    trains: bool = True,
    begun: Sequence[str] = (),
    kept_choice: Path | None = None,
) -> Node:
    """Check the run's machine and its further machines. Returns the node with the Python interpreters to use.

    The leading machine must reach each further machine, and all machines of one training must reach each other. The
    interpreter of an engine may not exist yet, because the run installs the engine later (engines_beside.py).

    Args:
        trains: whether the run trains on the node. A training needs GPU memory and disk space.
        begun: local directories of the run's trainings that may have started. Checkpoints of these trainings may be on
            the node's disk already, so that the node needs less free space.
        kept_choice: the file that stores the chosen engine and the planned GPUs for later attempts of the run.
    """
    size = find_model_size(config.model) if trains else ModelSize()
    num_machines = 1 + len(node.trainer_nodes)
    with StageProgress("bootstrap") as progress, ExitStack() as stack:
        if size.problem:
            progress.say(size.describe_problem(config.model.path))
        session = stack.enter_context(open_session(node))
        choice: EngineChoice | None = None
        if trains and has_open_placement(config, settings):
            node = placed_on(node, session, config, size, say=progress.say)
            config = with_placement(config, json.loads(node.placement or "{}"))
        placement = config.deployment
        needs = needs_of_node(node, config, size, trains=trains)
        left_bytes = checkpoint_disk_bytes(config, size) - checkpoint_bytes_on(session, node, begun)
        needs = replace(needs, disk_gb=max(settings.min_free_gb, left_bytes / 1e9))
        modules = modules_called(config, trains=trains)
        ready, report = prepare_machine(session, node, settings, needs, config, progress, modules)
        warn_of_memory(report, needs, config, size, num_machines=num_machines, say=progress.say)
        warn_of_precision(report, needs, config, say=progress.say)
        if trains and not report.gpus:
            check_kernels_without_gpu(config)
        if trains and report.gpus and not node.engine_nodes and (warning := shared_gpu_warning(config)):
            progress.say(warning)
        if is_open(config):
            choice = choose_on_node(session, ready, settings, config, size)
            progress.say(choice.describe(config.rollout.engine))
            placed = "" if ENGINES[choice.kind].is_own else ready.placement  # an embedded engine needs no GPU
            ready = replace(ready, engine_kind=choice.kind, placement=placed)
            config = with_choice_of(config, ready)
        if kept_choice is not None and (choice or ready.placement):
            keep_choice(kept_choice, choice, ready.placement)
        engine, beside = config.rollout.engine, stage_beside_installation(config, trains=trains)
        if leads_engines(config, node, trains=trains):
            ready = with_planned_engine(session, ready, settings, engine, first_stage=beside, say=progress.say)
        check_router(session, config, trains=trains)
        check_packages(session, ready, config, trains=trains)
        trainers, trainer_nodes = [(session, node)], list[Node]()
        for each, own_settings in zip(node.trainer_nodes, settings_of_trainers(settings), strict=True):
            own_needs = replace(
                needs,
                disk_gb=own_settings.min_free_gb,
                num_gpus=len(placement.trainer_gpu_ranks),
                last_gpu=max(placement.trainer_gpu_ranks, default=-1),
                engine_gpu_ranks=(),
            )
            with named_in_errors("node.trainer_nodes", each):
                own_session = stack.enter_context(open_session(each))
                found, own_report = prepare_machine(own_session, each, own_settings, own_needs, config, progress)
                warn_of_memory(own_report, own_needs, config, size, num_machines=num_machines, say=progress.say)
                check_alike(own_report, report)
                check_packages(own_session, found, config)
                for other_session, other in trainers:
                    check_both_ways(other_session, other, own_session, each)
            trainers.append((own_session, each))
            trainer_nodes.append(found)
        engine_nodes = prepare_engine_nodes(session, node, settings, config, size, progress)
    return replace(ready, trainer_nodes=tuple(trainer_nodes), engine_nodes=engine_nodes)


def prepare_engine_nodes(
    session: Session, node: Node, settings: NodeSettings, config: Config, size: ModelSize, progress: StageProgress
) -> tuple[Node, ...]:
    """Check the machines for inference engines, and plan the engines. Returns the nodes with their interpreters.

    `node`, which trains, and each machine for engines must reach each other.
    """
    placement, engine_nodes = config.deployment, list[Node]()
    num_machines = 1 + len(node.trainer_nodes)
    for each, own_settings in zip(node.engine_nodes, settings_of_engines(settings), strict=True):
        own_needs = NodeNeeds(
            disk_gb=own_settings.min_free_gb,
            num_gpus=len(placement.engine_gpu_ranks),
            last_gpu=max(placement.engine_gpu_ranks, default=-1),
            engine_gpu_ranks=placement.engine_gpu_ranks,
            engine_gb=engine_weight_bytes(config, size) / 1e9,
        )
        with named_in_errors("node.engine_nodes", each), open_session(each) as own_session:
            found, own_report = prepare_machine(own_session, each, own_settings, own_needs, config, progress)
            warn_of_memory(own_report, own_needs, config, size, num_machines=num_machines, say=progress.say)
            beside = stage_beside_installation(config, trains=True)  # evaluations have no engine nodes
            found = with_planned_engine(
                own_session, found, own_settings, config.rollout.engine, first_stage=beside, say=progress.say
            )
            check_both_ways(session, node, own_session, each)
        engine_nodes.append(found)
    return tuple(engine_nodes)


def needs_of_node(node: Node, config: Config, size: ModelSize, *, trains: bool) -> NodeNeeds:
    """The GPUs and the GPU memory that a run needs on its leading node. The caller adds the needed disk space."""
    placement = config.deployment
    stages = training_needs(config, size, num_machines=1 + len(node.trainer_nodes))
    least = max(stages, key=lambda stage: stage.least_bytes, default=None)
    own_gpus = {*placement.trainer_gpu_ranks, *(() if node.engine_nodes else placement.engine_gpu_ranks)}
    return NodeNeeds(
        num_gpus=len(own_gpus),
        last_gpu=max(own_gpus, default=-1),
        trains_on_gpu=trains and wants_gpu(config),
        is_rented_for_gpus=node.is_rented,
        trainer_gpu_ranks=placement.trainer_gpu_ranks,
        num_trainers=placement.num_trainer_processes,
        trainer_gb=least.least_bytes / 1e9 if least else 0.0,
        trainer_parts=f"in GiB: {describe_parts(least.certain_parts)}" if least else "",
        engine_gpu_ranks=() if node.engine_nodes else placement.engine_gpu_ranks,
        engine_gb=engine_weight_bytes(config, size) / 1e9,
    )


def placed_on(node: Node, session: Session, config: Config, size: ModelSize, *, say: Callable[[str], None]) -> Node:
    """Plan which GPUs train and which serve engines. Returns the node with this plan.

    If no plan fits, `say` receives the reason, and the node is returned unchanged. Without a plan, trainer and engines
    share the first GPU.
    """
    try:
        plan = plan_on_gpus(read_usable_gpus(session), config, size)
    except ConfigError as error:
        say(str(error))
        return node
    if plan is None:
        return node
    say(str(plan))
    return replace(node, placement=json.dumps(plan.settings))


def choose_on_node(
    session: Session, node: Node, settings: NodeSettings, config: Config, size: ModelSize
) -> EngineChoice:
    """Choose the inference engine by the GPUs of the first engine node, or else by the GPUs of `node`."""
    for own, own_settings in zip(node.engine_nodes, settings_of_engines(settings), strict=True):
        with open_session(own) as own_session:
            return choose_engine(own_session, own, own_settings, config, size)
    return choose_engine(session, node, settings, config, size)


def checkpoint_bytes_on(session: Session, node: Node, run_dirs: Sequence[str]) -> int:
    """Bytes that the checkpoints of trainings use on the node's disk.

    Args:
        run_dirs: local directories of the trainings. Missing directories count as empty.
    """
    if not run_dirs:
        return 0
    folders = [str(RunDirectory(Path(node.path_on_node(each))).checkpoints) for each in run_dirs]
    # A single call of du counts a file with several hard links only once. du skips missing folders.
    listed = session.run(["du", "-sk", *folders], timeout_s=DISK_USE_TIMEOUT_S, check=False, may_repeat=True)
    sizes = [line.split()[0] for line in listed.stdout.decode(errors="replace").splitlines() if line.strip()]
    return sum(1024 * int(each) for each in sizes if each.isdecimal())


def warn_of_memory(
    report: NodeReport,
    needs: NodeNeeds,
    config: Config,
    size: ModelSize,
    *,
    num_machines: int,
    say: Callable[[str], None],
) -> None:
    """Warn of GPUs that can hold the weights but may have too little memory for activations or caches."""
    is_on_gpus = needs.trainer_gb > 0 and not needs.trainers_share_cpu
    trainer_ranks = needs.trainer_gpu_ranks or (0,) if is_on_gpus else ()
    working = {rank: gpu for rank, gpu in enumerate(report.gpus) if not gpu.problem}
    trainers = {rank: working[rank] for rank in trainer_ranks if rank in working}
    engines = [working[rank].total_gb for rank in needs.engine_gpu_ranks if rank in working]
    warnings = [
        stage.warning(f"GPU {rank}, {gpu.name},", gpu.total_gb * 1e9)
        for stage in (training_needs(config, size, num_machines=num_machines) if trainers else ())
        for rank, gpu in trainers.items()
    ]
    if engines:
        warnings.append(engine_warning(config, size, min(engines) * 1e9, num_machines=num_machines))
    for warning in filter(None, warnings):
        say(warning)


def warn_of_precision(report: NodeReport, needs: NodeNeeds, config: Config, *, say: Callable[[str], None]) -> None:
    """Warn if a training computes in float32, the default, on a GPU that computes much faster in bfloat16."""
    ranks = needs.trainer_gpu_ranks or (0,) if needs.trains_on_gpu else ()
    gpu = next(
        (report.gpus[rank] for rank in ranks if rank < len(report.gpus) and report.gpus[rank].has_bfloat16), None
    )
    for kind, policy in torch_policies(config).items():
        if gpu is not None and policy.precision == "float32":
            say(
                f"training.{kind} computes in float32 on {gpu.name}, which is several times as fast in bfloat16: "
                f'training.{kind}.policy.precision = "bfloat16" keeps weights and optimizer in float32'
            )


def wants_gpu(config: Config) -> bool:
    """True if a training uses the PyTorch backend and must have a GPU.

    `deployment.trainer_processes` without `trainer_gpu_ranks` permits training on the CPU.
    """
    placement = config.deployment
    return bool(torch_policies(config)) and not (placement.trainer_processes and not placement.trainer_gpu_ranks)


def torch_policies(config: Config) -> dict[str, PolicyConfig]:
    """The policy settings of all trainings that use the PyTorch backend, by stage name."""
    policies = {name: training.policy for name, training in config.trainings.items()}
    return {name: policy for name, policy in policies.items() if policy.backend == "pytorch"}


def modules_called(config: Config, *, trains: bool) -> dict[str, str]:
    """The user's Python modules that the run's stages import, by the setting that names each module.

    Empty if no stage samples completions.
    """
    samples_for_rl = trains and config.is_graded
    if not samples_for_rl and config.evaluation.metric != "accuracy":
        return {}
    if samples_for_rl:
        return {**config.rollout.modules_named, **config.training.rl.modules_named}
    only_rl = ("rollout.generate_fn", "rollout.filter_fn")
    return {setting: module for setting, module in config.rollout.modules_named.items() if setting not in only_rl}


@contextmanager
def named_in_errors(setting: str, node: Node) -> Iterator[None]:
    """Prefix errors about a further node with the setting and the node's name."""
    try:
        yield
    except PermanentInfraError as error:
        raise PermanentInfraError(f"{setting}, {node.name}: {error}") from error


def prepare_machine(
    session: Session,
    node: Node,
    settings: NodeSettings | FurtherNode,
    needs: NodeNeeds,
    config: Config,
    progress: StageProgress,
    modules: Mapping[str, str] = NO_MODULES,
) -> tuple[Node, NodeReport]:
    """Install packages on one machine and check the machine.

    Returns the node with the Python interpreter to use, and the report of the machine's versions and devices.

    Args:
        modules: the user's Python modules that stages on this machine import, by the setting that names the module.
    """
    ready = install_packages(session, node, settings, progress)
    report = probe_node(session, ready)
    check_node(report, needs)
    if ready.is_remote:
        named = {**config.rollout.modules_named, **config.training.rl.modules_named}
        code_dir = place_code(session, ready, named, say=progress.say)
        check_imports(session, ready, code_dir, modules, key_variables(config.rollout))
    progress.say(
        f"Python {report.python_version}, torch {report.torch_version}, {report.device_summary}, "
        f"{report.free_disk_gb:.0f} GB of disk free"
    )
    return ready, report


def install_packages(
    session: Session, node: Node, settings: NodeSettings | FurtherNode, progress: StageProgress
) -> Node:
    """Install packages unless `settings.install` is "nothing". Returns the node with the interpreter that has them."""
    if isinstance(settings, LocalNode) or settings.install == "nothing":
        return node
    wanted = read_requirements(Path(settings.requirements)) if settings.requirements else installed_requirements()
    progress.say(f"installs {len(wanted)} packages by {settings.install}, unless they are installed already")
    python = ensure_environment(session, node, wanted, installer=settings.install, index=settings.package_index)
    return replace(node, python=python)
