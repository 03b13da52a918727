"""Messages in shared memory: what is written is read, a slot has one user, a bad answer costs its sender."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.wire import codec, shared_memory
from fleetbed.emulator.wire.shared_memory import SHARE_FROM_BYTES, SharedMemory

LARGE = bytes(range(256)) * (SHARE_FROM_BYTES // 256)


@pytest.fixture
def fd() -> Iterator[int]:
    file = os.memfd_create("shared")
    yield file
    os.close(file)


def test_a_message_is_read_as_it_was_written(fd: int) -> None:
    memory = SharedMemory(fd)
    sent = Bundle({"a": torch.randn(300, 301), "b": torch.arange(50_000), "c": torch.ones(3)}, {"x": 1})
    frames = codec.pack(sent)
    slot = memory.take(frames)
    assert slot is not None
    received = codec.unpack(shared_memory.received(fd, slot, frames[:1]))
    assert received.values == {"x": 1}
    assert all(tensor.equal(received.tensors[name]) for name, tensor in sent.tensors.items())
    received.tensors["a"].zero_()  # a worker may write to what it received
    assert codec.unpack(shared_memory.received(fd, slot, frames[:1])).tensors["a"].equal(sent.tensors["a"])


@given(sizes=st.lists(st.integers(0, 100_000), max_size=12))
@settings(max_examples=50, deadline=None)
def test_frames_of_any_size_come_back(sizes: list[int]) -> None:
    file = os.memfd_create("shared")
    frames = [os.urandom(size) for size in sizes]
    shared_memory.write(file, 12345, frames)
    found = shared_memory.read(file, 12345, sizes)
    os.close(file)
    assert [bytes(frame) for frame in found] == frames


def test_small_messages_take_no_slot_until_an_answer_was_large(fd: int) -> None:
    memory = SharedMemory(fd)
    assert memory.take([b"manifest", b"small"]) is None
    assert memory.answer(None, [b"manifest", LARGE], []) == [b"manifest", LARGE]
    slot = memory.take([b"manifest", b"small"])
    assert slot is not None
    assert slot.capacity == len(LARGE)


def test_an_answer_takes_the_place_of_the_order(fd: int) -> None:
    memory = SharedMemory(fd)
    slot = memory.take([b"manifest", LARGE])
    answer = [b"answer", LARGE[::-1]]
    sizes, sent = shared_memory.hand_in(fd, slot, answer)
    assert (sizes, sent) == ([len(LARGE)], [b"answer"])
    assert [bytes(frame) for frame in memory.answer(slot, sent, sizes)] == answer


def test_an_answer_that_does_not_fit_goes_through_the_socket(fd: int) -> None:
    memory = SharedMemory(fd)
    slot = memory.take([b"manifest", LARGE])
    answer = [b"answer", LARGE + b"x"]
    assert shared_memory.hand_in(fd, slot, answer) == ([], answer)


def test_slots_do_not_overlap_and_are_used_again(fd: int) -> None:
    memory = SharedMemory(fd)
    slots = [memory.take([b"manifest", bytes([number]) * SHARE_FROM_BYTES]) for number in range(5)]
    for number, slot in enumerate(slots):
        assert slot is not None
        (frame,) = shared_memory.received(fd, slot, [])
        assert bytes(frame) == bytes([number]) * SHARE_FROM_BYTES
    assert slots[2] is not None
    memory.release(slots[2])
    again = memory.take([b"manifest", LARGE])
    assert again is not None
    assert again.offset == slots[2].offset


@pytest.mark.parametrize("sizes", [[len(LARGE) + 1], [1 << 60], [len(LARGE), 1]])
def test_an_answer_outside_its_slot_is_refused(fd: int, sizes: list[int]) -> None:
    memory = SharedMemory(fd)
    slot = memory.take([b"manifest", LARGE])
    with pytest.raises(codec.WireError, match="outside its slot"):
        memory.answer(slot, [b"answer"], sizes)
    with pytest.raises(codec.WireError, match="outside its slot"):
        memory.answer(None, [b"answer"], [1])
