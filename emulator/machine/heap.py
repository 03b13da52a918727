"""The heap of this process: the C library's, in which torch keeps its tensors.

It grows and shrinks at its top. What was freed below something that lives on is a hole: its pages can be given back,
but what is allocated next is put there first.
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
    """Give the memory of what was freed back to the kernel: an idle client then costs megabytes, not its model."""
    gc.collect()
    LIBC.malloc_trim(0)


def keep() -> None:
    """Have this process keep what it frees, for the next use: where models are averaged, the next round's average."""
    LIBC.mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    keep_top()


def keep_top() -> None:
    """Have what is freed at the heap's top stay until `give_back`: else each training step would fault it in again.

    From then on malloc no longer learns from what is freed which sizes to map instead, so let it train a step before.
    """
    LIBC.mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)


def fill_holes() -> None:
    """Take the holes out of use, without touching them: from now on the heap grows at its top.

    For a process that forks: its forks would train in holes between what is alive, with a quarter more memory.
    """
    give_back()
    end = LIBC.sbrk(0)
    for size in HOLE_BYTES:
        while (hole := LIBC.malloc(size)) is not None and hole + size <= end:
            pass  # never freed
        LIBC.free(hole)
