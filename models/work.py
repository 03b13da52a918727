"""The work of a task, declared before it runs. Its plan in seconds, FLOPs, memory and bytes are derived from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from msgspec import Struct, structs

if TYPE_CHECKING:  # a caller that has a model has imported torch
    from torch import Tensor

    from fleetbed.models.base import Net

#: a part of a model; a number is one of its segments (`Net.segment`)
Part = Literal["all", "exits", "features", "intermediate", "classifier"] | int


def through(net: Net, part: Part) -> Callable[[Tensor], list[Tensor]]:
    """Return the output of a part of the model: one result, or the logits of all exits."""
    if part == "exits":
        return net.exits
    if isinstance(part, int):
        return lambda x: [net.segment(part, x)]
    method = {"all": "forward", "classifier": "classify"}.get(part, part)
    run: Callable[[Tensor], Tensor] = getattr(net, method)
    return lambda x: [run(x)]


def gives_logits(part: Part) -> bool:
    """Whether the results of a part are logits rather than features."""
    return part not in ("features", "intermediate")


def usual_parts(net: Net) -> tuple[Part, ...]:
    """Return the parts that are trained, one after the other, in the usual training of a model."""
    return ("exits",) if net.segments == 1 else tuple(range(1, net.segments + 1))


class Pass(Struct, frozen=True):
    """`samples` go through a part of the model: forward only, or forward and backward (`train`); `times` in a row."""

    kind: Literal["train", "forward"]
    part: Part
    samples: int
    times: int = 1


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

    def through_parts(self, parts: Sequence[Part]) -> Work:
        """Return the work with all of its steps for each of these parts in turn."""
        *before, last = (structs.replace(self.phases[-1], trains=part) for part in parts)
        return structs.replace(self, earlier=tuple(before), trains=last.trains)

    def cut(self, steps: int) -> Work:
        """Return the work, ended after this many steps."""
        left, earlier = steps, []
        for phase in self.earlier:
            earlier.append(structs.replace(phase, steps=min(left, phase.steps)))
            left -= earlier[-1].steps
        return structs.replace(self, earlier=tuple(earlier), steps=min(left, self.steps))


class ServerWork(Struct, frozen=True, kw_only=True):
    """What a merge does: work on models, each given as a variant with its phases and passes, and other FLOPs."""

    models: tuple[tuple[str, Work], ...] = ()
    flops: float = 0.0
