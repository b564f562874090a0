"""Test which GPUs of this machine can compute, and print one JSON object. acceptance.py runs this program on a new
machine.

The test uses the driver's own library (libcuda), so nothing has to be installed. A GPU that `nvidia-smi` lists may
still be unusable. The program therefore lets each GPU fill some memory, and reads the memory back. The program asks
nvidia-smi for a list of GPUs only if libcuda cannot be loaded. The machine's Python may be old, so the code uses only
the standard library and old syntax.

    {"has_driver": true, "listed": 0, "gpus": ["NVIDIA H100 80GB HBM3"], "memory": [85028765696], "code": 0,
     "problem": ""}
"""

import ctypes
import json
import subprocess
import sys
from typing import Any  # Any: a JSON object, a shared library

_LIBRARY = "libcuda.so.1"
_PATTERN = 0x5EED1234
NUM_WORDS = 1 << 20
_NAME_BYTES = 256


class _RefusedCallError(Exception):
    def __init__(self, call: str, code: int) -> None:
        super().__init__(call, code)
        self.call, self.code = call, code


def main() -> int:
    try:
        cuda = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        answer = {"has_driver": False, "listed": _count_listed(), "gpus": [], "memory": []}  # type: dict[str, Any]
        answer.update({"code": 0, "problem": str(error)})
    else:
        answer = _try_gpus(cuda)
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def _count_listed() -> int:
    """Return the number of GPUs that nvidia-smi lists, or 0 if nvidia-smi is missing or fails."""
    try:
        listed = subprocess.check_output(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"])
    except (OSError, subprocess.CalledProcessError):
        return 0
    return sum(1 for line in listed.splitlines() if line.startswith((b"GPU-", b"MIG-")))


def _try_gpus(cuda: Any) -> "dict[str, Any]":
    """Test the GPUs in order until one fails. Returns the GPUs that can compute, and the driver's error."""
    names, memory = [], []  # type: list[str], list[int]
    code, problem = 0, ""
    try:
        call(cuda, "cuInit", ctypes.c_uint(0))
        count = ctypes.c_int()
        call(cuda, "cuDeviceGetCount", ctypes.byref(count))
        for index in range(count.value):
            name, num_bytes = _try_gpu(cuda, index)
            names.append(name)
            memory.append(num_bytes)
    except _RefusedCallError as error:
        code = error.code
        problem = f"GPU {len(names)}: {error.call} answers {code} ({describe(cuda, code)})"
    except ValueError as error:
        problem = f"GPU {len(names)}: {error}"
    return {"has_driver": True, "listed": 0, "gpus": names, "memory": memory, "code": code, "problem": problem}


def _try_gpu(cuda: Any, index: int) -> "tuple[str, int]":
    """Let one GPU fill memory and read it back. Returns the GPU's name and its memory in bytes.

    Raises:
        _RefusedCallError: a call of the driver failed.
        ValueError: the memory does not contain the values that the GPU wrote.
    """
    device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_ulonglong()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    filled = (ctypes.c_uint32 * NUM_WORDS)()
    num_bytes, total_bytes = ctypes.c_size_t(ctypes.sizeof(filled)), ctypes.c_size_t()
    call(cuda, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    call(cuda, "cuDeviceGetName", name, ctypes.c_int(_NAME_BYTES), device)
    call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(total_bytes), device)
    call(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call(cuda, "cuCtxSetCurrent", context)
    call(cuda, "cuMemAlloc_v2", ctypes.byref(pointer), num_bytes)
    call(cuda, "cuMemsetD32_v2", pointer, ctypes.c_uint(_PATTERN), ctypes.c_size_t(NUM_WORDS))
    call(cuda, "cuMemcpyDtoH_v2", filled, pointer, num_bytes)
    call(cuda, "cuMemFree_v2", pointer)
    if bytes(filled) != _PATTERN.to_bytes(4, sys.byteorder) * NUM_WORDS:
        raise ValueError("its memory does not hold what it wrote")
    return name.value.decode("utf-8", "replace"), total_bytes.value


def call(cuda: Any, name: str, *arguments: Any) -> None:
    code = getattr(cuda, name)(*arguments)
    if code != 0:
        raise _RefusedCallError(name, code)


def describe(cuda: Any, code: int) -> str:
    text = ctypes.c_char_p()
    known = cuda.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text)) == 0 and text.value
    return known.decode("utf-8", "replace") if known else "unknown error"


if __name__ == "__main__":
    sys.exit(main())
