"""The shelf: memory that the broker shares with its workers, where the large frames of a message lie.

The socket carries what is said, and with an order a ticket that names the places of its tensors. The broker lays a
frame down once, for however many clients it is meant. A client reads it into memory of its own, so that what it
receives is charged to it, and writes its answer to a room that it was given, which is never charged to it. A socket
would copy each frame twice more, and into pages that are new every time.

The shelf is a file without a name that the workers inherit: nothing of it outlives the run.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_left
from collections.abc import Sequence
from weakref import WeakValueDictionary

import numpy as np

from fleetbed.emulator import large_pages
from fleetbed.emulator.messages import Places, Ticket
from fleetbed.emulator.wire import Buffer, WireError

#: a message whose tensors are smaller than this goes through the socket as a whole
SHELVE_FROM_BYTES = 1 << 18


class Space:
    """A part of the shelf that is in use, until nobody refers to it any more."""

    def __init__(self, shelf: Shelf, offset: int, size: int) -> None:
        self._shelf = shelf
        self.offset = offset
        self.size = size
        self.holds: Buffer = None  # what was laid down, so that its address means this as long as this lives

    def __del__(self) -> None:
        self._shelf.returned.append((self.offset, self.size))  # no more than that: this may happen at any moment

    def split(self, sizes: Sequence[int]) -> list[Space]:
        """Parts of this size from the beginning on, each for itself; the rest is free again."""
        parts, offset = [], self.offset
        for size in map(_whole_pages, sizes):
            parts.append(Space(self._shelf, offset, size))
            offset += size
        self.size -= offset - self.offset
        self.offset = offset
        return parts


class Shelf:
    """The broker's side."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # of addresses; more memory than this is not
        size = large_pages.rounded_up(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        os.ftruncate(fd, size)
        self._memory = large_pages.view(fd, 0, size, mmap.MAP_SHARED)
        self._address = np.frombuffer(self._memory, np.uint8).ctypes.data
        self._large = True  # whether all pages so far are
        self._free = [(0, size)]  # sorted, no two of them neighbours
        self._touched = 0  # up to here the kernel has handed pages out
        self.returned: list[tuple[int, int]] = []
        self._largest_answer = 0
        self._laid_down: WeakValueDictionary[tuple[int, int], Space] = WeakValueDictionary()

    def take(self, size: int) -> Space:
        """Room for so many bytes."""
        while self.returned:
            self._give_back(*self.returned.pop())
        size = _whole_pages(size)
        for number, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[number : number + 1] = [(offset + size, free - size)] if free > size else []
                # here, not when a client writes to it, for whom it would count then
                while self._touched < offset + size:
                    self._large &= large_pages.furnish(self._address + self._touched, self._fd, self._touched)
                    self._touched += large_pages.LARGE_PAGE
                return Space(self, offset, size)
        raise MemoryError(f"no room for {size} bytes on a shelf of {len(self._memory)}")

    def lay_down(self, frames: Sequence[Buffer]) -> list[Space]:
        """Places for the frames behind the manifest; none if they are to go through the socket."""
        behind = frames[1:]
        return [self._place(frame) for frame in behind] if _is_large(behind) else []

    def room_after(self, question: Sequence[Space]) -> Space | None:
        """Room for the answer to what lies in these places: as large as that, or as any answer so far."""
        if not question and not self._largest_answer:
            return None
        return self.take(max(self._largest_answer, sum(space.size for space in question)))

    def ticket(self, frames: Sequence[Buffer], places: Sequence[Space], room: Space | None) -> Ticket:
        """For an order with these frames, those behind the manifest in these places, or none of them."""
        laid_down = [(space.offset, len(frame)) for space, frame in zip(places, frames[1:], strict=False)]
        return Ticket(laid_down, (room.offset, room.size) if room is not None else (0, 0), self._large)

    def answer(self, frames: Sequence[Buffer], places: Places, room: Space | None) -> list[Buffer]:
        """The frames of a worker's answer, wherever they lie. Raises WireError."""
        if not places:
            if _is_large(frames[1:]):
                self._largest_answer = max(self._largest_answer, sum(_whole_pages(len(frame)) for frame in frames[1:]))
            return list(frames)
        sizes = [size for _, size in places]
        if room is None or places != _layout(room.offset, sizes) or sum(map(_whole_pages, sizes)) > room.size:
            raise WireError("an answer that lies where it must not")
        return [*frames, *map(self._view, room.split(sizes), sizes)]

    def _place(self, frame: Buffer) -> Space:
        view = np.frombuffer(frame, np.uint8)
        key = (view.ctypes.data, view.nbytes)
        space = self._laid_down.get(key)
        if space is None:
            space = self._laid_down[key] = self.take(view.nbytes)
            space.holds = frame
            np.frombuffer(self._memory, np.uint8, view.nbytes, space.offset)[:] = view
        return space

    def _view(self, space: Space, size: int) -> memoryview:
        """The memory of a space, which lives as long as anything that stands on it."""
        memory = (ctypes.c_ubyte * size).from_buffer(self._memory, space.offset)
        memory.space = space  # type: ignore[attr-defined]
        return memoryview(memory).cast("B")

    def _give_back(self, offset: int, size: int) -> None:
        at = bisect_left(self._free, (offset, size))
        if at < len(self._free) and self._free[at][0] == offset + size:
            size += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            offset, before = self._free.pop(at - 1)
            at, size = at - 1, size + before
        if size:
            self._free.insert(at, (offset, size))


# the workers' side


def fetch(fd: int, ticket: Ticket | None, frames: Sequence[Buffer]) -> list[Buffer]:
    """The frames of an order, those on the shelf copied into one block of memory."""
    found = list(frames)
    if ticket is None or not ticket.places:
        return found
    block = np.empty(sum(_aligned(size) for _, size in ticket.places), np.uint8).data
    start = 0
    for offset, size in ticket.places:
        frame = block[start : start + size]
        done = 0
        while done < size:
            done += os.preadv(fd, [frame[done:]], offset + done)
        found.append(frame)
        start += _aligned(size)
    return found


def look_at(fd: int, ticket: Ticket | None, frames: Sequence[Buffer]) -> list[Buffer]:
    """The frames of an order, those on the shelf where they lie; what is written to becomes the worker's own."""
    places = [] if ticket is None else ticket.places
    views: dict[int, memoryview] = {}
    for run in _neighbours(places):
        start, (last, size) = run[0][0], run[-1]
        whole = large_pages.view(fd, start, last + size - start, mmap.MAP_PRIVATE)
        views |= {offset: whole[offset - start : offset - start + size] for offset, size in run}
    return [*frames, *(views[offset] for offset, _ in places)]


def _neighbours(places: Places) -> list[Places]:
    """Those that lie in the same large page or the next: they are mapped together."""
    runs: list[Places] = []
    for offset, size in sorted(places):
        if runs and offset - sum(runs[-1][-1]) < large_pages.LARGE_PAGE:
            runs[-1].append((offset, size))
        else:
            runs.append([(offset, size)])
    return runs


def hand_in(fd: int, ticket: Ticket | None, frames: Sequence[Buffer]) -> Places:
    """Write the frames behind an answer's manifest to the shelf and give their places; none if they do not fit."""
    behind = frames[1:]
    if ticket is None or not _is_large(behind):
        return []
    offset, room = ticket.room
    places = _layout(offset, [len(frame) for frame in behind])
    needed = sum(_whole_pages(size) for _, size in places)
    if needed > room:
        return []
    if ticket.large:
        start, memory = offset, np.frombuffer(large_pages.view(fd, offset, needed, mmap.MAP_SHARED), np.uint8)
        for (offset, size), frame in zip(places, behind, strict=True):
            memory[offset - start : offset - start + size] = np.frombuffer(frame, np.uint8)
        return places
    for (offset, size), frame in zip(places, behind, strict=True):
        view, done = memoryview(frame), 0
        while done < size:
            done += os.pwritev(fd, [view[done:]], offset + done)
    return places


def carried(frames: Sequence[Buffer], places: Sequence[object]) -> Sequence[Buffer]:
    """What of a message goes through the socket: all of it, or its manifest where the rest lies on the shelf."""
    return frames[:1] if places else frames


def _layout(offset: int, sizes: Sequence[int]) -> Places:
    places = []
    for size in sizes:
        places.append((offset, size))
        offset += _whole_pages(size)
    return places


def _is_large(frames: Sequence[Buffer]) -> bool:
    return sum(map(len, frames)) >= SHELVE_FROM_BYTES


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _aligned(size: int) -> int:
    return -(-size // 64) * 64
