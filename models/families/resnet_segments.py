"""A ResNet whose variants are all the whole model, but are trained in more or fewer segments.

Training one segment at a time needs gradients, optimiser state and activations of that segment alone. So the variants
differ in memory, and in time, as each segment takes a pass over the data, but not in tensors.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fleetbed.models.base import InputSpec, Net
from fleetbed.models.families.resnet import DEPTHS, Cut, ResNet, ResNetFamily, ResNetOptions


class SegmentNet(ResNet):
    """A ResNet whose blocks are trained in segments of equal length; the stem belongs to the first.

    The short cut from a segment to the classifier has no parameters: maps are pooled, and the features get zeros on
    both sides up to the width of the last stage.
    """

    def __init__(
        self,
        blocks: tuple[int, ...],
        widths: tuple[int, ...],
        options: ResNetOptions,
        channels: int,
        classes: int,
        segments: int,
    ) -> None:
        super().__init__(blocks, widths, options, channels, classes)
        self.segments = segments

    def segment(self, number: int, x: Tensor) -> Tensor:
        blocks = [block for stage in self.all_stages() for block in stage]
        start, end = ((number + offset) * len(blocks) // self.segments for offset in (-1, 0))
        with torch.set_grad_enabled(torch.is_grad_enabled() and start == 0):
            maps = self.extract(x)
            for block in blocks[:start]:
                maps = block(maps)
        for block in blocks[start:end]:
            maps = block(maps)
        features = self.avgpool(maps).flatten(1)
        missing = self.fc.in_features - features.shape[1]
        if missing:
            features = F.pad(features, (missing // 2, missing - missing // 2))
        return self.classify(features)


class ResNetSegment(ResNetFamily):
    """FeDepth's way to fit a whole model into little memory: ResNet26, trained in 12 to 1 segments."""

    name = "resnet-segment"
    cuts: ClassVar = {f"resnet26-in-{segments}": Cut(DEPTHS["resnet26"]) for segments in (12, 6, 3, 2, 1)}

    def make(self, variant: str, spec: InputSpec) -> Net:
        blocks, segments = self.cuts[variant].blocks, int(variant.rpartition("-")[2])
        return SegmentNet(blocks, self.widths(variant), self.options, spec.shape[0], spec.classes, segments)
