"""The context of a run, made alike in the broker and in every worker, and the server's own pool of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetbed.emulator.data import Dataset, Split
from fleetbed.emulator.method.algorithm import Client, Context
from fleetbed.emulator.randomness import numpy_rng
from fleetbed.models.families.lookup import family
from fleetbed.profiles.experiment import RunConfig


@dataclass(frozen=True)
class PublicPool:
    """Samples that the server holds, disjoint from the clients' data (`data.public`)."""

    dataset: Dataset
    indices: NDArray[np.int64]
    labelled: bool = False

    def __len__(self) -> int:
        return len(self.indices)

    def draw(self, count: int, seed: int) -> Tensor:
        return self.dataset.batch("train", self._rows(count, seed), None)[0]

    def labels(self, count: int, seed: int) -> Tensor:
        assert self.labelled, "only a method with Needs.public_labels may read the labels of the public samples"
        return torch.from_numpy(self.dataset.y_train[self._rows(count, seed)])

    def with_labels(self) -> PublicPool:
        return replace(self, labelled=True)

    def _rows(self, count: int, seed: int) -> NDArray[np.int64]:
        rows: NDArray[np.int64] = numpy_rng(seed, "public").choice(self.indices, count, replace=False)
        return rows


def make_context(config: RunConfig, dataset: Dataset, split: Split, clients: Sequence[Client]) -> Context:
    experiment = config.experiment
    fixed = {config.algorithm.variant} if config.algorithm.variant is not None else set(config.model.assign)
    return Context(
        seed=config.seed,
        spec=dataset.spec,
        family=family(config.model.family, config.model.options).narrow(config.model.variants),
        clients=tuple(clients),
        training=experiment.training,
        rounds=experiment.rounds,
        ratio=experiment.participation.ratio,
        public=PublicPool(dataset, split.public) if len(split.public) else None,
        most_samples=max(map(len, split.train), default=0),
        most_clients=len(split.train),
        alone=len(fixed) == 1,
    )
