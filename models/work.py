"""What a task does, declared before it runs: from it come the plan in seconds, the FLOPs, the memory and the bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from msgspec import Struct, structs

if TYPE_CHECKING:  # torch is imported by whoever has a model
    from torch import Tensor

    from fleetbed.models.base import Net

Part = Literal["all", "features", "intermediate", "classifier"]


def through(net: Net, part: Part) -> Callable[[Tensor], Tensor]:
    """What a part of the model does with what goes into it."""
    method = {"all": "forward", "classifier": "classify"}.get(part, part)
    run: Callable[[Tensor], Tensor] = getattr(net, method)
    return run


class Pass(Struct, frozen=True):
    """`samples` go through a part of the model: forward only, or forward and backward (`train`)."""

    kind: Literal["train", "forward"]
    part: Part
    samples: int


class Phase(Struct, frozen=True, kw_only=True):
    """`steps` optimiser steps of `batch` samples, and what the method adds to each.

    A step goes forward and backward through the part `trains` and updates its parameters. Passes of `each_step` come
    after that, those that train each with a backward pass of its own, before the update.
    """

    steps: int = 0
    batch: int = 1
    trains: Part = "all"
    each_step: tuple[Pass, ...] = ()
    parameter_passes: int = 0  # elementwise passes over all parameters in each step (a proximal term is 2)
    flops: float = 0.0  # in each step, of what is no pass through the model (FedGen's generator)


class Work(Phase, frozen=True, kw_only=True):
    """A task: its last phase, the phases before it, and what it does and holds besides.

    `once` runs after the last step, in slices of `batch` where it is forward only. The held figures are memory beyond
    model, gradients and optimiser state. Bytes are those of the messages; None stands for a whole model.
    """

    earlier: tuple[Phase, ...] = ()
    once: tuple[Pass, ...] = ()
    held_models: int = 0  # further copies of the model's tensors, the received ones too (averaging: 1, MOON: 2)
    held_values: int = 0  # further f32 values (FedIN: a feature batch, FedHeNN: RAD and gram)
    bytes_down: int | None = None
    bytes_up: int | None = None

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All phases in order."""
        own = Phase(**{name: getattr(self, name) for name in Phase.__struct_fields__})
        return (*self.earlier, own)

    @property
    def all_steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def all_samples(self) -> int:
        """Samples that go through the steps."""
        return sum(phase.steps * phase.batch for phase in self.phases)

    def cut(self, steps: int) -> Work:
        """The same work, ended after so many steps."""
        left, earlier = steps, []
        for phase in self.earlier:
            earlier.append(structs.replace(phase, steps=min(left, phase.steps)))
            left -= earlier[-1].steps
        return structs.replace(self, earlier=tuple(earlier), steps=min(left, self.steps))


class ServerWork(Struct, frozen=True, kw_only=True):
    """What a merge does: work on models, each given as a variant with its phases and passes, and other FLOPs."""

    models: tuple[tuple[str, Work], ...] = ()
    flops: float = 0.0
