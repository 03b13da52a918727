"""ResNets with exits: classifiers after blocks before the last one, so that a part of the depth is a model of its own.

A variant has all blocks up to its last exit, and all exits up to there. It is the model of that exit: `forward` gives
its logits, `Net.exits` those of all. An exit reads the maps of a block, and not what other exits make of theirs.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import floor
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetbed.models.base import Index, InputSpec, Net, Section
from fleetbed.models.families.resnet import DEPTHS, Cut, ResNetFamily, ResNetOptions, Trunk


class ExitPlace(NamedTuple):
    """Where an exit is: after this block of this stage, both from 1."""

    stage: int
    block: int


class Exit(nn.Module):
    """A body, which turns a block's maps into features, and a classifier."""

    def __init__(self, body: nn.Sequential, features: int, classes: int) -> None:
        super().__init__()
        self.body = body
        self.fc = nn.Linear(features, classes)

    def forward(self, maps: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.body(maps))
        return logits


class ExitNet(Trunk):
    """A trunk that ends where its last exit is. The exits are called exit1, exit2 and so on."""

    classifier_parts = frozenset()

    def __init__(
        self,
        blocks: tuple[int, ...],
        widths: tuple[int, ...],
        options: ResNetOptions,
        channels: int,
        exits: Mapping[ExitPlace, Exit],
    ) -> None:
        super().__init__(blocks, widths, options, channels)
        self._places = {place: f"exit{number}" for number, place in enumerate(exits, 1)}
        for place, exit_ in exits.items():
            self.add_module(self._places[place], exit_)

    def section(self, name: str) -> Section:
        if name.startswith("exit"):
            return "classifier" if ".fc." in name else "intermediate"
        return super().section(name)

    def exits(self, x: Tensor) -> list[Tensor]:
        return [exit_(maps) for exit_, maps in self._reached(self.extract(x))]

    def intermediate(self, s: Tensor) -> Tensor:
        for exit_, maps in self._reached(s):
            last = exit_, maps
        f: Tensor = last[0].body(last[1])
        return f

    def classify(self, f: Tensor) -> Tensor:
        *_, last = self._places.values()
        logits: Tensor = self._exit(last).fc(f)
        return logits

    def _reached(self, s: Tensor) -> Iterator[tuple[Exit, Tensor]]:
        """Yield every exit with the maps that it reads."""
        for stage, blocks in enumerate(self.all_stages(), 1):
            for number, block in enumerate(blocks, 1):
                s = block(s)
                name = self._places.get(ExitPlace(stage, number))
                if name is not None:
                    yield self._exit(name), s

    def _exit(self, name: str) -> Exit:
        exit_ = self.get_submodule(name)
        assert isinstance(exit_, Exit)
        return exit_


class ExitFamily(ResNetFamily):
    """The base of the two families. The first variant ends at the first of the `places`, and so on."""

    has_exits = True
    places: ClassVar[tuple[ExitPlace, ...]]

    def make(self, variant: str, spec: InputSpec) -> Net:
        widths, places = self.widths(variant), self.places[: list(self.cuts).index(variant) + 1]
        exits = {place: self.exit_at(place, widths, spec.classes) for place in places}
        return ExitNet(self.cuts[variant].blocks, widths, self.options, spec.shape[0], exits)

    @abstractmethod
    def exit_at(self, place: ExitPlace, widths: tuple[int, ...], classes: int) -> Exit:
        """Make the exit of this place in a model of these widths."""

    def rows(self, name: str, windows: Sequence[Tensor | None]) -> Index:
        match = re.match(r"exit(\d)\.(fc\.)?", name)
        if match is None:
            return super().rows(name, windows)
        window = windows[self.places[int(match[1]) - 1].stage - 1]
        return (None, window) if match[2] else (window, window)


def _cut_at(place: ExitPlace, depth: str, rate: float = 1.0) -> Cut:
    """All blocks of a ResNet up to a place."""
    whole = DEPTHS[depth]
    return Cut((*whole[: place.stage - 1], place.block, *[0] * (len(whole) - place.stage)), rate)


class ResNetExitOptions(ResNetOptions, frozen=True, kw_only=True):
    """Those of a ResNet, and `exit`: early exits have three 3x3 convolutions and a linear layer, or only the latter."""

    exit: Literal["conv", "fc"] = "conv"


class ResNetExit(ExitFamily):
    """ScaleFL's cuts by depth and width: a level has the blocks up to its exit and floor(rate c) of c channels.

    ResNet26 with exits after 7, 8, 10 and all of its 12 blocks, as the released ResNet110 has them in proportion.
    """

    name = "resnet-exit"
    options_type = ResNetExitOptions
    options: ResNetExitOptions
    places = (ExitPlace(3, 1), ExitPlace(3, 2), ExitPlace(4, 1), ExitPlace(4, 3))
    cuts: ClassVar = {
        f"level{number}": _cut_at(place, "resnet26", rate)
        for number, (place, rate) in enumerate(zip(places, (0.7, 0.7, 0.75, 1.0), strict=True), 1)
    }

    def widths(self, variant: str) -> tuple[int, ...]:
        rate = self.cuts[variant].rate
        # 0.7 * 90 is a little less than 63 for a computer
        return tuple(max(1, floor(rate * self.options.base_width * 2**stage + 1e-9)) for stage in range(4))

    def exit_at(self, place: ExitPlace, widths: tuple[int, ...], classes: int) -> Exit:
        width = widths[place.stage - 1]
        is_early = place != self.places[-1]
        convolutions = [_convolution(width) for _ in range(3)] if is_early and self.options.exit == "conv" else []
        return Exit(nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten()), width, classes)


def _convolution(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
    )


class ResNetDepth(ExitFamily):
    """DepthFL's cuts by depth: the first stages of ResNet18, with an exit after each.

    An early exit weighs its maps by an attention mask, halves them up to the width of the last stage, and pools. The
    original has the 3x3 stem.
    """

    name = "resnet-depth"
    places = (ExitPlace(1, 2), ExitPlace(2, 2), ExitPlace(3, 2), ExitPlace(4, 2))
    cuts: ClassVar = {f"depth{number}": _cut_at(place, "resnet18") for number, place in enumerate(places, 1)}

    def exit_at(self, place: ExitPlace, widths: tuple[int, ...], classes: int) -> Exit:
        rest = widths[place.stage - 1 :]
        early = [Attention(rest[0]), *(_separable(*two) for two in pairwise(rest))] if len(rest) > 1 else []
        return Exit(nn.Sequential(*early, nn.AdaptiveAvgPool2d(1), nn.Flatten()), widths[-1], classes)


class Attention(nn.Module):
    """Multiplies maps by a mask between 0 and 1 that is computed at half their size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mask = nn.Sequential(_separable(width, width), nn.BatchNorm2d(width), nn.ReLU())

    def forward(self, maps: Tensor) -> Tensor:
        mask = F.interpolate(self.mask(maps), size=maps.shape[2:], mode="bilinear", align_corners=False)
        return torch.sigmoid(mask) * maps


def _separable(inputs: int, outputs: int) -> nn.Sequential:
    """Two depthwise separable convolutions, of which the first halves the maps."""

    def convolution(width: int, stride: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, inputs, 3, stride=stride, padding=1, groups=inputs, bias=False),
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]

    return nn.Sequential(*convolution(inputs, 2), *convolution(outputs, 1))
