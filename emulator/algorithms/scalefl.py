"""ScaleFL: levels that are cut by depth and by width, of which each learns at all of its exits.

Ilhan et al., "ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous Clients", CVPR 2023. A level h has the
blocks up to its exit, exits 1 ... h, and the first floor(v_h c) of the c channels of each layer. Unlike HeteroFL, which
cuts by width alone, a client trains all exits together, and the last one teaches the others. With their logits o_j:

    L   = sum_j j l_j / (h (h + 1) / 2),    l_h = CE(o_h, y)
    l_j = CE(o_j, y) + gamma T^2 KL(softmax(o_h / T) || softmax(o_j / T))      the second term after start * rounds

and every element of a weight is averaged over the clients whose level holds it, as in HeteroFL. A level never touches
what lies behind its exit.

The released code takes the mean of the divergence over samples and classes (`reduction: mean`), lets the gradient flow
into the teacher as well (`detach: false`) and has gamma 0 in all vision experiments. It sends every level at full
depth; here a level is cut at its exit. Running statistics are treated as in HeteroFL (`statistics`). Each level is
evaluated by its own last exit. A model with one exit is trained as by HeteroAvg.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator.bases.averaging import Means
from fleetbed.emulator.bases.exits import Exits
from fleetbed.emulator.method.algorithm import Context, Needs
from fleetbed.emulator.method.description import Description
from fleetbed.models.base import label_loss
from fleetbed.profiles.types import Fraction, NonNegative, Positive

ABOUT = Description(
    paper="Ilhan et al., CVPR 2023",
    down="P, exits included",
    up="P, exits included",
    client="nothing",
    server="one model with all exits, of which each level is a part, without statistics",
)


class Params(Means, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Means`, and:"""

    gamma: NonNegative = 0.0  # the weight of the divergence from the last exit
    temperature: Positive = 3.0  # T
    start: Fraction = 0.25  # the part of the rounds without the divergence
    detach: bool = True  # false: the last exit learns from the divergence too, as in the released code
    reduction: Literal["mean", "batchmean"] = "mean"  # batchmean: the sum over classes, as the divergence is defined
    statistics: Literal["recalibrated", "averaged"] = "recalibrated"  # averaged: they travel like weights


class Method(Exits):
    params: Params

    def __init__(self, params: Params, context: Context) -> None:
        super().__init__(params, context)
        self.buffers = params.statistics == "averaged"

    @property
    def needs(self) -> Needs:
        return replace(super().needs, total_rounds=self.params.gamma > 0)

    def loss(self, round_: int, exits: Sequence[Tensor], y: Tensor) -> Tensor:
        losses = [label_loss(logits, y) for logits in exits]
        if self.params.gamma and round_ > self.params.start * self.context.rounds:
            losses[:-1] = [a + self.divergence(o, exits[-1]) for a, o in zip(losses[:-1], exits[:-1], strict=True)]
        share = 2 / (len(exits) * (len(exits) + 1))
        return reduce(torch.add, [number * share * loss for number, loss in enumerate(losses, 1)])

    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        """gamma T^2 KL(teacher || student)"""
        p, t = self.params, self.params.temperature
        teacher = teacher.detach() if p.detach else teacher
        logs = F.log_softmax(student / t, 1), F.log_softmax(teacher / t, 1)
        scale = p.gamma * t**2 / (student.shape[1] if p.reduction == "mean" else 1)
        return scale * F.kl_div(*logs, reduction="batchmean", log_target=True)
