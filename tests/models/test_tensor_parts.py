"""Cutting tensors out and adding them back, against numpy's open mesh, and loading tensors that do not match."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleetbed.models.base import InputSpec, gather, scatter_add
from fleetbed.models.families.lookup import family
from fleetbed.profiles.errors import BadInput

torch.set_num_threads(1)

SPEC = InputSpec((3, 32, 32), 5)
FAMILY = family("resnet-stage", {"base_width": 4})


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


def test_a_loaded_model_uses_the_given_tensors() -> None:
    tensors = dict(FAMILY.build("resnet10", SPEC).state_dict())
    first, second = (FAMILY.load("resnet10", SPEC, tensors) for _ in range(2))
    assert first.state_dict()["fc.weight"].data_ptr() == tensors["fc.weight"].data_ptr()
    called = []
    first.get_submodule("fc").register_forward_hook(lambda *_: called.append(1))
    first.eval()
    second(torch.randn(2, 3, 32, 32))
    assert not called
    assert second.training


def test_tensors_that_do_not_match_are_named() -> None:
    tensors = {**FAMILY.build("resnet10", SPEC).state_dict(), "fc.bias": torch.ones(3), "scale": torch.ones(())}
    del tensors["fc.weight"]
    with pytest.raises(BadInput) as caught:
        FAMILY.load("resnet10", SPEC, tensors, "run/models/small.safetensors")
    sentence = str(caught.value)
    assert sentence.startswith("run/models/small.safetensors does not match the model: ")
    for part in ("fc.weight is missing", "scale is unknown to the model", "fc.bias is 3 and should be 5"):
        assert part in sentence


def test_only_five_mismatches_are_named() -> None:
    with pytest.raises(BadInput, match=r"conv1\.weight is missing; .*, and \d+ more;"):
        FAMILY.load("resnet10", SPEC, {})
