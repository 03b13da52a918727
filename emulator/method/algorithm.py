"""The interface of a method: one class with both halves, which knows nothing of clocks, processes, limits or sockets.

A method is a module of `emulator/algorithms/` (or an entry point in the group `fleetbed.algorithms`) with two
names: `Params`, a frozen type of its parameters, and `Method`, which makes an `Algorithm` from parameters and
context: a subclass, or a function. The server half runs in the broker, the client half in the client's process. Both
get the same `Context`, and neither keeps state in `self`: everything that lasts is in the server's state or in the
state that a client keeps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.optimizers import Stepper
from fleetbed.emulator.method.series import TargetSeries
from fleetbed.models.base import Family, InputSpec, Net, Tensors, gather
from fleetbed.models.work import ServerWork, Work
from fleetbed.profiles.experiment import PolicyKind, Training

ALL_POLICIES: frozenset[PolicyKind] = frozenset({"sync", "deadline", "over-select", "async", "buffered"})
ROUND_POLICIES: frozenset[PolicyKind] = frozenset({"sync", "deadline", "over-select"})


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The requirements of a method. A run that cannot meet one of them is refused before anything starts."""

    policies: frozenset[PolicyKind] = ALL_POLICIES
    policies_why: str = ""  # the reason, where a policy makes no sense for the method
    stages: tuple[str, ...] = ("train",)  # a round goes through these in order, with a merge after each
    shared_tensors: bool = False  # variants must share tensors by name (layer-wise averaging)
    cuts: bool = False  # models must have cut points: extractor, intermediate part, classifier
    classes: bool = False  # labels must be classes, not numbers
    public_samples: int = 0  # samples held by the server, disjoint from the clients' data
    public_labels: bool = False  # their labels too; a method that does not say so cannot read them
    total_rounds: bool = False  # it depends on `context.rounds`, so no rounds can be added to a run later
    initial_on_client: bool = False  # clients begin with `context.initial`, which they do not receive
    long_merges: bool = False  # merges take long, for example because they train: clients are served in the meantime
    reported: TargetSeries | None = None  # the series that the paper reports, if the targets belong to several


@dataclass(frozen=True)
class Client:
    """A client as a method sees it."""

    number: int
    variant: str
    samples: int


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A task as a method sees it before it runs."""

    client: Client
    task: int = 0  # the key of everything that is drawn at random for it
    stage: str = "train"  # one of `Needs.stages`
    round: int = 1  # of the policy, counted from 1; schedules depend on it


class PublicData(Protocol):
    """The server's own pool of samples (`data.public`)."""

    def __len__(self) -> int: ...

    def draw(self, count: int, seed: int) -> Tensor:
        """Draw `count` inputs without replacement, in an order that depends on `seed`."""
        ...

    def labels(self, count: int, seed: int) -> Tensor:
        """Return the labels of the inputs that `draw` returns, for methods with `Needs.public_labels`."""
        ...

    def with_labels(self) -> PublicData:
        """Return the same pool with readable labels."""
        ...


