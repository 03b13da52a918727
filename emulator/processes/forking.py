"""Forking: how a process prepares so that its forks are warm and small, and how a fork ends.

A fork shares every page with its parent until one of them writes to it. So the parent does what each fork
would have to do: it lets torch compile its kernels, gives memory back, and freezes its objects against collection.
"""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable

import torch

from fleetbed.emulator.machine import heap
from fleetbed.emulator.machine.parent import die_with


def one_thread() -> None:
    """Compute with one thread. Setting it again would make torch forget the kernels that it has compiled."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def ready_to_fork() -> None:
    """Freeze objects and close holes in the heap; call this when everything that the forks need is loaded."""
    gc.freeze()  # first, because a collection would take 0.1 s and find little among the imports
    heap.fill_holes()


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a fork, which ends when it is done or when its parent ends; return the fork's process id."""
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
    """Run `work` in a fork and wait for it. Raises RuntimeError if it fails."""
    _, status = os.waitpid(fork(work), 0)
    if status:
        code = os.waitstatus_to_exitcode(status)
        raise RuntimeError(f"a fork ended with exit code {code}; see its output above")


def warm(work: Callable[[], None]) -> None:
    """Run `work`, a training step, on behalf of all forks.

    Where torch could use a GPU it is done in a throw-away fork, which warms only the pages of files: after one
    backward pass torch's engine has a thread per GPU, and refuses to work in a fork.
    """
    if not torch.backends.cuda.is_built():
        work()
        return
    run_in_fork(work)


def keep_what_steps_free() -> None:
    """Let the forks keep, until a task ends, the memory that each step frees and the next one needs again.

    Call this after every model in use was warmed up, because malloc learns from that which sizes to keep.
    """
    if not torch.backends.cuda.is_built():
        heap.keep_top()
