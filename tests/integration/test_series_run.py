"""FedHeNN-homo from its run to the tables: shown in the series that the paper reports, another one on demand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_runs import TINIER, query

from fleetbed.analysis.tables.compare import compare_runs, records
from fleetbed.analysis.tables.runs import open_run
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.run.study import start_study
from fleetbed.profiles.resolve import load_experiment


def test_personal_models_on_their_own_test_data_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    method = "algorithms=[{name: fedhenn_homo, params: {rad: 8}, variant: resnet10}]"
    sets = (*TINIER, method, "data.public=16", "processes=inline", "data.test_limit=200")
    experiment = load_experiment("demo", (), sets)
    (folder,) = start_study(experiment, tmp_path / "study", search=(), command="", observer=Observer())
    final = query(folder, "SELECT accuracy, samples, local FROM evaluations WHERE version = 2")
    own = [(accuracy, samples) for accuracy, samples, local in final if local]
    (overall,) = [accuracy for accuracy, _, local in final if not local]
    run = open_run(folder)
    assert run.about.series == "personal-own"
    (row,) = records(compare_runs([run], None, []))
    assert row["final_mean"] == pytest.approx(np.average([a for a, _ in own], weights=[n for _, n in own]))
    (row,) = records(compare_runs([run], None, [], "global"))
    assert row["final_mean"] == pytest.approx(overall)
