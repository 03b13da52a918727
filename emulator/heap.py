"""The C heap, where tensors lie: kept between two steps, given back between two tasks."""

from __future__ import annotations

import ctypes
import gc

LIBC = ctypes.CDLL(None)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of malloc.h
LARGEST_IN_HEAP_BYTES = 32 << 20  # the most that glibc takes; larger blocks are mapped and unmapped by themselves
NEVER = (1 << 31) - 1


def hold() -> None:
    """Keep freed memory for the next tensors, until it is let go.

    Left alone, glibc gives it back as soon as much is free at the end of the heap, which depends on what happens to lie
    there: a step then pays for up to all of its pages again. One heap for all threads, so that what ZeroMQ's thread
    received can become a tensor's memory later.
    """
    LIBC.mallopt(M_ARENA_MAX, 1)
    LIBC.mallopt(M_MMAP_THRESHOLD, LARGEST_IN_HEAP_BYTES)
    LIBC.mallopt(M_TRIM_THRESHOLD, NEVER)


def let_go() -> None:
    """Give what is free back to the kernel: an idle client costs megabytes, not its model."""
    gc.collect()
    LIBC.malloc_trim(0)
