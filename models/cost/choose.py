"""Which variant a device trains: the largest that fits its memory, and its time and bytes where they are limited."""

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
_UNITS = {"memory": (MIB, "MiB"), "time": (1, "s a round"), "bytes": (1e6, "MB a round")}


class Limit(Struct, frozen=True):
    """A limit that a variant goes beyond: bytes of memory, seconds or bytes of a round."""

    name: Literal["memory", "time", "bytes"]
    variant: str
    needed: float
    allowed: float
    method: str = ""  # under which it does; empty: there is only one

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
    """`cost` is of the chosen variant, or of the smallest one where none fits."""

    variant: str | None
    cost: Cost
    reason: str
    stopped_by: Limit | None = None  # of the next larger variant; of the smallest one where none fits


def choose(
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
    """The largest variant, in the family's order, that keeps every limit.

    `work` says what the method's heaviest task does with a variant, `seconds` how long the device computes on it; that
    is asked only where a round's time is limited. `common` is the work of all methods, by name, that the variant has
    to fit under; without it, it has to fit under `work` alone.
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
    """The limits that a variant goes beyond, the cheapest to find out first."""
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
    """Three digits, and never fewer than a whole number has."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
