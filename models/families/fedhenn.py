"""The five networks of FedHeNN (Makhija et al., 2022): one to three convolutions, one to three dense layers.

The features are the input of the last dense layer. Unlike the released code, these networks do not drop out logits.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, NamedTuple

from msgspec import Meta
from torch import nn

from fleetbed.models.base import Family, InputSpec, Net, Options
from fleetbed.models.families.chain import Chain
from fleetbed.profiles.experiment import Width


class FedHeNNOptions(Options, frozen=True, kw_only=True):
    """The filters of the convolutions and the widths of the hidden dense layers; smaller networks use the
    first of them. The network for CIFAR-100 is `conv2-fc3` with filters 64, 128 and hidden layers 256, 128."""

    filters: Annotated[tuple[Width, ...], Meta(min_length=3, max_length=3)] = (64, 64, 64)
    hidden: Annotated[tuple[Width, ...], Meta(min_length=2, max_length=2)] = (120, 64)


class FedHeNNLayout(NamedTuple):
    convolutions: int
    dense: int
    smallest_image: int


KERNELS = (5, 5, 3)
LAYOUTS = {  # in order of parameters at 3x32x32
    "conv1-fc1": FedHeNNLayout(1, 1, 6),
    "conv3-fc3": FedHeNNLayout(3, 3, 28),
    "conv2-fc2": FedHeNNLayout(2, 2, 16),
    "conv2-fc3": FedHeNNLayout(2, 3, 16),
    "conv1-fc2": FedHeNNLayout(1, 2, 6),
}


class FedHeNNFamily(Family):
    """Five networks that share nothing but the similarity of their representations."""

    name = "fedhenn-cnn"
    shared = False
    options_type = FedHeNNOptions
    options: FedHeNNOptions
    variants = tuple(LAYOUTS)

    @property
    def smallest_image(self) -> int:
        return max(LAYOUTS[variant].smallest_image for variant in self.variants)

    def make(self, variant: str, spec: InputSpec) -> Net:
        layout = LAYOUTS[variant]
        channels, height, width = spec.shape
        stages: dict[str, nn.Module] = {}
        filters = (channels, *self.options.filters[: layout.convolutions])
        for number, ((inputs, outputs), kernel) in enumerate(zip(pairwise(filters), KERNELS, strict=False), 1):
            convolution = nn.Conv2d(inputs, outputs, kernel)
            stages[f"conv{number}"] = nn.Sequential(convolution, nn.ReLU(inplace=True), nn.MaxPool2d(2))
            height, width = (height - kernel + 1) // 2, (width - kernel + 1) // 2
        sizes = (filters[-1] * height * width, *self.options.hidden[: layout.dense - 1])
        for number, (inputs, outputs) in enumerate(pairwise(sizes), 1):
            dense = nn.Linear(inputs, outputs)
            stages[f"fc{number}"] = nn.Sequential(nn.Flatten(), dense, nn.ReLU(inplace=True))
        return Chain(stages, nn.Flatten(), nn.Linear(sizes[-1], spec.outputs))
