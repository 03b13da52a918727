"""The tensors of a model to evaluate, and the data on which its batch norm is recalibrated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from fleetbed.emulator.data import Dataset, Split
from fleetbed.emulator.method.algorithm import Context, Target
from fleetbed.emulator.method.bundle import Bundle


def target_tensors(target: Target, context: Context, kept: Bundle | None) -> dict[str, Tensor]:
    """Return the variant's initial tensors, replaced by those that the client kept, replaced by the target's own."""
    tensors = {**(kept.under(target.prefix) if kept is not None else {}), **(target.tensors or {})}
    if tensors.keys() >= context.family.index(target.variant, context.spec).keys():
        return tensors  # nothing of the initial ones would be left, so they are not made
    return {**context.initial(target.variant), **tensors}


def all_inputs(dataset: Dataset, split: Split, batch: int) -> Iterator[Tensor]:
    """The training inputs of all clients, in slices of at most `batch`, but of at least two as batch norm needs."""
    rows = np.concatenate(split.train)
    if len(rows) == 1:
        rows = np.repeat(rows, 2)
    slices = max(1, min(-(-len(rows) // batch), len(rows) // 2))
    for part in np.array_split(rows, slices):
        yield dataset.batch("train", part, None)[0]
