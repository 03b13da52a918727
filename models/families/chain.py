"""A model that is a chain of stages, for the families of small convolutional networks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from fleetbed.models.base import Net


class Chain(Net):
    """The first stage is the extractor; `pool` turns the output of the last one into features for `fc`."""

    def __init__(self, stages: Mapping[str, nn.Module], pool: nn.Module, fc: nn.Module) -> None:
        super().__init__()
        self.first, *self.rest = stages
        self.extractor_parts = frozenset({self.first})
        self.classifier_parts = frozenset({"fc"})
        for name, stage in stages.items():
            self.add_module(name, stage)
        self.pool = pool
        self.fc = fc

    def extract(self, x: Tensor) -> Tensor:
        s: Tensor = self.get_submodule(self.first)(x)
        return s

    def intermediate(self, s: Tensor) -> Tensor:
        for name in self.rest:
            s = self.get_submodule(name)(s)
        f: Tensor = self.pool(s)
        return f

    def classify(self, f: Tensor) -> Tensor:
        logits: Tensor = self.fc(f)
        return logits

    def stages(self, x: Tensor) -> dict[str, Tensor]:
        reached = {self.first: self.extract(x)}
        x = reached[self.first]
        for name in self.rest:
            x = reached[name] = self.get_submodule(name)(x)
        return reached
