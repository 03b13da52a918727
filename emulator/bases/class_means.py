"""A mean vector for each class, as clients collect it and the server averages it: logits or features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fleetbed.emulator.method.algorithm import Expected, Spec
from fleetbed.emulator.method.bundle import Bundle

CLASS = "class"


@dataclass(frozen=True)
class ClassMeans:
    """Sums and counts by class, which `add` changes in place. A width of 0 becomes that of the first vectors."""

    sums: Tensor  # [classes, width]
    counts: Tensor  # [classes]

    @classmethod
    def empty(cls, classes: int, width: int = 0, dtype: torch.dtype = torch.float32) -> ClassMeans:
        return cls(torch.zeros(classes, width, dtype=dtype), torch.zeros(classes, dtype=torch.int64))

    def add(self, classes: Tensor, vectors: Tensor) -> None:
        """Count each vector once, in its class."""
        if not self.sums.numel():
            self.sums.resize_(len(self.counts), vectors.shape[1]).zero_()
        rows = classes.long().cpu()
        self.sums.index_add_(0, rows, vectors.detach().cpu().to(self.sums.dtype))
        self.counts.add_(torch.bincount(rows, minlength=len(self.counts)))

    def clear(self) -> None:
        self.sums.zero_()
        self.counts.zero_()

    @property
    def known(self) -> Tensor:
        """The classes that were seen."""
        return self.counts.nonzero().flatten()

    @property
    def means(self) -> Tensor:
        """The mean of each class that was seen."""
        return self.sums[self.known] / self.counts[self.known, None]

    def records(self, name: str) -> Bundle:
        """Return the message: the classes that were seen, and the mean of each."""
        return records(name, self.known, self.means)


def records(name: str, classes: Tensor, vectors: Tensor) -> Bundle:
    """A class and its vector in each row: a vector's width and one more values of 4 bytes."""
    return Bundle({CLASS: classes.int(), name: vectors.float()})


def by_class(named: Tensor, vectors: Tensor, classes: int) -> Tensor:
    """The vectors of the classes `named`, in a table with a row for each class; NaN where it has none."""
    table = vectors.new_full((classes, vectors.shape[1]), torch.nan)
    table[named.long()] = vectors
    return table


def expected(name: str, width: int) -> Expected:
    """Return the form of such a message."""
    return Expected(tensors={CLASS: Spec(torch.int32, (None,)), name: Spec(torch.float32, (None, width))})


def objection(message: Bundle, name: str, classes: int) -> str | None:
    """Return what is wrong with the values of such a message; None if nothing is."""
    named, vectors = message.tensors[CLASS], message.tensors[name]
    if len(named) != len(vectors):
        return f"{len(named)} classes with {len(vectors)} vectors of {name}"
    if len(named) > classes or len({*named.tolist()} & {*range(classes)}) < len(named):
        return f"its classes must differ and lie between 0 and {classes - 1}"
    return None


def squared_error(vectors: Tensor, target: Tensor) -> Tensor:
    """The mean squared error over batch and width; a sample without a target (NaN) adds nothing."""
    return torch.where(target.isnan(), 0.0, vectors - target.nan_to_num()).square().mean()
