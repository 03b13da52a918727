"""The vision transformer against timm's own, and its pre-trained weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fleetbed.models.base import InputSpec
from fleetbed.models.families import vit
from fleetbed.models.families.lookup import family
from fleetbed.profiles.errors import HostCannot

torch.set_num_threads(1)

SPEC = InputSpec((1, 32, 48), 10)
real_create_model = vit.timm.create_model


def create_without_download(name: str, *, pretrained: bool, **options: Any) -> nn.Module:
    assert pretrained
    torch.manual_seed(5)
    model: nn.Module = real_create_model(name, pretrained=False, **options)
    return model


def test_pretrained_weights_give_timms_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vit.timm, "create_model", create_without_download)
    torch.manual_seed(1)
    net = family("vit-layer", {"pretrained": True}).build("vit12", SPEC).eval()
    theirs = create_without_download(
        "vit_small_patch16_224", pretrained=True, in_chans=1, img_size=(32, 48), num_classes=0
    ).eval()
    x = torch.randn(2, 1, 32, 48)
    torch.testing.assert_close(net.features(x), theirs(x))

    torch.manual_seed(1)
    fresh = family("vit-layer").build("vit12", SPEC)
    assert torch.equal(net.state_dict()["head.weight"], fresh.state_dict()["head.weight"])
    assert not torch.equal(net.state_dict()["cls_token"], fresh.state_dict()["cls_token"])


def test_a_shallow_variant_takes_the_first_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vit.timm, "create_model", create_without_download)
    pretrained = family("vit-layer", {"pretrained": True})
    deep, shallow = (pretrained.build(variant, SPEC).state_dict() for variant in ("vit12", "vit9"))
    assert "blocks.9.norm1.weight" not in shallow
    same = [name for name in shallow if not name.startswith("head")]
    assert all(torch.equal(shallow[name], deep[name]) for name in same)


def test_weights_that_cannot_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> nn.Module:
        raise FileNotFoundError("no such host")

    monkeypatch.setattr(vit.timm, "create_model", unreachable)
    pretrained = family("vit-layer", {"pretrained": True})
    with pytest.raises(HostCannot, match=r"vit_small_patch16_224 .* cannot be downloaded .* pretrained to false"):
        pretrained.build("vit8", SPEC)
    pretrained.empty("vit8", SPEC)  # weights are loaded into it anyway: nothing to download


def test_cross_layers_are_the_second_norms() -> None:
    family_ = family("vit-layer", {"width": 12, "heads": 2})
    tensors = family_.outline("vit9", SPEC).state_dict()
    expected = {f"blocks.{i}.norm2.weight": f"blocks.{i}.norm1.weight" for i in range(9)}
    assert family_.cross_layers(tensors) == expected
