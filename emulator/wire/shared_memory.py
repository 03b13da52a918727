"""Memory that the broker shares with its workers, for messages that are too large for a socket.

It is one sparse file in memory, inherited by every worker and divided into slots. An order gets a slot: the broker
writes its tensors there, the worker copies them into its own memory, so that it is charged for what it receives, and
later writes its answer over them. The file has no name, so nothing of it outlives the run.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Sequence

import numpy as np

from fleetbed.emulator.wire.codec import MAX_MESSAGE_BYTES, Buffer, WireError
from fleetbed.emulator.wire.messages import Slot

#: the distance between two slots; a slot costs only what was written to it
SLOT_BYTES = 2 * MAX_MESSAGE_BYTES
#: a message whose tensors are smaller than this goes through the socket
SHARE_FROM_BYTES = 1 << 18
ALIGNMENT = 64  # of tensors in memory


class SharedMemory:
    """The broker's side: hands out slots, and gets those back whose worker has answered or ended."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._free: list[int] = []
        self._allocated: list[int] = []  # by slot: bytes that the kernel has allocated
        self._largest_answer = 0

    def take(self, frames: Sequence[Buffer]) -> Slot | None:
        """Put the frames after the manifest into a slot; returns None if the message is to go through the socket."""
        sizes = [len(frame) for frame in frames[1:]]
        capacity = max(sum(sizes), self._largest_answer)
        if capacity < SHARE_FROM_BYTES:
            return None
        if not self._free:
            self._free.append(len(self._allocated))
            self._allocated.append(0)
        number = heapq.heappop(self._free)
        offset = number * SLOT_BYTES
        if capacity > self._allocated[number]:
            # allocated here, because pages are charged to the process that touches them first
            os.posix_fallocate(self._fd, offset, capacity)
            self._allocated[number] = capacity
        write(self._fd, offset, frames[1:])
        return Slot(offset, capacity, sizes)

    def release(self, slot: Slot) -> None:
        heapq.heappush(self._free, slot.offset // SLOT_BYTES)

    def answer(self, slot: Slot | None, frames: Sequence[Buffer], sizes: Sequence[int]) -> list[Buffer]:
        """The frames of a worker's answer; `sizes` are those of the frames that it left in its slot."""
        if not sizes:
            self._largest_answer = max(self._largest_answer, sum(len(frame) for frame in frames[1:]))
            return list(frames)
        if slot is None or sum(sizes) > slot.capacity or len(frames) != 1:
            raise WireError("an answer outside its slot of the shared memory")
        return [*frames, *read(self._fd, slot.offset, sizes)]


def received(fd: int, slot: Slot | None, frames: Sequence[Buffer]) -> list[Buffer]:
    """For a worker: return the frames of an order, from its slot or from the socket."""
    return list(frames) if slot is None else [*frames, *read(fd, slot.offset, slot.sizes)]


def hand_in(fd: int, slot: Slot | None, frames: Sequence[Buffer]) -> tuple[list[int], Sequence[Buffer]]:
    """For a worker: write an answer to its slot; returns the sizes there and the frames that are still to be sent."""
    sizes = [len(frame) for frame in frames[1:]]
    if slot is None or not SHARE_FROM_BYTES <= sum(sizes) <= slot.capacity:
        return [], frames
    write(fd, slot.offset, frames[1:])
    return sizes, frames[:1]


def write(fd: int, offset: int, frames: Sequence[Buffer]) -> None:
    """Write frames one after the other, starting at this offset."""
    for frame in frames:
        view = memoryview(frame)
        while view:
            done = os.pwrite(fd, view, offset)
            view, offset = view[done:], offset + done


def read(fd: int, offset: int, sizes: Sequence[int]) -> list[Buffer]:
    """Copy frames of these sizes into one new block of memory."""
    block = np.empty(sum(map(_aligned, sizes)), np.uint8).data
    frames, start = [], 0
    for size in sizes:
        frame, done = block[start : start + size], 0
        while done < size:
            got = os.preadv(fd, [frame[done:]], offset + done)
            if not got:
                raise WireError("the shared memory ends before the message does")
            done += got
        frames.append(frame)
        start, offset = start + _aligned(size), offset + size
    return frames


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
