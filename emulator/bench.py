"""Benches: memory that stays warm, lent to whoever is at work at full speed, one bench for each core.

A client gives its memory back after each task, so every task would begin with pages that are new to its process: a
third of a short one is spent on them. A bench is shared memory in large pages that the kernel has handed out long ago.
A client whose cap is far above its needs has its heap grow into one, trains there, and leaves it before it answers.
What is lent is taken off the limit that the kernel holds it to, so that both together are never more than its cap.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Iterator

import numpy as np

from fleetbed.emulator import heap, host
from fleetbed.emulator.heap import LIBC
from fleetbed.emulator.large_pages import LARGE_PAGE, Addresses, furnish, put, rounded_up

MADV_POPULATE_WRITE = 23
SMALL_PIECE = 64 << 10
LEEWAY = 32 << 20  # the heap may begin higher than when a client sat down first
HOST_PARTS = 4  # benches take at most one of so many parts of the memory that is free
#: a heap has holes, so it needs more room than there is in it
SLACK = 1.25

Place = tuple[int, int]  # offset in the shared memory, and size


def size_for(on_it_bytes: int, spare_bytes: int | None) -> int:
    """How much is lent to a client of whose needs so much would lie there; nothing if it cannot spare as much."""
    size = rounded_up(int(on_it_bytes * SLACK))
    return size if spare_bytes is None or size <= spare_bytes else 0


def count_for(size: int, clients: int) -> int:
    """How many benches of this size there are to be: one for each core, as far as they are used and leave room."""
    return min(host.cores(), clients, host.available_bytes() // HOST_PARTS // size) if size else 0


class Bench:
    """A bench that is lent, until nobody refers to it any more."""

    def __init__(self, benches: Benches, number: int, place: Place) -> None:
        self._benches = benches
        self._number = number
        self.place = place

    def __del__(self) -> None:
        self._benches.free.append(self._number)


class Benches:
    """The broker's side: so many benches of this size, behind what else there is in the shared memory.

    A thread furnishes them while the clients start, so that the memory is charged to nobody's cap; who comes before it
    is done gets what there is.
    """

    def __init__(self, fd: int, count: int, size: int) -> None:
        self._fd = fd
        self._size = size
        self._first = rounded_up(os.fstat(fd).st_size)
        os.ftruncate(fd, self._first + count * size)
        self.free = list(range(count))
        self._furnished = [0] * count
        self._closing = False
        self._thread = threading.Thread(target=self._furnish, name="furnisher", daemon=True)
        self._thread.start()

    def lend(self, most: int) -> Bench | None:
        """A free bench, or as much of it as this."""
        if not (self.free and most):
            return None
        number = self.free.pop()
        size = min(most, self._furnished[number])
        bench = Bench(self, number, (self._first + number * self._size, size))
        return bench if size else None

    def close(self) -> None:
        self._closing = True
        self._thread.join()

    def _furnish(self) -> None:
        """Page by page, each bench in turn."""
        window = Addresses(LARGE_PAGE)
        for done in range(0, self._size, LARGE_PAGE):
            for number in range(len(self._furnished)):
                if self._closing:
                    return
                offset = self._first + number * self._size + done
                put(window.start, LARGE_PAGE, mmap.MAP_SHARED, self._fd, offset)
                try:
                    furnish(window.start, self._fd, offset)
                except OSError:  # no memory is left: what there is can be lent
                    return
                self._furnished[number] = done + LARGE_PAGE


class Seat:
    """A client's side: where in its heap a bench is put, whichever it is lent."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._start: int | None = None

    @contextlib.contextmanager
    def at(self, place: Place) -> Iterator[None]:
        """Within this the heap lies on the bench. What is still alive afterwards has become the client's own memory."""
        parts = self._sit_down(place)
        try:
            yield
        finally:
            self._get_up(place, parts)

    def _sit_down(self, place: Place) -> list[heap.Piece]:
        """Put the bench wherever nothing is alive; gives where that is."""
        offset, size = place
        heap.keep_all()
        if self._start is None:
            heap.grow_to_multiple_of(LARGE_PAGE)  # the task would begin in small pages in front of the bench
        end = None if self._start is None else self._start + size + LEEWAY
        parts = []
        with heap.claimed(size + LARGE_PAGE, 2 * LARGE_PAGE, end) as pieces:
            for address, length in pieces:
                if self._start is None:
                    self._start = rounded_up(address)
                first = max(self._start, rounded_up(address))
                last = min(self._start + size, (address + length) // LARGE_PAGE * LARGE_PAGE)
                if last > first:
                    put(first, last - first, mmap.MAP_SHARED, self._fd, offset + first - self._start)
                    parts.append((first, last - first))
        return parts

    def _get_up(self, place: Place, parts: list[heap.Piece]) -> None:
        # most often the heap ends below the bench after this, and the kernel has taken it off
        heap.let_go(small_blocks=True)
        end = heap.top()
        left = [(first, min(length, end - first)) for first, length in parts if first < end]
        if not left:
            return
        assert self._start is not None
        with heap.claimed(max(length for _, length in left), SMALL_PIECE, end) as free:
            for first, length in left:
                # the same content, and whatever is written to becomes the client's own
                put(first, length, mmap.MAP_PRIVATE, self._fd, place[0] + first - self._start)
                for page in first + np.flatnonzero(_in_use(first, length, free)) * mmap.PAGESIZE:
                    _make_own(int(page))


def _make_own(page: int) -> None:
    """As if it was written to. A read would come first otherwise, and map the large page around it too."""
    if LIBC.madvise(page, mmap.PAGESIZE, MADV_POPULATE_WRITE) != 0:  # a kernel before 5.14
        ctypes.memmove(page, page, 1)


def _in_use(first: int, length: int, free: list[heap.Piece]) -> np.ndarray:
    """Which pages of a part are not wholly within free pieces."""
    in_use = np.ones(length // mmap.PAGESIZE, bool)
    for address, size in free:
        start = (address - first + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        end = (address - first + size) // mmap.PAGESIZE
        in_use[max(0, start) : max(0, end)] = False
    return in_use
