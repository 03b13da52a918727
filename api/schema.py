"""JSON Schema of each kind of profile, so that editors complete and check the YAML."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import cleandoc
from typing import Any

import msgspec

from fleetbed.key_texts import TEXTS
from fleetbed.profiles.loading import TYPES, Kind
from fleetbed.profiles.resolve import available


def json_schema(kind: Kind) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a kind; `profiles/schemas/<kind>.json` is its copy for the modelines.

    Every key has a description. Where a name is wanted, the known names are listed for completion; other text is valid
    too, because it may be a path or a profile of the user's own.
    """
    body = msgspec.json.schema(TYPES[kind])
    for name, part in body["$defs"].items():
        part["description"] = cleandoc(part["description"])
        for key, schema in part["properties"].items():
            if "description" not in schema:
                schema["description"] = TEXTS[name][key]
            if (names := NAMES.get(f"{name}.{key}")) is not None:
                others = schema.pop("anyOf", None) or [{"type": schema.pop("type")}]
                schema["anyOf"] = [{"enum": sorted(names())}, *others]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"fleetbed {kind}", **body}


def schema_text(kind: Kind) -> str:
    """Return the schema as text, as printed and stored."""
    return msgspec.json.format(msgspec.json.encode(json_schema(kind)), indent=2).decode() + "\n"


def _methods() -> Iterable[str]:
    from fleetbed.emulator.algorithms import names

    return names()


def _families() -> Iterable[str]:
    from fleetbed.models.families.lookup import family_names, outside_names

    return (*family_names(), *outside_names())


def _data_sets() -> Iterable[str]:
    from fleetbed.emulator.data.sources import SHIPPED
    from fleetbed.emulator.data.torchvision_sets import KNOWN

    return (*SHIPPED, *KNOWN)


#: the known names for a key
NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "Experiment.fleet": lambda: available("fleet"),
    **dict.fromkeys(("ServerChoice.device", "Member.device"), lambda: available("device")),
    **dict.fromkeys(("ServerChoice.link", "Member.link", "Device.link"), lambda: available("link")),
    "Data.name": _data_sets,
    "Model.family": _families,
    "AlgorithmChoice.name": _methods,
}