@dataclass(frozen=True, kw_only=True)
class Context:
    """The facts that hold for the whole run, the same in the broker and in every client."""

    seed: int
    spec: InputSpec
    family: Family
    #: the clients that take part in the run, on the server with their present variants; numbers may have gaps
    clients: tuple[Client, ...]
    training: Training
    rounds: int
    public: PublicData | None = None
    most_samples: int = 1_000_000_000  # of the client that has the most
    most_clients: int = 1_000_000_000  # the size of the fleet, known before it is known which clients take part
    ratio: float = 1.0  # the part of the clients that takes part in a round
    alone: bool = False  # the experiment gives all clients the same variant
    drawn: Tensors | None = None  # the initial tensors of the family's largest variant, see `with_initial`

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants in use, smallest first."""
        used = {client.variant for client in self.clients}
        return tuple(v for v in self.family.variants if v in used)

    def initial(self, variant: str) -> Tensors:
        """Return the initial tensors of a variant, always the same ones; torch's global generator is not advanced.

        If variants share tensors, these are parts of the largest variant's tensors, cut as in layer-wise averaging, so
        that all methods start from the same values. The exception is a variant that is cut by width and the only one
        in use: the values of wide layers do not suit narrow ones.
        """
        if not self.family.shared:
            return self._draw(variant)
        index = self.family.index(variant, self.spec)
        if self.alone and any(rows is not None for parts in index.values() for rows in parts):
            return self._draw(variant)
        return gather(self.drawn or self._draw(self.family.variants[-1]), index)

    def with_initial(self) -> Context:
        """Return the same context with the largest variant's tensors drawn; they may not fit into a client's memory."""
        if not self.family.shared or self.drawn is not None:
            return self
        return replace(self, drawn=self._draw(self.family.variants[-1]))

    def _draw(self, variant: str) -> Tensors:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return dict(self.family.build(variant, self.spec).state_dict())


class Job(Protocol):
    """A task on the device. All randomness comes from `seed(purpose)`, keyed by run seed, client and task."""

    context: Context
    assignment: Assignment
    message: Bundle
    kept: Bundle | None  # the state that this client kept after its last merged task
    steps: int  # optimiser steps so far; a policy that accepts partial work may end them early
    rows: Tensor  # of the current batch: the positions of its samples in `ordered`

    @property
    def client(self) -> Client:
        """The client that carries out the task."""
        ...

    def batches(
        self, *, epochs: int | None = None, steps: int | None = None, batch: int | None = None, phase: str = ""
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield mini-batches of the client's data, counted and paced: each is one optimiser step.

        Without arguments they follow the experiment's `training`. `steps` draws that many random batches instead of
        epochs. The last incomplete batch is dropped unless it is the only one. Calls with the same `phase` see the same
        order, so a task that trains in several phases gives each a name.
        """
        ...

    def foreign(self, samples: int, *, epochs: int, batch: int, phase: str) -> Iterator[Tensor]:
        """Yield mini-batches of data that the client received, as sample numbers; counted like `batches`."""
        ...

    def ordered(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the client's data once, in stored order, without augmentation; no optimiser steps."""
        ...

    def hold_out(self, share: float) -> None:
        """Set aside a share of the client's data, the same in every task; from then on only `held_out` reads it."""
        ...

    def held_out(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the data that was set aside, once, in stored order, without augmentation; no optimiser steps."""
        ...

    def class_counts(self) -> Tensor:
        """Return the number of the client's samples in each class."""
        ...

    def sample(self, count: int, purpose: str) -> tuple[Tensor, Tensor]:
        """Draw samples of the client's own data, without replacement if there are enough."""
        ...

    def model(self, tensors: dict[str, Tensor]) -> Net:
        """Return the client's model with a copy of these tensors, in training mode."""
        ...

    def optimizer(self, model: Net) -> Stepper:
        """Return the experiment's optimiser for the model, with the learning rate of the task's round."""
        ...

    def seed(self, purpose: str) -> int: ...

    def generator(self, purpose: str) -> torch.Generator: ...


class Spec(NamedTuple):
    """The type and shape of a tensor; None stands for any size."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The reply that a client must send: exactly these tensors and scalars, by name."""

    tensors: Mapping[str, Spec] = field(default_factory=dict)
    values: Mapping[str, type[bool] | type[int] | type[float] | type[str]] = field(default_factory=dict)


def like(tensors: Mapping[str, Tensor]) -> dict[str, Spec]:
    """Return the specs of these tensors, for a reply that has tensors of the same names, types and shapes."""
    return {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The result of a task. When it is merged, `keep` replaces the state that the client keeps; None leaves it."""

    message: Bundle
    keep: Bundle | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # recorded; `loss` is the mean training loss


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A result that has arrived at the server; arrivals come in the order of the timeline."""

    assignment: Assignment
    sent: Bundle  # the message that the client received
    message: Bundle
    staleness: int = 0  # the number of merges since `sent` was made
    weight: float = 1.0  # the policy's mixing weight; 1 in rounds

    @property
    def client(self) -> Client:
        return self.assignment.client


@dataclass(frozen=True, kw_only=True)
class Merged:
    state: Bundle
    metrics: dict[str, float] = field(default_factory=dict)  # recorded per merge, for analysis


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model to evaluate.

    It has the variant's initial tensors, replaced by those that `client` keeps below `prefix`, replaced by `tensors`.
    So a global model gives all of its tensors here, a personal one none, and others the part that is shared.
    """

    name: str
    variant: str
    tensors: dict[str, Tensor] | None = None
    client: int | None = None
    prefix: str = ""
    local: bool = False  # tested on that client's own test part instead of the whole test set
    shared: bool = False  # counts as a global model: `predict` combines the client's model with the server's
    recalibrate: bool = False  # first estimate batch norm's statistics on all clients' training data
    extras: dict[str, Tensor] = field(default_factory=dict)  # that `Algorithm.predict` needs in addition to the model


class ServerHalf(ABC):
    """What the engine asks of a method."""

    context: Context

    @property
    def needs(self) -> Needs:
        return Needs()

    def check(self) -> None:  # noqa: B027 - most methods have nothing to check
        """Raise BadInput if parameters, family and data do not fit together."""

    def reassign(self, clients: Sequence[Client]) -> None:
        """Replace the clients: one that ran out of memory continues with a smaller variant."""
        self.context = replace(self.context, clients=tuple(clients))

    def step_down(self, kept: Bundle, client: Client) -> Bundle | None:
        """Return the part of a client's kept state that is still of use with its new, smaller variant, if any."""
        return None

    @abstractmethod
    def setup(self) -> Bundle:
        """Return the server's first state."""

    @abstractmethod
    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        """Return the message for a client."""

    @abstractmethod
    def work(self, state: Bundle, assignment: Assignment) -> Work:
        """Declare the work of a task: the steps and passes that it will carry out, and what it holds."""

    def heaviest(self, state: Bundle, client: Client) -> Work:
        """Declare the heaviest task that this client may get; its variant is chosen by it.

        `state` is the first one. By default every task is as heavy as the first.
        """
        return self.work(state, Assignment(client=client, stage=self.needs.stages[0]))

    def expects(self, assignment: Assignment, sent: Bundle) -> Expected | None:
        """Declare the reply to `sent`. A reply of another form is refused, so that `merge` never sees it.

        With None only finiteness is checked, and `merge` must handle whatever a client sends.
        """
        return None

    def objection(self, assignment: Assignment, message: Bundle) -> str | None:
        """Return the fault in the values of a reply that is finite and has the declared form; None if there is none."""
        return None

    @abstractmethod
    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        """Merge results into the state: the server's half.

        There is at least one arrival; all are of one stage, have the declared form and are finite.
        """

    def foresee(self, state: Bundle, arrivals: Sequence[Arrival]) -> Bundle:
        """Return the state after a merge for forecasts: only messages and work that depend on it need to be right.

        By default the merge is carried out. A method with long merges skips the parts that change no sizes.
        """
        return self.merge(state, arrivals).state

    def server_work(self, state: Bundle, arrivals: Sequence[Arrival]) -> ServerWork:
        """Declare the cost of the merge; by default one pass over the tensors that arrived."""
        return ServerWork(flops=2.0 * sum(t.numel() for a in arrivals for t in a.message.tensors.values()))

    @abstractmethod
    def targets(self, state: Bundle) -> list[Target]:
        """Return the models to evaluate."""


class Algorithm(ServerHalf):
    """A method of federated learning: both halves, the server's and the client's."""

    def __init__(self, params: Any, context: Context) -> None:
        self.params = params
        self.context = context

    @abstractmethod
    def client(self, job: Job) -> Reply:
        """Carry out a task on the device: the client's half."""

    def predict(self, model: Net, x: Tensor, extras: Tensors) -> Tensor:
        """Return the scores of each class, for evaluation; `extras` are those of the target."""
        scores: Tensor = model(x)
        return scores
