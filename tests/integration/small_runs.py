"""Small real runs: eight clients of four kinds, each its own process, on a part of the shipped data."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from fleetbed.profiles.experiment import RunConfig, runs
from fleetbed.profiles.resolve import load_experiment

TINY = (
    "algorithms=[{name: heteroavg}]",
    "data.train_limit=400",
    "data.test_limit=100",
    "model.options={base_width: 4}",
    "training.max_steps=2",
    "timing.source=modelled",
    "budgets.round_s=null",
    "rounds=2",
)
#: where only the emulator's own behaviour matters: two small variants, a handful of samples
TINIER = (
    *TINY,
    "model.variants=[resnet10, resnet14]",
    "training.batch=4",
    "data.train_limit=200",
    "data.test_limit=40",
    "data.partition.min_size=4",
)
#: where few clients are enough: methods may evaluate a model, or two, of each
FOUR = (f"fleet={Path(__file__).with_name('four.yaml')}",)
#: for methods that need no weights in common: networks that are made in a millisecond
SMALL_NETS = (
    "model.family=fedhenn-cnn",
    "model.variants=[conv1-fc1, conv2-fc2]",
    "model.options={filters: [4, 4, 4], hidden: [8, 8]}",
)
#: for methods that cut by width
WIDTH = (
    "model.family=resnet-width",
    "model.variants=[resnet26-quarter, resnet26-half]",
    "model.assign=[resnet26-quarter, resnet26-half]",
    "model.options={base_width: 8}",
)


def model_of(family: str, *variants: str) -> tuple[str, ...]:
    """Half of the clients have one of these small models, half the other."""
    listed = ", ".join(variants)
    return (
        f"model.family={family}",
        f"model.variants=[{listed}]",
        f"model.assign=[{listed}]",
        "model.options={base_width: 4}",
    )


#: the models of methods that need a family of their own
OWN_MODEL = {
    "heterofl": WIDTH,
    "fedrolex": WIDTH,
    "scalefl": model_of("resnet-exit", "level1", "level2"),
    "depthfl": model_of("resnet-depth", "depth1", "depth2"),
    "fedepth": model_of("resnet-segment", "resnet26-in-3", "resnet26-in-1"),
}


def tiny(*sets: str) -> RunConfig:
    return runs(load_experiment("demo", (), (*TINY, *sets)))[0]


def query(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(folder / "run.sqlite") as db:
        return db.execute(sql).fetchall()
