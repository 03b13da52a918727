"""A run's result does not depend on its folder, its output streams, or cleaners of temporary files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from same_runs import results
from small_runs import TINIER, query

from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.run.study import start_study
from fleetbed.profiles.errors import FleetbedError
from fleetbed.profiles.resolve import load_experiment

FLEETBED = "from fleetbed.cli.main import program; program()"
CLOSED = ">&-"


def fleetbed(
    *words: str, mode: str = "inline", cwd: Path, out: str = "/dev/null", err: str = "/dev/null", **environment: str
) -> int:
    """Run the command in a shell that sends its output there; gives its exit code."""
    # as the console script does it: the current folder is not on the path
    code = f"import sys; sys.path[:1] == [''] and sys.path.pop(0); {FLEETBED}"
    sets = [word for key in (*TINIER, "rounds=1", f"processes={mode}") for word in ("--set", key)]
    redirect = " ".join(f"{n}>&-" if where == CLOSED else f"{n}>{where}" for n, where in ((1, out), (2, err)))
    command = ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-c", code, *words, *sets]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, timeout=240, check=False).returncode


@pytest.mark.slow
@pytest.mark.parametrize(
    ("out", "err", "environment"),
    [
        (CLOSED, CLOSED, {}),
        ("/dev/full", "/dev/full", {}),
        ("/dev/null", "/dev/null", {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}),
    ],
    ids=["closed", "full", "ascii"],
)
def test_a_run_does_not_depend_on_its_output(tmp_path: Path, out: str, err: str, environment: dict[str, str]) -> None:
    assert fleetbed("run", "demo", "--out", "größe", cwd=tmp_path, out=out, err=err, **environment) == 0
    (folder,) = (tmp_path / "größe").glob("heteroavg-*")
    assert query(folder, "SELECT value FROM meta WHERE key = 'status'") == [('"done"',)]
    again = fleetbed("run", "demo", "--out", "größe", cwd=tmp_path, out=out, err=err, **environment)
    assert again == 2, "it exists"


@pytest.mark.slow
def test_files_in_the_current_folder_are_not_imported_and_a_long_temporary_folder_has_no_effect(
    tmp_path: Path,
) -> None:
    for name in sys.stdlib_module_names - set(sys.builtin_module_names):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(77)\n")
    long = tmp_path / ("t" * 120)
    long.mkdir()
    code = fleetbed("run", "demo", "--out", "s", mode="resident", cwd=tmp_path, TMPDIR=str(long))
    assert code == 0
    (folder,) = (tmp_path / "s").glob("heteroavg-*")
    assert results(folder)


class Remover(Observer):
    """Does something to the run's folder once its first round is over."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act: Callable[[], object] | None = act

    def tick(self) -> None:
        if self._act is not None:
            self._act()
            self._act = None


@pytest.mark.parametrize("name", ["run.sqlite", "run.sqlite-wal"])
def test_a_run_whose_records_were_removed_does_not_end_as_done(tmp_path: Path, name: str) -> None:
    experiment = load_experiment("demo", (), (*TINIER, "processes=inline"))
    file = tmp_path / "s" / "heteroavg-sync-1" / name
    with pytest.raises(FleetbedError, match="removed or replaced while the run was writing them"):
        start_study(experiment, tmp_path / "s", search=(), command="", observer=Remover(lambda: file.unlink()))
