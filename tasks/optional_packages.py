"""Find the optional packages that a run's settings need, and check that each machine has or will get the packages.

Not here: required packages (infra/bootstrap.py), packages of engines (installed_engines.py), installing packages on a
machine (infra/environment.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rollouts.infra.environment import NODE_EXTRAS, installed_requirements, read_requirements
from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.node import Node, PackageSettings, RentedNode
from rollouts.infra.session import Session
from rollouts_core.config import Config

CHECK_TIMEOUT_S = 60.0
GPU_PLUGINS = ("jax-cuda", "jax-rocm")
FIND_MISSING = (
    "import importlib.util as util, json, sys; "
    "print(json.dumps([name for name in sys.argv[1:] if util.find_spec(name) is None]))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalPackage:
    """A package that only some settings need, for example peft for LoRA."""

    module: str
    distribution: str
    extra: str = ""
    """The extra of this project (`pip install rollouts[<extra>]`) that includes the package. Empty without an extra."""
    instead: str = ""
    """The name of an alternative package, which is also the name of that package's module."""

    @property
    def called(self) -> str:
        """Text for messages: the distribution, or "<distribution> or <alternative>"."""
        return f"{self.distribution} or {self.instead}" if self.instead else self.distribution


PEFT = OptionalPackage(module="peft", distribution="peft", extra="lora")
JAX = OptionalPackage(module="jax", distribution="jax", extra="jax")
FLASH_ATTENTION = {  # transformers can use the package kernels instead of these packages
    "flash_attention_2": OptionalPackage(module="flash_attn", distribution="flash-attn", instead="kernels"),
    "flash_attention_3": OptionalPackage(module="flash_attn_interface", distribution="flash-attn-3", instead="kernels"),
}
OF_ENVIRONMENTS = {
    "math_verify": OptionalPackage(module="math_verify", distribution="math-verify", extra="math"),
    "verifiers": OptionalPackage(module="verifiers", distribution="verifiers", extra="verifiers"),
}


def needed_packages(config: Config, *, trains: bool = True) -> dict[str, OptionalPackage]:
    """The optional packages that the run's stages import, by the setting that needs each package.

    Args:
        trains: False if the run only evaluates.
    """
    needed: dict[str, OptionalPackage] = {}
    for name, training in config.trainings.items() if trains else ():
        section, policy = f"training.{name}.policy", training.policy
        if policy.lora.rank:
            needed[f"{section}.lora"] = PEFT
        if policy.backend == "jax":
            needed[f'{section}.backend "jax"'] = JAX
        if package := FLASH_ATTENTION.get(policy.attention):
            needed[f'{section}.attention "{policy.attention}"'] = package
    samples = (trains and config.is_graded) or config.evaluation.metric == "accuracy"
    if samples and (package := OF_ENVIRONMENTS.get(config.rollout.environment_name)):
        needed[f'rollout.environment "{config.rollout.environment_name}"'] = package
    return needed


def check_packages(session: Session, node: Node, config: Config, *, trains: bool = True) -> None:
    """Raise PermanentInfraError if a node's interpreter lacks an optional package that the run's settings need."""
    needed = needed_packages(config, trains=trains)
    if not needed:
        return
    modules = sorted({name for package in needed.values() for name in (package.module, package.instead) if name})
    found = session.run([node.python, "-c", FIND_MISSING, *modules], timeout_s=CHECK_TIMEOUT_S, may_repeat=True)
    missing = json.loads(found.stdout.splitlines()[-1])
    for setting, package in needed.items():
        if package.module in missing and (not package.instead or package.instead in missing):
            remedy = f"run pip install 'rollouts[{package.extra}]' there" if package.extra else "install one there"
            raise PermanentInfraError(
                f"{setting} needs {package.called}, which {node.python} does not have: {remedy}, or name another "
                "interpreter in the node's settings"
            )


def check_sent_packages(settings: PackageSettings, config: Config, *, trains: bool = True) -> None:
    """Raise PermanentInfraError if a run would not install an optional package that its settings need.

    Args:
        settings: the settings of a machine on which the run installs packages.
    """
    needed = needed_packages(config, trains=trains)
    if not needed:
        return
    file = settings.requirements
    wanted = [Requirement(each) for each in (read_requirements(Path(file)) if file else installed_requirements())]
    names = {canonicalize_name(each.name) for each in wanted}
    for setting, package in needed.items():
        if names.isdisjoint((package.distribution, package.instead)):
            raise PermanentInfraError(f"{setting} needs {package.called}, {_remedy(settings, package)}")
        if package is JAX and isinstance(settings, RentedNode) and not _has_gpu_build(wanted):
            raise PermanentInfraError(
                f"{setting}: {file} (node.requirements) lists the CPU build of JAX, which would leave the rented GPU "
                "unused: list a GPU build instead, for example jax[cuda12]==0.7.2"
            )


def _has_gpu_build(requirements: Sequence[Requirement]) -> bool:
    """True if the requirements have JAX with GPU support: an extra such as jax[cuda12] or a GPU plugin of JAX."""
    extras = {extra for each in requirements if each.name == JAX.distribution for extra in each.extras}
    return bool(extras) or any(canonicalize_name(each.name).startswith(GPU_PLUGINS) for each in requirements)


def _remedy(settings: PackageSettings, package: OptionalPackage) -> str:
    """Text for messages: why a run would not install the package, and what the user can do."""
    if settings.requirements:
        return f"which {settings.requirements} (node.requirements) does not list: add it there"
    if package.extra in NODE_EXTRAS:
        return (
            "which is not installed here, and a run installs only packages that are installed here: run "
            f"pip install 'rollouts[{package.extra}]' here"
        )
    return (
        f"which a run does not install, because each kind of device needs its own build: list all packages, with "
        f"{package.distribution}'s build for that machine, in a file and name it as node.requirements, or install them "
        'there yourself (node.install = "nothing")'
    )
