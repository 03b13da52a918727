"""The heap of a process: where what is allocated comes to lie, and that what is over is given back."""

from __future__ import annotations

import numpy as np

from fleetbed.emulator.machine import heap
from fleetbed.emulator.processes.forking import run_in_fork

PIECE, LARGE = 100 << 10, 1 << 20


def top() -> int:
    """The address at which the heap ends."""
    return int(heap.LIBC.sbrk(0))


def make_holes(count: int) -> tuple[list[int], list[int]]:
    """Holes below what lives on, and what keeps them apart."""
    heap.keep()  # so that large pieces come from the heap too
    heap.fill_holes()  # those that other tests have left
    pieces = [(heap.LIBC.malloc(PIECE), heap.LIBC.malloc(PIECE)) for _ in range(count)]
    for hole, _ in pieces:
        heap.LIBC.free(hole)
    return [hole for hole, _ in pieces], [wall for _, wall in pieces]


def test_what_is_allocated_lies_in_a_hole_first() -> None:
    """What the next test is about, or it would show nothing."""

    def work() -> None:
        _, walls = make_holes(100)
        assert heap.LIBC.malloc(PIECE // 2) < max(walls)

    run_in_fork(work)


def test_filled_holes_are_out_of_use() -> None:
    def work() -> None:
        _, walls = make_holes(100)
        heap.fill_holes()
        assert all(heap.LIBC.malloc(size) > max(walls) for size in (heap.HOLE_BYTES[0], PIECE, LARGE))

    run_in_fork(work)


def test_what_is_freed_at_the_top_stays_until_it_is_given_back() -> None:
    def use_memory() -> None:
        for address in [heap.LIBC.malloc(PIECE) for _ in range(400)]:
            heap.LIBC.free(address)

    def work() -> None:
        heap.fill_holes()
        before = top()
        heap.LIBC.mallopt(heap.M_TRIM_THRESHOLD, LARGE)  # whatever was set before the fork
        use_memory()
        assert top() - before < 2 * LARGE
        heap.keep_top()
        use_memory()
        assert top() - before > 300 * PIECE
        heap.give_back()
        assert top() - before < LARGE

    run_in_fork(work)


def test_what_is_over_is_given_back() -> None:
    def work() -> None:
        heap.keep()
        heap.fill_holes()
        before = top()
        tensors = [np.ones(LARGE, np.uint8) for _ in range(50)]
        assert top() > before + 40 * LARGE
        tensors.clear()
        heap.give_back()
        assert top() < before + LARGE

    run_in_fork(work)
