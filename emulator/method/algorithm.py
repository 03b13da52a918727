"""The interface of a method: both halves in one class, which knows no clock, process, cap or socket.

A method is a module of `emulator/algorithms/` (or an entry point in the group `fleetbed.algorithms`) with two
names: `Params`, a frozen type of its parameters, and `Method`, which makes an `Algorithm` from parameters and
context: a subclass, or a function. The server half runs in the broker, the client half in the client's process. Both
are given the same `Context`, and neither keeps state in `self`: what lasts is in the server's state or in the client's
kept state.
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
    """What a method asks for; a run that cannot give it is refused by name before anything starts."""

    policies: frozenset[PolicyKind] = ALL_POLICIES
    policies_why: str = ""  # the reason, where a policy makes no sense for the method
    stages: tuple[str, ...] = ("train",)  # a round goes through these in order, with a merge after each
    shared_tensors: bool = False  # variants must share tensors by name (layer-wise averaging)
    cuts: bool = False  # models must have cut points: extractor, intermediate part, classifier
    classes: bool = False  # labels must be classes, not numbers
    public_samples: int = 0  # samples held by the server, disjoint from the clients' data
    public_labels: bool = False  # their labels too; a method that does not say so cannot read them
    total_rounds: bool = False  # what it does depends on `context.rounds`, so no rounds can be added to a run later
    initial_on_client: bool = False  # clients begin with `context.initial`, which they do not receive
    long_merges: bool = False  # a merge takes long, as where it trains: clients are served in the meantime
    reported: TargetSeries | None = None  # the series that the paper reports, where the targets are of several


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
    task: int = 0  # keys whatever is drawn at random for it
    stage: str = "train"  # one of `Needs.stages`
    round: int = 1  # of the policy, from 1: schedules go by it


class PublicData(Protocol):
    """The server's own pool of samples (`data.public`)."""

    def __len__(self) -> int: ...

    def draw(self, count: int, seed: int) -> Tensor:
        """`count` inputs without replacement, in an order given by `seed`."""
        ...

    def labels(self, count: int, seed: int) -> Tensor:
        """The labels of what `draw` returns, for methods with `Needs.public_labels`."""
        ...

    def with_labels(self) -> PublicData:
        """The same with labels."""
        ...


