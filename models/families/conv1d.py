"""Small networks over time, for windows of sensor values [channels, time].

A convolution of stride 2 is the extractor. Blocks with a shortcut follow, all of one width; the mean over time is what
the classifier reads. A variant has the first blocks of the larger ones, so that all of them share their cut points.
"""

from __future__ import annotations

from torch import Tensor, nn

from fleetbed.models.base import Family, InputSpec, Net, Options
from fleetbed.models.families.chain import Chain
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Width

BLOCKS = {"conv2": 1, "conv4": 3, "conv6": 5, "conv8": 7}


class Conv1dOptions(Options, frozen=True, kw_only=True):
    """The width of all layers."""

    width: Width = 32


class TimeBlock(nn.Module):
    """A convolution over time with batch norm, and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 5, padding=2, bias=False)
        self.bn = nn.BatchNorm1d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn(self.conv(x)) + x)
        return out


class Conv1dFamily(Family):
    """The number in a variant's name is that of its convolutions."""

    name = "conv1d"
    shared = True
    reads = "values"
    block_names = r"(blocks)\.\d+\."
    options_type = Conv1dOptions
    options: Conv1dOptions
    variants = tuple(BLOCKS)

    def make(self, variant: str, spec: InputSpec) -> Net:
        width = self.options.width
        stem = nn.Sequential(
            nn.Conv1d(spec.shape[0], width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm1d(width),
            nn.ReLU(inplace=True),
        )
        blocks = nn.Sequential(*(TimeBlock(width) for _ in range(BLOCKS[variant])))
        pool = nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten())
        return Chain({"stem": stem, "blocks": blocks}, pool, nn.Linear(width, spec.outputs))

    def check_input(self, spec: InputSpec) -> None:
        super().check_input(spec)
        if len(spec.shape) != 2:
            raise BadInput(
                f"{self.name} needs samples of the shape (channels, time), but these have {spec.shape}: "
                f"save the data in that shape, or write a model of your own (docs/writing-a-model.md)."
            )
