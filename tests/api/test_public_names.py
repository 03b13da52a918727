"""The names that `import fleetbed` offers, and that offering them costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import fleetbed

SOURCE = ast.parse((Path(__file__).parents[2] / "api" / "__init__.py").read_text())


def imported_for_type_checkers() -> set[str]:
    (guarded,) = (node for node in SOURCE.body if isinstance(node, ast.If))
    imports = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    return {"__version__", *(alias.name for node in imports for alias in node.names)}


def test_every_public_name_is_there_and_comes_from_where_type_checkers_look() -> None:
    assert set(fleetbed.__all__) == imported_for_type_checkers()
    assert fleetbed.__all__ == sorted(fleetbed.__all__)
    for name in fleetbed.__all__:
        found = getattr(fleetbed, name)
        if name != "__version__":
            assert found.__name__ == name
    assert set(fleetbed.__all__) <= set(dir(fleetbed))


def test_the_version_is_that_of_the_distribution() -> None:
    assert fleetbed.__version__ == version("fleetbed")


def test_reading_results_needs_no_torch() -> None:
    program = "import sys, fleetbed; fleetbed.run, fleetbed.load, fleetbed.compare, fleetbed.fit; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    assert {"torch", "matplotlib", "scipy", "rich", "typer"}.isdisjoint(done.stdout.split())
