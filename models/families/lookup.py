"""Finds families by name: fleetbed's own, those of entry points, or a file.

A module is imported only when its family is requested: timm alone takes half a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any

import msgspec

from fleetbed.models.base import Family, Options
from fleetbed.models.plug_ins import find_plug_in, outside
from fleetbed.profiles.errors import nearest
from fleetbed.profiles.explain import explain

GROUP = "fleetbed.families"

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
    "conv1d": ("conv1d", "Conv1dFamily"),
    "lstm": ("lstm", "LstmFamily"),
}


def family_names() -> tuple[str, ...]:
    """Return the names of fleetbed's own families."""
    return tuple(_FAMILIES)


def outside_names() -> tuple[str, ...]:
    """Return the names of the families that other packages bring. Nothing is imported."""
    return tuple(outside(GROUP))


def family(name: str, options: Mapping[str, Any] | None = None) -> Family:
    """Return the family `name` with these options and all of its variants (`Family.narrow` selects some)."""
    if name not in _FAMILIES:
        return _from_outside(name, options or {})
    module, kind = _FAMILIES[name]
    found: type[Family] = getattr(import_module(f"fleetbed.models.families.{module}"), kind)
    given = dict(options or {})
    try:
        return _made(found, msgspec.convert(given, found.options_type))
    except msgspec.ValidationError as error:
        raise explain(error, given, found.options_type, f"the model family {name}", "model.options") from error


@lru_cache(maxsize=64)
def _made(kind: type[Family], options: Options) -> Family:
    """Return one family for equal options, so that what was worked out for its variants is known to all who ask."""
    return kind(options)


def _from_outside(name: str, options: Mapping[str, Any]) -> Family:
    found = find_plug_in(GROUP, name, "model.family")
    if found is None:
        known = (*_FAMILIES, *outside_names())
        raise nearest(name, known, "model family", "model.family")
    from fleetbed.models.families.own import own_family

    return own_family(found, options)
