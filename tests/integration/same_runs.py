"""Checks that two runs are the same, and that a run leaves no processes or folders behind."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import psutil
from small_runs import query

from fleetbed.emulator.wire.storage import load_bundle

#: what a task's row says of device time and of learning; host times and meters differ from run to run
TASKS = (
    "SELECT task, client, round, stage, variant, outcome, detail, base_version, merged_version, staleness, "
    "dispatched_s, downloaded_s, compute_start_s, compute_end_s, uploaded_s, ended_s, waited_s, plan_s, "
    "flops, bytes_down, bytes_up, joules, steps, samples, loss FROM tasks ORDER BY task"
)
ROUNDS = "SELECT version, round, stage, device_start_s, device_end_s, server_s, merged FROM rounds ORDER BY version"
EVALUATIONS = "SELECT version, round, device_s, target, accuracy, loss FROM evaluations ORDER BY version, target"
METRICS = "SELECT version, name, value FROM metrics ORDER BY version, name"


def weights(folder: Path) -> str:
    """A hash of the final models."""
    found = hashlib.sha256()
    for path in sorted((folder / "models").glob("*.safetensors")):
        for name, tensor in sorted(load_bundle(path).tensors.items()):
            found.update(f"{path.name}/{name}/{tensor.dtype}/{tuple(tensor.shape)}".encode())
            found.update(tensor.numpy().tobytes())
    return found.hexdigest()[:16]


def results(folder: Path) -> dict[str, Any]:
    """All of a run that repeats."""
    assert query(folder, "SELECT value FROM meta WHERE key = 'status'") == [('"done"',)]
    tables = {"tasks": TASKS, "rounds": ROUNDS, "evaluations": EVALUATIONS, "metrics": METRICS}
    found: dict[str, Any] = {name: query(folder, sql) for name, sql in tables.items()}
    assert found["tasks"]
    assert found["evaluations"]
    kept = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in folder.glob("*/merge-*")}
    return {"weights": weights(folder), "kept": kept, **found}


def failures(folder: Path) -> list[tuple[Any, ...]]:
    """Tasks whose process failed, with what is known of it; without any, the host had no part in the results."""
    return query(folder, "SELECT task, client, outcome, detail FROM tasks WHERE outcome IN ('oom', 'crash', 'hang')")


def traces_of(pid: int) -> list[str]:
    """The cgroups that a run whose zygote had this pid has left."""
    return [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/fleetbed-????????-{pid}-*")]


def workers_in(folder: Path) -> list[psutil.Process]:
    """The processes that write to a run's log: its zygote and all that it forked."""
    log = str(folder / "workers.log")
    found = []
    for process in psutil.process_iter():
        try:
            if Path(f"/proc/{process.pid}/fd/2").resolve() == Path(log).resolve():
                found.append(process)
        except OSError:
            continue
    return found
