"""Chooses the largest variant that fits a device's memory, and its time and bytes if they are limited."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from fleetbed.models.base import Family, InputSpec
from fleetbed.models.cost.predict import Cost, cost
from fleetbed.models.work import Work
from fleetbed.profiles.experiment import Budgets, Optimizer
from fleetbed.profiles.types import Device, Link

MIB = 1 << 20
_UNITS = {"memory": (MIB, "MiB"), "time": (1, "s per round"), "bytes": (MIB, "MiB per round")}


class Limit(Struct, frozen=True):
    """A limit that a variant exceeds: bytes of memory, or seconds or bytes of a round."""

    name: Literal["memory", "time", "bytes"]
    variant: str
    needed: float
    allowed: float
    method: str = ""  # the method under which it does; empty if there is only one

    @property
    def sentence(self) -> str:
        scale, unit = _UNITS[self.name]
        needed, allowed = self.needed / scale, self.allowed / scale
        under = f" under {self.method}" if self.method else ""
        return (
            f"{self.variant} needs {_figure(needed)} {unit}{under}, {_figure(needed - allowed)} more than "
            f"the {_figure(allowed)} allowed"
        )


class Choice(Struct, frozen=True, kw_only=True):
    """The chosen variant. `cost` is its cost, or that of the smallest variant if none fits."""

    variant: str | None
    cost: Cost
    reason: str
    stopped_by: Limit | None = None  # the limit that the next larger variant exceeds, or the smallest if none fits


class FitRow(Struct, frozen=True, kw_only=True):
    """The choice for clients that are alike; the figures are those of the heaviest task of the first of them."""

    method: str = ""
    device: str
    link: str
    clients: list[int]
    variant: str | None
    memory_bytes: int
    cap_bytes: int
    compute_s: float
    transfer_s: float
    round_bytes: int
    reason: str
    stopped_by: Limit | None = None


def choose_variant(
    *,
    device: Device,
    link: Link,
    family: Family,
    spec: InputSpec,
    work: Callable[[str], Work],
    optimizer: Optimizer,
    budgets: Budgets,
    seconds: Callable[[str, Work], float],
    common: Mapping[str, Callable[[str], Work]] | None = None,
) -> Choice:
    """Return the largest variant, in the family's order, that exceeds no limit.

    `work` gives the method's heaviest task with a variant, `seconds` the device's compute time for it, which is used
    only if a round's time is limited. `common` is the work of all methods, by name, under which the variant has to fit;
    without it, the variant has to fit under `work` alone.
    """

    def broken(variant: str) -> Limit | None:
        for method, of_variant in (common or {"": work}).items():
            doing = of_variant(variant)
            needed = cost(family, variant, spec, doing, optimizer)
            for limit in _broken(variant, needed, doing, device, link, budgets, seconds):
                return replace(limit, method=method)
        return None

    above: Limit | None = None
    shared = f"common to {', '.join(common)}: " if common else ""
    for variant in reversed(family.variants):
        limit = broken(variant)
        if limit is None:
            reason = shared + (above.sentence if above else f"{variant} is the largest variant")
            own = cost(family, variant, spec, work(variant), optimizer)
            return Choice(variant=variant, cost=own, reason=reason, stopped_by=above)
        above = limit
    assert above is not None  # a family has variants
    smallest = family.variants[0]
    own = cost(family, smallest, spec, work(smallest), optimizer)
    return Choice(variant=None, cost=own, reason=f"{shared}no variant fits: {above.sentence}", stopped_by=above)


def round_bytes(work: Work, state_bytes: int) -> tuple[int, int]:
    """The bytes of a task down and up, as declared; a whole model where nothing is."""
    return (
        state_bytes if work.bytes_down is None else work.bytes_down,
        state_bytes if work.bytes_up is None else work.bytes_up,
    )


def transfer_seconds(link: Link, down_bytes: int, up_bytes: int) -> float:
    """How long a task's messages take down and up again, on a link that nothing disturbs."""
    return 8 * down_bytes / (link.down_mbit_s * 1e6) + 8 * up_bytes / (link.up_mbit_s * 1e6) + link.rtt_ms / 1e3


def _broken(
    variant: str,
    found: Cost,
    work: Work,
    device: Device,
    link: Link,
    budgets: Budgets,
    seconds: Callable[[str, Work], float],
) -> Iterator[Limit]:
    """Yield the limits that a variant exceeds, the cheapest to check first."""
    allowed = device.cap_mib * MIB * (1 - budgets.memory_margin)
    if found.memory_bytes > allowed:
        yield Limit("memory", variant, found.memory_bytes, allowed)
    down, up = round_bytes(work, found.state_bytes)
    if budgets.round_bytes is not None and down + up > budgets.round_bytes:
        yield Limit("bytes", variant, down + up, budgets.round_bytes)
    if budgets.round_s is not None:
        needed = seconds(variant, work) + transfer_seconds(link, down, up)
        if needed > budgets.round_s:
            yield Limit("time", variant, needed, budgets.round_s)


def _figure(value: float) -> str:
    """Format with three digits, or with all digits before the decimal point if those are more."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