@dataclass(frozen=True, kw_only=True)
class Context:
    """What holds for the whole run, the same in the broker and in every client."""

    seed: int
    spec: InputSpec
    family: Family
    #: those that take part in the run at all, on the server as they are now; numbers may have gaps
    clients: tuple[Client, ...]
    training: Training
    rounds: int
    public: PublicData | None = None
    most_samples: int = 1_000_000_000  # the most that a client of the fleet has
    ratio: float = 1.0  # of the clients that take part in a round
    alone: bool = False  # the experiment gives all clients the same variant
    drawn: Tensors | None = None  # the initial tensors of the family's largest variant, see `with_initial`

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants in use, smallest first."""
        used = {client.variant for client in self.clients}
        return tuple(v for v in self.family.variants if v in used)

    def initial(self, variant: str) -> Tensors:
        """The initial tensors of a variant, the same for all who ask; torch's global stream is not moved.

        Where variants share tensors they are parts of the largest one's, as the server of layer-wise averaging cuts
        them, so that all methods start alike. A variant that is cut by width and the only one in use is an exception:
        the values of wide layers do not suit narrow ones.
        """
        if not self.family.shared:
            return self._draw(variant)
        index = self.family.index(variant, self.spec)
        if self.alone and any(rows is not None for parts in index.values() for rows in parts):
            return self._draw(variant)
        return gather(self.drawn or self._draw(self.family.variants[-1]), index)

    def with_initial(self) -> Context:
        """The same with the largest variant's tensors drawn, which a client's process may have no room for."""
        if not self.family.shared or self.drawn is not None:
            return self
        return replace(self, drawn=self._draw(self.family.variants[-1]))

    def _draw(self, variant: str) -> Tensors:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return dict(self.family.build(variant, self.spec).state_dict())


class Job(Protocol):
    """A task on the device. Randomness comes from `seed(purpose)`, keyed by run seed, client and task."""

    context: Context
    assignment: Assignment
    message: Bundle
    kept: Bundle | None  # what this client's last committed task kept
    steps: int  # optimiser steps so far; a policy that takes partial work may end them early
    rows: Tensor  # of the batch at hand: where its samples are in `ordered`

    @property
    def client(self) -> Client:
        """The client that does it."""
        ...

    def batches(
        self, *, epochs: int | None = None, steps: int | None = None, batch: int | None = None, phase: str = ""
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Mini-batches of the client's data, counted and paced: each is one optimiser step.

        Without arguments: as the experiment's `training` says. `steps` draws that many random batches instead
        of epochs. The last incomplete batch is dropped unless it is the only one. Calls of one `phase` see the same
        order, so a task that trains in several phases names them.
        """
        ...

    def foreign(self, samples: int, *, epochs: int, batch: int, phase: str) -> Iterator[Tensor]:
        """Mini-batches of data that the client was sent, as the numbers of its samples; counted like `batches`."""
        ...

    def ordered(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The client's data once, in stored order and without augmentation; no optimiser steps."""
        ...

    def hold_out(self, share: float) -> None:
        """Set a share of the client's data aside, the same in every task: from now on only `held_out` reads it."""
        ...

    def held_out(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """What was set aside, once, in slices, in stored order and without augmentation; no optimiser steps."""
        ...

    def class_counts(self) -> Tensor:
        """How many samples of each class the client has."""
        ...

    def sample(self, count: int, purpose: str) -> tuple[Tensor, Tensor]:
        """Random samples of the client's own data, without replacement where there are enough."""
        ...

    def model(self, tensors: dict[str, Tensor]) -> Net:
        """The client's variant with a copy of these tensors, in training mode."""
        ...

    def optimizer(self, model: Net) -> Stepper:
        """The experiment's optimiser for the model, with the learning rate of the task's round."""
        ...

    def seed(self, purpose: str) -> int: ...

    def generator(self, purpose: str) -> torch.Generator: ...


class Spec(NamedTuple):
    """The type and shape of a tensor; None stands for any size."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a client must send back: these tensors and scalars by name, and no others."""

    tensors: Mapping[str, Spec] = field(default_factory=dict)
    values: Mapping[str, type[bool] | type[int] | type[float] | type[str]] = field(default_factory=dict)


def like(tensors: Mapping[str, Tensor]) -> dict[str, Spec]:
    """The specs of tensors that are to come back as they were sent, with other values."""
    return {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a task gives back. Once it is merged `keep` replaces the client's kept state; None leaves that."""

    message: Bundle
    keep: Bundle | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # recorded; `loss` is the mean training loss


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A result at the server, in timeline order."""

    assignment: Assignment
    sent: Bundle  # the snapshot that the client was given
    message: Bundle
    staleness: int = 0  # merges that happened since `sent` was taken
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
    """A model to evaluate: the variant's initial tensors, over them what `client` kept below `prefix`, over
    them `tensors`. So a global model gives all of its tensors, a personal one none, others a shared part."""

    name: str
    variant: str
    tensors: dict[str, Tensor] | None = None
    client: int | None = None
    prefix: str = ""
    local: bool = False  # on that client's own test part instead of the whole test set
    shared: bool = False  # counts as a global model, for `predict` uses the client's together with the server's
    recalibrate: bool = False  # estimate batch norm's statistics on all clients' training data before
    extras: dict[str, Tensor] = field(default_factory=dict)  # what `Algorithm.predict` needs besides the model


class Algorithm(ABC):
    """A method of federated learning."""

    def __init__(self, params: Any, context: Context) -> None:
        self.params = params
        self.context = context

    @property
    def needs(self) -> Needs:
        return Needs()

    def check(self) -> None:  # noqa: B027 - most methods have nothing to check
        """Raise BadInput where parameters, family and data do not go together."""

    def reassign(self, clients: Sequence[Client]) -> None:
        """Take these as the clients from now on: one that ran out of memory goes on with a smaller variant."""
        self.context = replace(self.context, clients=tuple(clients))

    def step_down(self, kept: Bundle, client: Client) -> Bundle | None:
        """The part of what a client kept that still serves it with its new, smaller variant; None: nothing."""
        return None

    @abstractmethod
    def setup(self) -> Bundle:
        """The server's first state."""

    @abstractmethod
    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        """What the client is sent."""

    @abstractmethod
    def work(self, state: Bundle, assignment: Assignment) -> Work:
        """What the task will do."""

    def heaviest(self, state: Bundle, client: Client) -> Work:
        """The most that any task of this client will ask for: what its variant is chosen by.

        `state` is the first one. By default the first task is as heavy as all others.
        """
        return self.work(state, Assignment(client=client, stage=self.needs.stages[0]))

    @abstractmethod
    def client(self, job: Job) -> Reply:
        """The client's half, on the device."""

    def expects(self, assignment: Assignment, sent: Bundle) -> Expected | None:
        """What the client must send back for `sent`; a reply of another form is refused, so `merge` never sees it.

        None: not declared, then only finiteness is checked and `merge` must cope with whatever a client sends.
        """
        return None

    def objection(self, assignment: Assignment, message: Bundle) -> str | None:
        """What is wrong with the values of a reply that is finite and has the expected form; None: nothing."""
        return None

    @abstractmethod
    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        """The server's half. Arrivals are never empty, all of one stage, always as expected and finite."""

    def foresee(self, state: Bundle, arrivals: Sequence[Arrival]) -> Bundle:
        """The state after a merge, as far as messages and work depend on it: forecasts continue from it.

        By default the merge is carried out. A method whose merges take long leaves out what changes no sizes.
        """
        return self.merge(state, arrivals).state

    def server_work(self, state: Bundle, arrivals: Sequence[Arrival]) -> ServerWork:
        """What the merge costs the server; by default one pass over what arrived."""
        return ServerWork(flops=2.0 * sum(t.numel() for a in arrivals for t in a.message.tensors.values()))

    @abstractmethod
    def targets(self, state: Bundle) -> list[Target]:
        """What is evaluated."""

    def predict(self, model: Net, x: Tensor, extras: Tensors) -> Tensor:
        """The scores of each class for evaluation; `extras` are those of the target."""
        scores: Tensor = model(x)
        return scores
