"""How a trainer or the embedded engine should get memory; set by whoever starts it: glibc reads it only then.

Not here: starting them (tasks/stage.py, launch.py).

A training step on a CPU frees its activations and asks for as much again. By default glibc gives large pieces back to
the system at once, which then hands out zeroed pages one by one: up to a fifth of a small model's step. An engine gains
a tenth of a decoding step at 20M parameters from huge pages.
"""

from __future__ import annotations

KEPT_MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # transparent huge pages: fewer pages to hand out
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # smaller pieces come from the heap, which is kept
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),  # how much free memory at its end is kept
    "MALLOC_TOP_PAD_": str(64 << 20),  # and by how much it grows at a time
}
"""Environment variables under which glibc keeps freed memory; other C libraries ignore them."""
