"""The ledger: living bytes, their peak, and the internal memory of operators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fleetbed.models.cost.counting import HOLES, MAPPED_BYTES, Ledger, scratch_bytes

aten = torch.ops.aten


def heap(used: int) -> int:
    """What a heap takes in which so much was used at most."""
    return round((1 + HOLES) * used)


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with FakeTensorMode(), Ledger() as ledger:
        yield ledger


def test_living_tensors_are_counted(ledger: Ledger) -> None:
    a = torch.empty(1000)
    b = torch.empty(500, dtype=torch.int64)
    assert ledger.live.total() == 8000
    del a
    assert ledger.live.total() == 4000
    del b
    assert ledger.live.total() == 0


def test_blocks_in_the_heap_leave_it_as_large_as_it_was_and_full_of_holes(ledger: Ledger) -> None:
    a, b = torch.empty(600), torch.empty(400)
    ledger.keep("model", 700)
    del a, b
    c = torch.empty(250)
    assert ledger.live == {"activations": 1000, "model": 700}
    assert ledger.peak == 700 + heap(4000)
    assert ledger.at_peak["allocator"] == heap(4000) - 4000
    del c


def test_large_blocks_are_mapped_and_go_when_they_are_freed(ledger: Ledger) -> None:
    small, large = torch.empty(1000), torch.empty(MAPPED_BYTES // 4)
    del large
    assert ledger.peak == heap(4000) + MAPPED_BYTES
    larger = torch.empty(MAPPED_BYTES)
    assert ledger.peak == heap(4000) + 4 * MAPPED_BYTES
    del small, larger
    largest = torch.empty(2 * MAPPED_BYTES)  # the heap has not shrunk
    assert ledger.peak == heap(4000) + 8 * MAPPED_BYTES
    assert ledger.at_peak["allocator"] == heap(4000)
    del largest


def test_views_and_updates_in_place_cost_nothing(ledger: Ledger) -> None:
    a = torch.empty(10, 10)
    view = a.t()[2:].detach()
    a.add_(1.0).relu_()
    assert ledger.peak == heap(400)
    del a
    assert ledger.live.total() == 400  # the view holds it
    del view
    assert ledger.live.total() == 0


def test_roles(ledger: Ledger) -> None:
    with ledger.role("batch"):
        batch = torch.empty(100)
    with ledger.role(None):
        elsewhere = torch.empty(1000)
    ledger.keep("held", 50)
    other = torch.empty(10)
    assert ledger.live == {"batch": 400, "uncounted": 0, "held": 50, "activations": 40}
    ledger.rebook(other, "gradients")
    assert (ledger.live["activations"], ledger.live["gradients"]) == (0, 40)
    assert (ledger.at_peak["activations"], ledger.at_peak["gradients"]) == (0, 40)
    del batch, elsewhere


def test_a_later_role_does_not_change_a_peak_it_was_not_part_of(ledger: Ledger) -> None:
    large = torch.empty(1000)
    del large
    small = torch.empty(10)
    ledger.rebook(small, "gradients")
    assert dict(ledger.at_peak) == {"activations": 4000, "allocator": heap(4000) - 4000}


def test_scratch_counts_for_the_moment(ledger: Ledger) -> None:
    a = torch.empty(100)
    ledger.scratch(1000)
    b = torch.empty(100)
    assert ledger.live.total() == 800
    assert ledger.peak == heap(1400)
    assert ledger.at_peak["workspace"] == 1000
    ledger.scratch(MAPPED_BYTES)
    assert ledger.peak == heap(1400) + MAPPED_BYTES
    del a, b


def conv(channels: int, filters: int, side: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    x, weight = torch.empty(2, channels, side, side), torch.empty(filters, channels, 1, 1)
    return (x, weight), torch.empty(2, filters, side, side)


def test_scratch_of_a_convolution() -> None:
    """Blocked copies of 16 channels: of input, weight and output while it computes; then the output is copied back."""
    args, out = conv(32, 16, 4)
    assert scratch_bytes(aten.convolution.default, args, out) == 4 * (2 * 32 * 16 + 32 * 16)
    args, out = conv(16, 64, 4)
    assert scratch_bytes(aten.convolution.default, args, out) == 4 * (2 * 64 * 16)
    args, out = conv(3, 8, 4)  # few channels are read as they are, the output is padded to 16
    assert scratch_bytes(aten.convolution.default, args, out) == 4 * (2 * 16 * 16)
    assert scratch_bytes(aten.relu.default, (out,), out) == 0
