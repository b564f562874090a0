"""Pins that a node that is not good enough is refused before any work, with a sentence that says what to do."""

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from rollouts.infra.bootstrap import (
    GpuReport,
    NodeNeeds,
    NodeReport,
    check_alike,
    check_imports,
    check_node,
    probe_node,
)
from rollouts.infra.errors import CommandFailedError, PermanentInfraError
from rollouts.infra.node import LocalNode, Node
from rollouts.infra.providers import open_session, provision_node, release_node

GPU = GpuReport(name="NVIDIA H200", total_gb=141.0, free_gb=140.0)
GOOD = NodeReport(
    python="/usr/bin/python3",
    root="/runs",
    python_version="3.11.9",
    torch_version="2.10.0+cu128",
    torch_problem="",
    torch_build="CUDA 12.8",
    gpus=(GPU, GPU),
    gpu_problem="",
    driver="570.86.15",
    num_driver_gpus=2,
    num_cpus=16,
    total_memory_gb=128.0,
    free_memory_gb=100.0,
    free_disk_gb=50.0,
    root_problem="",
)


def test_a_good_node_passes() -> None:
    check_node(GOOD, NodeNeeds(disk_gb=50, num_gpus=2, trainer_gpu_ranks=(0, 1), trainer_gb=141.0))
    assert GOOD.device_summary == "2 x NVIDIA H200"


@pytest.mark.parametrize(
    ("difference", "sentence"),
    [
        ({"gpus": ()}, r"it has CPU with 16 cores, but the leading machine has 2 x NVIDIA H200: .* all have GPUs"),
        ({"torch_version": "2.9.0"}, r"it has torch 2\.9\.0, but the leading machine has 2\.10\.0\+cu128: install"),
    ],
)
def test_machines_that_cannot_train_together_are_told(difference: dict[str, Any], sentence: str) -> None:
    check_alike(GOOD, dataclasses.replace(GOOD, gpus=(GPU,)))
    with pytest.raises(PermanentInfraError, match=sentence):
        check_alike(dataclasses.replace(GOOD, **difference), GOOD)


@pytest.mark.parametrize(
    ("defect", "sentence"),
    [
        ({"python_version": "3.9.1"}, r"Python 3\.11 or newer is needed, .* is 3\.9\.1"),
        ({"torch_version": None, "torch_problem": "No module named 'torch'"}, "cannot import torch .*install"),
        ({"torch_version": "2.5.1"}, r"torch 2\.6 or newer is needed, .* has 2\.5\.1"),
        ({"gpus": (GPU,), "gpu_problem": "error 802"}, r"2 working GPUs are needed, the node has 1 \(error 802\)"),
        (
            {"gpus": (dataclasses.replace(GPU, name="NVIDIA L4", total_gb=24.0), GPU)},
            r"takes at least 100 GB on each GPU, GPU 0 of the node, NVIDIA L4, has 24 GB: train with policy\.lora",
        ),
        ({"free_disk_gb": 3.0}, r"20 GB of free disk are needed at /runs, 3 GB"),
        ({"root_problem": "Read-only file system"}, r"/runs cannot be written \(Read-only file system\)"),
    ],
)
def test_a_defect_is_refused_with_one_sentence(defect: dict[str, Any], sentence: str) -> None:
    report = dataclasses.replace(GOOD, **defect)
    with pytest.raises(PermanentInfraError, match=sentence):
        check_node(report, NodeNeeds(disk_gb=20, num_gpus=2, trainer_gb=100, num_trainers=2, trainer_gpu_ranks=(0, 1)))


TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version"
)


def test_a_machine_is_refused_whose_gpus_torch_cannot_use() -> None:
    report = dataclasses.replace(GOOD, gpus=(), gpu_problem=TOO_OLD, driver="470.57.02")
    with pytest.raises(PermanentInfraError) as caught:
        check_node(report, NodeNeeds(trains_on_gpu=True))
    assert str(caught.value) == (
        "the training needs a GPU that torch can use, torch 2.10.0+cu128 on the node, built for CUDA 12.8, can use "
        "none (NVIDIA's driver is 470.57.02; The NVIDIA driver on your system is too old (found version 11040)): take "
        "a build of torch that the driver supports (node.requirements, node.package_index), or a machine with a newer "
        "driver (node.query.min_cuda), or set deployment.trainer_processes = 1 without trainer_gpu_ranks to train on "
        "the CPU"
    )
    check_node(report, NodeNeeds(trains_on_gpu=False))


