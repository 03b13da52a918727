"""What every model and every family of models can be asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch
from msgspec import Struct
from torch import Tensor, nn

Tensors = dict[str, Tensor]
Section = Literal["extractor", "intermediate", "classifier"]
Index = tuple[Tensor | None, ...]  # per dimension: the rows that a variant takes of the full tensor, None is all


class InputSpec(Struct, frozen=True):
    """What goes in: an image's (channels, height, width), or (tokens,) of a text with its vocabulary."""

    shape: tuple[int, ...]
    classes: int
    vocabulary: int = 0


class Net(nn.Module, ABC):
    """A model with its cut points: logits = classify(intermediate(extract(x)))."""

    @abstractmethod
    def extract(self, x: Tensor) -> Tensor:
        """The shallow part, up to the first cut (FedIN's s_in)."""

    @abstractmethod
    def intermediate(self, s: Tensor) -> Tensor:
        """From the first cut to the features that the classifier reads (FedIN's s_out), shape [batch, d]."""

    @abstractmethod
    def classify(self, f: Tensor) -> Tensor:
        """The last layer: logits before the softmax."""

    @abstractmethod
    def section(self, name: str) -> Section:
        """The section that the parameter or buffer `name` belongs to."""

    @abstractmethod
    def stages(self, x: Tensor) -> dict[str, Tensor]:
        """The activations after each stage, by name, from shallow to deep (for CKA per stage)."""

    def features(self, x: Tensor) -> Tensor:
        return self.intermediate(self.extract(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x))


class Family(ABC):
    """A handful of variants of one model, from the smallest to the largest."""

    name: str
    variants: tuple[str, ...]
    #: whether variants share tensors by name with the largest one; without it weights cannot be averaged across them
    shared: bool

    @abstractmethod
    def build(self, variant: str, spec: InputSpec) -> Net:
        """A fresh model, initialised from torch's global generator (seed it before)."""

    @abstractmethod
    def index(self, variant: str, spec: InputSpec, shift: int = 0) -> dict[str, Index]:
        """Which part of which tensor of the largest variant this variant holds.

        `shift` moves the channel windows of width families (FedRolex); depth families ignore it.
        """

    def cross_layers(self, names: Mapping[str, Tensor]) -> dict[str, str]:
        """InCo: the layers among `names` that take a cross-layer gradient, each with its base layer."""
        del names
        return {}


def gather(full: Mapping[str, Tensor], index: Mapping[str, Index]) -> Tensors:
    """Cut a variant's tensors out of the full ones. Where all of a tensor is taken it is the same tensor."""
    return {name: _take(full[name], parts) for name, parts in index.items()}


def _take(tensor: Tensor, parts: Index) -> Tensor:
    for dim, rows in enumerate(parts):
        if rows is not None:
            tensor = tensor.index_select(dim, rows)
    return tensor


def scatter_add(into: Tensors, part: Mapping[str, Tensor], index: Mapping[str, Index]) -> None:
    """Add a variant's tensors in place where they belong in the full ones."""
    for name, parts in index.items():
        if all(rows is None for rows in parts):
            into[name] += part[name]
        else:
            grid = torch.meshgrid(
                *(
                    torch.arange(size) if rows is None else rows
                    for size, rows in zip(into[name].shape, parts, strict=True)
                ),
                indexing="ij",
            )
            into[name].index_put_(grid, part[name].to(into[name].dtype), accumulate=True)
