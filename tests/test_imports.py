"""Who may import whom. Without this, light code grows heavy and layers grow together one import at a time."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollouts_core

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("flows", "tasks", "infra", "rollouts_core")

ALLOWED_OWN = {
    "flows": {"flows", "tasks", "infra", "rollouts_core"},
    "tasks": {"tasks", "infra", "rollouts_core"},
    "infra": {"infra"},
    "rollouts_core": {"rollouts_core"},
}
CONFINED = {
    "prefect": ("flows/", "tasks/"),
    "torch": ("rollouts_core/",),
    "transformers": ("rollouts_core/",),
    "jax": ("rollouts_core/backends/jax_model.py", "rollouts_core/backends/jax.py"),
    "paramiko": ("infra/ssh/connection.py", "infra/ssh/login_keys.py"),
    "fsspec": ("infra/stores/object_store.py",),
}


def test_packages_import_only_what_lies_below_them() -> None:
    wrong = [
        f"{path} imports {module}"
        for path, module in _imports()
        for package in [module.removeprefix("rollouts.").partition(".")[0]]
        if package in PACKAGES and package not in ALLOWED_OWN[path.partition("/")[0]]
    ]
    assert wrong == []


def test_no_package_is_imported_by_a_name_that_others_may_have() -> None:
    generic = {"flows", "tasks", "infra"}
    assert [f"{path} imports {module}" for path, module in _imports() if module.partition(".")[0] in generic] == []


def test_heavy_libraries_stay_in_their_rooms() -> None:
    wrong = [
        f"{path} imports {module}"
        for path, module in _imports()
        for library in [module.partition(".")[0]]
        if library in CONFINED and not path.startswith(CONFINED[library])
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "module",
    [
        "rollouts_core",
        "rollouts_core.config",
        "rollouts_core.types",
        "rollouts_core.job",
        "rollouts_core.fingerprint",
        "rollouts_core.report",
        "rollouts_core.stages.planning",
        "rollouts.tasks.plan",
        "rollouts.tasks.artifacts",
        "rollouts.infra.jobs",
        "rollouts.flows.cli",
    ],
)
def test_the_orchestrator_stays_light(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'transformers', 'paramiko'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "spared"),
    [
        ("eval_job", "transformers.modeling_utils torch._dynamo torch.distributed.fsdp"),
        ("sft_job", "aiohttp rollouts_core.backends.fsdp rollouts_core.embedded.app"),
        ("rl_job", "rollouts_core.backends.fsdp"),
        ("serve_job", "transformers"),
    ],
)
def test_a_job_does_not_load_what_it_can_spare(job: str, spared: str) -> None:
    code = f"import sys, rollouts_core.jobs.{job}; sys.exit(str(set({spared!r}.split()) & set(sys.modules) or ''))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert loaded.stderr.strip() == ""


IMPORT_EACH_FIRST = """
import importlib, sys
for module in sys.argv[2:]:
    for name in [each for each in sys.modules if f"{each}.".startswith(f"{sys.argv[1]}.")]:
        del sys.modules[name]
    try:
        importlib.import_module(module)
    except ImportError as error:
        print(f"{module}: {error}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("package", ["infra", "tasks"])
def test_every_module_can_be_the_first_that_is_imported(package: str) -> None:
    files = [path.relative_to(ROOT) for path in sorted((ROOT / package).rglob("*.py")) if path.stem != "__init__"]
    modules = [".".join(("rollouts", *path.with_suffix("").parts)) for path in files]
    command = [sys.executable, "-c", IMPORT_EACH_FIRST, f"rollouts.{package}", *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "", "modules that import each other in a circle"


PACKAGES_BESIDE_TORCH = (
    "pydantic datasets orjson blake3 jsonschema tomli_w httpx_aiohttp starlette uvicorn httptools trl prefect"
)
"""What a machine with torch and transformers often lacks."""
NEEDED = {
    "": "types batch filters comparison metrics seeds stopping optimizer_step data.packing data.data_buffer "
    "algorithms.mismatch model.attention model.logprobs model.model_shape model.rms_norm model.weight_sample "
    "backends.optim backends.process_group backends.protocol backends.snapshot",
    "pydantic": "checkpoint config job fingerprint algorithms.advantages algorithms.loss data.dataset model.policy "
    "model.varlen backends.pytorch backends.fsdp rl_batch sft checks.resource_needs",
    "pydantic blake3": "embedded.decoder embedded.segments",
    "pydantic jsonschema": "environments rewards",
    "pydantic blake3 jsonschema orjson httpx_aiohttp": "engines rl rollout.manager",
}
"""The core's parts by those of the packages that they need to be imported."""
IMPORT_WITHOUT = """
import importlib, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split():
            raise ModuleNotFoundError(f"no module {name}", name=name)
sys.meta_path.insert(0, Missing())
for part in sys.argv[2:]:
    for name in [each for each in sys.modules if each.partition(".")[0] == "rollouts_core"]:
        del sys.modules[name]
    try:
        importlib.import_module(f"rollouts_core.{part}")
    except ModuleNotFoundError as error:
        print(part)
"""


@pytest.mark.slow
@pytest.mark.parametrize("needed", NEEDED)
def test_a_part_of_the_core_needs_no_more_packages_than_the_table_says(needed: str) -> None:
    missing = set(PACKAGES_BESIDE_TORCH.split()) - set(needed.split())
    able = {part for names, parts in NEEDED.items() if not missing & set(names.split()) for part in parts.split()}
    every = " ".join(NEEDED.values()).split()
    command = [sys.executable, "-c", IMPORT_WITHOUT, " ".join(missing), *every]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == set(every) - able


@pytest.mark.slow
def test_prefect_is_not_imported_before_its_environment_is_set() -> None:
    code = "import sys, rollouts.flows.cli, rollouts.flows.preflight; sys.exit('prefect' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_every_public_name_exists() -> None:
    assert [name for name in rollouts_core.__all__ if not hasattr(rollouts_core, name)] == []


@pytest.mark.slow
def test_no_module_uses_global_variables() -> None:
    wrong = [
        str(path) for path in _files() for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Global)
    ]
    assert wrong == []


def _files() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def _imports() -> Iterator[tuple[str, str]]:
    """(file, module) for every import, also those inside functions."""
    for path in _files():
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((name, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                yield name, node.module
