"""Child processes import nothing from the folder that the user happens to stand in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetbed.emulator.machine import interpreter

ROOT = Path(interpreter.__file__).resolve().parents[2]
BUILT_IN = set(sys.builtin_module_names)


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder with a file for every module of the standard library, and for ours; each ends who imports it."""
    folder = tmp_path / "trap"
    folder.mkdir()
    for name in {*sys.stdlib_module_names, "fleetbed", "torch", "numpy", "msgspec", "zmq"} - BUILT_IN:
        (folder / f"{name}.py").write_text(f"raise SystemExit('foreign code: {name}')\n")
    return folder


def run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_trap_catches_what_is_not_isolated(trap: Path) -> None:
    found = run([sys.executable, "-c", "import statistics"], trap)
    assert "foreign code" in found.stderr


@pytest.mark.parametrize("safe_path", ["", "1"])
def test_modules_come_from_where_they_belong(trap: Path, safe_path: str) -> None:
    statements = (
        "import statistics, secrets, types, json, random; from fleetbed.profiles import errors; print(sys.argv[1])"
    )
    found = run(interpreter.command(statements, 7), trap, PYTHONSAFEPATH=safe_path)
    assert (found.stdout, found.stderr) == ("7\n", "")


def test_what_the_user_set_in_pythonpath_is_found(trap: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/my_own_method.py").write_text("def main(): print('mine')\n")
    found = run(interpreter.module_command("my_own_method"), trap, PYTHONPATH=str(tmp_path / "mine"))
    assert found.stdout == "mine\n"


def test_every_child_process_is_started_this_way() -> None:
    found = [
        path.name
        for folder in ("profiles", "models", "emulator", "analysis", "cli")
        for path in (ROOT / folder).rglob("*.py")
        if "sys.executable" in path.read_text()
    ]
    assert found == ["interpreter.py"]
