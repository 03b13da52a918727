"""The small experiments really run: every method and policy of two of them, one round each, in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import query

from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.run import run
from fleetbed.profiles.experiment import runs
from fleetbed.profiles.resolve import load_experiment

SETS = ("rounds=1", "seeds=[1]", "processes=inline", "data.test_limit=200", "evaluation.every=1")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedhenn-small", "policies-small"])
def test_every_run_of_it_ends_with_its_models_evaluated(name: str, tmp_path: Path) -> None:
    experiment = load_experiment(name, (), SETS)
    for config in runs(experiment):
        folder = tmp_path / config.name
        run.start(config, folder, search=(), command="test", observer=Observer())
        assert query(folder, "SELECT value FROM meta WHERE key = 'status'") == [('"done"',)]
        ((tasks,),) = query(folder, "SELECT count(*) FROM tasks WHERE outcome = 'ok'")
        assert tasks >= 1
        assert {reason for (reason,) in query(folder, "SELECT DISTINCT reason FROM clients")} == {
            "the experiment gives every client this variant"
            if config.algorithm.variant
            else "the experiment assigns it"
        }
        evaluated = query(folder, "SELECT accuracy, local FROM evaluations WHERE round = 1")
        assert evaluated
        assert all(0 <= accuracy <= 1 for accuracy, _ in evaluated)
        if name == "fedhenn-small":
            assert sum(local for _, local in evaluated) == 10  # each client's own model on its own test data