def test_a_machine_that_was_rented_for_its_gpus_has_to_have_one() -> None:
    report = dataclasses.replace(GOOD, gpus=(), driver="", num_driver_gpus=0)
    check_node(report, NodeNeeds(trains_on_gpu=True))
    with pytest.raises(PermanentInfraError, match=r"can use none \(its nvidia-smi lists none\)"):
        check_node(report, NodeNeeds(trains_on_gpu=True, is_rented_for_gpus=True))


def test_a_gpu_is_named_that_the_machine_does_not_have() -> None:
    check_node(GOOD, NodeNeeds(num_gpus=1, last_gpu=1))
    with pytest.raises(PermanentInfraError, match="deployment names GPU 2, the node has GPUs 0 to 1: name others"):
        check_node(GOOD, NodeNeeds(num_gpus=1, last_gpu=2))


def test_a_machine_without_gpus_needs_the_memory_of_all_trainers() -> None:
    report = dataclasses.replace(GOOD, gpus=())
    check_node(report, NodeNeeds(num_trainers=2, trainer_gb=64))
    with pytest.raises(PermanentInfraError, match="at least 130 GB of memory, the node has 128 GB"):
        check_node(report, NodeNeeds(num_trainers=2, trainer_gb=65))


def test_trainers_that_share_the_cpu_need_its_memory_and_no_gpu() -> None:
    small = dataclasses.replace(GOOD, gpus=(dataclasses.replace(GPU, total_gb=4.0),))
    check_node(small, NodeNeeds(num_trainers=2, trainer_gb=64))
    with pytest.raises(PermanentInfraError, match="at least 130 GB of memory, the node has 128 GB"):
        check_node(small, NodeNeeds(num_trainers=2, trainer_gb=65))
    with pytest.raises(PermanentInfraError, match="the weights of an engine take 5 GB on each GPU"):
        check_node(small, NodeNeeds(num_trainers=2, trainer_gb=64, engine_gpu_ranks=(0,), engine_gb=5))


def test_the_parts_of_what_is_too_large_are_named_and_engines_are_looked_at_too() -> None:
    needs = NodeNeeds(trainer_gb=150, trainer_parts="in GiB: weights 70.0", engine_gpu_ranks=(1,), engine_gb=142)
    with pytest.raises(PermanentInfraError, match=r"at least 150 GB on each GPU \(in GiB: weights 70\.0\), GPU 0"):
        check_node(GOOD, needs)
    with pytest.raises(PermanentInfraError, match=r"weights of an engine take 142 GB on each GPU, GPU 1 of the node"):
        check_node(GOOD, dataclasses.replace(needs, trainer_gb=0.0))
    check_node(GOOD, dataclasses.replace(needs, trainer_gb=140.0, engine_gb=140.0))


@pytest.mark.slow
def test_the_probe_finds_this_machine(tmp_path: Path) -> None:
    node = provision_node(LocalNode(), tmp_path / "store")
    with open_session(node) as session:
        report = probe_node(session, node)
    assert report.python_version == ".".join(str(part) for part in sys.version_info[:3])
    assert report.torch_version is not None and report.num_cpus == os.cpu_count()
    assert 0 < report.free_memory_gb <= report.total_memory_gb and report.free_disk_gb > 0
    check_node(report, NodeNeeds())


