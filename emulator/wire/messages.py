"""The messages between broker, zygote and workers, apart from the method's own tensors."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from fleetbed.emulator.limits.plan import Cap, LimitPlan
from fleetbed.emulator.method.algorithm import Client
from fleetbed.emulator.timeline.plan import Pace
from fleetbed.models.cost.opaque import Counted
from fleetbed.models.work import Part
from fleetbed.profiles.experiment import RunConfig


class Setup(Struct, frozen=True, kw_only=True):
    """The facts of a run that are known from its beginning; written as JSON to its folder, read once by the zygote."""

    config: RunConfig
    folder: str
    dataset: str = ""  # the folder of the prepared data
    runner: str | None = None  # a module whose `open_runner` makes what carries out the tasks; None: the emulator's own
    files: dict[str, str] = {}  # the user's own code, with the SHA-256 of each file


class Enrolment(Struct, frozen=True, kw_only=True):
    """The clients of a run, once they are chosen; written as JSON to the run folder, read once by the zygote."""

    clients: tuple[Client, ...]
    keep_heap: bool  # clients keep their heap between tasks, else they give it back


Size = Annotated[int, Meta(ge=0)]


class Slot(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of the shared memory: it holds the frames after an order's manifest, and may hold those of the answer."""

    offset: Size
    capacity: Size  # how many bytes the answer may have
    sizes: list[Size]  # of the order's frames, one after the other


# broker -> worker, over ZeroMQ


class Train(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """A task of a client. `paces` and `pace_total_s` are host seconds; 0 means full speed."""

    task: int
    client: int
    variant: str
    stage: str
    kept: str | None
    round: int = 1  # decides about the learning rate, and schedules go by it
    most_steps: int | None = None  # partial work: the task ends after so many
    paces: tuple[Pace, ...] = ()
    pace_total_s: float = 0.0
    slot: Slot | None = None


#: what leads the names of a target's extra tensors in the message of an evaluation
EXTRAS = "extras/"


class Evaluate(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """An evaluation of a model whose tensors come with the message, or were kept by a client."""

    task: int
    variant: str
    kept: str | None
    prefix: str
    local_client: int | None
    batch: int
    recalibrate: bool = False  # batch norm's statistics, on all clients' training data
    slot: Slot | None = None


class Measure(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A measurement of one pass, hot and alone: `train` with an optimiser step if `optimise`.

    `first` is the first step of a task, which is slower: it loads the model that was received into new memory.
    """

    task: int
    variant: str
    kind: Literal["first", "train", "forward", "parameters"]
    part: Part
    samples: int
    optimise: bool
    once: bool = False  # only to see whether a step as the model is usually trained can be done; whatever the part


ToWorker = Train | Evaluate | Measure
to_worker = msgspec.msgpack.Decoder(ToWorker)


# worker -> broker


class Hello(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A worker is inside its limits; `caps` are the values that were read back."""

    caps: tuple[Cap, ...]


Number = Annotated[int, Meta(ge=0, le=1 << 60)]  # what the records can hold
Fraction = Annotated[float, Meta(ge=0, le=1)]
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
    counted: Counted | None = None  # operators of code that declares no work
    sizes: list[Size] = []  # of the frames after its manifest, if they are in its slot


def kept_name(client: int, task: int) -> str:
    """The file, in the run's folder, of what a client keeps after a task."""
    return f"state/client-{client:03d}/task-{task:08d}.safetensors"


class Evaluated(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    task: int
    samples: Number
    loss: float  # of a model that has diverged it is not finite
    accuracy: Fraction | None = None  # of classes
    f1: Fraction | None = None  # of classes: the plain mean over them
    mae: float | None = None  # of numbers: the mean absolute error


class Measured(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The median over repetitions, their spread, and the cores that other programs kept busy meanwhile."""

    task: int
    seconds: float
    spread: float = 0.0
    other_cores: float = 0.0


Failure = Literal["oom", "crash", "host"]  # host: not the client's fault, this machine cannot continue


class Failed(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    task: int
    kind: Failure
    detail: str


FromWorker = Hello | Trained | Evaluated | Measured | Failed
from_worker = msgspec.msgpack.Decoder(FromWorker)


# broker <-> zygote, over a socket pair


class Open(Struct, frozen=True, kw_only=True, tag=True):
    """The first message: the name of the run, the address that workers connect to, and the file for their output."""

    run: str
    address: str
    log: str


class Configure(Struct, frozen=True, tag=True):
    """Sent once, before any worker is spawned: the file with the `Setup`. Services can be spawned from then on."""

    setup: str


class Enrol(Struct, frozen=True, tag=True):
    """Sent once, when the clients are chosen: the file with the `Enrolment`. Clients can be spawned from then on."""

    enrolment: str


class Spawn(Struct, frozen=True, kw_only=True, tag=True):
    """`identity` is the worker's name on the socket: new for each process, so that no other can pass for it."""

    worker: str
    identity: str
    title: str
    plan: LimitPlan
    one_task: bool


class Kill(Struct, frozen=True, tag=True):
    worker: str


ToZygote = Open | Configure | Enrol | Spawn | Kill
to_zygote = msgspec.msgpack.Decoder(ToZygote)


class Ready(Struct, frozen=True, tag=True):
    """The zygote has done what `Configure` or `Enrol` asked for."""


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
    """The zygote could not do what it was told: fork this worker or, with None, configure itself."""

    worker: str | None
    text: str


FromZygote = Ready | Forked | Exited | Trouble
from_zygote = msgspec.msgpack.Decoder(FromZygote)
