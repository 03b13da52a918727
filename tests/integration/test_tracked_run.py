"""`fleetbed run --track tensorboard`: points come while a run goes on, and after a kill it continues where it was."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import TINIER, query

from fleetbed.emulator.machine.interpreter import module_command

pytestmark = pytest.mark.slow

ROUNDS = 40  # enough that some are left when the first have been sent


def start(*args: object) -> subprocess.Popen[str]:
    command = module_command("fleetbed.cli.main", "run", *map(str, args), "--track", "tensorboard", function="program")
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.1)


def test_points_come_while_the_run_goes_on_and_none_twice_after_a_kill(tmp_path: Path) -> None:
    loader: Any = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader", reason="no tensorboard")
    study = tmp_path / "study"
    kept = study / "trackers" / "tensorboard.json"

    def standing() -> dict[str, Any]:
        found = json.loads(kept.read_bytes()) if kept.exists() else {}
        return found.get("heteroavg-sync-1", {"sent": {"round": -1}, "ended": None})

    sets = [part for text in (*TINIER, f"rounds={ROUNDS}") for part in ("--set", text)]
    with start("demo", "--out", study, *sets) as process:
        wait_for(lambda: standing()["sent"]["round"] >= 1)
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: standing()["ended"] == "killed")  # the tracker notices, and finishes by itself
    reached = standing()["sent"]["round"]
    with start("--resume", study) as process:
        assert process.wait() == 0
    assert standing()["ended"] == "done"

    steps: dict[str, list[int]] = {}
    place = study / "trackers" / "tensorboard" / "heteroavg-sync-1"
    for path in sorted(place.glob("events.out.tfevents.*")):
        for event in loader.LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                steps.setdefault(value.tag, []).append(event.step)
    rounds = [number for (number,) in query(study / "heteroavg-sync-1", "SELECT DISTINCT round FROM rounds ORDER BY 1")]
    tested = [number for (number,) in query(study / "heteroavg-sync-1", "SELECT DISTINCT round FROM evaluations")]
    assert reached < ROUNDS == rounds[-1]
    assert steps["fleet/bytes"] == [0, *rounds]
    assert sorted(steps["test/accuracy"]) == sorted(tested)
    assert (place / "report.html").exists()
