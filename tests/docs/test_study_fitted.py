"""Checks the runs of the study that fit into a budget: their rounds and when their learning rate falls."""

from __future__ import annotations

from types import ModuleType

from fleetbed.profiles.experiment import AlgorithmChoice
from fleetbed.profiles.resolve import load_experiment


def test_the_rate_falls_after_the_same_share_of_the_rounds(fitted: ModuleType) -> None:
    whole = load_experiment("claims-cifar10-small")
    assert (whole.rounds, [change.round for change in whole.training.schedule]) == (24, [15])
    algorithm = AlgorithmChoice(name="fedin")
    half = fitted.fitted(whole, algorithm, 12)
    assert (half.rounds, [change.round for change in half.training.schedule]) == (12, [8])
    assert [change.lr for change in half.training.schedule] == [0.0003]
    assert half.algorithms == (algorithm,)
    assert half.evaluation.every == 1
    assert half.seeds == whole.seeds


def test_as_many_rounds_as_fit_are_made_but_not_without_end(fitted: ModuleType) -> None:
    assert [fitted.rounds_that_fit(24, share) for share in (2.0, 1.5, 0.5, 0.1)] == [12, 16, 48, 192]
