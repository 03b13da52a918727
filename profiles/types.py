"""What a device, a link and a fleet are: frozen types with the unit in every name.

Read from YAML in one pass (`loading.py`); unknown keys are errors, ranges are checked by the type.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from fleetbed.profiles.runtimes import RUNTIMES, RuntimeName

# Bounds are wide: they keep out what would hang a run or fill the memory, not what is merely unusual. All figures fit
# single precision, quotients of two of them do not overflow, and the JSON schemas carry them.
Positive = Annotated[float, Meta(ge=1e-12, le=1e12)]
NonNegative = Annotated[float, Meta(ge=0, le=1e12)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=1_000_000_000)]
Gflops = Annotated[float, Meta(ge=1e-6, le=1e9)]
Mib = Annotated[float, Meta(ge=1, le=1e9)]
MbitPerSecond = Annotated[float, Meta(ge=1e-6, le=1e7)]  # from one bit a second
GbPerSecond = Annotated[float, Meta(ge=1e-6, le=1e6)]
Milliseconds = Annotated[float, Meta(ge=0, le=1e7)]
Seconds = Annotated[float, Meta(ge=1e-3, le=1e10)]  # up to three centuries
Watts = Annotated[float, Meta(ge=1e-6, le=1e6)]
MAX_CLIENTS = 100_000
Clients = Annotated[int, Meta(ge=1, le=MAX_CLIENTS)]
ProvenanceKind = Literal["measured", "fitted", "vendor", "derived", "assumed"]
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
    cores: Annotated[int, Meta(ge=1, le=100_000)]
    clock_ghz: Annotated[float, Meta(ge=1e-6, le=1e3)] | None = None
    fp64_gflops: Gflops | None = None
    fp32_gflops: Gflops


class Gpu(Profile, frozen=True, kw_only=True):
    """The sustained rate is a measured one; where it is missing the peak stands in, which is optimistic."""

    description: str
    fp32_gflops_peak: Gflops | None = None
    fp32_gflops_sustained: Gflops | None = None


class Memory(Profile, frozen=True, kw_only=True):
    """`available_mib` is what an application finds free.

    `runtime_mib` is what the training software takes of it, where that was measured on the device; else the device's
    `runtime` says it. The measured bandwidth is that of copying, each byte counted once, as tinymembench reports it.
    """

    installed_mib: Mib
    visible_mib: Mib
    available_mib: Mib
    runtime_mib: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    bandwidth_gb_s_peak: GbPerSecond | None = None
    bandwidth_gb_s_measured: GbPerSecond | None = None


class Rates(Profile, frozen=True, kw_only=True):
    """How fast the device trains, by class of operation; forward and backward passes alike, on all cores.

    A multiply-add is two FLOP. `memory_gb_s` counts the bytes that an operator reads and writes, `call_us` is what
    every call of an operator takes beside its work.
    """

    conv_1x1_gflops: Gflops
    conv_gflops: Gflops  # k x k, also grouped
    depthwise_gflops: Gflops
    matmul_gflops: Gflops  # linear layers, attention, recurrent layers
    memory_gb_s: GbPerSecond  # element-wise work, norms, pooling, data movement
    call_us: Annotated[float, Meta(ge=0, le=1e6)]


class Power(Profile, frozen=True, kw_only=True):
    """At the wall. Without both figures the joules of a client are not reported."""

    idle_w: Watts | None = None
    load_w: Watts | None = None


class Throttle(Profile, frozen=True, kw_only=True):
    """Thermal throttling: after `after_s` seconds of load the rate falls to `rate` of what it was."""

    after_s: Seconds
    rate: Annotated[float, Meta(ge=1e-4, le=1)]


class LinkOverride(Profile, frozen=True, kw_only=True):
    """What this device reaches on its own default link, where that differs from the link's profile."""

    down_mbit_s: MbitPerSecond
    up_mbit_s: MbitPerSecond


class Device(Profile, frozen=True, kw_only=True):
    """What a board or phone is. Its file stem is its name.

    `trains_on` is the unit that trains, `runtime` the training software, `link` the name of the default link. Without
    `rates` they are derived from the matrix-product rate and the memory bandwidth (`rates.py`). `train_scale`
    multiplies the planned time where training on the device was measured: 2.0 is half as fast as its rates promise.
    """

    title: str
    trains_on: Unit
    cpu: Cpu
    gpu: Gpu | None = None
    memory: Memory
    runtime: RuntimeName = "pytorch"
    rates: Rates | None = None
    power: Power = Power()
    link: str
    link_override: LinkOverride | None = None
    train_scale: Annotated[float, Meta(ge=1e-4, le=1e4)] = 1.0
    throttle: Throttle | None = None
    provenance: tuple[Provenance, ...] = ()

    @property
    def rate_gflops(self) -> float:
        """The FP32 matmul rate of the unit that trains, which sets the slowdown against the host."""
        if self.trains_on == "cpu":
            return self.cpu.fp32_gflops
        assert self.gpu is not None  # loading.py checks that
        rate = self.gpu.fp32_gflops_sustained or self.gpu.fp32_gflops_peak
        assert rate is not None
        return rate

    @property
    def cap_mib(self) -> float:
        """What is left for training: the memory cap of a client on this device."""
        return self.memory.available_mib - self.runtime_mib

    @property
    def runtime_mib(self) -> float:
        """What the training software takes of the available memory."""
        own = self.memory.runtime_mib
        return RUNTIMES[self.runtime].memory_mib if own is None else own


class Link(Profile, frozen=True, kw_only=True):
    """A network link as the device sees it. `loss` is the part of the packets that is lost, from 0 to 1."""

    title: str
    down_mbit_s: MbitPerSecond
    up_mbit_s: MbitPerSecond
    rtt_ms: Milliseconds
    jitter_ms: Milliseconds = 0.0
    loss: Fraction = 0.0
    provenance: tuple[Provenance, ...] = ()


class Member(Profile, frozen=True, kw_only=True):
    """One line of a fleet: so many of a device (`count`) or such a part of the total (`weight`).

    `override` replaces figures of the device by dotted key path, for example `memory.available_mib: 256`.
    """

    device: str
    count: Clients | None = None
    weight: Annotated[float, Meta(ge=1e-9, le=100)] | None = None
    link: str | None = None
    override: dict[str, int | float | str] = {}


class Fleet(Profile, frozen=True, kw_only=True):
    """How many of which device, on which link: counts, or weights (that sum to 1 or 100) with a `total`."""

    title: str
    members: Annotated[tuple[Member, ...], Meta(min_length=1)]
    total: Clients | None = None
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
