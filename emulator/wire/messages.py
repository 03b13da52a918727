"""What broker, zygote and workers say to each other, beside the method's own tensors."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from fleetbed.emulator.limits.plan import Cap, LimitPlan
from fleetbed.emulator.method.algorithm import Client
from fleetbed.emulator.timeline.plan import Pace
from fleetbed.models.work import Part
from fleetbed.profiles.experiment import RunConfig


class Setup(Struct, frozen=True, kw_only=True):
    """All that a worker must know of the run; written as JSON in the run folder, read once by the zygote."""

    config: RunConfig
    folder: str
    dataset: str
    clients: tuple[Client, ...] = ()
    keep_heap: bool = False  # clients keep their heap between tasks, else they give it back


Size = Annotated[int, Meta(ge=0)]


class Slot(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of the shared memory: the frames behind an order's manifest lie there, and its answer may."""

    offset: Size
    room: Size  # for the answer
    sizes: list[Size]  # of the order's frames, one after the other


# broker -> worker, over ZeroMQ


class Train(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """A task of a client. `paces` and `pace_total_s` are host seconds; 0 means full speed."""

    task: int
    client: int
    variant: str
    stage: str
    kept: str | None
    round: int = 1  # whose learning rate applies
    most_steps: int | None = None  # partial work: to be ended after so many
    paces: tuple[Pace, ...] = ()
    pace_total_s: float = 0.0
    slot: Slot | None = None


#: what leads the names of a target's extra tensors in the message of an evaluation
EXTRAS = "extras/"


class Evaluate(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """Measure a model. Its tensors come with the message, or are those that a client kept."""

    task: int
    variant: str
    kept: str | None
    prefix: str
    local_client: int | None
    batch: int
    recalibrate: bool = False  # batch norm's statistics, on all clients' training data
    slot: Slot | None = None


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


Number = Annotated[int, Meta(ge=0, le=1 << 60)]  # what the records can hold
Amount = Annotated[float, Meta(ge=0, le=1e15)]  # this rules out NaN too
Metrics = Annotated[dict[Annotated[str, Meta(min_length=1, max_length=256)], float], Meta(max_length=1000)]


class Trained(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    task: int
    keep: str | None
    metrics: Metrics
    steps: Number
    samples: Number
    seconds: Amount  # wall time of the compute phase
    cpu_s: Amount
    throttled_s: Amount | None
    peak_bytes: Number | None
    anon_bytes: Number | None
    gpu_peak_bytes: Number | None = None
    gpu_w: Amount | None = None
    sizes: list[Size] = []  # of the frames behind its manifest, if they are in its slot


def kept_name(client: int, task: int) -> str:
    """The file, in the run's folder, of what a client keeps after a task."""
    return f"state/client-{client:03d}/task-{task:08d}.safetensors"


class Evaluated(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    task: int
    samples: Number
    accuracy: Annotated[float, Meta(ge=0, le=1)]
    loss: float  # of a model that has diverged it is not finite


class Measured(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The median over repetitions, how far they lay apart, and what others kept busy meanwhile."""

    task: int
    seconds: float
    spread: float = 0.0
    other_cores: float = 0.0


Failure = Literal["oom", "crash", "host"]  # host: no fault of the client's, this machine cannot go on


class Failed(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    task: int
    kind: Failure
    detail: str


FromWorker = Hello | Trained | Evaluated | Measured | Failed
from_worker = msgspec.msgpack.Decoder(FromWorker)


# broker <-> zygote, over a socket pair


class Open(Struct, frozen=True, kw_only=True, tag=True):
    """The first order: the name of the run, where workers connect to, and the file that they write their output to."""

    run: str
    address: str
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


class Forked(Struct, frozen=True, tag=True):
    """A worker's process has begun; its hello is due."""

    worker: str


class Exited(Struct, frozen=True, tag=True):
    worker: str
    status: int  # negative: the signal that ended it
    oom: bool
    ordered: bool  # the broker had it killed, and it was alive until then
    stopped: bool = False  # the zygote killed it because a signal had stopped it


class Trouble(Struct, frozen=True, tag=True):
    """The zygote could not do what it was told."""

    worker: str | None
    text: str


FromZygote = Ready | Forked | Exited | Trouble
from_zygote = msgspec.msgpack.Decoder(FromZygote)
