"""Generated garbage at every loader: the result is a profile or a BadInput of one line, never anything else."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetbed.profiles import BadInput, Fleet, available, clients_of, load_experiment
from fleetbed.profiles.loading import TYPES, Kind, decode
from fleetbed.profiles.resolve import FOLDERS, find_profile, load_device, load_fleet, load_link
from fleetbed.profiles.yaml_text import parse, read_mapping

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LOADERS: dict[Kind, Callable[[str], Any]] = {
    "device": load_device,
    "link": load_link,
    "fleet": load_fleet,
    "experiment": load_experiment,
}
KINDS = st.sampled_from(sorted(FOLDERS))
SHIPPED = {kind: [(path.read_text(), read_mapping(path)) for path in available(kind).values()] for kind in FOLDERS}

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True),
    st.text(max_size=20),
    st.just("512 MB"),
)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=15,
)
yaml_like = st.text(alphabet="ab01.:-{}[]&*!|>'\"%@`#,? \n\t~<=\\xU\u00e9\u2028", max_size=60)


def accept(call: Callable[[], Any]) -> Any:
    """The result, or None for a BadInput, whose sentence must be one that can be shown."""
    try:
        return call()
    except BadInput as error:
        sentence = str(error)
        assert sentence
        assert len(sentence) < 1500
        return None


@QUICK
@given(st.text(max_size=80) | yaml_like)
def test_text(text: str) -> None:
    accept(lambda: parse(text, "x"))


@QUICK
@given(KINDS, st.binary(max_size=80) | yaml_like.map(lambda text: text.encode()))
def test_bytes_in_a_file(tmp_path: Path, kind: Kind, data: bytes) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(data)
    assert accept(lambda: LOADERS[kind](str(file))) is None


@QUICK
@given(KINDS, st.dictionaries(st.text(max_size=8), trees, max_size=5))
def test_mappings(kind: Kind, tree: dict[str, Any]) -> None:
    assert accept(lambda: decode(tree, TYPES[kind], "x")) is None


@QUICK
@given(st.data(), KINDS)
def test_a_shipped_profile_with_one_value_replaced(data: st.DataObject, kind: Kind) -> None:
    tree = deepcopy(data.draw(st.sampled_from(SHIPPED[kind]))[1])
    node: Any = tree
    while True:
        places: list[Any] = list(node) if isinstance(node, dict) else list(range(len(node)))
        place = data.draw(st.sampled_from(places))
        if not (isinstance(node[place], (dict, list)) and node[place] and data.draw(st.booleans())):
            break
        node = node[place]
    match data.draw(st.sampled_from(["replace", "remove", "rename"])):
        case "replace":
            node[place] = data.draw(trees)
        case "remove":
            del node[place]
        case "rename" if isinstance(node, dict):
            node[data.draw(st.text(max_size=8))] = node.pop(place)
    profile = accept(lambda: decode(tree, TYPES[kind], "x"))
    if isinstance(profile, Fleet) and (profile.total or 0) < 1000:
        accept(lambda: clients_of(profile) if sum(m.count or 0 for m in profile.members) < 1000 else None)


@QUICK
@given(st.data(), KINDS)
def test_a_shipped_file_with_some_characters_changed(tmp_path: Path, data: st.DataObject, kind: Kind) -> None:
    text = data.draw(st.sampled_from(SHIPPED[kind]))[0]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 5))
        text = text[:at] + data.draw(yaml_like) + text[at + cut :]
    file = tmp_path / "x.yaml"
    file.write_text(text)
    accept(lambda: LOADERS[kind](str(file)))


@QUICK
@given(st.lists(st.text(max_size=30) | st.tuples(st.text(max_size=12), yaml_like).map("=".join), max_size=3))
def test_settings(sets: list[str]) -> None:
    accept(lambda: load_experiment("demo", sets=sets))


@QUICK
@given(KINDS, st.text(max_size=30))
def test_names(kind: Kind, name: str) -> None:
    accept(lambda: find_profile(kind, name))


@QUICK
@given(st.dictionaries(st.text(max_size=20), st.integers() | st.floats() | st.text(max_size=10), max_size=3))
def test_overrides(override: dict[str, int | float | str]) -> None:
    tree = {"title": "x", "members": [{"device": "phone-low", "count": 1, "override": override}]}
    fleet = accept(lambda: decode(tree, Fleet, "x"))
    if fleet is not None:
        accept(lambda: clients_of(fleet))


def test_deep_nesting(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    for text in (
        "a: " + "[" * 3000 + "]" * 3000,
        "- " * 3000,
        "a:\n" + "".join(" " * n + "b:\n" for n in range(1, 1000)),
    ):
        file.write_text(text)
        with pytest.raises(BadInput):
            load_device(str(file))