def test_an_interpreter_without_torch_is_reported_and_not_an_error(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    node = provision_node(LocalNode(python=str(bare)), tmp_path / "store")
    with open_session(node) as session:
        report = probe_node(session, node)
    assert report.torch_version is None and "torch" in report.torch_problem


TORCH = """
import sys
from pathlib import Path
from types import SimpleNamespace as Some

Path({log!r}).open("a").write("torch\\n")
__version__ = "2.9.0"
version = Some(cuda="12.8", hip=None)
devices = Path({devices!r}).read_text().split()

class Sum:
    def sum(self):
        return 2

def ones(size, device):
    return Sum()

def init():
    raise AssertionError("Torch not compiled with CUDA enabled")

cuda = Some(
    init=init,
    device_count=lambda: len(devices),
    mem_get_info=lambda index: (1e9, 80e9),
    get_device_name=lambda index: "H200",
    get_device_capability=lambda index: (9, 0),
    get_device_properties=lambda index: Some(uuid=devices[index]),
)
"""
NVIDIA_SMI = """#!/bin/sh
for device in $(cat {listed}); do echo "GPU-$device, $(cat {free}), 570.86.15"; done
"""


class FakePackages:
    """A node whose interpreter finds a torch of ours, which notes every import, and that the driver's program asks."""

    def __init__(self, folder: Path) -> None:
        self.log, self.packages, self.devices = folder / "log", folder / "packages", folder / "devices"
        self.free, tools, self.listed = folder / "free", folder / "tools", folder / "listed"
        for path in (self.packages / "torch", tools, folder / "code" / "rollouts_core" / "jobs"):
            path.mkdir(parents=True)
        self.log.write_text("")
        self.free.write_text("1000")
        self.use_devices("")
        self.code_dir = folder / "code"
        (self.packages / "torch" / "__init__.py").write_text(TORCH.format(log=str(self.log), devices=str(self.devices)))
        for job in ("sft_job", "rl_job", "eval_job"):
            (self.code_dir / "rollouts_core" / "jobs" / f"{job}.py").write_text("import torch\n")
        (tools / "nvidia-smi").write_text(NVIDIA_SMI.format(listed=self.listed, free=self.free))
        python = tools / "python"
        variables = f"PATH={tools}:$PATH PYTHONPATH={self.packages} PYTHONDONTWRITEBYTECODE=1"
        python.write_text(f'#!/bin/sh\nexport {variables}\nexec {sys.executable} -S "$@"\n')
        for program in (python, tools / "nvidia-smi"):
            program.chmod(0o755)
        self.node = provision_node(LocalNode(python=str(python)), folder / "store")

    def use_devices(self, uuids: str, *, of_torch: str | None = None) -> None:
        self.listed.write_text(uuids)
        self.devices.write_text(uuids if of_torch is None else of_torch)

    def change_torch(self, text: str) -> None:
        """Let our torch go on with this."""
        with (self.packages / "torch" / "__init__.py").open("a") as torch:
            torch.write(text)

    def probe(self) -> NodeReport:
        with open_session(self.node) as session:
            return probe_node(session, self.node)

    def check_imports(self, code_dir: Path, modules: dict[str, str] | None = None, *variables: str) -> None:
        with open_session(self.node) as session:
            check_imports(session, self.node, str(code_dir), modules or {}, variables)

    @property
    def num_imports(self) -> int:
        return self.log.read_text().count("torch")


def test_torch_is_asked_once_until_something_of_the_interpreter_changes(tmp_path: Path) -> None:
    fake = FakePackages(tmp_path)
    first, second = fake.probe(), fake.probe()
    assert (first.torch_version, second.torch_version, fake.num_imports) == ("2.9.0", "2.9.0", 1)
    (fake.packages / "orjson-3.11.dist-info").mkdir()
    assert fake.probe().torch_version == "2.9.0" and fake.num_imports == 2
    torch = fake.packages / "torch" / "__init__.py"
    torch.write_text(torch.read_text().replace("2.9.0", "2.10.0"))
    assert fake.probe().torch_version == "2.10.0" and fake.num_imports == 3
    fake.probe()
    assert fake.num_imports == 3


def test_what_went_wrong_is_asked_again(tmp_path: Path) -> None:
    fake = FakePackages(tmp_path)
    torch = fake.packages / "torch" / "__init__.py"
    text = torch.read_text()
    torch.write_text(text + "raise OSError('libcuda.so')\n")
    for _ in range(2):
        assert fake.probe().torch_problem == "libcuda.so"
    assert fake.num_imports == 2


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has devices of its own")
def test_devices_are_asked_for_their_memory_every_time_and_tried_again_when_they_are_others(tmp_path: Path) -> None:
    fake = FakePackages(tmp_path)
    fake.use_devices("a b")
    assert [gpu.free_gb for gpu in fake.probe().gpus] == [1.0, 1.0]
    assert (
        fake.probe().gpus
        == (GpuReport(name="H200", total_gb=80.0, free_gb=1000 * 1048576 / 1e9, has_bfloat16=True),) * 2
    )
    fake.free.write_text("2000")
    assert [gpu.free_gb for gpu in fake.probe().gpus] == [2000 * 1048576 / 1e9] * 2
    assert fake.num_imports == 1
    fake.use_devices("a c")
    fake.probe()
    assert fake.num_imports == 2
    fake.free.write_text("[GPU is lost]")
    for num_imports in (3, 4):
        assert len(fake.probe().gpus) == 2 and fake.num_imports == num_imports


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has devices of its own")
def test_torch_says_why_it_sees_no_device_that_the_driver_lists(tmp_path: Path) -> None:
    fake = FakePackages(tmp_path)
    fake.use_devices("a b", of_torch="")
    for _ in range(2):
        found = fake.probe()
        assert (found.gpus, found.gpu_problem) == ((), "Torch not compiled with CUDA enabled")
        assert (found.driver, found.num_driver_gpus, found.torch_build) == ("570.86.15", 2, "CUDA 12.8")
    fake.use_devices("a b")
    assert fake.probe().gpu_problem == "" and fake.probe().torch_build == "CUDA 12.8"


FASTEST_FIRST = """
import os

if os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
    devices.reverse()
cuda.mem_get_info = lambda index: (1e9, {"small": 12e9, "large": 24e9}[devices[index]])
"""


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has devices of its own")
def test_unlike_gpus_are_counted_as_jobs_count_them(tmp_path: Path) -> None:
    fake = FakePackages(tmp_path)
    fake.use_devices("small large")
    fake.change_torch(FASTEST_FIRST)
    report = fake.probe()
    assert [gpu.total_gb for gpu in report.gpus] == [12.0, 24.0] == [gpu.total_gb for gpu in fake.probe().gpus]
    check_node(report, NodeNeeds(num_gpus=1, last_gpu=1, trainer_gpu_ranks=(1,), trainer_gb=20.0))


ALL_TAKEN = """
def ones(size, device):
    if device == "cuda:0":
        raise RuntimeError("CUDA error: out of memory")
    return Sum()
"""


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has devices of its own")
def test_a_gpu_that_others_use_up_does_not_hide_those_after_it(tmp_path: Path) -> None:
    fake = FakePackages(tmp_path)
    fake.use_devices("a b")
    fake.change_torch(ALL_TAKEN)
    for _ in range(2):
        report = fake.probe()
        assert report.gpus[1] == GpuReport(name="H200", total_gb=80.0, free_gb=1.0, has_bfloat16=True)
        assert report.device_summary == "1 x H200"
    check_node(report, NodeNeeds(num_gpus=1, last_gpu=1, trains_on_gpu=True, trainer_gpu_ranks=(1,), trainer_gb=60.0))
    for needs in (NodeNeeds(num_gpus=1, trainer_gpu_ranks=(0,)), NodeNeeds(trains_on_gpu=True)):
        with pytest.raises(PermanentInfraError, match=r"GPU 0 of the node cannot compute \(CUDA error: out of"):
            check_node(report, needs)
    with pytest.raises(PermanentInfraError, match="2 working GPUs are needed, the node has 1"):
        check_node(report, NodeNeeds(num_gpus=2, trainer_gpu_ranks=(0, 1)))


def test_gpus_that_were_hidden_on_purpose_are_not_missed(tmp_path: Path) -> None:
    fake = FakePackages(tmp_path)
    fake.use_devices("a b", of_torch="")
    python = Path(fake.node.python)
    python.write_text(python.read_text().replace("export ", "export CUDA_VISIBLE_DEVICES= "))
    assert fake.probe().gpu_problem == ""


def test_code_is_imported_once_and_other_code_too(tmp_path: Path) -> None:
    fake = FakePackages(tmp_path)
    for _ in range(2):
        fake.check_imports(fake.code_dir)
    assert fake.num_imports == 1
    other = tmp_path / "other"
    shutil.copytree(fake.code_dir, other)
    for code_dir in (other, fake.code_dir):
        fake.check_imports(code_dir)
    assert fake.num_imports == 2
    (other / "rollouts_core" / "jobs" / "rl_job.py").write_text("import no_such_module\n")
    shutil.copytree(other, tmp_path / "broken")
    for _ in range(2):
        with pytest.raises(PermanentInfraError, match=r"cannot import the training .*no_such_module"):
            fake.check_imports(tmp_path / "broken")


def test_a_link_that_leads_nowhere_hides_no_change_of_the_packages(tmp_path: Path) -> None:
    fake = FakePackages(tmp_path)
    (fake.packages / "gone.egg-link").symlink_to("nowhere")
    own = fake.packages / "package_of_a_test.py"
    own.write_text("")
    (fake.code_dir / "rollouts_core" / "jobs" / "rl_job.py").write_text("import package_of_a_test\n")
    fake.check_imports(fake.code_dir)
    own.unlink()
    with pytest.raises(PermanentInfraError, match="No module named 'package_of_a_test'"):
        fake.check_imports(fake.code_dir)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import sympy_of_a_test\n", "ModuleNotFoundError: No module named 'sympy_of_a_test'"),
        ("print('{}')\nopen('no_such_words.txt')\n", r"FileNotFoundError: .*no_such_words\.txt'"),
        ("import sys\nsys.exit()\n", "SystemExit: "),
    ],
)
def test_a_module_of_the_users_that_the_node_cannot_import_is_one_sentence(
    code: str, problem: str, tmp_path: Path
) -> None:
    fake = FakePackages(tmp_path)
    (fake.code_dir / "my_rewards.py").write_text("print('hello')\n")
    (fake.code_dir / "my_environment.py").write_text(code)
    modules = {"rollout.reward_fn": "my_rewards", "rollout.environment": "my_environment"}
    for _ in range(2):
        with pytest.raises(
            PermanentInfraError, match=rf"^rollout\.environment: .* import my_environment \({problem}\)"
        ):
            fake.check_imports(fake.code_dir, modules)
    fake.check_imports(fake.code_dir, {"rollout.reward_fn": "my_rewards"})


