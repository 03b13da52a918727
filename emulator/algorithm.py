"""The interface of a method: both halves in one class, which knows no clock, process, cap or socket.

A method is a module of `emulator/algorithms/` (or an entry point in the group `fleetbed.algorithms`) with two
names: `Params`, a frozen type of its parameters, and `Method`, a subclass of `Algorithm`. The server half
runs in the broker, the client half in the client's process; both are given the same `Context`, neither keeps
state in `self`: what lasts is in the server's state or in the client's kept state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fleetbed.emulator.bundle import Bundle
from fleetbed.emulator.optimizers import Stepper
from fleetbed.models.base import Family, InputSpec, Net
from fleetbed.models.work import Work
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
    public_samples: int = 0  # unlabelled samples held by the server, disjoint from the clients' data
    local_evaluation: bool = False  # evaluated on the clients' own test parts


@dataclass(frozen=True)
class Client:
    """A client as a method sees it."""

    number: int
    variant: str
    samples: int


class PublicData(Protocol):
    """The server's own pool of samples (`data.public`)."""

    def __len__(self) -> int: ...

    def draw(self, count: int, seed: int) -> Tensor:
        """`count` inputs without replacement, in an order given by `seed`."""
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

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants in use, smallest first."""
        used = {client.variant for client in self.clients}
        return tuple(v for v in self.family.variants if v in used)

    def initial(self, variant: str) -> dict[str, Tensor]:
        """The initial tensors of a variant, the same for all who ask; torch's global stream is not moved."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return dict(self.family.build(variant, self.spec).state_dict())


class Job(Protocol):
    """A task on the device. Randomness comes from `seed(purpose)`, keyed by run seed, client and task."""

    context: Context
    client: Client
    message: Bundle
    kept: Bundle | None  # what this client's last committed task kept

    def batches(
        self, *, epochs: int | None = None, steps: int | None = None, batch: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Mini-batches of the client's data, counted and paced: each is one optimiser step.

        Without arguments: as the experiment's `training` says. `steps` draws that many random batches instead
        of epochs. The last incomplete batch is dropped unless it is the only one.
        """
        ...

    def sample(self, count: int, purpose: str) -> tuple[Tensor, Tensor]:
        """Random samples of the client's own data, without replacement where there are enough."""
        ...

    def model(self, tensors: dict[str, Tensor]) -> Net:
        """The client's variant with a copy of these tensors, in training mode."""
        ...

    def optimizer(self, model: Net) -> Stepper: ...

    def seed(self, purpose: str) -> int: ...

    def generator(self, purpose: str) -> torch.Generator: ...


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a task gives back. Once it is merged `keep` replaces the client's kept state; None leaves that."""

    message: Bundle
    keep: Bundle | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # `loss` is the mean training loss


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A result at the server, in timeline order."""

    client: Client
    sent: Bundle  # the snapshot that the client was given
    message: Bundle
    staleness: int = 0  # merges that happened since `sent` was taken
    weight: float = 1.0  # the policy's mixing weight; 1 in rounds


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
        """From now on these are the clients: one that ran out of memory goes on with a smaller variant."""
        self.context = replace(self.context, clients=tuple(clients))

    @abstractmethod
    def setup(self) -> Bundle:
        """The server's first state."""

    @abstractmethod
    def send(self, state: Bundle, client: Client, stage: str, task: int) -> Bundle:
        """What the client is sent; `task` keys whatever is drawn at random."""

    @abstractmethod
    def work(self, state: Bundle, client: Client, stage: str) -> Work:
        """What the task will do."""

    def heaviest(self, state: Bundle, client: Client) -> Work:
        """The most that any task of this client will ask for: what its variant is chosen by.

        `state` is the first one. By default the first task is as heavy as all others.
        """
        return self.work(state, client, self.needs.stages[0])

    @abstractmethod
    def client(self, job: Job, stage: str) -> Reply:
        """The client's half, on the device."""

    @abstractmethod
    def merge(self, state: Bundle, arrivals: Sequence[Arrival], stage: str, version: int) -> Merged:
        """The server's half. `version` counts merges; arrivals are never empty and always finite."""

    def server_work(self, state: Bundle, arrivals: Sequence[Arrival], stage: str) -> Work:
        """What the merge costs the server; by default one pass over what arrived."""
        del state, stage
        return Work(server_flops=2.0 * sum(t.numel() for a in arrivals for t in a.message.tensors.values()))

    @abstractmethod
    def targets(self, state: Bundle) -> list[Target]:
        """What is evaluated."""
