"""Environment variables for glibc's memory allocator, for trainers and the embedded engine.

A training step on a CPU frees its activations, and the next step allocates as much memory again. By default glibc
returns large blocks to the system at once. The kernel zeroes each page before it hands it out again, which takes up to
a fifth of a small model's step. Huge pages also make a decoding step of a model with 20M parameters a tenth faster.
glibc reads these variables only when a process starts.
"""

from __future__ import annotations

KEPT_MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # transparent huge pages: fewer page faults
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # smaller blocks come from the heap, whose memory is kept
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),  # bytes of free memory to keep at the end of the heap
    "MALLOC_TOP_PAD_": str(64 << 20),  # bytes by which the heap grows at a time
}
"""Variables that make glibc keep freed memory. Other C libraries ignore them."""
