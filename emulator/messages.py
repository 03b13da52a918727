"""What broker, zygote and workers say to each other, beside the method's own tensors."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from fleetbed.emulator.algorithm import Client
from fleetbed.emulator.limits.plan import Cap, LimitPlan
from fleetbed.models.work import Part
from fleetbed.profiles.experiment import RunConfig


class Setup(Struct, frozen=True, kw_only=True):
    """All that a worker must know of the run; written as JSON in the run folder, read once by the zygote."""

    config: RunConfig
    folder: str
    dataset: str
    clients: tuple[Client, ...] = ()


Size = Annotated[int, Meta(ge=0)]
Places = list[tuple[Size, Size]]  # offsets and sizes on the shelf


class Ticket(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where the frames behind an order's manifest lie, if not in the message, and room for those of its answer."""

    places: Places
    room: tuple[int, int]
    large: bool  # whether all of it lies in large pages


# broker -> worker, over ZeroMQ


class Train(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """A task of a client. `pace_step_s` and `pace_total_s` are host seconds; 0 means full speed."""

    task: int
    client: int
    variant: str
    stage: str
    kept: str | None
    most_steps: int | None = None  # partial work: to be ended after so many
    pace_step_s: float = 0.0
    pace_total_s: float = 0.0
    ticket: Ticket | None = None
    bench: tuple[Size, Size] | None = None  # offset and size, where it may train in lent memory


class Evaluate(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """Measure a model. Its tensors come with the message, or are those that a client kept."""

    task: int
    variant: str
    kept: str | None
    prefix: str
    local_client: int | None
    batch: int
    ticket: Ticket | None = None


class Measure(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The reference time of one pass, hot and alone: `train` with an optimiser step if `optimise`."""

    task: int
    variant: str
    kind: Literal["train", "forward", "parameters"]
    part: Part
    samples: int
    optimise: bool
    once: bool = False  # only to see whether it can be done


ToWorker = Train | Evaluate | Measure
to_worker = msgspec.msgpack.Decoder(ToWorker)


# worker -> broker


class Hello(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A worker is inside its limits: what became of each, read back."""

    caps: tuple[Cap, ...]


class Trained(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    task: int
    keep: str | None
    metrics: dict[str, float]
    steps: int
    samples: int
    seconds: float  # wall time of the compute phase
    cpu_s: float
    throttled_s: float | None
    peak_bytes: int | None
    anon_bytes: int | None
    gpu_peak_bytes: int | None = None
    gpu_w: float | None = None
    not_finite: str | None = None  # a tensor that holds NaN or infinity
    places: Places = []  # of the frames behind its manifest, if they are not in the message


class Evaluated(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    task: int
    samples: int
    accuracy: float
    loss: float


class Measured(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    task: int
    seconds: float


Failure = Literal["oom", "crash", "host"]  # host: no fault of the client's, this machine cannot go on


class Failed(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    task: int
    kind: Failure
    detail: str


FromWorker = Hello | Trained | Evaluated | Measured | Failed
from_worker = msgspec.msgpack.Decoder(FromWorker)


# broker <-> zygote, over a socket pair


class Open(Struct, frozen=True, kw_only=True, tag=True):
    """The first order: the name of the run, the folder of its sockets, and where workers write what they say."""

    run: str
    folder: str
    log: str


class Configure(Struct, frozen=True, tag=True):
    setup: str


class Spawn(Struct, frozen=True, kw_only=True, tag=True):
    """`identity` is the worker's name on the socket: new for each process, so that nobody else can speak for it."""

    worker: str
    identity: str
    title: str
    plan: LimitPlan
    one_task: bool


class Kill(Struct, frozen=True, tag=True):
    worker: str


ToZygote = Open | Configure | Spawn | Kill
to_zygote = msgspec.msgpack.Decoder(ToZygote)


class Ready(Struct, frozen=True, tag=True):
    """The zygote has been configured."""


class Exited(Struct, frozen=True, tag=True):
    worker: str
    status: int  # negative: the signal that ended it
    oom: bool
    ordered: bool  # the broker had it killed, and it was alive until then


class Trouble(Struct, frozen=True, tag=True):
    """The zygote could not do what it was told."""

    worker: str | None
    text: str


FromZygote = Ready | Exited | Trouble
from_zygote = msgspec.msgpack.Decoder(FromZygote)
