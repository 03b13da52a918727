"""What FedSelect and FedDPA share: some entries of a model are the client's own, all others are averaged.

A mask is true where an entry is the client's own. Where masks travel they do so as bits, tensor by tensor, and an entry
is averaged over the clients that hold it and do not call it their own; one that nobody shares stays as it was. Each
client keeps its whole model, which is what is evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from fleetbed.emulator.bases.averaging import Averaging, trained_shapes
from fleetbed.emulator.method.algorithm import Arrival, Assignment, Expected, Job, Needs, Spec, Target
from fleetbed.emulator.method.bundle import Bundle, prefixed
from fleetbed.emulator.method.local_training import on_both_test_sets, own_targets
from fleetbed.emulator.method.optimizers import make_optimizer
from fleetbed.models.base import Net, Tensors

Masks = dict[str, Tensor]
MASK = "mask/"


class OwnEntries(Averaging):
    """Averages what is not a client's own. A method makes the masks and trains by them."""

    #: whether masks travel; without them all entries are averaged
    masks_travel: bool = True

    @property
    def needs(self) -> Needs:
        return replace(super().needs, initial_on_client=True, reported="personal-own")

    def may_be_own(self, variant: str) -> dict[str, torch.Size]:
        """The shapes of the tensors that have masks, by name."""
        return trained_shapes(self.context.family, variant, self.context.spec)

    def mask_bytes(self, variant: str) -> int:
        """The size of the masks of a variant on the wire."""
        return sum(bits_size(shape) for shape in self.may_be_own(variant).values()) * self.masks_travel

    def message(self, job: Job, model: Net, masks: Masks) -> Bundle:
        """What a client sends: its trained weights, and its masks where they travel."""
        weights = {name: t for name, t in model.state_dict().items() if name in job.message.tensors}
        return Bundle({**weights, **(packed(masks) if self.masks_travel else {})})

    def expects(self, assignment: Assignment, sent: Bundle) -> Expected:
        weights = super().expects(assignment, sent)
        assert weights is not None
        if not self.masks_travel:
            return weights
        shapes = self.may_be_own(assignment.client.variant)
        bits = {MASK + name: Spec(torch.uint8, (bits_size(shape),)) for name, shape in shapes.items()}
        return Expected(tensors={**weights.tensors, **bits})

    def mask(self, arrival: Arrival, name: str) -> Tensor | None:
        bits = arrival.message.tensors.get(MASK + name)
        if bits is None or not bits.any():
            return None
        return (~unpacked(bits, arrival.message.tensors[name].shape)).float()

    def targets(self, state: Bundle) -> list[Target]:
        return on_both_test_sets(own_targets(self.context))


class MovingEntries:
    """An optimiser that moves some entries only. All others stay what they are, bit for bit.

    They never see a gradient, so that neither momentum nor Adam's means move them; and weight decay, which would, is
    added to the gradients of those that do move. `moving` says which entries of a tensor move; a tensor that it does
    not name moves as a whole or, by `others`, not at all.
    """

    def __init__(self, job: Job, model: Net, moving: Mapping[str, Tensor], *, others: bool) -> None:
        choice = job.context.training.optimizer_in(job.assignment.round)
        self._optimizer = make_optimizer(structs.replace(choice, weight_decay=0.0), model)
        self.state = self._optimizer.state
        nothing = torch.tensor(False)
        self._parts = [
            (
                p,
                moving[name].to(p.device) if name in moving else None if others else nothing,
                0.0 if "bias" in name and not choice.decay_biases else choice.weight_decay,
            )
            for name, p in model.named_parameters()
        ]

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        for p, moves, decay in self._parts:
            if p.grad is None:
                continue
            if decay:
                p.grad.add_(p, alpha=decay)
            if moves is not None:
                p.grad.mul_(moves)
        self._optimizer.step()


def combined(masks: Masks, own: Tensors, received: Tensors) -> Tensors:
    """What was received, but for the client's own entries."""
    mixed = {n: torch.where(mask, own[n].to(mask.device), received[n]) for n, mask in masks.items() if mask.any()}
    return {**received, **mixed}


def inverted(masks: Masks) -> Masks:
    return {name: ~mask for name, mask in masks.items()}


def is_any(masks: Masks) -> bool:
    """Whether there is any entry that is the client's own."""
    return any(bool(mask.any()) for mask in masks.values())


def share_of(masks: Masks) -> float:
    """The share of entries that are the client's own, of those that may be."""
    return sum(int(mask.sum()) for mask in masks.values()) / max(1, sum(mask.numel() for mask in masks.values()))


def bits_size(shape: torch.Size) -> int:
    """The bytes of a mask of this shape."""
    return -(-shape.numel() // 8)


def packed(masks: Masks) -> Tensors:
    """Masks as they travel and are kept."""
    bits = {name: np.packbits(mask.cpu().numpy().reshape(-1)) for name, mask in masks.items()}
    return prefixed(MASK, {name: torch.from_numpy(array) for name, array in bits.items()})


def unpacked(bits: Tensor, shape: torch.Size) -> Tensor:
    array = np.unpackbits(bits.cpu().numpy(), count=shape.numel())
    return torch.from_numpy(array).bool().reshape(shape)
