"""The families by name. A module is imported when its family is asked for: timm alone takes half a second."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import msgspec

from fleetbed.models.base import Family, suggestion
from fleetbed.profiles.errors import BadInput

_FAMILIES = {
    "resnet-stage": ("resnet", "ResNetStage"),
    "resnet-width": ("resnet", "ResNetWidth"),
    "resnet-grid": ("resnet", "ResNetGrid"),
}


def names() -> tuple[str, ...]:
    """Every family that `family` knows."""
    return tuple(_FAMILIES)


def family(name: str, options: Mapping[str, Any] | None = None) -> Family:
    """The family `name` with all of its variants (`Family.narrow` keeps some); options not given are defaults."""
    if name not in _FAMILIES:
        raise BadInput(
            f"model.family: there is no family {name!r}{suggestion(name, _FAMILIES)}; "
            f"the families are {', '.join(_FAMILIES)}"
        )
    module, kind = _FAMILIES[name]
    made: type[Family] = getattr(import_module(f"fleetbed.models.{module}"), kind)
    known = made.options_type.__struct_fields__
    for option in options or {}:
        if option not in known:
            allowed = f"its options are {', '.join(known)}" if known else "it has no options"
            raise BadInput(
                f"model.options: {name} has no option {option!r}{suggestion(option, known)}; {allowed}"
            )
    try:
        return made(msgspec.convert(dict(options or {}), made.options_type))
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        key = f"model.options.{where.rstrip('`')}" if where else "model.options"
        raise BadInput(f"{key} of {name}: {what}") from error
