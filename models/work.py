"""The work of a task, declared before it runs: its plan in seconds, its FLOPs and its memory follow from it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Part = Literal["all", "features", "intermediate"]


class Pass(Struct, frozen=True):
    """`samples` go through a part of the model: forward only, or forward and backward (`train`)."""

    kind: Literal["train", "forward"]
    part: Part
    samples: int


class Work(Struct, frozen=True, kw_only=True):
    """`steps` optimiser steps of `batch` samples, and the method's additions to them.

    Passes of `each_step` come after the step's own pass and before the update; each that trains has its own backward
    pass. `once` runs after the last step, in slices of `batch` if it is forward only. The `held_` figures are memory
    besides model, gradients and optimiser state.
    """

    steps: int = 0
    batch: int = 1
    each_step: tuple[Pass, ...] = ()
    once: tuple[Pass, ...] = ()
    parameter_passes: int = 0  # elementwise passes over all parameters in each step (a proximal term is 2)
    held_models: int = 0  # further copies of the model's tensors, including the received ones (averaging: 1, MOON: 2)
    held_values: int = 0  # further f32 values (FedIN: a feature batch, FedHeNN: RAD and gram)
    server_flops: float = 0.0  # work of the server that is not a pass through a model
