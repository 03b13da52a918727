"""The live page: who may read it, what it says of runs in every state, and that it follows the records."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from synthetic_runs import write_run
from test_report_commands import run_command

from fleetbed.analysis.page import changes
from fleetbed.analysis.page.serving import LiveServer
from fleetbed.analysis.page.watching import Watched
from fleetbed.emulator.limits.owner import this_process
from fleetbed.emulator.records.records import Records
from fleetbed.emulator.records.snapshot import FILE, Snapshot, TaskNow
from fleetbed.profiles.errors import BadInput


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    write_run(tmp_path, "fedavg", rounds=2)
    with LiveServer(Watched([tmp_path])) as one:
        thread = threading.Thread(target=one.serve_forever, args=(0.05,))
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def ask(server: LiveServer, path: str, method: str = "GET", host: str | None = None) -> tuple[int, bytes]:
    line = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    try:
        line.request(method, path, headers={} if host is None else {"Host": host})
        answer = line.getresponse()
        return answer.status, answer.read()
    finally:
        line.close()


def test_only_those_who_know_the_address_can_read_and_nobody_can_write(server: LiveServer) -> None:
    own = f"/{server.token}/"
    assert server.server_address[0] == "127.0.0.1"
    assert server.url.endswith(own)
    assert len(server.token) >= 20
    status, page = ask(server, own)
    assert status == 200
    assert b"connect-src 'self'" in page
    assert b"fedavg-sync-1" in page
    for path in ("/", "/state", "/x/", f"/{server.token}x/", f"{own}../etc/passwd", f"{own}run.sqlite", "/%00/"):
        assert ask(server, path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
        assert ask(server, own, method)[0] == 405
    assert ask(server, own, host="evil.example")[0] == 404  # a name that was pointed at this address
    for query in ("?known=x", "?known=-1", "?known=", "?known=99999999999999999999"):
        assert ask(server, f"{own}state{query}")[0] == 200


def test_data_travel_only_if_they_are_new(server: LiveServer) -> None:
    path = f"/{server.token}/state"
    first = json.loads(ask(server, path)[1])
    assert first["payload"]["runs"][0]["label"] == "fedavg, seed 1"
    again = json.loads(ask(server, f"{path}?known={first['stamp']}")[1])
    assert again.keys() == {"stamp", "now"}
    assert again["now"][0]["state"] == "done"


def state_of(folder: Path) -> dict[str, Any]:
    (found,) = Watched([folder]).state(None)["now"]
    return found  # type: ignore[no-any-return]


def test_a_run_that_goes_on_one_that_was_killed_and_one_from_elsewhere(tmp_path: Path) -> None:
    folder = write_run(tmp_path, status="running", stop_after=3)
    assert state_of(folder)["state"] == "not finished: still running or killed after round 3 of 12"
    tasks = (TaskNow(0, "resnet10", "trains", 100.0, 130.0), TaskNow(1, "resnet10", "uploads", 100.0, 110.0))

    def live(process: str) -> None:
        snapshot = Snapshot(process=process, round=4, device_s=120.0, host_s=9.0, left_s=18.0, tasks=tasks)
        (folder / FILE).write_bytes(msgspec.json.encode(snapshot))

    live(this_process())
    found = state_of(folder)
    assert (found["state"], found["ended"], found["left_s"]) == ("running", False, 18.0)
    assert found["doing"] == {"trains": 1, "uploads": 1, "idle": 8}
    assert found["tasks"][0] == ["000", "pi-zero-2w", "resnet10", "trains", 20.0, 130.0]
    code = "from fleetbed.emulator.limits.owner import this_process; print(this_process())"
    dead = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    live(dead)
    found = state_of(folder)
    assert (found["state"], found["ended"]) == ("not finished: killed after round 3 of 12", True)
    live("00000000-1-1")
    assert "still running or killed" in state_of(folder)["state"]
    (folder / FILE).write_text("{")
    assert "still running or killed" in state_of(folder)["state"]
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)  # must not be waited for
    assert "still running or killed" in state_of(folder)["state"]


def test_new_records_and_new_runs_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "LEAST_S", 0.0)
    monkeypatch.setattr(changes, "SHARE", 0)
    folder = write_run(tmp_path, status="running", stop_after=1)
    watched = Watched([tmp_path])
    first = watched.state(None)
    records = Records(folder / "run.sqlite")
    records.notice("oom", "<b>client 003</b> ran out of memory", 5.0, 4.0)
    records.close()
    os.utime(folder / "run.sqlite", ns=(1, first["stamp"]))
    second = watched.state(first["stamp"])
    assert second["stamp"] == first["stamp"] + 1
    assert second["now"][0]["notices"][-1] == [4.0, "<b>client 003</b> ran out of memory"]
    assert "<b>client 003" not in watched.page()
    write_run(tmp_path, "fedin", rounds=1)
    assert [one["name"] for one in watched.state(None)["now"]] == ["fedavg-sync-1", "fedin-sync-1"]


def test_a_study_whose_runs_have_not_begun(tmp_path: Path) -> None:
    run = write_run(tmp_path / "other", rounds=1)
    config = Records(run / "run.sqlite")
    experiment = config.meta("config")["experiment"]
    config.close()
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "study.json").write_text(json.dumps({"experiment": experiment}))
    watched = Watched([tmp_path / "study"])
    assert watched.state(None)["now"] == [{"name": "fedavg-sync-1", "state": "not started"}]
    assert "Waiting for the first run" in watched.page()


def test_a_run_that_is_just_being_created_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run --watch` starts both at once, so the page may find the records before the run has written to them."""
    monkeypatch.setattr(changes, "LEAST_S", 0.0)
    monkeypatch.setattr(changes, "SHARE", 0)
    records = write_run(tmp_path, rounds=1) / "run.sqlite"
    written = records.read_bytes()
    records.write_bytes(b"")
    watched = Watched([tmp_path])
    assert "recorded nothing yet" in watched.state(None)["now"][0]["state"]
    records.write_bytes(written)
    assert watched.state(None)["now"][0]["state"] == "done"


def test_bad_input_is_one_sentence(tmp_path: Path, server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"no run, there is no run\.sqlite"):
        Watched([tmp_path / "empty"])
    port = server.server_address[1]
    with pytest.raises(BadInput, match=f"--port {port}: cannot listen there .*; choose another port"):
        LiveServer(server.watched, port)
    assert run_command("watch", tmp_path / "nothing") == 2
    assert capsys.readouterr().err.count("\n") == 1
