"""Data sets: found by name, prepared once, shared by all clients without copies, and divided among them.

folder = prepare_dataset(experiment.data)  # plain .npy files in the user's cache, written once
dataset = open_dataset(folder)             # memory-mapped
split = divide(dataset, experiment.data, clients, seed)
x, y = dataset.batch("train", split.train[0][:16], rng)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetbed.emulator.data.dataset import Dataset, open_dataset
    from fleetbed.emulator.data.partitions import divide, partition
    from fleetbed.emulator.data.split import Split
    from fleetbed.emulator.data.store import prepare_dataset

__all__ = ["Dataset", "Split", "divide", "open_dataset", "partition", "prepare_dataset"]

_HOME = {
    "Dataset": "dataset",
    "Split": "split",
    "divide": "partitions",
    "open_dataset": "dataset",
    "partition": "partitions",
    "prepare_dataset": "store",
}


def __getattr__(name: str) -> Any:
    # on first use, because these modules import torch and the command line must start without it
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
