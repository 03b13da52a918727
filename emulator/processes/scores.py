"""Adds up how good a model is, over the batches of a test set."""

from __future__ import annotations

import torch
from torch import Tensor

from fleetbed.emulator.wire.messages import Evaluated
from fleetbed.models.base import InputSpec, label_loss


class Scores:
    """Loss, accuracy and macro F1 where labels are classes; loss and mean absolute error where they are numbers."""

    def __init__(self, spec: InputSpec) -> None:
        self._spec = spec
        self._samples = 0
        self._loss = 0.0
        self._error = 0.0
        self._right, self._labels, self._predicted = torch.zeros(3, spec.classes, dtype=torch.int64)  # by class

    def add(self, out: Tensor, y: Tensor) -> None:
        self._samples += len(y)
        self._loss += float(label_loss(out, y, "sum"))
        if self._spec.targets:
            self._error += float((out - y).abs().sum())
        else:
            found, classes = out.argmax(1), self._spec.classes
            self._right += torch.bincount(y[found == y], minlength=classes)
            self._labels += torch.bincount(y, minlength=classes)
            self._predicted += torch.bincount(found, minlength=classes)

    def evaluated(self, task: int) -> Evaluated:
        if self._spec.targets:
            values = max(1, self._samples * self._spec.targets)
            return Evaluated(task=task, samples=self._samples, loss=self._loss / values, mae=self._error / values)
        samples = max(1, self._samples)
        return Evaluated(
            task=task,
            samples=self._samples,
            loss=self._loss / samples,
            accuracy=int(self._right.sum()) / samples,
            f1=macro_f1(self._right, self._labels + self._predicted),
        )


def macro_f1(right: Tensor, occurring: Tensor) -> float:
    """The F1 of each class, as the plain mean over classes; `occurring` counts a class as a label and as a prediction.

    A class that never occurs is left out.
    """
    known = occurring > 0
    return float((2 * right[known] / occurring[known]).double().mean()) if bool(known.any()) else 0.0
