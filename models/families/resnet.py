"""ResNets cut by depth, by width, or by both, with torchvision's tensor names, so that its weights can be loaded.

A variant has the first blocks of each stage and a window of each layer's channels, so that each of its tensors is a
part of the tensor with the same name in the largest variant. Layers of the same width share one window: the terms of a
residual addition are aligned, and so are batch norm and the inputs of the next layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from msgspec import Meta
from torch import Tensor, nn

from fleetbed.models.base import Family, Index, InputSpec, Net, Options

Stem = Literal["7x7", "3x3"]

DEPTHS = {
    "resnet10": (1, 1, 1, 1),
    "resnet14": (1, 1, 2, 2),
    "resnet18": (2, 2, 2, 2),
    "resnet22": (2, 2, 3, 3),
    "resnet26": (3, 3, 3, 3),
}
RATES = {"sixteenth": 1 / 16, "eighth": 1 / 8, "quarter": 1 / 4, "half": 1 / 2, "full": 1.0}


class ResNetOptions(Options, frozen=True, kw_only=True):
    """`base_width` is the width of the first stage, doubled in each of the next three; `stem` is ImageNet's
    7x7 of stride 2 with max-pooling, or a 3x3 of stride 1 without it, which does not shrink small images.
    `zero_init_residual` makes every block start as its shortcut, like torchvision's option: deep variants then learn as
    early as shallow ones, which matters in short runs."""

    base_width: Annotated[int, Meta(ge=1, le=4096)] = 64
    stem: Stem = "7x7"
    zero_init_residual: bool = False


class Cut(NamedTuple):
    """The part of the largest variant that a variant has: blocks per stage, and the part of each layer's channels."""

    blocks: tuple[int, ...]
    rate: float = 1.0


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut. Written out here, because importing torchvision takes over a second."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += shortcut
        y: Tensor = self.relu(out)
        return y


class Trunk(Net):
    """Stem and four stages of basic blocks, with any depths and widths; a stage may have no blocks."""

    extractor_parts = frozenset({"conv1", "bn1"})

    def __init__(self, blocks: tuple[int, ...], widths: tuple[int, ...], options: ResNetOptions, channels: int) -> None:
        super().__init__()
        self._zero_init_residual = options.zero_init_residual
        if options.stem == "7x7":
            self.conv1 = nn.Conv2d(channels, widths[0], 7, stride=2, padding=3, bias=False)
            self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            self.conv1 = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _stage(blocks[0], widths[0], widths[0], stride=1)
        self.layer2 = _stage(blocks[1], widths[0], widths[1], stride=2)
        self.layer3 = _stage(blocks[2], widths[1], widths[2], stride=2)
        self.layer4 = _stage(blocks[3], widths[2], widths[3], stride=2)

    def initialise(self) -> None:
        super().initialise()
        if self._zero_init_residual:
            for module in self.modules():
                if isinstance(module, BasicBlock):
                    nn.init.zeros_(module.bn2.weight)

    def initialise_module(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        else:
            super().initialise_module(module)

    def extract(self, x: Tensor) -> Tensor:
        s: Tensor = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return s

    def stages(self, x: Tensor) -> dict[str, Tensor]:
        x = self.extract(x)
        reached = {"stem": x}
        for number, stage in enumerate(self.all_stages(), 1):
            if len(stage):
                x = reached[f"layer{number}"] = stage(x)
        return reached

    def all_stages(self) -> list[nn.Sequential]:
        """The four stages, each a row of blocks."""
        return [self.layer1, self.layer2, self.layer3, self.layer4]


def _stage(blocks: int, inputs: int, width: int, stride: int) -> nn.Sequential:
    widths = [inputs, *[width] * blocks]
    return nn.Sequential(
        *(BasicBlock(before, after, stride if n == 0 else 1) for n, (before, after) in enumerate(pairwise(widths)))
    )


class ResNet(Trunk):
    """A trunk and a classifier, as torchvision has them."""

    classifier_parts = frozenset({"fc"})

    def __init__(
        self, blocks: tuple[int, ...], widths: tuple[int, ...], options: ResNetOptions, channels: int, classes: int
    ) -> None:
        super().__init__(blocks, widths, options, channels)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[3], classes)

    def intermediate(self, s: Tensor) -> Tensor:
        maps = self.layer4(self.layer3(self.layer2(self.layer1(s))))
        f: Tensor = self.avgpool(maps).flatten(1)
        return f

    def classify(self, f: Tensor) -> Tensor:
        logits: Tensor = self.fc(f)
        return logits


