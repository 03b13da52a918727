"""Which variant a device trains: the largest that fits its memory, and its time and bytes where they are limited."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct

from fleetbed.models.base import Family, InputSpec
from fleetbed.models.cost import Cost, cost
from fleetbed.models.work import Work
from fleetbed.profiles.experiment import Budgets, Optimizer
from fleetbed.profiles.types import Device, Link

MIB = 1 << 20


class Limit(Struct, frozen=True):
    """A limit that a variant goes beyond."""

    name: str  # memory, time or bytes
    variant: str
    needed: float
    allowed: float

    @property
    def sentence(self) -> str:
        scale, unit = {"memory": (MIB, "MiB"), "time": (1, "s a round"), "bytes": (1e6, "MB a round")}[self.name]
        needed, allowed = self.needed / scale, self.allowed / scale
        return (
            f"{self.variant} needs {needed:.3g} {unit}, {needed / allowed - 1:.0%} more than the {allowed:.3g} allowed"
        )


class Choice(Struct, frozen=True, kw_only=True):
    """`cost` is of the chosen variant, or of the smallest one where none fits."""

    variant: str | None
    cost: Cost
    reason: str
    stopped_by: Limit | None = None  # of the next larger variant


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
) -> Choice:
    """The largest variant, in the family's order, that keeps every limit.

    `work` says what the method's heaviest task does with a variant, `seconds` how long the device computes on it; that
    is asked only where a round's time is limited.
    """
    above: Limit | None = None
    found: Cost | None = None
    for variant in reversed(family.variants):
        doing = work(variant)
        found = cost(family, variant, spec, doing, optimizer)
        broken = next(_broken(variant, found, doing, device, link, budgets, seconds), None)
        if broken is None:
            reason = above.sentence if above else f"{variant} is the largest variant"
            return Choice(variant=variant, cost=found, reason=reason, stopped_by=above)
        above = broken
    assert found is not None  # a family has variants
    assert above is not None
    return Choice(variant=None, cost=found, reason=f"no variant fits: {above.sentence}", stopped_by=above)


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
    if budgets.round_bytes is not None and 2 * found.state_bytes > budgets.round_bytes:
        yield Limit("bytes", variant, 2 * found.state_bytes, budgets.round_bytes)
    if budgets.round_s is not None:
        bits = 8 * found.state_bytes
        needed = seconds(variant, work) + bits / (link.down_mbit_s * 1e6) + bits / (link.up_mbit_s * 1e6)
        if needed > budgets.round_s:
            yield Limit("time", variant, needed, budgets.round_s)
