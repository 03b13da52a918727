"""Counts the torch operators of code that declares no work, while it runs.

Each operator is counted by class, as those of declared work are (`operations.py`), and the CPU seconds that it took on
this host are noted with it. So every CPU second of such code is charged once: as the operators that it was spent on,
or, where it was not spent on one that is counted, by how much slower the device is. Left out are operators that are in
no class, and those on tensors that are not dense, not on the CPU or of a type of their own.
"""

from __future__ import annotations

import time
from functools import cache
from math import isfinite
from typing import Any

import torch
from msgspec import Struct
from torch._ops import OpOverload

from fleetbed.models.cost.operations import Operations, OperatorCount, facts_of, tensors_in

MOST = 1e18  # of each class; more than any host does in a task
TRIES, CALLS = 5, 400


class Counted(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The operators that were counted in a task, and the CPU seconds of this host that they and their counting took."""

    operations: Operations
    cpu_s: float

    def __post_init__(self) -> None:
        values = [getattr(self.operations, name) for name in self.operations.__struct_fields__]
        if not all(isfinite(value) and 0 <= value <= MOST for value in (*values, self.cpu_s)):
            raise ValueError("counted operators are out of range")


class OpaqueCount(OperatorCount):
    """Counts the operators of the code inside it. The threads and processes that this code starts are not seen."""

    supports_higher_order_operators = True  # they are left out, and run as they do without this

    def __init__(self) -> None:
        super().__init__()
        self._seen_s = 0.0
        self._entered = 0

    def counted(self) -> Counted:
        return Counted(operations=self.total, cpu_s=self._seen_s + self._entered * entry_s())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if types or not isinstance(func, OpOverload):  # tensors of a type of their own; operators that take functions
            return func(*args, **kwargs)
        facts = facts_of(func)
        if facts.is_composite:
            with self:
                return func.decompose(*args, **kwargs)
        start = time.process_time()
        out = func(*args, **kwargs)
        if not facts.is_free:
            ran = time.process_time()
            inputs, outputs = tensors_in(args, kwargs), tensors_in(out)
            if facts.is_known and all(map(_is_plain, (*inputs, *outputs))):
                self._count(func, args, kwargs, out, inputs, outputs)
            else:
                start += ran - start  # its own seconds are left out, those of looking at it are not
        self._entered += 1
        self._seen_s += time.process_time() - start
        return out


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested


@cache
def entry_s() -> float:
    """CPU seconds that an operator takes to reach the count, which cannot see them: the least of a few tries."""
    found = []
    for _ in range(TRIES):
        x, count = torch.zeros(1), OpaqueCount()
        with count:
            start = time.process_time()
            for _ in range(CALLS):
                x.view(1)
            took_s = time.process_time() - start
        found.append((took_s - count._seen_s) / CALLS)
    return max(0.0, min(found))
