"""A sweep over any key: which runs it makes, their names, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import count_runs, runs, settings_of
from fleetbed.profiles.resolve import load_experiment, make_experiment

BASE = {"title": "A sweep", "fleet": "demo", "algorithms": [{"name": "fedavg"}, {"name": "fedprox"}], "seeds": [1, 2]}


def test_every_combination_makes_runs_with_its_values() -> None:
    sweep = {"training.optimizer.lr": [0.01, 0.1], "data.partition.alpha": [0.1, 1, 10]}
    experiment = make_experiment({**BASE, "sweep": sweep})
    found = runs(experiment)
    assert len(found) == count_runs(experiment) == 2 * 2 * 3 * 2
    assert len({run.name for run in found}) == len(found)
    first = found[0]
    assert first.name == "fedavg-sync-lr=0.01, alpha=0.1-1"
    assert first.title == "fedavg, lr=0.01, alpha=0.1"
    for run in found:
        setting = run.experiment
        assert run.point == {
            "training.optimizer.lr": setting.training.optimizer.lr,
            "data.partition.alpha": setting.data.partition.alpha,
        }
        assert not setting.sweep
    assert len(settings_of(experiment)) == 6


def test_a_key_of_one_algorithm_concerns_no_other() -> None:
    experiment = make_experiment({**BASE, "sweep": {"algorithms.1.params.mu": [0.1, 1]}})
    assert [run.name for run in runs(experiment)] == [
        "fedavg-sync-1",
        "fedavg-sync-2",
        "fedprox-sync-mu=0.1-1",
        "fedprox-sync-mu=0.1-2",
        "fedprox-sync-mu=1-1",
        "fedprox-sync-mu=1-2",
    ]
    assert count_runs(experiment) == 6


def test_a_value_that_is_needed_may_come_from_the_sweep_alone() -> None:
    experiment = make_experiment(
        {**BASE, "policies": [{"kind": "deadline"}], "sweep": {"policies.0.deadline_s": [10, 20]}}
    )
    assert {run.policy.deadline_s for run in runs(experiment)} == {10, 20}


def test_keys_with_the_same_end_are_told_apart() -> None:
    experiment = make_experiment({**BASE, "sweep": {"training.batch": [8, 16], "evaluation.batch": [128, 256]}})
    assert runs(experiment)[0].name == "fedavg-sync-training.batch=8, evaluation.batch=128-1"


def test_paths_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "title: x\nfleet: demo\nalgorithms: [{name: fedavg}]\nsweep: {data.name: [./a.npz, ./b.npz]}\n"
    )
    found = runs(load_experiment(str(tmp_path / "mine.yaml")))
    assert [run.experiment.data.name for run in found] == [str(tmp_path / "a.npz"), str(tmp_path / "b.npz")]
    assert [run.name for run in found] == ["fedavg-sync-name=a-1", "fedavg-sync-name=b-1"]


def test_a_setting_can_add_a_sweep() -> None:
    found = runs(load_experiment("demo", (), ["sweep={training.batch: [8, 16]}", "algorithms=[{name: fedavg}]"]))
    assert [run.experiment.training.batch for run in found] == [8, 16]


@pytest.mark.parametrize(
    ("sweep", "sentence"),
    [
        (
            {"training.optimizer.lrr": [0.1]},
            "with sweep lrr=0.1: training.optimizer.lrr: there is no key 'lrr'",
        ),
        ({"training.optimizer.lr": ["fast"]}, 'with sweep lr=fast: training.optimizer.lr is "fast", but a number'),
        ({"training.optimizer.lr": [-1]}, "with sweep lr=-1: training.optimizer.lr is -1, but a number"),
        ({"training.batch": 8}, "sweep.training.batch is 8, but a list of at least 1 is needed"),
        ({"training.batch": []}, "sweep.training.batch is a list of 0, but a list of at least 1 is needed"),
        ({"training.batch": [8, 8]}, 'sweep.training.batch: "batch=8" occurs twice'),
        ({"seeds": [[1], [2]]}, "sweep.seeds cannot be swept: list them under seeds"),
        ({"rounds": [1, 2]}, "sweep.rounds cannot be swept: a longer run contains the shorter one"),
        ({"training..batch": [1]}, "sweep.training..batch: the key path has an empty part"),
        ({"algorithms.7.params.mu": [1]}, 'algorithms is a list of 2, but "7" was asked for'),
        ({"policies.0.deadline_s": [5]}, "policies.0.deadline_s is given, but kind is sync"),
        ({f"training.{key}": list(range(1, 60)) for key in ("batch", "epochs", "max_steps")}, "make 821516 runs"),
        ({"model.options.base_width": ["x" * 150, "y" * 190]}, "would have a folder name of"),
    ],
)
def test_a_wrong_sweep_is_a_sentence(sweep: dict[str, object], sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        make_experiment({**BASE, "sweep": sweep})
    assert sentence in str(caught.value)
