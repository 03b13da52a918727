"""A task on the device, as a method's client half sees it: its data, its model, its randomness, its pace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fleetbed.emulator.data import Dataset
from fleetbed.emulator.method.algorithm import Assignment, Client, Context
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.optimizers import Stepper, make_optimizer
from fleetbed.emulator.method.schedule import batch_of, held_out_of
from fleetbed.emulator.randomness import derive, numpy_rng, torch_rng
from fleetbed.models.base import Net


class StepPacer(Protocol):
    def step(self) -> None: ...


class LocalJob:
    """Implements `algorithm.Job` over the shared data set."""

    counted: None = None  # its work is declared

    def __init__(
        self,
        *,
        context: Context,
        assignment: Assignment,
        message: Bundle,
        kept: Bundle | None,
        dataset: Dataset,
        indices: np.ndarray,
        pacer: StepPacer | None = None,
        device: str = "cpu",
        most_steps: int | None = None,
    ) -> None:
        self.context = context
        self.assignment = assignment
        self.message = message
        self.kept = kept
        self.steps = 0
        self.samples = 0
        self.rows = torch.empty(0, dtype=torch.int64)
        self._dataset = dataset
        self._indices = indices
        self._held_out = indices[:0]
        self._pacer = pacer
        self._most_steps = most_steps
        self._device = device

    @property
    def client(self) -> Client:
        return self.assignment.client

    def batches(
        self, *, epochs: int | None = None, steps: int | None = None, batch: int | None = None, phase: str = ""
    ) -> Iterator[tuple[Tensor, Tensor]]:
        training = self.context.training
        own = len(self._indices)
        size = batch_of(own, batch or training.batch)
        if steps is None:
            limit = training.max_steps if epochs is None else None
            order = self._epochs(own, training.epochs if epochs is None else epochs, size, limit, f"order{phase}")
        else:
            order = self._random(steps, size, f"order{phase}")
        for rows in self._counted(order):
            augment = numpy_rng(self.context.seed, self.client.number, self.assignment.task, "augment", self.steps)
            self.rows = torch.from_numpy(rows)
            yield self._batch(self._indices[rows], augment)

    def foreign(self, samples: int, *, epochs: int, batch: int, phase: str) -> Iterator[Tensor]:
        order = self._epochs(samples, epochs, batch_of(samples, batch), None, f"order{phase}")
        return map(torch.from_numpy, self._counted(order))

    def _counted(self, order: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """Count and pace steps on these samples, as many as the task may make."""
        for rows in order:
            if self.steps == self._most_steps:
                return
            # batch norm cannot take a batch of one: a lone sample is shown twice
            yield rows if len(rows) > 1 else np.repeat(rows, 2)
            self.steps += 1
            self.samples += len(rows)
            if self._pacer is not None:
                self._pacer.step()

    def ordered(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        return self._slices(self._indices, batch)

    def hold_out(self, share: float) -> None:
        count = held_out_of(len(self._indices), share)
        rng = numpy_rng(self.context.seed, self.client.number, "validation")
        chosen = np.isin(np.arange(len(self._indices)), rng.permutation(len(self._indices))[:count])
        self._held_out, self._indices = self._indices[chosen], self._indices[~chosen]

    def held_out(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        return self._slices(self._held_out, batch)

    def _slices(self, rows: np.ndarray, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(rows), batch):
            yield self._batch(rows[start : start + batch], None)

    def class_counts(self) -> Tensor:
        labels = self._dataset.strata("train")[self._indices]
        return torch.from_numpy(np.bincount(labels, minlength=self.context.spec.classes))

    def _epochs(self, samples: int, epochs: int, size: int, limit: int | None, purpose: str) -> Iterator[np.ndarray]:
        """The numbers of the samples in each batch."""
        rng = self._rng(purpose)
        made = 0
        for _ in range(epochs):
            shuffled = rng.permutation(samples)
            for start in range(0, len(shuffled) - size + 1, size):
                if made == limit:
                    return
                made += 1
                yield shuffled[start : start + size]

    def _random(self, steps: int, size: int, purpose: str) -> Iterator[np.ndarray]:
        rng = self._rng(purpose)
        for _ in range(steps):
            yield rng.choice(len(self._indices), size, replace=False)

    def sample(self, count: int, purpose: str) -> tuple[Tensor, Tensor]:
        rows = self._rng(purpose).choice(self._indices, count, replace=count > len(self._indices))
        return self._batch(rows, None)

    def _batch(self, rows: np.ndarray, augment: np.random.Generator | None) -> tuple[Tensor, Tensor]:
        x, y = self._dataset.batch("train", rows, augment)
        return x.to(self._device), y.to(self._device)

    def model(self, tensors: dict[str, Tensor]) -> Net:
        # a copy: received tensors are views of the message, and methods compare with them after training
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        model = self.context.family.load(
            self.client.variant, self.context.spec, copies, "what the client received"
        ).train()
        return model if self._device == "cpu" else model.to(self._device)

    def optimizer(self, model: Net) -> Stepper:
        return make_optimizer(self.context.training.optimizer_in(self.assignment.round), model)

    def seed(self, purpose: str) -> int:
        return derive(self.context.seed, self.client.number, self.assignment.task, purpose)

    def generator(self, purpose: str) -> torch.Generator:
        return torch_rng(self.context.seed, self.client.number, self.assignment.task, purpose)

    def _rng(self, purpose: str) -> np.random.Generator:
        return numpy_rng(self.context.seed, self.client.number, self.assignment.task, purpose)
