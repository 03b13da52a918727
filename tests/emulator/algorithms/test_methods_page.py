"""docs/methods.md has the table of methods as they describe themselves.

`python tests/emulator/algorithms/test_methods_page.py` writes the table anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from fleetbed.cli.methods import method_info
from fleetbed.emulator.algorithms import names

PAGE = Path(__file__).parents[3] / "docs" / "methods.md"
HEAD = (
    "| method | paper | down (values) | up (values) | a client keeps | the server holds "
    "| parameters (defaults) | policies |\n|---|---|---|---|---|---|---|---|\n"
)
TABLE = re.compile(r"^\| method \|.*?\n(?!\|)", re.DOTALL | re.MULTILINE)


def table() -> str:
    rows = []
    for name, title in names().items():
        if not title.startswith("from "):  # a plug-in of this environment
            info = method_info(name)
            settings = [
                f"`{each['name']}`" + (f" ({each['default']})" if each["default"] else "") for each in info.parameters
            ]
            facts = (info.paper, info.down, info.up, info.client, info.server, ", ".join(settings), info.policies)
            rows.append(f"| `{name}` | {' | '.join(facts)} |\n")
    return HEAD + "".join(rows)


def test_the_page_has_the_table_of_methods() -> None:
    found = TABLE.search(PAGE.read_text())
    assert found is not None
    assert found[0] == table(), f"run: python {Path(__file__).name}"


def test_every_method_and_parameter_is_described() -> None:
    for name, title in names().items():
        if not title.startswith("from "):
            info = method_info(name)
            assert all((info.paper, info.down, info.up, info.client, info.server, info.policies)), name
            assert [each["name"] for each in info.parameters if not each["text"]] == [], name


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text(), count=1))
