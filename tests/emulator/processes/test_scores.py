"""Accuracy, macro F1 and mean absolute error against values calculated by hand."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fleetbed.emulator.processes.scores import Scores
from fleetbed.models.base import InputSpec


def test_classes() -> None:
    scores = Scores(InputSpec((2,), 4))
    labels, found = torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([0, 0, 1, 1, 0, 1])
    for part in (slice(0, 4), slice(4, 6)):
        scores.add(F.one_hot(found[part], 4).float(), labels[part])
    made = scores.evaluated(7)
    assert (made.task, made.samples, made.mae) == (7, 6, None)
    assert made.accuracy == pytest.approx(3 / 6)
    # F1 = 2 right / (labels + predictions): 4/6, 2/5, 0/1; class 3 never occurs
    assert made.f1 == pytest.approx((4 / 6 + 2 / 5 + 0) / 3)
    assert made.loss == pytest.approx(float(F.cross_entropy(F.one_hot(found, 4).float(), labels)))


def test_numbers() -> None:
    scores = Scores(InputSpec((2,), 0, targets=2))
    y = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    for part in (slice(0, 2), slice(2, 3)):
        scores.add(y[part] + torch.tensor([1.0, -3.0]), y[part])
    made = scores.evaluated(1)
    assert (made.samples, made.accuracy, made.f1) == (3, None, None)
    assert made.mae == pytest.approx(2.0)
    assert made.loss == pytest.approx(5.0)


def test_nothing_to_test() -> None:
    assert Scores(InputSpec((2,), 3)).evaluated(1).samples == 0
