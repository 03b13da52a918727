"""The heap of this process: the C library's, in which torch keeps its tensors.

It grows and shrinks at its top. What was freed below something that lives on is a hole: its pages can be given back,
but what is allocated next is put there first.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
from collections.abc import Iterator

import numpy as np

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.malloc.argtypes, LIBC.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
LIBC.free.argtypes, LIBC.free.restype = [ctypes.c_void_p], None
LIBC.sbrk.argtypes, LIBC.sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of mallopt(3)
LARGEST_MMAP_THRESHOLD, NEVER_TRIM = 32 << 20, (1 << 31) - 1
#: all below the smallest size that malloc may map instead of taking it from the heap
HOLE_BYTES = (64 << 10, 16 << 10, 4 << 10)
#: how many blocks of a size NumPy keeps back for its next arrays, and for which sizes that matters here
NUMPY_KEEPS, NUMPY_BYTES, NUMPY_DIMENSIONS = 7, range(8, 264, 8), range(1, 6)

Piece = tuple[int, int]  # its address and size


def let_go(*, small_blocks: bool = False) -> None:
    """Give the memory of what is over back to the kernel: an idle client costs megabytes, not its model.

    With `small_blocks` also those that NumPy keeps back, which hold the heap up. That takes a tenth of a millisecond.
    """
    gc.collect()
    if small_blocks:
        for size in NUMPY_BYTES:
            _renew_numpy_blocks((size,))
        for dimensions in NUMPY_DIMENSIONS:
            _renew_numpy_blocks((0,) * dimensions)
    LIBC.malloc_trim(0)


def _renew_numpy_blocks(shape: tuple[int, ...]) -> None:
    """Have NumPy keep other blocks for its next arrays than those freed last, which may lie high."""
    high = [np.empty(shape, np.uint8) for _ in range(NUMPY_KEEPS)]
    low = [np.empty(shape, np.uint8) for _ in range(NUMPY_KEEPS)]
    del low  # these are kept
    del high  # so these are really freed


def keep() -> None:
    """Have this process keep what it frees, for the next use: where models are averaged, the next round's average."""
    LIBC.mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    LIBC.mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)


def keep_top() -> None:
    """Have what is freed at the heap's top stay until `let_go`: else each training step would find it gone, or not.

    From then on malloc no longer learns from what is freed which sizes to map instead, so let it train a step before.
    """
    LIBC.mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)


def keep_all() -> None:
    """As `keep`, and have even the largest pieces come from the heap."""
    keep()
    LIBC.mallopt(M_MMAP_MAX, 0)


def fill_holes() -> None:
    """Take the holes out of use, without touching them: from now on the heap grows at its top.

    For a process that forks: its forks would train in holes between what is alive, with a quarter more memory.
    """
    let_go(small_blocks=True)
    end = top()
    for size in HOLE_BYTES:
        while (hole := LIBC.malloc(size)) is not None and hole + size <= end:
            pass  # never freed
        LIBC.free(hole)


def grow_to_multiple_of(size: int) -> None:
    """Have what is allocated next at the top lie a page before a multiple of this size, and leave the gap unused."""
    probe = LIBC.malloc(size)
    if probe is not None:
        LIBC.free(probe)
        LIBC.malloc(max(0, -probe % size - mmap.PAGESIZE))  # never freed


def top() -> int:
    """The address at which the heap ends."""
    return int(LIBC.sbrk(0))


@contextlib.contextmanager
def claimed(largest: int, smallest: int, end: int | None = None) -> Iterator[list[Piece]]:
    """What is free up to this address, in pieces of at least and at most these sizes: within this it is nobody's.

    Without an end it is one piece of the largest size, for which the heap grows. What malloc notes stands outside.
    """
    pieces: list[Piece] = []
    size = largest
    while size >= smallest:
        address = LIBC.malloc(size)
        if address is not None and (end is None or address + size <= end):
            pieces.append((address, size))
            if end is None:
                break
        else:
            LIBC.free(address)
            size //= 2
    try:
        yield pieces
    finally:
        for address, _ in pieces:
            LIBC.free(address)
