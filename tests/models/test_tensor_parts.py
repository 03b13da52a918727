"""Cutting tensors out and adding them back, against numpy's open mesh, and loading what does not match."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fleetbed.models.base import gather, load_tensors, scatter_add
from fleetbed.profiles.errors import BadInput

torch.set_num_threads(1)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int] | None]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    rows = [draw(st.none() | st.lists(st.integers(0, n - 1), min_size=1, unique=True)) for n in shape]
    return shape, rows


@given(cuts())
def test_gather_and_scatter_are_numpys_open_mesh(cut: tuple[tuple[int, ...], list[list[int] | None]]) -> None:
    shape, rows = cut
    generator = np.random.default_rng(0)
    full = generator.standard_normal(shape).astype(np.float32)
    index = {"w": tuple(None if r is None else torch.tensor(r) for r in rows)}
    mesh = np.ix_(*(range(n) if r is None else r for n, r in zip(shape, rows, strict=True)))

    part = gather({"w": torch.tensor(full)}, index)["w"]
    assert np.array_equal(part.numpy(), full[mesh])

    added = generator.standard_normal(part.shape).astype(np.float32)
    into = {"w": torch.tensor(full)}
    scatter_add(into, {"w": torch.tensor(added)}, index)
    expected = full.copy()
    expected[mesh] += added
    assert np.array_equal(into["w"].numpy(), expected)


def test_scatter_add_adds_two_clients_where_they_overlap() -> None:
    into = {"w": torch.zeros(3, 3)}
    ones = {"w": torch.ones(2, 2)}
    scatter_add(into, ones, {"w": (torch.tensor([0, 1]), torch.tensor([0, 1]))})
    scatter_add(into, ones, {"w": (torch.tensor([2, 0]), torch.tensor([2, 0]))})
    assert into["w"].tolist() == [[2, 1, 1], [1, 1, 0], [1, 0, 1]]


def test_gathering_all_of_a_tensor_copies_nothing() -> None:
    full = {"w": torch.ones(2, 2)}
    assert gather(full, {"w": (None, None)})["w"] is full["w"]


def test_load_tensors_copies() -> None:
    net = nn.Linear(2, 2)
    tensors = {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}
    load_tensors(net, tensors)
    with torch.no_grad():
        net.weight.add_(1)
    assert tensors["weight"].tolist() == [[1, 1], [1, 1]]


def test_load_tensors_names_what_does_not_match() -> None:
    tensors = {"weight": torch.ones(2, 3), "scale": torch.ones(())}
    with pytest.raises(BadInput) as caught:
        load_tensors(nn.Linear(2, 2), tensors, "run/models/small.safetensors")
    sentence = str(caught.value)
    assert sentence.startswith("run/models/small.safetensors does not match the model: ")
    for part in ("bias is missing", "scale is unknown to the model", "weight is 2x3 and should be 2x2"):
        assert part in sentence


def test_load_tensors_counts_what_it_does_not_name() -> None:
    net = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))
    with pytest.raises(BadInput, match=r"0\.weight is missing; .*, and 3 more;"):
        load_tensors(net, {})
