"""Flower apps, written as their users write them, on emulated boards: real commands, real processes."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fleetbed.emulator.machine import host
from fleetbed.emulator.machine.calibration import Calibration, HostRate, Store, host_fingerprint

pytest.importorskip("flwr")

APPS = Path(__file__).parent / "apps"
#: what repeats from run to run: everything but the meters, and the times that follow from them
ROWS = "SELECT task, client, round, stage, outcome, bytes_down, bytes_up, loss FROM tasks ORDER BY task"
FIGURES = "SELECT version, task, name, value FROM metrics ORDER BY version, task, name"


@pytest.fixture(scope="module", autouse=True)
def _known_host(own_cache: None) -> None:
    """A host whose speed is known, so that no run measures it: 100 GFLOPS a core, 18 times a Raspberry Pi Zero 2 W."""
    rate = HostRate(100.0, 100.0, host.cores(), 0.0, 0.0, 0.0)
    Store().save(Calibration(host_fingerprint(), "2026-01-01", rate))


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "fleetbed.cli.main", *map(str, arguments)]


def flower(app: str | Path, out: Path, *arguments: str | Path, fleet: str | Path = "iot-10") -> str:
    """Run an app; returns what the command said, after checking that it succeeded."""
    asked = command("flower", APPS / app, "--fleet", fleet, "--out", out, *arguments)
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300, cwd=out.parent)
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    return done.stderr


def rows(out: Path, query: str) -> list[Any]:
    (records,) = out.rglob("run.sqlite")
    with sqlite3.connect(records) as db:
        return db.execute(query).fetchall()


@pytest.mark.slow
def test_two_runs_with_one_seed_give_the_same_rows_but_for_the_meters(tmp_path: Path) -> None:
    for name in ("a", "b"):
        flower("quick_numpy", tmp_path / name)
    assert rows(tmp_path / "a", ROWS) == rows(tmp_path / "b", ROWS)
    assert rows(tmp_path / "a", FIGURES) == rows(tmp_path / "b", FIGURES)
    assert rows(tmp_path / "a", "SELECT DISTINCT round, stage, outcome FROM tasks") == [
        (1, "train", "ok"),
        (1, "evaluate", "ok"),
        (2, "train", "ok"),
        (2, "evaluate", "ok"),
    ]
    # the state of a client survives, and every client is told of its partition and its device
    calls = "SELECT value FROM metrics WHERE name = 'calls' AND task IS NOT NULL ORDER BY version"
    assert rows(tmp_path / "a", calls) == [(1.0,)] * 10 + [(2.0,)] * 10
    # without torch the time on the device is the CPU time of the call, multiplied by how much slower the device is
    metered = rows(tmp_path / "a", "SELECT measured_s / cpu_s, slowdown, flops FROM tasks JOIN clients USING (client)")
    assert len(metered) == 40
    assert all((ratio, flops) == (pytest.approx(slowdown), 0) for ratio, slowdown, flops in metered)
    told = dict(rows(tmp_path / "a", "SELECT client, value FROM metrics JOIN tasks USING (task) WHERE name = 'memory'"))
    caps = dict(rows(tmp_path / "a", "SELECT client, memory_cap_bytes FROM clients"))
    assert {client: int(value) for client, value in told.items()} == {c: cap >> 20 for c, cap in caps.items()}
    # the mean of 0/10 to 9/10, as the app reports its accuracy
    assert rows(tmp_path / "a", "SELECT version, round, samples, accuracy FROM evaluations") == [
        (2, 1, 10, pytest.approx(0.45)),
        (4, 2, 10, pytest.approx(0.45)),
    ]


@pytest.mark.slow
def test_a_torch_app_is_metered_and_its_server_evaluates(tmp_path: Path) -> None:
    file = tmp_path / "asked.yaml"
    app = os.path.relpath(APPS / "fashion_torch", tmp_path)
    config = "run_config: {num-server-rounds: 2, learning-rate: 0.05}"
    file.write_text(f"title: On boards\nfleet: iot-10\nflower:\n  app: {app}\n  {config}\n")
    done = subprocess.run(
        command("run", file, "--out", tmp_path / "out"), capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "round 2/2" in done.stderr
    out = tmp_path / "out"
    found = rows(out, "SELECT round, target, accuracy FROM evaluations ORDER BY version")
    assert [(number, target) for number, target, _ in found] == [(0, "server"), (1, "server"), (2, "server")]
    assert all(0.05 < accuracy < 0.95 for *_, accuracy in found)
    # FLOPs by hand: two convolutions and the linear layers; no gradient of the images. 96 samples, or 24 evaluated
    conv1, conv2, linear = 2 * 28**2 * 6 * 75, 2 * 10**2 * 16 * 150, 2 * (400 * 120 + 120 * 84 + 84 * 10)
    assert rows(out, "SELECT DISTINCT stage, flops FROM tasks ORDER BY stage DESC") == [
        ("train", 96 * (2 * conv1 + 3 * conv2 + 3 * linear)),
        ("evaluate", 24 * (conv1 + conv2 + linear)),
    ]
    assert rows(out, "SELECT count(*) FROM tasks WHERE measured_s > 0") == [(30,)]
    ((said,),) = rows(out, "SELECT text FROM notices WHERE kind = 'timing'")
    assert said.startswith("30 of 30 calls used torch: ")
    assert all(peak for (peak,) in rows(out, "SELECT peak_bytes FROM tasks"))
    report = subprocess.run(
        command("report", out, "--out", tmp_path / "report.html"), capture_output=True, text=True, timeout=120
    )
    assert report.returncode == 0, report.stderr
    page = (tmp_path / "report.html").read_text()
    assert "The Flower app fashion_torch on 10 clients" in page
    assert "no model is chosen by the memory of a device" in page
    assert "resuming in the middle of its ServerApp" in page
    data = json.loads(page.split('id="payload">')[1].split("</script>")[0])
    assert [one["name"] for one in data["metrics"]] == [
        "server accuracy",
        "server loss",
        "train_loss",
        "num-examples (train)",
        "eval_loss",
        "eval_acc",
        "num-examples (evaluate)",
    ]
    assert [len(one["curves"][0]["x"]) for one in data["metrics"][:3]] == [3, 3, 2]
    plot = command("plot", "metrics", out, "--out", tmp_path)
    assert subprocess.run(plot, capture_output=True, timeout=120).returncode == 0
    assert (tmp_path / "metrics.png").stat().st_size > 10_000
    refused = subprocess.run(command("plot", "cka", out), capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert refused.returncode == 2
    assert "is a run of a Flower app" in refused.stderr


@pytest.mark.slow
def test_a_legacy_app_goes_on_without_the_clients_that_run_out_of_memory(tmp_path: Path) -> None:
    # the same work on all boards: more than the two Raspberry Pi Zero 2 W have, and less than all others have
    flower("legacy_numpy", tmp_path / "out", "--set", "work-mib=220")
    caps = rows(tmp_path / "out", "SELECT client, memory_cap_bytes > 220 << 20 FROM clients ORDER BY client")
    assert caps == [(0, 0), (1, 0), *((client, 1) for client in range(2, 10))]
    ended = rows(tmp_path / "out", "SELECT client, stage, outcome FROM tasks WHERE outcome != 'ok' ORDER BY task")
    assert ended == [(0, "train", "oom"), (1, "train", "oom")] * 2
    peaks = "SELECT min(peak_bytes) FROM tasks WHERE stage = 'train' AND outcome = 'ok'"
    ((least,),) = rows(tmp_path / "out", peaks)
    assert least >= 220 << 20
    assert rows(tmp_path / "out", "SELECT round, stage, merged FROM rounds") == [
        (1, "query", 1),
        (1, "train", 8),
        (1, "evaluate", 10),
        (2, "train", 8),
        (2, "evaluate", 10),
    ]
    losses = [loss for (loss,) in rows(tmp_path / "out", "SELECT loss FROM evaluations ORDER BY version")]
    assert losses[1] < losses[0]


@pytest.mark.slow
def test_every_way_to_fail_is_an_error_of_flower(tmp_path: Path) -> None:
    trace = (
        tmp_path / "presence.tsv"
    )  # a trace starts anywhere, so that the last client is away but for a second in weeks
    trace.write_text("".join(f"{client}\t0\t4000001\n" for client in range(5)) + "5\t4000000\t4000001\n")
    sets = ("flower.hang_s=2", "availability.kind=trace", f"availability.trace={trace}")
    arguments = [part for item in sets for part in ("--set", item)]
    flower("troubled", tmp_path / "out", *arguments, fleet=APPS / "six.yaml")
    (log,) = tmp_path.rglob("server.log")
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    told = {key: value for line in lines for key, value in line.items()}
    # codes: 2 the ClientApp raised an error, 8 it crashed, 4 there is no reply, 5 the node is away
    assert told["query"] == [[0, 0], [1, 2], [2, 8], [3, 4], [4, 0], [5, 5]]
    assert told["timeout"] == [[4, 0]]
    assert (told["first"], told["then"]) == ([[4, 0]], [[0, 0]])
    ended = rows(tmp_path / "out", "SELECT client, outcome, detail FROM tasks WHERE outcome != 'ok' ORDER BY client")
    # an error in the app is told with its file and line
    assert [(client, outcome, detail.split(" (")[0]) for client, outcome, detail in ended] == [
        (0, "late", "the round was closed before it arrived"),
        (1, "crash", "ClientAppRaised: ValueError: bad luck"),
        (2, "crash", "ended by exit status 3"),
        (3, "hang", "no answer within 2 s"),
        (5, "offline", "it was away when it was invited"),
    ]
    assert "ValueError: bad luck" in next(tmp_path.rglob("workers.log")).read_text()


@pytest.mark.slow
def test_a_serverapp_that_fails_ends_the_run_with_a_sentence_and_its_traceback_in_a_file(tmp_path: Path) -> None:
    asked = command("flower", APPS / "troubled", "--fleet", APPS / "six.yaml", "--out", "out", "--set", "fails=true")
    done = subprocess.run(asked, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "the ServerApp failed at" in done.stderr
    assert "RuntimeError: no more rounds" in done.stderr.splitlines()[-1]
    assert "Traceback" in next(tmp_path.rglob("error.log")).read_text()
    # nothing of it can be continued, so it is carried out anew
    again = subprocess.run(command("run", "--resume", "out"), capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert again.returncode in (1, 2)
    assert "Traceback" not in again.stderr


@pytest.mark.slow
def test_ctrl_c_ends_in_order(tmp_path: Path) -> None:
    asked = command("flower", APPS / "troubled", "--fleet", APPS / "six.yaml", "--out", "out")
    with subprocess.Popen(asked, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as running:
        end_s = time.monotonic() + 60
        while not list(tmp_path.rglob("server.log")) and time.monotonic() < end_s:
            time.sleep(0.1)
        time.sleep(2)  # a client hangs by now, and the ServerApp waits for it
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in said
    assert rows(tmp_path / "out", "SELECT value FROM meta WHERE key = 'status'") == [('"interrupted"',)]
