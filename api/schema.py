"""JSON Schema of each kind of profile, so that editors complete and check the YAML."""

from __future__ import annotations

from inspect import cleandoc
from typing import Any

import msgspec

from fleetbed.profiles.loading import TYPES, Kind


def json_schema(kind: Kind) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a kind; `profiles/schemas/<kind>.json` is its copy for the modelines."""
    body = msgspec.json.schema(TYPES[kind])
    for part in body["$defs"].values():
        part["description"] = cleandoc(part["description"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"fleetbed {kind}", **body}


def schema_text(kind: Kind) -> str:
    """Return the schema as text, as printed and stored."""
    return msgspec.json.format(msgspec.json.encode(json_schema(kind)), indent=2).decode() + "\n"
