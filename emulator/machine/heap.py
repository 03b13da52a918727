"""The heap of this process: the C library's, in which torch keeps its tensors.

It grows and shrinks at its top. Memory freed below a block in use is a hole: its pages can be given back, but the next
allocations are put there first.
"""

from __future__ import annotations

import ctypes
import gc

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.malloc.argtypes, LIBC.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
LIBC.free.argtypes, LIBC.free.restype = [ctypes.c_void_p], None
LIBC.sbrk.argtypes, LIBC.sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
LARGEST_MMAP_THRESHOLD, NEVER_TRIM = 32 << 20, (1 << 31) - 1
#: all below the smallest size that malloc may map instead of taking it from the heap
HOLE_BYTES = (64 << 10, 16 << 10, 4 << 10)


def give_back() -> None:
    """Give freed memory back to the kernel, so that an idle client costs a few megabytes instead of its model."""
    gc.collect()
    LIBC.malloc_trim(0)


def keep() -> None:
    """Let this process keep freed memory for its next use, such as the next round's average of models."""
    LIBC.mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    keep_top()


def keep_top() -> None:
    """Keep memory freed at the heap's top until `give_back`, so that training steps do not fault it in each time.

    After this call malloc no longer learns which sizes to map instead, so train a step before.
    """
    LIBC.mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)


def fill_holes() -> None:
    """Allocate all holes without touching them, so that the heap grows at its top from now on.

    For a process that forks: its forks would otherwise train in the holes, with a quarter more memory.
    """
    give_back()
    end = LIBC.sbrk(0)
    for size in HOLE_BYTES:
        while (hole := LIBC.malloc(size)) is not None and hole + size <= end:
            pass  # never freed
        LIBC.free(hole)