class ResNetFamily(Family):
    """The base of the families, which differ in their table of cuts, and in what reads the trunk's maps."""

    shared = True
    options_type = ResNetOptions
    options: ResNetOptions
    block_names = r"(layer\d)\.\d+\."
    cuts: ClassVar[dict[str, Cut]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.variants = tuple(cls.cuts)

    @property
    def smallest_image(self) -> int:
        return int(self.options.stem[0])  # the stem's kernel must not be larger than the image

    def widths(self, variant: str) -> tuple[int, ...]:
        """Return the channels of the four stages; the stem has as many as the first."""
        rate = self.cuts[variant].rate
        return tuple(ceil(rate * self.options.base_width * 2**stage) for stage in range(4))

    def make(self, variant: str, spec: InputSpec) -> Net:
        return ResNet(self.cuts[variant].blocks, self.widths(variant), self.options, spec.shape[0], spec.outputs)

    def index(self, variant: str, spec: InputSpec, shift: int = 0) -> dict[str, Index]:
        tensors = self.tensors(variant, spec)
        widths = zip(self.widths(variant), self.widths(self.variants[-1]), strict=True)
        windows = [_window(part, full, shift) for part, full in widths]
        return {name: self.rows(name, windows)[: t.ndim] + (None,) * (t.ndim - 2) for name, t in tensors.items()}

    def rows(self, name: str, windows: Sequence[Tensor | None]) -> Index:
        """Return the rows of a tensor's first two dimensions: output and input channels."""
        if name.startswith("fc."):
            return (None, windows[3]) if name == "fc.weight" else (None,)
        match = re.match(r"layer(\d)\.(\d+)\.(conv1|downsample)?", name)
        if match is None:  # the stem
            return (windows[0], None)
        stage = int(match[1]) - 1
        opens = stage > 0 and match[2] == "0" and match[3]  # these read the output of the previous stage
        return (windows[stage], windows[stage - 1 if opens else stage])

    def cross_layers(self, names: Iterable[str]) -> dict[str, str]:
        known = dict.fromkeys(names)  # unlike a set it keeps their order
        found = {}
        for name in known:
            match = re.fullmatch(r"(layer\d)\.([1-9]\d*)\.conv[12]\.weight", name)
            if match and (base := f"{match[1]}.0.conv2.weight") in known:
                found[name] = base
        return found

    def part_of(self, variant: str, whole: str) -> bool:
        part, held = self.cuts[variant], self.cuts[whole]
        shallower = all(own <= other for own, other in zip(part.blocks, held.blocks, strict=True))
        return shallower and part.rate <= held.rate


def _window(part: int, full: int, shift: int) -> Tensor | None:
    """Return the numbers of `part` of `full` channels from `shift` on, wrapping around; None if it is all of them."""
    return None if part == full else (torch.arange(part) + shift) % full


class ResNetStage(ResNetFamily):
    """Stage splitting: the first blocks of each stage, at full width."""

    name = "resnet-stage"
    cuts: ClassVar = {name: Cut(blocks) for name, blocks in DEPTHS.items()}


class ResNetWidth(ResNetFamily):
    """Hetero splitting: all blocks, a window of the channels."""

    name = "resnet-width"
    cuts: ClassVar = {f"resnet26-{name}": Cut(DEPTHS["resnet26"], rate) for name, rate in RATES.items()}


class ResNetGrid(ResNetFamily):
    """Depth and width together. The order by parameters and by FLOPs is the same: width first, then depth."""

    name = "resnet-grid"
    cuts: ClassVar = {
        f"{depth}-{width}": Cut(blocks, RATES[width])
        for width in ("quarter", "half", "full")
        for depth, blocks in DEPTHS.items()
    }
