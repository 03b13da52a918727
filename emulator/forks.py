"""Forking: what a process does before, so that its forks are warm and small, and how a fork ends.

A fork shares every page with its parent until one of them writes to it. So the parent does what all would do: it has
torch compile its kernels, then gives its memory back and freezes its objects, which no collection touches from then on.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
LARGEST_MMAP_THRESHOLD, NEVER_TRIM = 32 << 20, (1 << 31) - 1


def let_go() -> None:
    """Give the memory of what is over back to the kernel: an idle client costs megabytes, not its model."""
    gc.collect()
    LIBC.malloc_trim(0)


def keep_heap() -> None:
    """Have this process keep what it frees, for the next use: where models are averaged, the next round's average."""
    LIBC.mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    LIBC.mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)


def ready_to_fork() -> None:
    """Call it when all is there that the forks will need."""
    let_go()
    gc.freeze()


def fork(work: Callable[[], None]) -> int:
    """Do this in a fork, which ends with it, or with its parent; gives the fork's process id."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    status = 1
    try:
        die_with(parent)
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - a fork must never return into its parent's stack
        traceback.print_exc()
    finally:
        os._exit(status)


def run_in_fork(work: Callable[[], None]) -> None:
    """Do this in a fork and wait for it. RuntimeError unless it ends well."""
    _, status = os.waitpid(fork(work), 0)
    if status:
        code = os.waitstatus_to_exitcode(status)
        raise RuntimeError(f"a fork ended with exit code {code}; what it said stands above")


def warm(work: Callable[[], None]) -> None:
    """Do this, a training step, on behalf of all forks.

    It is done in a thread of its own, to which malloc gives an arena of its own: what lasts would otherwise lie between
    what was freed, and the forks would train in a heap full of holes, with a quarter more memory.

    Where torch could use a GPU it is done in a throw-away fork, which warms the pages that files have and no more:
    after one backward pass torch's engine has a thread per GPU, and refuses to work in a fork.
    """
    if not torch.backends.cuda.is_built():
        with ThreadPoolExecutor(1) as thread:
            thread.submit(work).result()
        return
    run_in_fork(work)


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Get this signal when the parent ends, whose process id this is."""
    LIBC.prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it had ended before the line above
        os._exit(1)
