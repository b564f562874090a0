"""Probe a node, and refuse a node that does not meet the needs of the pipeline.

probe_node ── node_probe.py on the node ── NodeReport ── check_node ── returns, or raises PermanentInfraError
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from rollouts.infra import node_probe
from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.node import Node
from rollouts.infra.session import Session, read_answer

MIN_PYTHON = (3, 11)
_MIN_TORCH = (2, 6)
NO_MODULES: Mapping[str, str] = MappingProxyType({})
PROBE_TIMEOUT_S = 180.0
"""Time limit of a probe in seconds. Importing torch from a cold network disk takes one or two minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """A CUDA device of a node. If `problem` is empty, the device has passed a test computation."""

    name: str
    total_gb: float
    free_gb: float
    has_bfloat16: bool = False
    """Whether the device computes bfloat16 in hardware, several times as fast as float32."""
    problem: str = ""
    """Why the device cannot compute. If `problem` is not empty, the other fields are meaningless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """Hardware and software of a node. Sizes are in GB of 10^9 bytes."""

    python: str
    root: str
    python_version: str
    torch_version: str | None
    torch_problem: str
    """Why torch cannot be imported, or "" if the import works."""
    torch_build: str
    """The hardware for which torch was built, for example `CUDA 12.8` or `the CPU`, or "" without torch."""
    gpus: tuple[GpuReport, ...]
    gpu_problem: str
    """The problem of the first device that cannot compute, or "" if all devices can compute."""
    driver: str
    """Version of NVIDIA's driver, or "" if nvidia-smi reports no version."""
    num_driver_gpus: int
    """Number of GPUs that nvidia-smi lists. torch may see fewer GPUs."""
    num_cpus: int
    total_memory_gb: float
    free_memory_gb: float
    free_disk_gb: float
    """Free space on the disk of `root`."""
    root_problem: str
    """Why files cannot be written to `root`, or "" if files can be written."""

    @property
    def device_summary(self) -> str:
        """The devices in words, for example `2 x NVIDIA H200` or `CPU with 8 cores`."""
        names = [gpu.name for gpu in self.gpus if not gpu.problem]
        return f"{len(names)} x {' and '.join(sorted(set(names)))}" if names else f"CPU with {self.num_cpus} cores"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNeeds:
    """The requirements that a pipeline has on a node. Sizes are in GB of 10^9 bytes."""

    disk_gb: float = 0.0
    num_gpus: int = 0
    last_gpu: int = -1
    """The highest GPU rank that the settings name, or -1 if the settings name no GPU rank."""
    trains_on_gpu: bool = False
    """Whether torch trains on this node and the settings do not permit training on the CPU."""
    is_rented_for_gpus: bool = False
    trainer_gpu_ranks: tuple[int, ...] = ()
    """GPU ranks of the trainer, or an empty tuple for the first GPU, or for the CPU on a node without GPUs."""
    num_trainers: int = 1
    trainer_gb: float = 0.0
    """Lower bound of the memory in GB that one trainer process needs."""
    trainer_parts: str = ""
    """The parts of which `trainer_gb` consists, in words, for error texts."""
    engine_gpu_ranks: tuple[int, ...] = ()
    engine_gb: float = 0.0
    """Memory in GB that the weights of an engine need on each of the engine's GPUs."""

    @property
    def trainers_share_cpu(self) -> bool:
        """Whether several trainer processes run on the CPU. Several processes use the CPU even if the node has GPUs."""
        return self.num_trainers > 1 and not self.trainer_gpu_ranks


def probe_node(session: Session, node: Node) -> NodeReport:
    """Probe the node and return its report. The probe stores its result on the node and imports torch again only after
    a change of the environment.

    Raises:
        PermanentInfraError: the node's interpreter cannot be run.
    """
    program = session.place_program(Path(node_probe.__file__))
    argv = [node.python, "-Xutf8", program, "probe", node.root]
    completed = session.run(argv, timeout_s=PROBE_TIMEOUT_S, check=False, may_repeat=True)
    document = read_answer(completed)
    gpus = tuple(GpuReport(**gpu) for gpu in document["gpus"])
    return NodeReport(**{**document, "gpus": gpus, "python": node.python, "root": node.root})


