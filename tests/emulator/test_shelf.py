"""The memory that broker and workers share: what is laid down is read, and every place comes back when it may."""

from __future__ import annotations

import gc
import mmap
import os
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fleetbed.emulator import large_pages, wire
from fleetbed.emulator.bundle import Bundle
from fleetbed.emulator.messages import Ticket
from fleetbed.emulator.shelf import Shelf, Space, fetch, hand_in, look_at

WEIGHTS = Bundle({"a": torch.randn(400, 400), "b": torch.randn(70_001), "small": torch.arange(5)}, {"round": 3})


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("shelf")
    yield made
    os.close(made)


@pytest.fixture(params=["large pages", "small pages"])
def shelf(fd: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    if request.param == "small pages":  # a kernel that cannot make large ones
        monkeypatch.setattr(large_pages, "MADV_COLLAPSE", -1)
    return Shelf(fd)


def same(one: Bundle, other: Bundle) -> bool:
    return one.values == other.values and all(torch.equal(t, other.tensors[name]) for name, t in one.tensors.items())


def all_free(shelf: Shelf) -> bool:
    gc.collect()
    shelf.take(0)  # takes note of what has come back
    return len(shelf._free) == 1 and shelf._free[0][0] == 0


def mappings() -> int:
    """How often the shelf is mapped here."""
    return Path("/proc/self/maps").read_text().count("memfd:shelf")


def send(shelf: Shelf, frames: list[wire.Buffer]) -> tuple[Ticket, list[Space], Space | None]:
    places = shelf.lay_down(frames)
    room = shelf.room_after(places)
    return shelf.ticket(frames, places, room), places, room


@pytest.mark.parametrize("receive", [fetch, look_at])
def test_a_worker_reads_what_the_broker_laid_down(
    shelf: Shelf, fd: int, receive: Callable[..., list[wire.Buffer]]
) -> None:
    frames = wire.pack(WEIGHTS)
    order, places, _ = send(shelf, frames)
    assert len(places) == 2
    found = wire.unpack(receive(fd, order, frames[:1]))
    assert same(found, WEIGHTS)
    found.tensors["a"].zero_()  # memory of its own
    assert same(wire.unpack(receive(fd, order, frames[:1])), WEIGHTS)


def test_a_worker_finds_what_lies_apart(shelf: Shelf, fd: int) -> None:
    """Parts of a message that was sent before lie where they lay; the rest may be far away, in front or behind."""
    first = shelf.lay_down(wire.pack(Bundle({"b": WEIGHTS.tensors["b"]})))
    between = shelf.take(5 * large_pages.LARGE_PAGE)
    frames = wire.pack(WEIGHTS)
    order, places, _ = send(shelf, frames)
    assert first[0].offset == places[1].offset < places[0].offset - between.size
    assert same(wire.unpack(look_at(fd, order, frames[:1])), WEIGHTS)


def test_what_is_looked_at_is_let_go_with_the_last_tensor_on_it(shelf: Shelf, fd: int) -> None:
    frames = wire.pack(WEIGHTS)
    order, _, _ = send(shelf, frames)
    before = mappings()
    found = wire.unpack(look_at(fd, order, frames[:1]))
    kept = found.tensors["b"]
    del found
    assert torch.equal(kept, WEIGHTS.tensors["b"])
    assert mappings() > before
    del kept
    assert mappings() == before


def test_what_many_are_sent_lies_there_once(shelf: Shelf) -> None:
    one, other = (shelf.lay_down(wire.pack(WEIGHTS)) for _ in range(2))
    assert [space.offset for space in one] == [space.offset for space in other]
    third = shelf.lay_down(wire.pack(Bundle({name: t.clone() for name, t in WEIGHTS.tensors.items()})))
    assert {space.offset for space in third}.isdisjoint(space.offset for space in one)


def test_small_messages_have_nothing_to_do_with_it(shelf: Shelf, fd: int) -> None:
    frames = wire.pack(Bundle({"logits": torch.randn(100, 100)}))
    assert shelf.lay_down(frames) == []
    assert shelf.room_after([]) is None
    assert fetch(fd, None, frames) == frames
    assert hand_in(fd, None, frames) == []


def test_an_answer_comes_back_and_its_place_is_free_when_nobody_holds_it(shelf: Shelf, fd: int) -> None:
    frames = wire.pack(WEIGHTS)
    order, _, room = send(shelf, frames)
    said = wire.pack(WEIGHTS)
    places = hand_in(fd, order, said)
    answer = wire.unpack(shelf.answer(said[:1], places, room))
    assert same(answer, WEIGHTS)
    del room, _
    kept = answer.tensors["b"]
    del answer
    gc.collect()
    again = [shelf.take(300_000) for _ in range(4)]  # would lie on it, if it counted as free
    for space in again:
        os.pwrite(fd, b"\xff" * space.size, space.offset)
    assert torch.equal(kept, WEIGHTS.tensors["b"])
    del kept, again, space
    assert all_free(shelf)


def test_an_answer_without_room_goes_through_the_socket_and_the_next_has_room(shelf: Shelf, fd: int) -> None:
    question = wire.pack(Bundle({"w": torch.randn(70_000)}))
    order, _, room = send(shelf, question)
    said = wire.pack(WEIGHTS)
    assert hand_in(fd, order, said) == []
    assert shelf.answer(said, [], room) == said
    order, _, room = send(shelf, question)
    assert same(wire.unpack(shelf.answer(said[:1], hand_in(fd, order, said), room)), WEIGHTS)


@pytest.mark.parametrize("shift", [-4096, 4096, 1])
def test_an_answer_that_lies_elsewhere_is_rubbish(shelf: Shelf, fd: int, shift: int) -> None:
    shelf.take(1 << 20)
    order, _, room = send(shelf, wire.pack(WEIGHTS))
    said = wire.pack(WEIGHTS)
    places = [(offset + shift, size) for offset, size in hand_in(fd, order, said)]
    with pytest.raises(wire.WireError, match="lies where it must not"):
        shelf.answer(said[:1], places, room)


def test_an_answer_larger_than_its_room_is_rubbish(shelf: Shelf) -> None:
    room = shelf.take(4096)
    with pytest.raises(wire.WireError, match="lies where it must not"):
        shelf.answer([b""], [(room.offset, 8192)], room)


@pytest.mark.parametrize("seed", range(20))
def test_no_two_hold_the_same_and_all_comes_back(shelf: Shelf, seed: int) -> None:
    rng = random.Random(seed)
    held: list[Space] = []
    for _ in range(300):
        if held and rng.random() < 0.5:
            space = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.3:
                pages = space.size // mmap.PAGESIZE
                held += space.split([rng.randint(0, pages // 2) * mmap.PAGESIZE for _ in range(2)])
            del space
        else:
            held.append(shelf.take(rng.randint(0, 100_000)))
        spans = sorted((space.offset, space.offset + space.size) for space in held if space.size)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    held.clear()
    assert all_free(shelf)
