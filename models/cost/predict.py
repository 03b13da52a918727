"""Predicts the cost of training a variant: peak memory, FLOPs, the bytes of a model on the wire.

Memory is what a client's process adds after its fork while it trains; the cap and the meter use the same definition.
`rehearsal.py` computes it, which takes seconds, so that the result is stored in the user's cache.

FLOPs are two per multiply-add and include matrix products and convolutions; elementwise work is not counted, as in
fvcore, torch's counter and the papers. The time on a device comes from the work by class of operation, which includes
all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.metadata import version
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from fleetbed.models.base import Family, InputSpec
from fleetbed.models.cost.cache import cached
from fleetbed.models.cost.flops import forward_macs
from fleetbed.models.cost.operations import FLOAT_BYTES, Operations, parameter_pass
from fleetbed.models.cost.rehearsal import Rehearsal, rehearse
from fleetbed.models.work import Pass, Work
from fleetbed.profiles.experiment import Optimizer

T = TypeVar("T")

#: an elementwise pass multiplies and adds once per parameter
PARAMETER_PASS_FLOPS = 2.0


class Cost(Struct, frozen=True, kw_only=True):
    """The cost of a task. `memory` divides the peak `memory_bytes` by the role of the bytes alive at that moment."""

    memory_bytes: int
    memory: dict[str, int]
    flops: float  # of the whole work
    operations: Operations  # of the whole work, by class
    steps: tuple[Operations, ...]  # of one step of each of its phases
    parameters: int
    state_bytes: int  # parameters and buffers that are sent: the size of a message with the whole model


def cost(family: Family, variant: str, spec: InputSpec, work: Work, optimizer: Optimizer) -> Cost:
    """The cost of `work` on a client. Quick, and remembered: what depends on a client's samples is not rehearsed.

    A step is the same however many there are, so is a slice of a pass without gradients, and what is held all the time
    only adds to the peak.
    """
    earlier, last = (
        [replace(p, steps=min(1, p.steps), parameter_passes=0, flops=0.0) for p in work.phases[:-1]],
        min(1, work.steps),
    )
    one = replace(
        work,
        earlier=tuple(earlier),
        steps=last,
        parameter_passes=0,
        flops=0.0,
        held_models=0,
        held_values=0,
        once=tuple(replace(each, times=1, samples=_at_once(each, work)) for each in work.once),
        bytes_down=None,
        bytes_up=None,
    )
    found = _rehearsed(family, variant, spec, one, optimizer)
    for operator in found.unknown:
        _notice(operator, f"{family.name} {variant}")
    steps = [
        step + phase.parameter_passes * parameter_pass(found.parameters) + Operations(matmul_flop=phase.flops)
        for phase, step in zip(work.phases, found.steps, strict=True)
    ]
    operations = Operations()
    for each, slice_ in zip(work.once, found.once, strict=True):
        operations += each.times * each.samples / _at_once(each, work) * slice_
    flops = operations.flop
    for phase, step in zip(work.phases, steps, strict=True):
        operations += phase.steps * step
        flops += phase.steps * (step.flop + PARAMETER_PASS_FLOPS * phase.parameter_passes * found.parameters)
    held = work.held_models * found.state_bytes + work.held_values * FLOAT_BYTES
    memory = {**found.memory, "held": held} if held else found.memory
    return Cost(
        memory_bytes=sum(memory.values()),
        memory=memory,
        flops=flops,
        operations=operations,
        steps=tuple(steps),
        parameters=found.parameters,
        state_bytes=found.state_bytes,
    )


def _at_once(each: Pass, work: Work) -> int:
    """How many samples go through at once: all where gradients are needed, else a batch."""
    return each.samples if each.kind == "train" else min(each.samples, work.batch)


@cache
def _notice(operator: str, where: str) -> None:
    """Log an unclassified operator, once per operator and model."""
    logging.getLogger("fleetbed").warning(
        "fleetbed: %s uses the operator %s, which is in no class of operations: it is counted as memory-bound",
        where,
        operator,
    )


@lru_cache(maxsize=1024)
def forward_flops(family: Family, variant: str, spec: InputSpec) -> float:
    """Count one sample with fvcore. Separate from `cost`, because it takes as long and a choice does not need it."""
    about = [version("fvcore"), family.name, family.options, variant, spec]
    return _remembered(family, about, float, lambda: 2.0 * forward_macs(family.empty(variant, spec), spec))


@lru_cache(maxsize=4096)
def _rehearsed(family: Family, variant: str, spec: InputSpec, work: Work, optimizer: Optimizer) -> Rehearsal:
    about = [family.name, family.options, variant, spec, work, optimizer]
    return _remembered(family, about, Rehearsal, lambda: rehearse(family, variant, spec, work, optimizer))


def _remembered(family: Family, about: object, type_: type[T], compute: Callable[[], T]) -> T:
    """Use the user's cache, except for a family from elsewhere, whose code may change unnoticed."""
    module = type(family).__module__
    ours = module.startswith("fleetbed.models.families.") and not module.endswith(".own")
    return cached(about, type_, compute) if ours else compute()
