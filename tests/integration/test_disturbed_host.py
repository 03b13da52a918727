"""A run whose calibration was disturbed reports this at once, in its records and in its report."""

from __future__ import annotations

from pathlib import Path

import pytest
from observers import Listener
from small_runs import TINIER, query

from fleetbed.analysis.tables.notes import cautions
from fleetbed.analysis.tables.runs import open_runs
from fleetbed.analysis.tables.series import series_of
from fleetbed.emulator.machine import calibration
from fleetbed.emulator.machine.calibration import HostRate, Store
from fleetbed.emulator.run.references import References
from fleetbed.emulator.run.study import start_study
from fleetbed.emulator.wire.messages import Measured
from fleetbed.profiles.resolve import load_experiment


@pytest.mark.slow
@pytest.mark.parametrize("disturbed", [True, False])
def test_a_disturbed_calibration_is_reported_and_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disturbed: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    others = 0.7 if disturbed else 0.0
    measured: list[HostRate] = []

    def measure_rate() -> HostRate:
        measured.append(HostRate(50.0, 40.0, 2, 0.0, 0.0, others))
        return measured[-1]

    monkeypatch.setattr(calibration, "measure_rate", measure_rate)
    answer = Measured(task=0, seconds=0.01, spread=0.02, other_cores=others)
    monkeypatch.setattr(References, "_measure", lambda *_: answer)
    sets = (*TINIER, "processes=inline", "timing.source=enforced", "seeds=[1, 2]", "rounds=1")
    heard = Listener()
    folders = start_study(load_experiment("demo", (), sets), tmp_path / "s", search=(), command="", observer=heard)
    told = [
        line
        for line in heard.said
        if line.startswith("other programs used this host during the measurement (others kept")
    ]
    kept = Store().path.exists()
    assert kept != disturbed
    assert len(measured) == (3 if disturbed else 1)  # once for all runs of the study
    for folder in folders:
        (count,) = query(folder, "SELECT count(*) FROM notices WHERE kind = 'calibration'")
        assert count == (1,) if disturbed else (0,)
    shown = [
        text
        for text in cautions(series_of(open_runs([tmp_path / "s"])))
        if "other processes disturbed the calibration" in text
    ]
    assert len(shown) == (1 if disturbed else 0)  # one for both runs
    if disturbed:
        assert heard.said[2] == told[0]  # before it are which run it is, and that the host is being measured
        assert "the rate, reference times: " in told[1]
    else:
        assert told == []
