"""What training a variant costs, before it is trained: peak memory, FLOPs, the bytes of a model on the wire.

Memory is what a client's process adds after its fork while it trains, the same definition as the cap's and the
meter's. `rehearsal.py` finds it out; what it found is kept in the user's cache, for it takes seconds.

FLOPs are two per multiply-add and count matrix products and convolutions; elementwise work is left out, as fvcore,
torch's counter and the papers do. The time on a device comes from the work by class of operation, which has all of it.
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
from fleetbed.models.cost.cache import kept
from fleetbed.models.cost.flops import forward_macs
from fleetbed.models.cost.operations import Operations, parameter_pass
from fleetbed.models.cost.rehearsal import Rehearsal, rehearse
from fleetbed.models.work import Work
from fleetbed.profiles.experiment import Optimizer

T = TypeVar("T")

#: an elementwise pass multiplies and adds once per parameter
PARAMETER_PASS_FLOPS = 2.0


class Cost(Struct, frozen=True, kw_only=True):
    """`memory` splits the peak `memory_bytes` by what is alive at that moment."""

    memory_bytes: int
    memory: dict[str, int]
    flops: float  # of the whole work
    operations: Operations  # of the whole work, by class
    steps: tuple[Operations, ...]  # of one step of each of its phases
    parameters: int
    state_bytes: int  # parameters and buffers that travel: what a message with the whole model weighs


def cost(family: Family, variant: str, spec: InputSpec, work: Work, optimizer: Optimizer) -> Cost:
    """The cost of `work` on a client. Quick, and remembered: a step is the same however many there are."""
    earlier, last = (
        [replace(p, steps=min(1, p.steps), parameter_passes=0) for p in work.phases[:-1]],
        min(1, work.steps),
    )
    one = replace(
        work,
        earlier=tuple(earlier),
        steps=last,
        parameter_passes=0,
        server_flops=0.0,
        bytes_down=None,
        bytes_up=None,
    )
    found = _rehearsed(family, variant, spec, one, optimizer)
    for operator in found.unknown:
        _notice(operator, f"{family.name} {variant}")
    steps = [
        step + phase.parameter_passes * parameter_pass(found.parameters)
        for phase, step in zip(work.phases, found.steps, strict=True)
    ]
    operations, flops = found.once + Operations(matmul_flop=work.server_flops), found.once.flop + work.server_flops
    for phase, plain, step in zip(work.phases, found.steps, steps, strict=True):
        operations += phase.steps * step
        flops += phase.steps * (plain.flop + PARAMETER_PASS_FLOPS * phase.parameter_passes * found.parameters)
    return Cost(
        memory_bytes=sum(found.memory.values()),
        memory=found.memory,
        flops=flops,
        operations=operations,
        steps=tuple(steps),
        parameters=found.parameters,
        state_bytes=found.state_bytes,
    )


@cache
def _notice(operator: str, where: str) -> None:
    """Once per operator and model."""
    logging.getLogger("fleetbed").warning(
        "fleetbed: %s uses the operator %s, which no class of operations knows: it is counted as memory-bound",
        where,
        operator,
    )


@lru_cache(maxsize=1024)
def forward_flops(family: Family, variant: str, spec: InputSpec) -> float:
    """Of one sample, by fvcore. Apart from `cost`, for it takes as long and a choice does not need it."""
    about = [version("fvcore"), family.name, family.options, variant, spec]
    return _remembered(family, about, float, lambda: 2.0 * forward_macs(family.empty(variant, spec), spec))


@lru_cache(maxsize=4096)
def _rehearsed(family: Family, variant: str, spec: InputSpec, work: Work, optimizer: Optimizer) -> Rehearsal:
    about = [family.name, family.options, variant, spec, work, optimizer]
    return _remembered(family, about, Rehearsal, lambda: rehearse(family, variant, spec, work, optimizer))


def _remembered(family: Family, about: object, type_: type[T], compute: Callable[[], T]) -> T:
    """In the user's cache, unless the family is not ours: then its code may change without our noticing."""
    ours = __package__ == type(family).__module__.rpartition(".")[0]
    return kept(about, type_, compute) if ours else compute()