def check_imports(
    session: Session,
    node: Node,
    code_dir: str,
    modules: Mapping[str, str] = NO_MODULES,
    variables: Collection[str] = (),
) -> None:
    """Check that the node's interpreter can import the training code and the user's modules.

    Args:
        code_dir: the code's folder on the node. The folder's name contains a digest of its content, so a stored result
            of an earlier check of this folder is valid.
        modules: the user's modules, by the settings that contain the modules' names.
        variables: names of environment variables that a job will have and the session does not have.

    Raises:
        PermanentInfraError: a package or a file is missing on the node.
    """
    program = session.place_program(Path(node_probe.__file__))
    names = [*dict.fromkeys(modules.values()), *(f"{variable}=" for variable in sorted(variables))]
    command = [node.python, "-Xutf8", program, "imports", node.root, code_dir, *names]
    completed = session.run(command, timeout_s=PROBE_TIMEOUT_S, check=False)
    if completed.exit_code != 0:
        problem = completed.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise PermanentInfraError(
            f"{node.python} on the node cannot import the training ({problem}): "
            "install the project's dependencies there, or name another interpreter in the node's settings"
        )
    answer = read_answer(completed)
    if refused := answer.get("module"):
        setting = next(setting for setting, module in modules.items() if module == refused)
        raise PermanentInfraError(
            f"{setting}: {node.python} on the node cannot import {refused} ({answer['problem']}): install what it "
            "needs there, or list it in node.requirements; modules beside the configuration or on PYTHONPATH come "
            "along if an import names them, and data only in the folder of a package"
        )


def check_node(report: NodeReport, needs: NodeNeeds) -> None:
    """Check that the node meets the needs.

    Raises:
        PermanentInfraError: a need is not met. The error's text names the need, the value found, and a remedy.
    """
    if _version(report.python_version) < MIN_PYTHON:
        raise PermanentInfraError(
            f"Python {_dotted(MIN_PYTHON)} or newer is needed, {report.python} is {report.python_version}: "
            "name another interpreter in the node's settings"
        )
    if report.torch_version is None:
        raise PermanentInfraError(
            f"{report.python} cannot import torch ({report.torch_problem}): "
            "install the project there, or name another interpreter in the node's settings"
        )
    if _version(report.torch_version) < _MIN_TORCH:
        raise PermanentInfraError(
            f"torch {_dotted(_MIN_TORCH)} or newer is needed, {report.python} has {report.torch_version}: upgrade it"
        )
    _check_gpus(report, needs)
    _check_memory(report, needs)
    if report.root_problem:
        raise PermanentInfraError(
            f"{report.root} cannot be written ({report.root_problem}): choose another root in the node's settings"
        )
    check_disk(report.root, report.free_disk_gb, needs.disk_gb)


def check_disk(root: str, free_gb: float, needed_gb: float) -> None:
    """Raise PermanentInfraError if the disk of a directory has less free space than needed."""
    if free_gb < needed_gb:
        raise PermanentInfraError(
            f"{_size(needed_gb)} of free disk are needed at {root}, {_size(free_gb)} are there: "
            "free some space, choose another root, or lower min_free_gb"
        )


