"""The schemas and the reference: every key has one text, and known names are completed."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import inspect

from fleetbed.emulator.algorithms import names
from fleetbed.key_texts import TEXTS
from fleetbed.profiles.loading import TYPES
from fleetbed.profiles.resolve import available
from fleetbed.reference import _own_text, _structs, reference
from fleetbed.schema import json_schema

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"


def structs() -> list[inspect.StructType]:
    seen: set[str] = set()
    return [struct for type_ in TYPES.values() for struct in _structs(inspect.type_info(type_), seen)]


def test_every_key_has_exactly_one_text() -> None:
    for struct in structs():
        own = {field.encode_name for field in struct.fields if _own_text(field.type)}
        listed = set(TEXTS.get(struct.cls.__name__, {}))
        assert not own & listed, struct.cls
        assert own | listed == {field.encode_name for field in struct.fields}, (
            f"{struct.cls.__name__}: write a text for each key into api/key_texts.py"
        )
    assert set(TEXTS) <= {struct.cls.__name__ for struct in structs()}


def test_the_page_is_that_of_the_types() -> None:
    assert PAGE.read_text() == reference(), "run: python -m fleetbed.reference > docs/reference.md"


@pytest.mark.parametrize(
    ("kind", "part", "key", "wanted"),
    [
        ("experiment", "AlgorithmChoice", "name", set(names())),
        ("experiment", "Experiment", "fleet", set(available("fleet"))),
        ("experiment", "Model", "family", {"resnet-stage", "lstm"}),
        ("experiment", "Data", "name", {"fashion-mini", "cifar10"}),
        ("fleet", "Member", "device", set(available("device"))),
        ("fleet", "Member", "link", set(available("link"))),
        ("device", "Device", "link", set(available("link"))),
    ],
)
def test_known_names_are_listed_and_others_allowed(kind: str, part: str, key: str, wanted: set[str]) -> None:
    first, *others = json_schema(kind)["$defs"][part]["properties"][key]["anyOf"]  # type: ignore[arg-type]
    assert wanted <= set(first["enum"])
    assert {"type": "string"} in others
