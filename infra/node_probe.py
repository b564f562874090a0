"""Print, as one JSON object, what a node has: `python node_probe.py ROOT`, run on the node itself by bootstrap.py.

Standard library only, and old syntax, so that an interpreter that is too old can say so. Each CUDA device has to add
two numbers: a device that the driver lists and that cannot compute is not there.
"""

import importlib
import json
import os
import platform
import shutil
import sys
import tempfile
from typing import Any  # Any: a JSON object


def main(root: str) -> None:
    """Print the report about this node and about the directory `root`."""
    total_memory, free_memory = _read_memory()
    document: dict[str, Any] = {
        "python_version": platform.python_version(),
        "torch_version": None,
        "torch_problem": "",
        "gpus": [],
        "gpu_problem": "",
        "num_cpus": os.cpu_count() or 1,
        "total_memory_gb": total_memory / 1e9,
        "free_memory_gb": free_memory / 1e9,
        "free_disk_gb": 0.0,
        "root_problem": "",
    }
    try:
        os.makedirs(root, exist_ok=True)  # noqa: PTH103 - old syntax, see the head
        with tempfile.TemporaryFile(dir=root):
            pass
        document["free_disk_gb"] = shutil.disk_usage(root).free / 1e9
    except OSError as error:
        document["root_problem"] = str(error)
    _add_torch(document)
    sys.stdout.write(json.dumps(document) + "\n")


def _add_torch(document: "dict[str, Any]") -> None:
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError, RuntimeError) as error:
        document["torch_problem"] = str(error)
        return
    document["torch_version"] = torch.__version__
    try:
        for index in range(torch.cuda.device_count()):
            assert int(torch.ones(2, device="cuda:" + str(index)).sum()) == 2
            free_bytes, total_bytes = torch.cuda.mem_get_info(index)
            gpu = {"name": torch.cuda.get_device_name(index)}
            document["gpus"].append({**gpu, "total_gb": total_bytes / 1e9, "free_gb": free_bytes / 1e9})
        if not document["gpus"] and os.path.exists("/proc/driver/nvidia/version"):  # noqa: PTH110 - old syntax
            torch.cuda.init()  # says why it sees none: a driver that is too old, or a build without CUDA
    except (AssertionError, RuntimeError) as error:
        document["gpu_problem"] = str(error)


def _read_memory() -> "tuple[int, int]":
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/proc/meminfo") as file:  # noqa: PTH123 - old syntax, see the head
            rows = dict(line.split(":", 1) for line in file)
        return total, int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return total, total  # macOS counts differently; all of it is the honest upper bound


if __name__ == "__main__":
    main(sys.argv[1])
