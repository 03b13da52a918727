"""JSON Schema of each kind of profile, so that editors complete and check the YAML."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import cleandoc
from pathlib import Path
from typing import Any

import msgspec

from fleetbed.key_texts import TEXTS
from fleetbed.profiles.loading import TYPES, Kind
from fleetbed.profiles.resolve import available, shipped


def json_schema(kind: Kind, *, with_names: bool = True) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a kind, with a description of every key.

    Where a name is wanted, the known names are listed for completion; other text is valid too, because it may be a path
    or a profile of the user's own. `profiles/schemas/<kind>.json`, for the files that come with fleetbed, is a copy
    without these names, which does not change with every new method.
    """
    body = msgspec.json.schema(TYPES[kind])
    for name, part in body["$defs"].items():
        part["description"] = cleandoc(part["description"])
        for key, schema in part["properties"].items():
            if "description" not in schema:
                schema["description"] = TEXTS[name][key]
            if with_names and (names := NAMES.get(f"{name}.{key}")) is not None:
                others = schema.pop("anyOf", None) or [{"type": schema.pop("type")}]
                schema["anyOf"] = [{"enum": sorted(names())}, *others]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"fleetbed {kind}", **body}


def schema_text(kind: Kind, *, with_names: bool = True) -> str:
    """Return the schema as text, as printed and stored."""
    schema = json_schema(kind, with_names=with_names)
    return msgspec.json.format(msgspec.json.encode(schema), indent=2).decode() + "\n"


def store_schemas(folder: Path) -> None:
    """Write the copies without names; `python -m fleetbed.schema` writes those that come with fleetbed."""
    for kind in TYPES:
        (folder / f"{kind}.json").write_text(schema_text(kind, with_names=False), encoding="utf-8")


def _methods() -> Iterable[str]:
    from fleetbed.emulator.algorithms import names

    return names()


def _families() -> Iterable[str]:
    from fleetbed.models.families.lookup import family_names, outside_names

    return (*family_names(), *outside_names())


def _policies() -> Iterable[str]:
    from fleetbed.emulator.timeline.own_policies import policy_names

    return policy_names()


def _data_sets() -> Iterable[str]:
    from fleetbed.emulator.data.sources import DOWNLOADED, SHIPPED

    return (*SHIPPED, *DOWNLOADED)


#: the known names for a key
NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "Experiment.fleet": lambda: available("fleet"),
    **dict.fromkeys(("ServerChoice.device", "Member.device"), lambda: available("device")),
    **dict.fromkeys(("ServerChoice.link", "Member.link", "Device.link"), lambda: available("link")),
    "Data.name": _data_sets,
    "Model.family": _families,
    "AlgorithmChoice.name": _methods,
    "Policy.kind": _policies,
}

if __name__ == "__main__":
    store_schemas(shipped() / "schemas")
