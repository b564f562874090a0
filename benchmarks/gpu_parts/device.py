"""Which GPU there is, and a sentence if the check cannot run on it.

python -m gpu_parts.device     prints the facts as JSON; a process of its own, so that the parent loads no torch
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from importlib import metadata

MIN_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 units, which torch's and flash-attn's kernels for packed rows need."""
PACKAGES = ("torch", "transformers", "peft", "accelerate", "trl", "flash_attn", "sglang", "vllm", "prefect", "numpy")
"""Packages whose versions the record names, if they are installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The GPU of this machine, as torch reports it."""

    torch: str
    """Its version."""
    cuda: str = ""
    """Version of CUDA that it was built for; empty for a build without CUDA."""
    rocm: str = ""
    """Version of ROCm that it was built for; empty for another build."""
    has_mps: bool = False
    """Whether this is a Mac with a GPU that torch can use."""
    error: str = ""
    """torch's error at its first use of the GPU; empty if it works."""
    name: str = ""
    """Name of the GPU; empty without a GPU."""
    capability: tuple[int, int] = (0, 0)
    """Its compute capability."""
    kernels: tuple[str, ...] = ()
    """Architectures that this torch has kernels for, like sm_90."""
    gib: float = 0.0
    """Memory of the GPU."""
    driver: str = ""
    """Newest version of CUDA that the driver supports."""
    packages: dict[str, str]
    """Versions of PACKAGES."""
    python: str
    """Version of Python."""

    @property
    def device(self) -> str:
        """The GPU in words."""
        return f"{self.name}, {self.gib:.0f} GiB, driver for CUDA {self.driver}, torch for CUDA {self.cuda}"


def find_problem(facts: Facts) -> str:
    """Why the check cannot run here, and what to do; empty if it can."""
    if facts.rocm:
        return f"this torch ({facts.torch}) is built for ROCm {facts.rocm}: only NVIDIA GPUs are supported, use one"
    if not facts.cuda:
        found = "Apple's MPS is not supported" if facts.has_mps else "another usable GPU was not found"
        return (
            f"this torch ({facts.torch}) has no CUDA, and {found}: install a build of torch for CUDA on a machine with "
            "an NVIDIA GPU, or try the check on the CPU with --rehearse"
        )
    if facts.error:
        return (
            f"torch {facts.torch} cannot use a GPU here ({facts.error}): look at nvidia-smi, and install a driver for "
            f"CUDA {facts.cuda} or newer, or a torch for an older CUDA"
        )
    if facts.capability < MIN_CAPABILITY:
        return (
            f"{facts.name} has compute capability {_dotted(facts.capability)}, the check needs "
            f"{_dotted(MIN_CAPABILITY)} or newer, for bfloat16: use an Ampere GPU (A100, RTX 30) or a newer one"
        )
    if facts.kernels and not _has_kernels(facts):
        return (
            f"torch {facts.torch} has no kernels for {facts.name} (compute capability {_dotted(facts.capability)}), "
            f"only for {', '.join(facts.kernels)}: install a build of torch for this GPU"
        )
    return ""


def _has_kernels(facts: Facts) -> bool:
    """An architecture runs the kernels of an older minor version, and compiles those that are kept as PTX."""
    major, minor = facts.capability
    for kernel in facts.kernels:
        kind, _, digits = kernel.partition("_")
        number = int("".join(filter(str.isdigit, digits)))
        if kind == "compute" and number <= 10 * major + minor:
            return True
        if kind == "sm" and number // 10 == major and number % 10 <= minor:
            return True
    return False


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def read_facts() -> Facts:
    """The facts of this machine; uses the GPU for a moment."""
    import torch  # heavy, and only for the process that asks

    packages = {name: _version(name) for name in PACKAGES if _version(name)}
    known = Facts(
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        rocm=torch.version.hip or "",
        has_mps=torch.backends.mps.is_available(),
        packages=packages,
        python=platform.python_version(),
    )
    if known.rocm or not known.cuda:
        return known
    try:
        torch.zeros(1, device="cuda").add_(1).item()
    except (RuntimeError, AssertionError) as error:
        return _with(known, error=str(error).partition("\n")[0].rstrip("."), **_gpu_of(torch))
    return _with(known, **_gpu_of(torch))


def _gpu_of(torch: object) -> dict[str, object]:
    """Name, capability and memory of the first GPU, as far as torch can say."""
    cuda = torch.cuda  # type: ignore[attr-defined]  # the module, which is imported late
    try:
        properties = cuda.get_device_properties(0)
    except (RuntimeError, AssertionError):
        return {}
    driver = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]  # 12040 is 12.4
    return {
        "name": properties.name,
        "capability": (properties.major, properties.minor),
        "kernels": tuple(cuda.get_arch_list()),
        "gib": properties.total_memory / 2**30,
        "driver": f"{driver // 1000}.{driver % 1000 // 10}",
    }


def _with(facts: Facts, **changes: object) -> Facts:
    return Facts(**{**asdict(facts), **changes})


def from_json(text: str) -> Facts:
    """The facts that this module printed."""
    told = json.loads(text)
    return Facts(**{**told, "capability": tuple(told["capability"]), "kernels": tuple(told["kernels"])})


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    print(json.dumps(asdict(read_facts())))
