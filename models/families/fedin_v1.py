"""The five networks of the first version of FedIN (Chan and Ngai, 2023, Table I), read literally.

A block is a 1x1 convolution to c channels and a 3x3 one to 4c, with a shortcut. A 3x3 stem is the extractor; each of
the three stages begins with a block that projects its shortcut, followed by more blocks in stages 2 and 3. Where the
table is illegible (stage 2 of models B and C), two further blocks are assumed, as in model A.
"""

from __future__ import annotations

from torch import Tensor, nn

from fleetbed.models.base import Family, InputSpec, Net
from fleetbed.models.families.chain import Chain

FURTHER_BLOCKS = {"E": (1, 1, 0), "B": (2, 1, 0), "C": (2, 2, 0), "D": (1, 3, 0), "A": (2, 3, 0)}
WIDTHS = (64, 128, 256)
EXPANSION = 4


class Block(nn.Module):
    """A 1x1 convolution to `width` channels, a 3x3 one to four times as many, and the shortcut."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.conv1 = nn.Conv2d(inputs, width, 1, stride=stride, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        result: Tensor = self.relu(out + self.downsample(x))
        return result


class FedInV1Family(Family):
    """Blocks are named by stage and position, so that each of the models is a part of model A."""

    name = "fedin-v1"
    shared = True
    variants = tuple(FURTHER_BLOCKS)

    @property
    def smallest_image(self) -> int:
        return 3

    def part_of(self, variant: str, whole: str) -> bool:
        pairs = zip(FURTHER_BLOCKS[variant], FURTHER_BLOCKS[whole], strict=True)
        return all(blocks <= others for blocks, others in pairs)

    def make(self, variant: str, spec: InputSpec) -> Net:
        inputs = WIDTHS[0]
        stem = nn.Conv2d(spec.shape[0], inputs, 3, padding=1, bias=False)
        stages = {"stage1": nn.Sequential(stem, nn.BatchNorm2d(inputs), nn.ReLU(inplace=True))}
        for number, (width, further) in enumerate(zip(WIDTHS, FURTHER_BLOCKS[variant], strict=True), 2):
            outputs = EXPANSION * width
            first = Block(inputs, width, stride=1 if number == 2 else 2)
            stages[f"stage{number}"] = nn.Sequential(first, *(Block(outputs, width) for _ in range(further)))
            inputs = outputs
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return Chain(stages, pool, nn.Linear(inputs, spec.outputs))
