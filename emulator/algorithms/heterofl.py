"""HeteroFL: each client trains the first channels of every layer.

Diao et al., "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients", ICLR
2021. Unlike HeteroAvg, which may cut by depth, a client of rate r holds the first ceil(r c) of the c channels of each
layer and all classes, and every element of a weight is averaged over the clients that hold it:

    w_ij <- w_ij + mean over the clients k that hold ij of (w_k,ij after - w_k,ij sent)

Two things differ from HeteroAvg on the same variants:

    masked loss    CE(z', y), where z' is z with 0 for the classes that the client has no samples of. They stay in the
                   denominator but get no gradient; in the mean their rows of the classifier do not count either.
    static norms   Batch norm's running statistics do not travel, since a channel sees other inputs at each width.
                   They are estimated on all clients' training data for each model that is evaluated.

The paper's scaler, which divides activations by r in training, is left out: before batch norm it has no effect. With
`mask: false` and `statistics: averaged`, and no clipping, it is HeteroAvg.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Literal

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from fleetbed.emulator.bases.averaging import Averaging, Means
from fleetbed.emulator.method.algorithm import Arrival, Assignment, Context, Expected, Job, Needs, Spec
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.description import Description
from fleetbed.emulator.method.local_training import Step, cross_entropy_step
from fleetbed.models.base import Net, Tensors, label_loss
from fleetbed.models.work import Work
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.types import Positive

CLASSES = "classes/own"  # 1 for each class that the client has samples of, else 0


ABOUT = Description(
    paper="Diao et al., ICLR 2021",
    down="P",
    up="P, and a byte for each class",
    client="nothing",
    server="one model, of which each variant is a part, without statistics",
)


class Params(Means, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Means`, and:"""

    mask: bool = True  # the masked loss and mean; false: plain cross-entropy, and no labels travel
    clip: Positive | None = None  # the largest norm of a gradient; the released code has 1
    statistics: Literal["recalibrated", "averaged"] = "recalibrated"  # averaged: they travel like weights


class Method(Averaging):
    params: Params

    def __init__(self, params: Params, context: Context) -> None:
        super().__init__(params, context)
        self.buffers = params.statistics == "averaged"

    @property
    def needs(self) -> Needs:
        return dataclasses.replace(super().needs, cuts=self.params.mask, classes=self.params.mask)

    def check(self) -> None:
        super().check()
        family = self.context.family
        if len(family.variants) > 1 and not family.by_width(self.context.spec):
            raise BadInput(
                f"model.family is {family.name}, whose variants are not cut by width, but this method gives each "
                f"client a part of the channels: choose resnet-width or resnet-grid."
            )

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        plain = super().work(state, assignment)
        assert plain.bytes_up is not None
        return replace(
            plain,
            parameter_passes=2 if self.params.clip else 0,
            bytes_up=plain.bytes_up + self.context.spec.classes * self.params.mask,
        )

    # the client's half

    def local_step(self, job: Job, model: Net, start: Tensors) -> Step:
        largest, is_masked = self.params.clip, self.params.mask
        absent = job.class_counts() == 0 if is_masked else torch.zeros(0)

        def clip() -> None:
            if largest is not None:
                clip_grad_norm_(model.parameters(), largest)

        def masked_loss(z: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(z.masked_fill(absent.to(z.device), 0.0), y)

        return cross_entropy_step(model, clip, masked_loss if is_masked and bool(absent.any()) else label_loss)

    def extras(self, job: Job, model: Net, start: Tensors) -> Bundle:
        """The set of classes that the client has samples of."""
        if not self.params.mask:
            return Bundle()
        return Bundle({CLASSES: (job.class_counts() > 0).to(torch.int8)})

    def expects(self, assignment: Assignment, sent: Bundle) -> Expected | None:
        """The weights, and one number for each class."""
        weights = super().expects(assignment, sent)
        assert weights is not None
        if not self.params.mask:
            return weights
        return Expected(tensors={**weights.tensors, CLASSES: Spec(torch.int8, (self.context.spec.classes,))})

    def objection(self, assignment: Assignment, message: Bundle) -> str | None:
        if not self.params.mask:
            return None
        own = message.tensors[CLASSES]
        if not bool(((own == 0) | (own == 1)).all()):
            return f"{CLASSES} holds other numbers than 0 and 1"
        return None if bool(own.any()) else f"{CLASSES} names no class"

    # the server's half

    @cached_property
    def classifier(self) -> frozenset[str]:
        """The names of the tensors that have a row for each class."""
        net = self.context.family.outline(self.context.family.variants[-1], self.context.spec)
        return frozenset(name for name, _ in net.named_parameters() if net.section(name) == "classifier")

    def mask(self, arrival: Arrival, name: str) -> Tensor | None:
        """Of the classifier only the rows of the client's own classes count."""
        own = arrival.message.tensors.get(CLASSES)
        if own is None or name not in self.classifier or bool(own.all()):
            return None
        return own.float().reshape(-1, *[1] * (arrival.message.tensors[name].ndim - 1))
