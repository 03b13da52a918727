"""What a device, a link and a fleet are: frozen types with the unit in every name.

Read from YAML in one pass (`loading.py`); unknown keys are errors, ranges are checked by the type.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=1_000_000_000)]
ProvenanceKind = Literal["measured", "vendor", "derived", "assumed"]
Unit = Literal["cpu", "gpu"]


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of everything that is read from YAML: immutable, and unknown keys are refused."""


class Provenance(Profile, frozen=True, kw_only=True):
    """Where a figure comes from. `figure` is a dotted key path of the same file, or a group of them."""

    figure: str
    kind: ProvenanceKind
    source: str | None = None
    note: str = ""


class Cpu(Profile, frozen=True, kw_only=True):
    """The rates are of a matrix product on all cores."""

    description: str
    cores: Count
    clock_ghz: Positive | None = None
    fp64_gflops: Positive | None = None
    fp32_gflops: Positive


class Gpu(Profile, frozen=True, kw_only=True):
    """The sustained rate is a measured one; where it is missing the peak stands in, which is optimistic."""

    description: str
    fp32_gflops_peak: Positive | None = None
    fp32_gflops_sustained: Positive | None = None


class Memory(Profile, frozen=True, kw_only=True):
    """`available_mib` is what an application finds free, `runtime_mib` what the framework takes of it."""

    installed_mib: Positive
    visible_mib: Positive
    available_mib: Positive
    runtime_mib: NonNegative
    bandwidth_gb_s_peak: Positive | None = None
    bandwidth_gb_s_measured: Positive | None = None


class Power(Profile, frozen=True, kw_only=True):
    """At the wall. Without both figures the joules of a client are not reported."""

    idle_w: Positive | None = None
    load_w: Positive | None = None


class Throttle(Profile, frozen=True, kw_only=True):
    """Thermal throttling: after `after_s` seconds of load the rate falls to `rate` of what it was."""

    after_s: Positive
    rate: Annotated[float, Meta(gt=0, le=1)]


class LinkOverride(Profile, frozen=True, kw_only=True):
    """What this device reaches on its own default link, where that differs from the link's profile."""

    down_mbit_s: Positive
    up_mbit_s: Positive


class Device(Profile, frozen=True, kw_only=True):
    """What a board or phone is. Its file stem is its name.

    `trains_on` is the unit that trains, `link` the name of the default link. `train_scale` multiplies the
    slowdown where training on the device was measured: 2.0 is half as fast as its rate promises.
    """

    title: str
    trains_on: Unit
    cpu: Cpu
    gpu: Gpu | None = None
    memory: Memory
    power: Power = Power()
    link: str
    link_override: LinkOverride | None = None
    train_scale: Positive = 1.0
    throttle: Throttle | None = None
    provenance: tuple[Provenance, ...] = ()

    @property
    def rate_gflops(self) -> float:
        """The FP32 matmul rate of the unit that trains, which sets the slowdown against the host."""
        if self.trains_on == "cpu":
            return self.cpu.fp32_gflops
        assert self.gpu is not None  # checked by loading.check_device
        rate = self.gpu.fp32_gflops_sustained or self.gpu.fp32_gflops_peak
        assert rate is not None
        return rate

    @property
    def cap_mib(self) -> float:
        """What is left for training: the memory cap of a client on this device."""
        return self.memory.available_mib - self.memory.runtime_mib


class Link(Profile, frozen=True, kw_only=True):
    """A network link as the device sees it. `loss` is the part of the packets that is lost, from 0 to 1."""

    title: str
    down_mbit_s: Positive
    up_mbit_s: Positive
    rtt_ms: NonNegative
    jitter_ms: NonNegative = 0.0
    loss: Fraction = 0.0
    provenance: tuple[Provenance, ...] = ()


class Member(Profile, frozen=True, kw_only=True):
    """One line of a fleet: so many of a device (`count`) or such a part of the total (`weight`).

    `override` replaces figures of the device by dotted key path, for example `memory.available_mib: 256`.
    """

    device: str
    count: Count | None = None
    weight: Positive | None = None
    link: str | None = None
    override: dict[str, int | float | str] = {}


class Fleet(Profile, frozen=True, kw_only=True):
    """How many of which device, on which link: counts, or weights (that sum to 1 or 100) with a `total`."""

    title: str
    members: Annotated[tuple[Member, ...], Meta(min_length=1)]
    total: Count | None = None
    provenance: tuple[Provenance, ...] = ()


class ClientSpec(Profile, frozen=True, kw_only=True):
    """One member of a fleet, with everything resolved. `device` already carries the overrides."""

    number: int
    kind: str
    device: Device
    link_name: str
    link: Link

    @property
    def name(self) -> str:
        return f"{self.number:03d}"
