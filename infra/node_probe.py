"""Print a report about a node, or whether the node can import the training, as one JSON object.

bootstrap.py runs this program on the node.

    python node_probe.py probe ROOT               hardware, versions and disk of the node
    python node_probe.py imports ROOT CODE_DIR [MODULE]... [VARIABLE=]...
                                                  import the training and the user's modules from CODE_DIR, with
                                                  placeholder values for the variables that a job will have

The program uses only the standard library and old syntax, so that an old interpreter can still report its version. The
probe lets each CUDA device add two numbers. The report lists a device that fails with the reason.

Importing torch takes seconds, so successful results are stored in ROOT/.probes. A stored result is reused while the
interpreter, its packages, the driver and the boot of the machine are the same. Free memory, free disk space and the
list of devices are read every time.
"""

import errno
import fcntl
import hashlib
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any  # Any: a JSON object

_KEPT_DIR = ".probes"
_MAX_KEPT_FOLDERS = 20
NVIDIA_SMI_TIMEOUT_S = 30.0
_FIRST_WITH_BFLOAT16 = (8, 0)
"""The compute capability of the A100, NVIDIA's first GPU with bfloat16."""
LOCKLESS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
NO_LOCKS = "its file system has no locks: Lustre's, for one, has to be mounted with -o flock"
_DRIVER, _BOOT = "/proc/driver/nvidia/version", "/proc/sys/kernel/random/boot_id"
_DEVICE = re.compile(r"nvidia\d+$")
_VARIABLES = ("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "LD_", "PYTHON", "VIRTUAL_ENV")
"""Prefixes of environment variables that affect imports or the visible devices."""


def main(argv: "list[str]") -> int:
    verb, root = argv[1], argv[2]
    try:
        document = probe(root) if verb == "probe" else check_imports(root, argv[3], argv[4:])
    except _RefusedModuleError as error:
        document = {"module": error.args[0], "problem": error.args[1]}
    sys.stdout.write("\n" + json.dumps(document) + "\n")  # imported modules may have printed an incomplete line
    return 0


def probe(root: str) -> "dict[str, Any]":
    """Return the report about this node and the directory `root`."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # jobs use this order; CUDA's default begins with the fastest GPU
    total_memory, free_memory = _read_memory()
    document: dict[str, Any] = {
        "python_version": platform.python_version(),
        "torch_version": None,
        "torch_problem": "",
        "torch_build": "",
        "gpus": [],
        "gpu_problem": "",
        "driver": "",
        "num_driver_gpus": 0,
        "num_cpus": os.cpu_count() or 1,
        "total_memory_gb": total_memory / 1e9,
        "free_memory_gb": free_memory / 1e9,
        "free_disk_gb": 0.0,
        "root_problem": "",
    }
    document["root_problem"] = find_root_problem(root)
    if not document["root_problem"]:
        document["free_disk_gb"] = shutil.disk_usage(root).free / 1e9
    rows = _ask_driver()
    document["driver"], document["num_driver_gpus"] = rows[0][-1] if rows else "", len(rows)
    identity = _describe_environment()
    kept = _read_kept(root, "torch", identity)
    gpus = None if kept is None else _refresh_gpus(kept["gpus"], rows)
    if kept is not None and gpus is not None:
        document.update(kept, gpus=gpus)
        return document
    found = _ask_torch(document, rows)
    if found is not None and identity == _describe_environment():  # if not, packages are being installed
        kept = {name: document[name] for name in ("torch_version", "torch_build")}
        _keep(root, "torch", identity, dict(kept, gpus=found))
    return document


def find_root_problem(root: str) -> str:
    """Return why this directory cannot contain run directories, or "" if files can be written and locked there."""
    try:
        os.makedirs(root, exist_ok=True)  # noqa: PTH103 - old syntax, see the head
        with tempfile.TemporaryFile(dir=root) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        return NO_LOCKS if error.errno in LOCKLESS else str(error)
    return ""


class _RefusedModuleError(Exception):
    """A module of the user cannot be imported. The arguments are the module's name and the reason."""


def check_imports(root: str, code_dir: str, names: "list[str]") -> "dict[str, Any]":
    """Import the training and the user's modules from a folder, whose name contains a digest of its content.

    Raises:
        _RefusedModuleError: a module of the user cannot be imported.
        ImportError: the training cannot be imported.
    """
    identity = _describe_environment()
    kept = _read_kept(root, "imports", identity) or {"folders": []}
    asked = " ".join([code_dir, *names])
    if asked not in kept["folders"]:
        sys.path.insert(0, code_dir)
        for job in ("sft_job", "rl_job", "eval_job"):
            importlib.import_module("rollouts_core.jobs." + job)
        for variable in [name[:-1] for name in names if name.endswith("=")]:
            os.environ.setdefault(variable, "not known here")
        for module in [name for name in names if not name.endswith("=")]:
            try:
                importlib.import_module(module)
            except (Exception, SystemExit) as error:
                raise _RefusedModuleError(module, type(error).__name__ + ": " + str(error)) from error
        _keep(root, "imports", identity, {"folders": [*kept["folders"], asked][-_MAX_KEPT_FOLDERS:]})
    return {}


# ── torch and the devices ──


def _ask_torch(document: "dict[str, Any]", rows: "list[list[str]]") -> "list[dict[str, Any]] | None":
    """Add torch's facts to the report. Returns the devices to store, or None if a device failed, or if torch and
    nvidia-smi list different devices."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError, RuntimeError) as error:
        document["torch_problem"] = str(error)
        return None
    document["torch_version"], document["torch_build"] = torch.__version__, _build_of(torch)
    found = []
    try:
        for index in range(torch.cuda.device_count()):
            try:
                found.append(_try_gpu(torch, index))
            except (AssertionError, RuntimeError) as error:  # for example, other programs use all GPU memory
                problem = str(error) or type(error).__name__
                document["gpu_problem"] = document["gpu_problem"] or problem
                document["gpus"].append({"name": "", "total_gb": 0.0, "free_gb": 0.0, "problem": problem})
            else:
                document["gpus"].append({name: value for name, value in found[-1].items() if name != "uuid"})
        if document["gpu_problem"]:
            if not found:
                document["gpus"] = []
            return None
        if not found and has_gpus(rows) and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1"):
            torch.cuda.init()  # raises an error with the reason, for example an old driver
            raise RuntimeError("torch finds no GPU and reports no reason")
    except (AssertionError, RuntimeError) as error:
        document["gpu_problem"] = str(error)
        return None
    return found if _refresh_gpus(found, rows) is not None else None


def _try_gpu(torch: "Any", index: int) -> "dict[str, Any]":
    """Let a device add two numbers, and return its description. Raises RuntimeError if the device cannot compute."""
    assert int(torch.ones(2, device="cuda:" + str(index)).sum()) == 2
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return {
        "name": torch.cuda.get_device_name(index),
        "total_gb": total_bytes / 1e9,
        "free_gb": free_bytes / 1e9,
        "has_bfloat16": torch.cuda.get_device_capability(index) >= _FIRST_WITH_BFLOAT16,
        "uuid": "GPU-" + str(uuid),
    }


def _build_of(torch: "Any") -> str:
    """Return the hardware for which torch was built, in words."""
    version = getattr(torch, "version", None)
    for name, attribute in (("CUDA", "cuda"), ("ROCm", "hip")):
        if getattr(version, attribute, None):
            return name + " " + str(getattr(version, attribute))
    return "the CPU"


def has_gpus(rows: "list[list[str]]") -> bool:
    """Return whether this machine has NVIDIA GPUs: nvidia-smi lists a GPU, or the machine has a GPU's device file.

    The driver's kernel module does not prove that a GPU exists, because a container without GPUs sees the module too.
    """
    return bool(rows) or any(_DEVICE.match(name) for name in os.listdir("/dev"))  # noqa: PTH208 - old syntax


def _refresh_gpus(kept: "list[dict[str, Any]]", rows: "list[list[str]]") -> "list[dict[str, Any]] | None":
    """Return the stored devices with their current free memory, or None if the driver now lists other devices."""
    if not kept:
        return None if has_gpus(rows) else []
    free_gb = _free_memory_of_gpus(rows)
    if sorted(free_gb) != sorted(gpu["uuid"] for gpu in kept):
        return None
    as_they_are = [dict(gpu, free_gb=free_gb[gpu["uuid"]]) for gpu in kept]
    return [{name: value for name, value in gpu.items() if name != "uuid"} for gpu in as_they_are]


def _free_memory_of_gpus(rows: "list[list[str]]") -> "dict[str, float]":
    """Return the free memory in GB by the device's UUID. Returns an empty dict if the driver does not report the free
    memory of every device."""
    try:
        return {uuid: float(free_mib) * 1048576 / 1e9 for uuid, free_mib, _ in rows}
    except ValueError:
        return {}


def _ask_driver() -> "list[list[str]]":
    """Return UUID, free memory in MiB, and driver version of each GPU, as nvidia-smi reports them."""
    query = ["nvidia-smi", "--query-gpu=uuid,memory.free,driver_version", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, stdout=subprocess.PIPE, check=True, timeout=NVIDIA_SMI_TIMEOUT_S).stdout.decode()
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    rows = [[field.strip() for field in line.split(",")] for line in answer.splitlines()]
    return [row for row in rows if len(row) == 3]


# ── kept results ──


def _describe_environment() -> str:
    """Return a digest that changes when packages are installed, the driver changes, or the machine is rebooted."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    seen: list[Any] = [sys.version, sys.prefix, variables, _text_of(_DRIVER), _text_of(_BOOT)]
    folders = [sys.executable]
    # sys.path[0] is this program's own folder, whose changes do not matter.
    folders += [folder for path in sys.path[1:] for folder in (path, path + "/torch", path + "/torch/lib")]
    for folder in folders:
        seen.append([folder, _times_of(folder)])
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()


def _times_of(path: str) -> "list[Any]":
    """Return the modification time of a file. For a folder, return the names in it, with the times of files and
    `*-info` folders."""
    try:
        with os.scandir(path) as entries:
            # Python changes a folder's time when it compiles modules in the folder, so only the folder's name counts.
            return sorted(
                [each.name, _time_of(each) if "-info" in each.name or not each.is_dir() else 0]
                for each in entries
                if each.name != "__pycache__"
            )
    except NotADirectoryError:
        return [os.stat(path).st_mtime_ns]  # noqa: PTH116 - old syntax
    except OSError as error:
        return [str(error.errno)]


def _time_of(entry: "os.DirEntry[str]") -> int:
    try:
        return entry.stat().st_mtime_ns
    except FileNotFoundError:  # the symbolic link is broken
        return entry.stat(follow_symlinks=False).st_mtime_ns


def _text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - old syntax, see the head
            return file.read()
    except OSError:
        return ""


def _path_of(root: str, kind: str) -> str:
    interpreter = hashlib.sha256(sys.executable.encode()).hexdigest()[:16]
    return root + "/" + _KEPT_DIR + "/" + kind + "-" + interpreter + ".json"


def _read_kept(root: str, kind: str, identity: str) -> "dict[str, Any] | None":
    try:
        document = json.loads(_text_of(_path_of(root, kind)))
        return dict(document["found"]) if document["identity"] == identity else None
    except (ValueError, TypeError, KeyError):
        return None


def _keep(root: str, kind: str, identity: str, found: "dict[str, Any]") -> None:
    """Store a result for the next probe. If the file cannot be written, the next probe imports torch again."""
    path = _path_of(root, kind)
    try:
        os.makedirs(root + "/" + _KEPT_DIR, exist_ok=True)  # noqa: PTH103 - old syntax, as below
        part = path + "." + str(os.getpid())
        with open(part, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump({"identity": identity, "found": found}, file)
        os.replace(part, path)  # noqa: PTH105
    except OSError:
        pass


def _read_memory() -> "tuple[int, int]":
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:  # noqa: PTH123 - old syntax, see the head
            rows = dict(line.split(":", 1) for line in file)
        return total, int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return total, total  # macOS does not report free memory; the total is an upper bound


if __name__ == "__main__":
    sys.exit(main(sys.argv))
