"""The ten networks of FedHe (Chan and Ngai, 2021, Table II), which are those of FedMD.

Two or three convolutions, each with batch norm, ReLU and dropout, and a dense layer without bias. Model 9 has
128-128-192 filters as in both released codes; the 198 of the table is a misprint. The papers count as Keras
does, parameters and the running mean and variance of batch norm together: 307,392 for model 9 on MNIST,
309,696 on CIFAR-10. The 324,672 and 326,976 of the paper are these with the dense kernel counted twice. Batch
norm has Keras's epsilon, but torch's momentum: Keras's 0.99 would need hundreds of steps before the running
statistics mean anything.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

from torch import nn

from fleetbed.models.base import Family, InputSpec, Net
from fleetbed.models.families.chain import Chain


class FedHeLayout(NamedTuple):
    filters: tuple[int, ...]
    dropout: float


LAYOUTS = {  # in order of size; the numbers are those of Table II
    "model8": FedHeLayout((128, 128, 128), 0.3),
    "model6": FedHeLayout((64, 128, 192), 0.2),
    "model9": FedHeLayout((128, 128, 192), 0.3),
    "model5": FedHeLayout((64, 128, 256), 0.2),
    "model7": FedHeLayout((128, 192, 256), 0.2),
    "model0": FedHeLayout((128, 256), 0.2),
    "model3": FedHeLayout((256, 256), 0.3),
    "model1": FedHeLayout((128, 384), 0.2),
    "model2": FedHeLayout((128, 512), 0.2),
    "model4": FedHeLayout((256, 512), 0.4),
}


class FedHeNet(Chain):
    """The chain with the initialisation of the released code."""

    def initialise_module(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Conv2d | nn.Linear):
            super().initialise_module(module)
            return
        # LeCun's normal, truncated at two deviations; the divisor restores the wanted deviation
        deviation = sqrt(1 / module.weight[0].numel()) / 0.8796256610342398
        nn.init.trunc_normal_(module.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class FedHeFamily(Family):
    """Ten networks that share nothing but their logits."""

    name = "fedhe-cnn"
    shared = False
    variants = tuple(LAYOUTS)

    @property
    def smallest_image(self) -> int:
        return 12 if any(len(LAYOUTS[variant].filters) == 3 for variant in self.variants) else 3

    def make(self, variant: str, spec: InputSpec) -> Net:
        filters, dropout = LAYOUTS[variant]
        channels, height, width = spec.shape
        first = nn.Sequential(
            nn.Conv2d(channels, filters[0], 3, padding=1),
            *_after(filters[0], dropout),
            # Keras's "same" pooling excludes its padding from the mean, which equals repeating the border
            nn.ReplicationPad2d((0, 1, 0, 1)),
            nn.AvgPool2d(2, stride=1),
        )
        if len(filters) == 2:
            second = nn.Sequential(nn.Conv2d(filters[0], filters[1], 3, stride=2), *_after(filters[1], dropout))
            stages = {"conv1": first, "conv2": second}
            height, width = _third(height), _third(width)
        else:
            second = nn.Sequential(
                nn.Conv2d(filters[0], filters[1], 2, stride=2), *_after(filters[1], dropout), nn.AvgPool2d(2)
            )
            third = nn.Sequential(nn.Conv2d(filters[1], filters[2], 3, stride=2), *_after(filters[2], dropout))
            stages = {"conv1": first, "conv2": second, "conv3": third}
            height, width = _third(height // 4), _third(width // 4)
        fc = nn.Linear(filters[-1] * height * width, spec.outputs, bias=False)
        return FedHeNet(stages, nn.Flatten(), fc)


def _after(filters: int, dropout: float) -> tuple[nn.Module, ...]:
    return nn.BatchNorm2d(filters, eps=1e-3), nn.ReLU(inplace=True), nn.Dropout(dropout)


def _third(size: int) -> int:
    """Return the size of a map after a 3x3 convolution of stride 2 without padding."""
    return (size - 3) // 2 + 1
