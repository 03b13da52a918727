"""docs/methods.md names every method and every parameter with its default."""

from __future__ import annotations

import re
from pathlib import Path

from fleetbed.emulator.algorithms import load_algorithm, names

PAGE = (Path(__file__).parents[3] / "docs" / "methods.md").read_text()


def test_every_method_and_parameter_is_in_the_table() -> None:
    rows = {m[1]: m[0] for m in re.finditer(r"^\| `(\w+)` \|.*$", PAGE, re.MULTILINE)}
    shipped = [name for name in names() if not names()[name].startswith("from ")]
    assert set(rows) == set(shipped)
    shared = set(load_algorithm("fedhenn").Params.__struct_encode_fields__)
    for name in shipped:
        listed = set(re.findall(r"`(\w+)`", rows[name].split("|")[6]))
        fields = set(load_algorithm(name).Params.__struct_encode_fields__)
        if name == "fedhenn_homo":  # the row refers to that of fedhenn
            assert fields - shared <= listed
        else:
            assert listed == fields, name