def test_a_module_of_the_users_may_read_the_keys_that_its_job_has(tmp_path: Path) -> None:
    fake = FakePackages(tmp_path)
    (fake.code_dir / "my_rewards.py").write_text("import os\nKEY = os.environ['KEY_OF_A_TEST']\n")
    modules = {"rollout.reward_fn": "my_rewards"}
    with pytest.raises(PermanentInfraError, match="KEY_OF_A_TEST"):
        fake.check_imports(fake.code_dir, modules)
    fake.check_imports(fake.code_dir, modules, "KEY_OF_A_TEST")


def test_a_root_that_cannot_be_a_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    node = Node(name="local", kind="local", root=str(tmp_path / "file"), python=str(bare))
    with open_session(node) as session:
        assert "File exists" in probe_node(session, node).root_problem


def test_an_interpreter_that_is_none_is_named(tmp_path: Path) -> None:
    node = provision_node(LocalNode(python="/bin/false"), tmp_path)
    with open_session(node) as session, pytest.raises(CommandFailedError, match="/bin/false"):
        probe_node(session, node)


def test_a_local_node_is_plain_json_and_uses_the_store_and_our_interpreter(tmp_path: Path) -> None:
    node = provision_node(LocalNode.model_validate({"kind": "local", "gpu_type": "of another form"}), tmp_path)
    assert node == Node(name="local", kind="local", root=str(tmp_path), python=sys.executable)
    record = json.loads(json.dumps(dataclasses.asdict(node)))
    assert TypeAdapter(Node).validate_python(record) == node
    release_node(node)
    assert tmp_path.exists()


def test_a_root_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PermanentInfraError, match="choose another root"):
        provision_node(LocalNode(root=str(tmp_path / "file" / "runs")), tmp_path)


def test_every_field_of_the_form_has_a_help_text() -> None:
    fields = LocalNode.model_json_schema()["properties"]
    assert all(field["description"] for field in fields.values())
