"""Runs each method for as many rounds as fit into what HeteroAvg spends in all its rounds, at most MOST times as many.

    python docs/study/fitted.py time|bytes|joules cifar10|fashion SEED [KEY=VALUE ...]    # what --set would take

What a method spends is in curves.csv, from the study's runs with this seed. A method that is just cut off there has
never had the low learning rate of the last rounds, and one that spends less could go on. Here the rate falls after the
same share of the rounds as in the study. The runs of FedIN for device time on CIFAR-10 go to
runs/11-fedin-time/cifar10-time. What was begun before is continued.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from claims import CURVES, read_rows
from orders import BASE, BUDGETS, METHODS, PERSONAL, TITLES, curves_of, same, spent

import fleetbed
from fleetbed.profiles.experiment import AlgorithmChoice, Experiment
from fleetbed.profiles.resolve import load_experiment

EVALUATIONS = 8
MOST = 8


def rounds_that_fit(rounds: int, share: float) -> int:
    """Return with how many rounds a method comes closest to the base, of which it spends this share in so many."""
    return min(round(rounds / share), MOST * rounds)


def fitted(experiment: Experiment, algorithm: AlgorithmChoice, rounds: int) -> Experiment:
    """Return the experiment of this method alone for these rounds, with its schedule scaled."""
    changes = tuple(
        msgspec.structs.replace(change, round=1 + round((change.round - 1) * rounds / experiment.rounds))
        for change in experiment.training.schedule
    )
    return msgspec.structs.replace(
        experiment,
        algorithms=(algorithm,),
        rounds=rounds,
        training=msgspec.structs.replace(experiment.training, schedule=changes),
        evaluation=msgspec.structs.replace(experiment.evaluation, every=max(1, rounds // EVALUATIONS)),
    )


def run_all(axis: str, study: str, seed: str, sets: Sequence[str]) -> None:
    experiment = load_experiment(f"claims-{study}-small", sets=[f"seeds=[{seed}]", *sets])
    curves = curves_of((row for row in read_rows(CURVES) if row["seed"] == seed), study)
    choices = {choice.title: choice for choice in experiment.algorithms if choice.title in curves}
    for method in (name for name in METHODS if name in choices and name not in (BASE, *PERSONAL)):
        out = Path("runs", f"{seed}-{method}-{axis}", f"{study}-{axis}")
        if out.exists():
            fleetbed.run(resume=out)
        elif not same(share := spent(curves, method, axis)):
            rounds = rounds_that_fit(experiment.rounds, share)
            fleetbed.run(msgspec.to_builtins(fitted(experiment, choices[method], rounds)), out=out)


def main(arguments: Sequence[str]) -> None:
    match arguments:
        case [axis, study, seed, *sets] if axis in BUDGETS and study in TITLES:
            run_all(axis, study, seed, sets)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
