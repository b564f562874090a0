"""Settings of glibc's allocator for trainers and the embedded engine. glibc reads them only at process start.

A training step on a CPU frees its activations and then allocates as much again. By default glibc returns large blocks
to the system at once. The system then provides zeroed pages one by one, which takes up to a fifth of a small model's
step. Huge pages also speed up an engine's decoding step by a tenth at 20M parameters.
"""

from __future__ import annotations

KEPT_MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # transparent huge pages: fewer page faults
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # smaller blocks come from the heap, which is kept
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),  # free memory to keep at the heap's end
    "MALLOC_TOP_PAD_": str(64 << 20),  # growth of the heap per step
}
"""Environment variables that make glibc keep freed memory; other C libraries ignore them."""
