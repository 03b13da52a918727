from __future__ import annotations

from pathlib import Path

import pytest

from fleetbed.emulator.checks import board
from fleetbed.emulator.checks.class_rates import ClassTimes, TrainingStep
from fleetbed.emulator.machine import host
from fleetbed.profiles.checks.provenance import without_provenance
from fleetbed.profiles.loading import read_profile
from fleetbed.profiles.types import Device, Rates

MIB = 2**20
RATES = Rates(
    conv_1x1_gflops=8.0, conv_gflops=9.0, depthwise_gflops=0.5, matmul_gflops=11.0, memory_gb_s=1.5, call_us=20.0
)
CLASSES = ClassTimes(rates=RATES, steps=[TrainingStep("resnet18", 2.0, 2.2)], turns=7, spread=0.03)


@pytest.fixture
def _rated(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = {"matmul": [10.0, 11.0, 12.0], "copy": [2.0, 2.5, 3.0]}
    monkeypatch.setattr(board, "run_kernel", lambda name, **_: samples[name])
    monkeypatch.setattr(board, "measure_classes", lambda threads: CLASSES if threads == 4 else None)
    monkeypatch.setattr(board, "_runtime_bytes", lambda: 150 * MIB)
    monkeypatch.setattr(host, "memory_bytes", lambda: 1850 * MIB)
    monkeypatch.setattr(host, "available_bytes", lambda: 1630 * MIB)
    monkeypatch.setattr(host, "cores", lambda: 4)


@pytest.mark.usefixtures("_rated")
def test_the_profile_has_the_measured_values_and_loads(tmp_path: Path) -> None:
    file = tmp_path / "board.yaml"
    measured, classes = board.measure_board("My board", "wifi5")
    file.write_text(board.as_yaml(measured))
    device = read_profile(file, Device)
    assert device.rates == RATES
    assert [step.error for step in classes.steps] == [pytest.approx(0.1)]
    assert (device.title, device.link, device.trains_on) == ("My board", "wifi5", "cpu")
    assert (device.cpu.cores, device.rate_gflops) == (4, 11.0)
    memory = device.memory
    assert (memory.installed_mib, memory.visible_mib, memory.available_mib) == (2048, 1850, 1630)
    assert (memory.runtime_mib, memory.bandwidth_gb_s_measured) == (150, 2.5)
    assert device.cap_mib == 1480
    assert (device.power.idle_w, device.power.load_w) == (None, None)


@pytest.mark.usefixtures("_rated")
def test_every_figure_says_where_it_comes_from() -> None:
    device, _ = board.measure_board("My board", "wifi5")
    assert without_provenance(device) == []
    kinds = {entry.figure: entry.kind for entry in device.provenance}
    assert kinds["cpu.fp32_gflops"] == kinds["memory.runtime_mib"] == kinds["rates"] == "measured"
    notes = {entry.figure: entry.note for entry in device.provenance}
    assert "resnet18 +10%" in notes["rates"]
    assert kinds["memory.installed_mib"] == "derived"
    assert kinds["link"] == "assumed"


def test_a_board_says_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = tmp_path / "model"
    name.write_text("Raspberry Pi 4 Model B Rev 1.4\0")
    monkeypatch.setattr(board, "_BOARD_NAME", name)
    assert board.board_title() == "Raspberry Pi 4 Model B Rev 1.4"


def test_the_framework_takes_memory() -> None:
    assert board._runtime_bytes() > 20 * MIB
