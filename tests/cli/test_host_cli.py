from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fleetbed.cli.main import main
from fleetbed.emulator.checks import board, verify
from fleetbed.emulator.checks.class_rates import ClassTimes, TrainingStep
from fleetbed.emulator.checks.verify import Finding
from fleetbed.emulator.machine import calibration
from fleetbed.emulator.machine.calibration import HostRate
from fleetbed.profiles.types import Rates

IDLE = HostRate(180.0, 120.0, 2, 0.01, 0.02, other_cores=0.0)
BUSY = HostRate(90.0, 60.0, 2, 0.5, 0.5, other_cores=1.3)


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(args)
    return int(caught.value.code or 0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor") == 0
    text = capsys.readouterr().out
    assert "not calibrated yet: run fleetbed calibrate" in text
    assert all(knob in text for knob in ("cpu", "memory", "gpu-compute", "gpu-memory", "link"))


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [knob["knob"] for knob in report["knobs"]] == ["cpu", "memory", "gpu-compute", "gpu-memory", "link"]
    assert {knob["status"] for knob in report["knobs"]} <= {"enforced", "modelled", "unavailable"}


def test_calibrate_saves_its_measurement(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "measure_rate", lambda: IDLE)
    assert run("calibrate", "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert first["calibration"]["rate"]["alone_gflops"] == 180.0
    assert run("calibrate") == 0
    out = capsys.readouterr()
    assert first["id"] in out.out
    assert "one core alone: 180.0 GFLOPS (spread 1.0%)" in out.out
    assert out.err == ""


def test_calibrate_warns_on_a_busy_host(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "measure_rate", lambda: BUSY)
    assert run("calibrate") == 0
    told = capsys.readouterr()
    assert "others kept 1.3 cores busy" in told.err
    assert "was not saved" in told.err
    assert "saved in" not in told.out


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """What the hogs will be said to have found; nothing is run."""
    found: list[Finding] = []
    monkeypatch.setattr(calibration, "measure_rate", lambda: IDLE)
    monkeypatch.setattr(verify, "_findings", lambda _order: iter(found))
    return found


def test_verify_prints_requested_and_measured_values(
    capsys: pytest.CaptureFixture[str], findings: list[Finding]
) -> None:
    findings.append(Finding("rate alone", "raspberry-pi-5-8gb", 2.0, 2.002, "pacing"))
    assert run("verify", "--devices", "raspberry-pi-5-8gb", "--json") == 0
    (proof,) = json.loads(capsys.readouterr().out)["proofs"]
    assert (proof["asked"], proof["unit"], proof["ok"]) == (70.3, "GFLOPS", True)
    assert proof["error"] == pytest.approx(-0.001, abs=1e-4)


def test_verify_fails_beyond_the_bar(capsys: pytest.CaptureFixture[str], findings: list[Finding]) -> None:
    findings.append(Finding("rate alone", "raspberry-pi-5-8gb", 2.0, 2.2, "pacing", other_cores=0.9))
    assert run("verify", "--devices", "raspberry-pi-5-8gb") == 1
    out = capsys.readouterr()
    assert "-9.09%" in out.out
    assert "other processes used up to 0.9 cores" in out.err


def test_verify_refuses_an_unknown_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "--devices", "raspberry-pi-6") == 2
    assert "raspberry-pi-5-8gb" in capsys.readouterr().err


@pytest.fixture
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    samples: dict[str, Any] = {"matmul": [10.0, 11.0, 12.0], "copy": [2.0, 2.5, 3.0]}
    monkeypatch.setattr(board, "run_kernel", lambda name, **_: samples[name])
    monkeypatch.setattr(board, "_runtime_bytes", lambda: 150 * 2**20)
    rates = Rates(
        conv_1x1_gflops=8.0, conv_gflops=9.0, depthwise_gflops=0.5, matmul_gflops=11.0, memory_gb_s=1.5, call_us=20.0
    )
    classes = ClassTimes(rates=rates, steps=[TrainingStep("resnet18", 2.0, 2.2)], turns=7, spread=0.03)
    monkeypatch.setattr(board, "measure_classes", lambda _: classes)


@pytest.mark.usefixtures("_measured")
def test_measure_writes_a_profile_that_can_be_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("profiles", "measure", "--name", "My Board 2", "--link", "wifi5") == 0
    out = capsys.readouterr().out
    assert "my-board-2.yaml: 11 GFLOPS" in out
    assert "resnet18       2000         2200          +10.0%" in out
    assert run("profiles", "check", "./my-board-2.yaml", "--kind", "device") == 0


@pytest.mark.usefixtures("_measured")
def test_measure_warns_where_a_step_did_not_repeat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steady = board.measure_classes(1)
    monkeypatch.setattr(board, "measure_classes", lambda _: replace(steady, spread=1.3))
    assert run("profiles", "measure", "--name", "b") == 0
    assert "times of the same training step differ by 130%" in capsys.readouterr().err


@pytest.mark.usefixtures("_measured")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--out", "there.yaml"], "there.yaml: this file already exists"),
        (["--out", "nowhere/b.yaml"], "the folder nowhere does not exist"),
        (["--link", "wifi9"], "wifi9"),
    ],
)
def test_measure_refuses_before_it_measures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], sentence: str
) -> None:
    (tmp_path / "there.yaml").write_text("title: mine\n")
    assert run("profiles", "measure", "--name", "b", *options) == 2
    assert sentence in capsys.readouterr().err
    assert (tmp_path / "there.yaml").read_text() == "title: mine\n"
    assert not (tmp_path / "b.yaml").exists()
