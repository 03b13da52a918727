"""A model that cannot be built is refused with the key, the value found and the values allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.profiles.errors import BadInput


def refusal(name: str, options: dict[str, Any] | None = None) -> str:
    with pytest.raises(BadInput) as caught:
        family(name, options)
    return str(caught.value)


def test_unknown_family() -> None:
    sentence = refusal("resnet-stag")
    assert "model.family" in sentence
    assert "'resnet-stag'" in sentence
    assert "resnet-stage" in sentence


def test_unknown_option() -> None:
    sentence = refusal("resnet-stage", {"base_widht": 8})
    assert "model.options.base_widht" in sentence
    assert "did you mean base_width" in sentence
    assert "there are none" in refusal("fedin-v1", {"width": 3})


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"stem": "5x5"}, ["model.options.stem", "5x5", "3x3, 7x7"]),
        ({"base_width": 0}, ["model.options.base_width", "is 0,", "whole number from 1"]),
        ({"base_width": "wide"}, ["model.options.base_width", "wide", "whole number"]),
    ],
)
def test_bad_option(options: dict[str, Any], parts: list[str]) -> None:
    sentence = refusal("resnet-stage", options)
    assert all(part in sentence for part in parts), sentence


def test_vit_options_must_go_together() -> None:
    assert "a width of 10 cannot be divided among 6 heads" in refusal("vit-layer", {"width": 10})
    sentence = refusal("vit-layer", {"pretrained": True, "patch": 8})
    assert "need patch 16, but it is 8" in sentence
    assert "pretrained to false" in sentence


@pytest.mark.parametrize("ask", ["build", "empty", "outline", "index"])
def test_unknown_variant(ask: str) -> None:
    with pytest.raises(BadInput, match=r"resnet-stage: there is no variant 'resnet81'; did you mean .*resnet18"):
        getattr(family("resnet-stage"), ask)("resnet81", InputSpec((3, 32, 32), 10))


def test_narrow_refuses_unknown_variants_and_those_that_do_not_nest() -> None:
    with pytest.raises(BadInput, match="there is no variant 'vit13'"):
        family("vit-layer").narrow(("vit8", "vit13"))
    with pytest.raises(BadInput, match="resnet26-quarter of resnet-grid is not a part of resnet10-full"):
        family("resnet-grid").narrow(("resnet26-quarter", "resnet10-full"))
    with pytest.raises(BadInput, match="C of fedin-v1 is not a part of D"):
        family("fedin-v1").narrow(("C", "D"))


@pytest.mark.parametrize(
    ("name", "small", "large"),
    [("vit-layer", "vit8", "vit12"), ("resnet-width", "resnet26-half", "resnet26-full"), ("fedin-v1", "C", "A")],
)
def test_a_smaller_variant_is_part_of_a_larger_one_and_not_the_other_way(name: str, small: str, large: str) -> None:
    assert family(name).part_of(small, large)
    assert not family(name).part_of(large, small)


def test_narrow_keeps_the_order_and_the_family_as_it_was() -> None:
    whole = family("fedhe-cnn")
    assert whole.narrow(("model4", "model9")).variants == ("model9", "model4")
    assert whole.narrow(()).variants == whole.variants
    assert len(whole.variants) == 10
    assert family("fedin-v1").narrow(("E", "D", "A")).variants == ("E", "D", "A")
    with pytest.raises(BadInput, match="there is no variant 'model4'"):
        whole.narrow(("model9",)).build("model4", InputSpec((3, 32, 32), 10))


@pytest.mark.parametrize("classes", [1, 0, -1])
def test_too_few_classes(classes: int) -> None:
    with pytest.raises(BadInput, match=f"at least 2 classes, but this has {classes}"):
        family("resnet-stage").build("resnet10", InputSpec((3, 32, 32), classes))


SMALLEST: list[tuple[str, dict[str, Any], int]] = [
    ("resnet-stage", {}, 7),
    ("resnet-stage", {"stem": "3x3"}, 3),
    ("vit-layer", {"patch": 8}, 8),
    ("fedhe-cnn", {}, 12),
    ("fedhenn-cnn", {}, 28),
    ("fedin-v1", {}, 3),
]


@pytest.mark.parametrize(("name", "options", "smallest"), SMALLEST)
def test_the_smallest_image_works_and_a_smaller_one_is_refused(
    name: str, options: dict[str, Any], smallest: int
) -> None:
    chosen = family(name, options)
    short = InputSpec((1, smallest, smallest - 1), 10)
    with pytest.raises(BadInput, match=f"at least {smallest}x{smallest}, but these are {smallest}x{smallest - 1}"):
        chosen.outline(chosen.variants[0], short)
    for variant in chosen.variants:
        net = chosen.outline(variant, InputSpec((1, smallest, smallest), 10))
        assert net(torch.empty(2, 1, smallest, smallest, device="meta")).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "variant", "smallest"),
    [("fedhenn-cnn", "conv1-fc1", 6), ("fedhenn-cnn", "conv2-fc2", 16), ("fedhe-cnn", "model0", 3)],
)
def test_a_narrowed_family_accepts_the_inputs_of_its_own_variants(name: str, variant: str, smallest: int) -> None:
    chosen = family(name).narrow((variant,))
    assert chosen.smallest_image == smallest
    net = chosen.outline(variant, InputSpec((1, smallest, smallest), 2))
    assert net(torch.empty(2, 1, smallest, smallest, device="meta")).shape == (2, 2)


def test_vit_needs_whole_patches() -> None:
    with pytest.raises(BadInput, match="multiples of the patch of 16, but these are 32x40"):
        family("vit-layer").outline("vit8", InputSpec((3, 32, 40), 10))


def test_the_wrong_kind_of_data() -> None:
    with pytest.raises(BadInput, match="resnet-stage needs images, but the data is text"):
        family("resnet-stage").build("resnet10", InputSpec((25,), 2, vocabulary=100))
    with pytest.raises(BadInput, match="lstm needs text, but the data is images"):
        family("lstm").build("lstm1", InputSpec((3, 32, 32), 10))
    with pytest.raises(BadInput, match="lstm needs text, but the data is values"):
        family("lstm").build("lstm1", InputSpec((25,), 2))
