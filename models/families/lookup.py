"""Finds families by name. A module is imported only when its family is requested: timm alone takes half a second."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import msgspec

from fleetbed.models.base import Family
from fleetbed.profiles.errors import nearest
from fleetbed.profiles.explain import explain

_FAMILIES = {
    "resnet-stage": ("resnet", "ResNetStage"),
    "resnet-width": ("resnet", "ResNetWidth"),
    "resnet-grid": ("resnet", "ResNetGrid"),
    "resnet-exit": ("resnet_exits", "ResNetExit"),
    "resnet-depth": ("resnet_exits", "ResNetDepth"),
    "resnet-segment": ("resnet_segments", "ResNetSegment"),
    "vit-layer": ("vit", "VitFamily"),
    "fedhe-cnn": ("fedhe", "FedHeFamily"),
    "fedhenn-cnn": ("fedhenn", "FedHeNNFamily"),
    "fedin-v1": ("fedin_v1", "FedInV1Family"),
    "lstm": ("lstm", "LstmFamily"),
}


def family_names() -> tuple[str, ...]:
    """Return the names of all families."""
    return tuple(_FAMILIES)


def family(name: str, options: Mapping[str, Any] | None = None) -> Family:
    """Return the family `name` with these options and all of its variants (`Family.narrow` selects some)."""
    if name not in _FAMILIES:
        raise nearest(name, _FAMILIES, "model family", "model.family")
    module, kind = _FAMILIES[name]
    made: type[Family] = getattr(import_module(f"fleetbed.models.families.{module}"), kind)
    given = dict(options or {})
    try:
        return made(msgspec.convert(given, made.options_type))
    except msgspec.ValidationError as error:
        raise explain(error, given, made.options_type, f"the model family {name}", "model.options") from error
