"""Say, as one JSON object, which GPUs of this machine can compute; run on a fresh machine by acceptance.py.

By the driver's own library (libcuda), so before anything is installed there: that `nvidia-smi` lists a GPU does not
mean that it can be used. Each GPU fills a piece of its memory, which is read back. Standard library only, and old
syntax, so that every interpreter can run it.

What nvidia-smi lists is asked only where that library cannot be loaded.

    {"has_driver": true, "listed": 0, "gpus": ["NVIDIA H100 80GB HBM3"], "memory": [85028765696], "code": 0,
     "problem": ""}
"""

import ctypes
import json
import subprocess
import sys
from typing import Any  # Any: a JSON object, a shared library

LIBRARY = "libcuda.so.1"
PATTERN = 0x5EED1234
NUM_WORDS = 1 << 20
NAME_BYTES = 256


class RefusedCallError(Exception):
    """The driver answered with another code than success."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(call, code)
        self.call, self.code = call, code


def main() -> int:
    """Try every GPU and print what came out."""
    try:
        cuda = ctypes.CDLL(LIBRARY)
    except OSError as error:
        answer = {"has_driver": False, "listed": count_listed(), "gpus": [], "memory": []}  # type: dict[str, Any]
        answer.update({"code": 0, "problem": str(error)})
    else:
        answer = try_gpus(cuda)
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def count_listed() -> int:
    """How many GPUs nvidia-smi lists; 0 where there is none, or it fails."""
    try:
        listed = subprocess.check_output(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"])
    except (OSError, subprocess.CalledProcessError):
        return 0
    return sum(1 for line in listed.splitlines() if line.startswith((b"GPU-", b"MIG-")))


def try_gpus(cuda: Any) -> "dict[str, Any]":
    """The GPUs that computed, up to the first that did not, with what the driver said about that."""
    names, memory = [], []  # type: list[str], list[int]
    code, problem = 0, ""
    try:
        call(cuda, "cuInit", ctypes.c_uint(0))
        count = ctypes.c_int()
        call(cuda, "cuDeviceGetCount", ctypes.byref(count))
        for index in range(count.value):
            name, num_bytes = try_gpu(cuda, index)
            names.append(name)
            memory.append(num_bytes)
    except RefusedCallError as error:
        code = error.code
        problem = f"GPU {len(names)}: {error.call} answers {code} ({describe(cuda, code)})"
    except ValueError as error:
        problem = f"GPU {len(names)}: {error}"
    return {"has_driver": True, "listed": 0, "gpus": names, "memory": memory, "code": code, "problem": problem}


def try_gpu(cuda: Any, index: int) -> "tuple[str, int]":
    """Have one GPU fill memory; returns its name, and how many bytes of memory it has.

    Raises:
        RefusedCallError: the driver refuses a call.
        ValueError: what was read back is something else.
    """
    device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_ulonglong()
    name = ctypes.create_string_buffer(NAME_BYTES)
    filled = (ctypes.c_uint32 * NUM_WORDS)()
    num_bytes, total_bytes = ctypes.c_size_t(ctypes.sizeof(filled)), ctypes.c_size_t()
    call(cuda, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    call(cuda, "cuDeviceGetName", name, ctypes.c_int(NAME_BYTES), device)
    call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(total_bytes), device)
    call(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call(cuda, "cuCtxSetCurrent", context)
    call(cuda, "cuMemAlloc_v2", ctypes.byref(pointer), num_bytes)
    call(cuda, "cuMemsetD32_v2", pointer, ctypes.c_uint(PATTERN), ctypes.c_size_t(NUM_WORDS))
    call(cuda, "cuMemcpyDtoH_v2", filled, pointer, num_bytes)
    call(cuda, "cuMemFree_v2", pointer)
    if bytes(filled) != PATTERN.to_bytes(4, sys.byteorder) * NUM_WORDS:
        raise ValueError("its memory does not hold what it wrote")
    return name.value.decode("utf-8", "replace"), total_bytes.value


def call(cuda: Any, name: str, *arguments: Any) -> None:
    """Call a function of the driver; RefusedCallError where it does not succeed."""
    code = getattr(cuda, name)(*arguments)
    if code != 0:
        raise RefusedCallError(name, code)


def describe(cuda: Any, code: int) -> str:
    """What the driver calls an error."""
    text = ctypes.c_char_p()
    known = cuda.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text)) == 0 and text.value
    return known.decode("utf-8", "replace") if known else "unknown error"


if __name__ == "__main__":
    sys.exit(main())
