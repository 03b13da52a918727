"""What clients of a run need, turn after turn, is what their methods declare, also where they keep a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import TINIER, query

from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.run.study import start_study
from fleetbed.profiles.resolve import load_experiment

pytestmark = [pytest.mark.slow, pytest.mark.root]

#: what clients keep is a model (FedTGP), with an optimiser (FedGKT, Private), with two (FedMD), or two models and more
METHODS = {
    "fedtgp": "{server_epochs: 1}",
    "fedgkt": "{server_epochs: 1}",
    "private": "{keep_optimizer: true}",
    "fedmd": "{public: 8, match_batch: 4}",
    "fedgen": "{server_steps: 1}",
    "fedfomo": "{}",
    "fedselect": "{every: 1}",
}


@pytest.mark.parametrize("method", METHODS)
def test_declared_memory_is_what_clients_need(tmp_path: Path, method: str) -> None:
    fleet = tmp_path / "two.yaml"
    fleet.write_text("title: two alike\nmembers:\n  - {device: raspberry-pi-4b-4gb, count: 2}\n")
    sets = (
        *TINIER,
        f"algorithms=[{{name: {method}, params: {METHODS[method]}}}]",
        f"fleet={fleet}",
        "model.variants=[resnet10]",
        "model.options={base_width: 32}",
        "training.batch=16",
        "training.max_steps=3",
        "training.optimizer={name: adam, lr: 0.001}",
        "data.train_limit=120",
        f"data.public={8 if 'public' in METHODS[method] else 0}",
        "rounds=3",
        "evaluation.every=3",
        "processes=resident",
    )
    (folder,) = start_study(
        load_experiment("demo", (), sets), tmp_path / "study", search=(), command="", observer=Observer()
    )
    rows = query(
        folder,
        "SELECT max(peak_bytes), memory_predicted_bytes FROM tasks JOIN clients USING (client) GROUP BY client",
    )
    if any(peak is None for peak, _ in rows):
        pytest.skip("no memory cgroup can be written here")
    assert [f"{predicted / peak - 1:+.0%}" for peak, predicted in rows if abs(predicted / peak - 1) > 0.25] == []
