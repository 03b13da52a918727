"""A fleet that cannot fit is refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetbed.cli.main import main
from fleetbed.emulator.machine import host
from fleetbed.emulator.machine.capacity import check_processes_fit
from fleetbed.emulator.processes import early_start
from fleetbed.profiles.errors import HostCannot


def test_a_fleet_that_fits_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 20 << 30)
    check_processes_fit(500, "resident")


def test_a_fleet_that_does_not_fit_is_told_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 4 << 30)
    with pytest.raises(
        HostCannot, match=r"5000 resident clients need 62048 MiB and 4096 MiB are free: about 170 would"
    ):
        check_processes_fit(5000, "resident")


@pytest.mark.parametrize("processes", ["on-demand", "inline"])
def test_clients_without_a_process_of_their_own_need_no_room(processes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 4 << 30)
    check_processes_fit(5000, processes)  # type: ignore[arg-type]


def test_the_command_refuses_it_before_any_process_or_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start() -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(host, "available_bytes", lambda: 3 << 30)
    monkeypatch.setattr(early_start, "ZygoteProcess", start)
    with pytest.raises(SystemExit) as ended:
        main(["run", "demo", "--set", "fleet=iot-200", "--out", str(tmp_path / "out")])
    assert ended.value.code == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "about 85 would fit; set processes to on-demand" in said
    assert not (tmp_path / "out").exists()
