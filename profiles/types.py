"""The types of devices, links and fleets: frozen, with the unit in every name.

They are read from YAML in one pass (`loading.py`); unknown keys are errors, and the types check ranges.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from fleetbed.profiles.runtimes import RUNTIMES, RuntimeName

# Bounds are wide: they exclude values that would hang a run or fill the memory, not values that are merely unusual. All
# figures fit single precision, quotients of two of them do not overflow, and the JSON schemas include them.
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
    """The base of all types that are read from YAML: immutable, and unknown keys are refused."""


class Provenance(Profile, frozen=True, kw_only=True):
    """The origin of a figure. `figure` is a dotted key path in the same file, or a group of them."""

    figure: str
    kind: ProvenanceKind
    source: str | None = None
    note: str = ""


class Cpu(Profile, frozen=True, kw_only=True):
    """A CPU. The rates are those of a matrix product on all cores."""

    description: str
    cores: Annotated[int, Meta(ge=1, le=100_000)]
    clock_ghz: Annotated[float, Meta(ge=1e-6, le=1e3)] | None = None
    fp64_gflops: Gflops | None = None
    fp32_gflops: Gflops


class Gpu(Profile, frozen=True, kw_only=True):
    """A GPU. The sustained rate is measured; without it the peak is used, which is optimistic."""

    description: str
    fp32_gflops_peak: Gflops | None = None
    fp32_gflops_sustained: Gflops | None = None


class Memory(Profile, frozen=True, kw_only=True):
    """`available_mib` is the memory that is free for an application.

    `runtime_mib` is the part that the training software needs, if it was measured on the device; otherwise it follows
    from the device's `runtime`. The measured bandwidth is that of copying, each byte counted once, as in tinymembench.
    """

    installed_mib: Mib
    visible_mib: Mib
    available_mib: Mib
    runtime_mib: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    bandwidth_gb_s_peak: GbPerSecond | None = None
    bandwidth_gb_s_measured: GbPerSecond | None = None


class Rates(Profile, frozen=True, kw_only=True):
    """Training rates by class of operation, on all cores, for forward and backward passes alike.

    A multiply-add is two FLOP. `memory_gb_s` counts the bytes that an operator reads and writes; `call_us` is the time
    of every call of an operator besides its work.
    """

    conv_1x1_gflops: Gflops
    conv_gflops: Gflops  # k x k, also grouped
    depthwise_gflops: Gflops
    matmul_gflops: Gflops  # linear layers, attention, recurrent layers
    memory_gb_s: GbPerSecond  # element-wise work, norms, pooling, data movement
    call_us: Annotated[float, Meta(ge=0, le=1e6)]


class Power(Profile, frozen=True, kw_only=True):
    """Power at the wall. Without both figures the energy of a client is not reported."""

    idle_w: Watts | None = None
    load_w: Watts | None = None


class Throttle(Profile, frozen=True, kw_only=True):
    """Thermal throttling: after `after_s` seconds of load the speed falls to `rate` times its value."""

    after_s: Seconds
    rate: Annotated[float, Meta(ge=1e-4, le=1)]


class LinkOverride(Profile, frozen=True, kw_only=True):
    """The rates that this device reaches on its default link, if they differ from the link's profile."""

    down_mbit_s: MbitPerSecond
    up_mbit_s: MbitPerSecond


class Device(Profile, frozen=True, kw_only=True):
    """A board or phone. Its name is that of its file.

    `trains_on` is the unit that trains, `runtime` the training software, `link` the name of the default link. Missing
    `rates` are derived from the matrix-product rate and the memory bandwidth (`rates.py`). `train_scale` multiplies the
    planned time, if training was measured on the device: 2.0 is half as fast as the rates predict.
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
        """The FP32 matmul rate of the unit that trains, which determines the slowdown relative to the host."""
        if self.trains_on == "cpu":
            return self.cpu.fp32_gflops
        assert self.gpu is not None  # loading.py checks that
        rate = self.gpu.fp32_gflops_sustained or self.gpu.fp32_gflops_peak
        assert rate is not None
        return rate

    @property
    def cap_mib(self) -> float:
        """The memory left for training: the memory cap of a client on this device."""
        return self.memory.available_mib - self.runtime_mib

    @property
    def runtime_mib(self) -> float:
        """The part of the available memory that the training software needs."""
        own = self.memory.runtime_mib
        return RUNTIMES[self.runtime].memory_mib if own is None else own


class Link(Profile, frozen=True, kw_only=True):
    """A network link as seen by the device. `loss` is the fraction of packets lost, from 0 to 1."""

    title: str
    down_mbit_s: MbitPerSecond
    up_mbit_s: MbitPerSecond
    rtt_ms: Milliseconds
    jitter_ms: Milliseconds = 0.0
    loss: Fraction = 0.0
    provenance: tuple[Provenance, ...] = ()


class Member(Profile, frozen=True, kw_only=True):
    """One line of a fleet: a number of devices (`count`) or a part of the total (`weight`).

    `override` replaces figures of the device by dotted key path, for example `memory.available_mib: 256`.
    """

    device: str
    count: Clients | None = None
    weight: Annotated[float, Meta(ge=1e-9, le=100)] | None = None
    link: str | None = None
    override: dict[str, int | float | str] = {}


class Fleet(Profile, frozen=True, kw_only=True):
    """The numbers of devices and their links: counts, or weights (which sum to 1 or 100) with a `total`."""

    title: str
    members: Annotated[tuple[Member, ...], Meta(min_length=1)]
    total: Clients | None = None
    provenance: tuple[Provenance, ...] = ()


class ClientSpec(Profile, frozen=True, kw_only=True):
    """One member of a fleet, with everything resolved. `device` includes the overrides."""

    number: int
    kind: str
    device: Device
    link_name: str
    link: Link

    @property
    def name(self) -> str:
        return f"{self.number:03d}"