def _check_gpus(report: NodeReport, needs: NodeNeeds) -> None:
    """Check that the node has all GPUs of the settings, and that torch can use a GPU for training.

    Raises:
        PermanentInfraError: the node has too few GPUs, a named GPU cannot compute, or torch can use no GPU and would
            silently train on the CPU.
    """
    num_working = sum(not gpu.problem for gpu in report.gpus)
    if num_working < needs.num_gpus:
        reason = f" ({report.gpu_problem})" if report.gpu_problem else ""
        raise PermanentInfraError(
            f"{needs.num_gpus} working GPUs are needed, the node has {num_working}{reason}: "
            "use fewer ranks or another node"
        )
    first = () if needs.trainer_gpu_ranks or not needs.trains_on_gpu else (0,)
    for rank in (*needs.trainer_gpu_ranks, *needs.engine_gpu_ranks, *first):
        if rank < len(report.gpus) and (problem := report.gpus[rank].problem):
            raise PermanentInfraError(
                f"GPU {rank} of the node cannot compute ({problem}): name others (deployment.trainer_gpu_ranks, "
                "deployment.engine_gpu_ranks), or use another node"
            )
    if 0 < report.num_driver_gpus <= needs.last_gpu:
        raise PermanentInfraError(
            f"deployment names GPU {needs.last_gpu}, the node has GPUs 0 to {report.num_driver_gpus - 1}: name others, "
            "or use another node"
        )
    if needs.trains_on_gpu and not report.gpus and (report.gpu_problem or needs.is_rented_for_gpus):
        driver = f"NVIDIA's driver is {report.driver}" if report.driver else "its nvidia-smi lists none"
        problem = report.gpu_problem.strip().split("\n")[0].split(". ")[0].rstrip(".")
        raise PermanentInfraError(
            f"the training needs a GPU that torch can use, torch {report.torch_version} on the node, built for "
            f"{report.torch_build}, can use none ({'; '.join(each for each in (driver, problem) if each)}): take "
            "a build of torch that the driver supports (node.requirements, node.package_index), or a machine with a "
            "newer driver (node.query.min_cuda), or set deployment.trainer_processes = 1 without trainer_gpu_ranks to "
            "train on the CPU"
        )


def check_alike(report: NodeReport, leader: NodeReport) -> None:
    """Check that a node can train together with the leader.

    Raises:
        PermanentInfraError: only one of the two nodes has GPUs, or the nodes have different versions of torch, whose
            protocols may differ.
    """
    if bool(report.gpus) != bool(leader.gpus):
        raise PermanentInfraError(
            f"it has {report.device_summary}, but the leading machine has {leader.device_summary}: train on machines "
            "that all have GPUs, or on machines without GPUs"
        )
    if report.torch_version != leader.torch_version:
        raise PermanentInfraError(
            f"it has torch {report.torch_version}, but the leading machine has {leader.torch_version}: install the "
            "same version"
        )


def _check_memory(report: NodeReport, needs: NodeNeeds) -> None:
    """Check that the devices have enough memory for the training state and for the engines' weights.

    Raises:
        PermanentInfraError: a device has too little memory.
    """
    remedy = "train with policy.lora, on more GPUs, or on another node"
    parts = f" ({needs.trainer_parts})" if needs.trainer_parts else ""
    all_trainers_gb = needs.trainer_gb * needs.num_trainers
    is_on_cpu = not report.gpus or needs.trainers_share_cpu
    if is_on_cpu and report.total_memory_gb < all_trainers_gb:
        raise PermanentInfraError(
            f"training takes at least {_size(all_trainers_gb)} of memory{parts}, the node has "
            f"{_size(report.total_memory_gb)}: {remedy}"
        )
    for rank in () if is_on_cpu else needs.trainer_gpu_ranks or (0,):
        gpu = report.gpus[rank] if rank < len(report.gpus) else None
        if gpu is not None and not gpu.problem and gpu.total_gb < needs.trainer_gb:
            raise PermanentInfraError(
                f"training takes at least {_size(needs.trainer_gb)} on each GPU{parts}, GPU {rank} of the node, "
                f"{gpu.name}, has {_size(gpu.total_gb)}: {remedy}"
            )
    for rank in needs.engine_gpu_ranks:
        gpu = report.gpus[rank] if rank < len(report.gpus) else None
        if gpu is not None and not gpu.problem and gpu.total_gb < needs.engine_gb:
            raise PermanentInfraError(
                f"the weights of an engine take {_size(needs.engine_gb)} on each GPU, GPU {rank} of the node, "
                f"{gpu.name}, has {_size(gpu.total_gb)}: give each engine more GPUs (deployment.engine_gpu_ranks), or "
                "take another node"
            )


def _size(gb: float) -> str:
    if gb >= 1000:
        return f"{gb:.0f} GB"
    return f"{gb:.3g} GB" if gb >= 1 else f"{1000 * gb:.3g} MB"


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(str(part) for part in version)
