"""A bed without clock, processes or links: small families, made-up data, the real job, a loop of rounds.

The loop holds every method to the contract: it does the steps that it declared, no message or state that is in
someone else's hands changes, and what a client keeps is committed with the merge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import torch
from handmade_tasks import make_task
from torch import Tensor, nn

from fleetbed.emulator.algorithms import load_method
from fleetbed.emulator.engine.replies import Flaw, flaw_in
from fleetbed.emulator.method.algorithm import Algorithm, Arrival, Assignment, Client, Context, Merged, Reply, Target
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.job import LocalJob
from fleetbed.emulator.method.local_training import recalibrate
from fleetbed.emulator.randomness import numpy_rng
from fleetbed.emulator.wire import codec
from fleetbed.emulator.wire.messages import Trained
from fleetbed.models.base import Family, Index, InputSpec, Net
from fleetbed.models.cost.predict import cost
from fleetbed.models.families import lookup
from fleetbed.models.work import ServerWork, Work
from fleetbed.profiles.experiment import AlgorithmChoice, Optimizer, Training

torch.set_num_threads(1)
SPEC = InputSpec((1, 4, 4), 3)
SGD = Optimizer(lr=0.05, momentum=0.9)
TRAINING = Training(batch=8, epochs=1, optimizer=SGD)
ADAM = Optimizer(name="adam", lr=1e-3)


class ToyNet(Net):
    extractor_parts = frozenset({"stem"})
    classifier_parts = frozenset({"fc"})

    def __init__(self, inputs: int, stem: int, width: int, depth: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(inputs, stem, bias=False), nn.BatchNorm1d(stem), nn.ReLU())
        first = [nn.Linear(stem, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout)]
        self.blocks = nn.Sequential(nn.Sequential(*first))
        for _ in range(depth - 1):
            self.blocks.append(nn.Sequential(nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()))
        self.fc = nn.Linear(width, classes)

    def extract(self, x: Tensor) -> Tensor:
        return self.stem(x)

    def intermediate(self, s: Tensor) -> Tensor:
        return self.blocks(s)

    def classify(self, f: Tensor) -> Tensor:
        return self.fc(f)

    def stages(self, x: Tensor) -> dict[str, Tensor]:
        return {"stem": self.extract(x)}


class ToyDepth(Family):
    """Variants that share their first blocks."""

    name = "toy-depth"
    shared = True
    block_names = r"(blocks)\.\d+\."
    variants = ("one", "two", "three")
    dropout = 0.0

    def make(self, variant: str, spec: InputSpec) -> Net:
        depth = ("one", "two", "three").index(variant) + 1
        return ToyNet(16, 6, 5, depth, spec.classes, self.dropout)


class ToyDropout(ToyDepth):
    name = "toy-dropout"
    dropout = 0.3


class ToyWidth(Family):
    """`half` holds half of the channels of `full`; the stem, and with it s_in, differs."""

    name = "toy-width"
    shared = True
    variants = ("half", "full")

    def make(self, variant: str, spec: InputSpec) -> Net:
        return ToyNet(16, *((3, 2) if variant == "half" else (6, 4)), 1, spec.classes, 0.0)

    def index(self, variant: str, spec: InputSpec, shift: int = 0) -> dict[str, Index]:
        own = self.outline(variant, spec).state_dict()
        full = self.outline(self.variants[-1], spec).state_dict()
        return {
            name: tuple(
                None if size == whole else (torch.arange(size) + shift) % whole
                for size, whole in zip(t.shape, full[name].shape, strict=True)
            )
            for name, t in own.items()
        }


class ToyExitNet(ToyNet):
    """Every block has an exit, the last one is `fc`'s heir."""

    classifier_parts = frozenset({"heads"})

    def __init__(self, depth: int, classes: int) -> None:
        super().__init__(16, 6, 5, depth, classes, 0.0)
        del self.fc
        self.heads = nn.ModuleList(nn.Linear(5, classes) for _ in range(depth))

    def classify(self, f: Tensor) -> Tensor:
        return self.heads[-1](f)

    def exits(self, x: Tensor) -> list[Tensor]:
        f, found = self.extract(x), []
        for block, head in zip(self.blocks, self.heads, strict=True):
            f = block(f)
            found.append(head(f))
        return found


class ToyExits(ToyDepth):
    """Variants that share their first blocks, each block with an exit."""

    name = "toy-exits"
    has_exits = True

    def make(self, variant: str, spec: InputSpec) -> Net:
        return ToyExitNet(("one", "two", "three").index(variant) + 1, spec.classes)


class ToySegmentNet(ToyNet):
    """Three blocks, trained one by one or together."""

    def __init__(self, segments: int, classes: int) -> None:
        super().__init__(16, 6, 5, 3, classes, 0.0)
        self.segments = segments

    def segment(self, number: int, x: Tensor) -> Tensor:
        each = 3 // self.segments
        start = (number - 1) * each
        with torch.set_grad_enabled(torch.is_grad_enabled() and start == 0):
            f = self.blocks[:start](self.extract(x))
        return self.classify(self.blocks[start : start + each](f))


class ToySegments(Family):
    """The same model, trained in three segments or in one."""

    name = "toy-segments"
    shared = True
    variants = ("in-3", "in-1")

    def make(self, variant: str, spec: InputSpec) -> Net:
        return ToySegmentNet(int(variant[-1]), spec.classes)


class ToyStrangers(Family):
    """Variants that share nothing."""

    name = "toy-strangers"
    shared = False
    variants = ("thin", "thick")

    def make(self, variant: str, spec: InputSpec) -> Net:
        return ToyNet(16, 6, 4 if variant == "thin" else 9, 1, spec.classes, 0.0)


class PointNet(Net):
    """Its answer to anything is its one weight."""

    extractor_parts = frozenset({"stem"})
    classifier_parts = frozenset({"weight"})

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def extract(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def intermediate(self, s: Tensor) -> Tensor:
        return s

    def classify(self, f: Tensor) -> Tensor:
        return self.weight.expand(len(f), 1)

    def stages(self, x: Tensor) -> dict[str, Tensor]:
        return {}


class ToyPoint(Family):
    """A single weight that begins as 0, for examples worked out by hand."""

    name = "toy-point"
    shared = True
    variants = ("point",)

    def make(self, variant: str, spec: InputSpec) -> Net:
        return PointNet()


class MadeUpData:
    """Classes that can be told apart: a pattern for each, and noise."""

    def __init__(self, spec: InputSpec, samples: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.spec = spec
        self.y = torch.from_numpy(rng.integers(0, spec.classes, samples))
        patterns = torch.from_numpy(rng.normal(size=(spec.classes, *spec.shape)).astype(np.float32))
        noise = torch.from_numpy(rng.normal(size=(samples, *spec.shape)).astype(np.float32))
        self.x = patterns[self.y] + 0.5 * noise
        if spec.vocabulary:  # a text of word numbers
            self.x = (self.x.abs() * spec.vocabulary / 8).long() % spec.vocabulary

    def strata(self, split: str) -> np.ndarray:
        return self.y.numpy()

    def batch(self, split: str, indices: np.ndarray, rng: Any) -> tuple[Tensor, Tensor]:
        rows = torch.as_tensor(np.asarray(indices))
        return self.x[rows], self.y[rows]


@dataclass(frozen=True)
class Pool:
    """The server's own samples."""

    data: MadeUpData
    rows: np.ndarray
    labelled: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def draw(self, count: int, seed: int) -> Tensor:
        return self._batch(count, seed)[0]

    def labels(self, count: int, seed: int) -> Tensor:
        assert self.labelled
        return self._batch(count, seed)[1]

    def with_labels(self) -> Pool:
        return replace(self, labelled=True)

    def _batch(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        return self.data.batch("train", numpy_rng(seed, "public").choice(self.rows, count, replace=False), None)


@dataclass
class Bed:
    """A context with its data. `samples` is one number, or one for each client."""

    family: Family
    variants: Sequence[str]
    samples: int | Sequence[int] = 24
    spec: InputSpec = SPEC
    training: Training = TRAINING
    seed: int = 7
    public: int = 0
    rounds: int = 5
    context: Context = field(init=False)

    def __post_init__(self) -> None:
        counts = [self.samples] * len(self.variants) if isinstance(self.samples, int) else list(self.samples)
        self.data = MadeUpData(self.spec, sum(counts) + self.public)
        edges = np.cumsum([0, *counts, self.public])
        *parts, pool = [np.arange(a, b) for a, b in pairwise(edges)]
        self.parts = parts
        self.context = Context(
            seed=self.seed,
            spec=self.spec,
            family=self.family,
            clients=tuple(Client(n, v, c) for n, (v, c) in enumerate(zip(self.variants, counts, strict=True))),
            training=self.training,
            rounds=self.rounds,
            most_clients=len(self.variants),
            public=Pool(self.data, pool) if self.public else None,
        )

    def method(self, name: str, **params: Any) -> Algorithm:
        return load_method(AlgorithmChoice(name=name, params=params), self.context)

    def job(
        self,
        client: Client,
        message: Bundle,
        kept: Bundle | None = None,
        task: int = 0,
        stage: str = "train",
        round_: int = 1,
        most_steps: int | None = None,
    ) -> LocalJob:
        return LocalJob(
            context=self.context,
            assignment=Assignment(client=client, task=task, stage=stage, round=round_),
            message=message,
            kept=kept,
            dataset=self.data,  # type: ignore[arg-type]
            indices=self.parts[client.number],
            most_steps=most_steps,
        )


FAMILIES = ("depth", "width", "resnet")


def bed_on(kind: str, optimizer: Optimizer = SGD, samples: int | Sequence[int] = 24) -> Bed:
    """Three clients with unequal models of a family that is cut by depth, by width, or is a small resnet-stage."""
    training = Training(batch=8, optimizer=optimizer)
    if kind == "resnet":
        nets = lookup.family("resnet-stage", {"base_width": 4})
        variants, spec = ["resnet10", "resnet14", "resnet18"], InputSpec((1, 16, 16), 3)
        return Bed(nets, variants, samples, spec, training)
    nets, variants = (
        (ToyDepth(None), ["one", "two", "three"]) if kind == "depth" else (ToyWidth(None), ["half", "full", "full"])
    )
    return Bed(nets, variants, samples, training=training)


def toy_depths(
    *variants: str,
    nets: type[Family] = ToyDepth,
    optimizer: Optimizer = SGD,
    samples: int | Sequence[int] = 24,
    public: int = 0,
    epochs: int = 1,
) -> Bed:
    """Clients whose models share their first blocks."""
    training = Training(batch=8, epochs=epochs, optimizer=optimizer)
    return Bed(nets(None), variants, samples, training=training, public=public)


def small_resnets(family: str, *variants: str, steps: int = 1) -> Bed:
    """Clients with the smallest models of a family of ResNets, and four samples each."""
    training = Training(batch=4, max_steps=steps, optimizer=SGD)
    return Bed(lookup.family(family, {"base_width": 4}), variants, 4, InputSpec((1, 8, 8), 3), training)


def exit_logits() -> tuple[list[Tensor], Tensor]:
    """The logits of three exits for four samples, and the labels."""
    torch.manual_seed(5)
    return [torch.randn(4, 3, requires_grad=True) for _ in range(3)], torch.tensor([0, 1, 2, 1])


def without_class(bed: Bed, client: int, label: int) -> Bed:
    """The same, but this client has no sample of the class."""
    rows = bed.parts[client]
    bed.data.y[rows] = torch.where(bed.data.y[rows] == label, (label + 1) % bed.spec.classes, bed.data.y[rows])
    return bed


def wire_sizes(bed: Bed, variant: str) -> tuple[int, int, int]:
    """The trainable values, the values of float buffers and the integer counters of a variant."""
    net = bed.family.build(variant, bed.spec)
    buffers = [b for b in net.buffers() if b.is_floating_point()]
    counters = [b for b in net.buffers() if not b.is_floating_point()]
    return sum(p.numel() for p in net.parameters()), sum(b.numel() for b in buffers), len(counters)


def weights(bundle: Bundle) -> dict[str, Tensor]:
    """The weights of a message or a state, without what goes with them."""
    return {name: t for name, t in bundle.tensors.items() if "/" not in name}


@dataclass
class Run:
    """What happened, merge by merge."""

    state: Bundle
    kept: dict[int, Bundle] = field(default_factory=dict)
    sent: list[list[Bundle]] = field(default_factory=list)
    replies: list[list[Reply]] = field(default_factory=list)
    merged: list[Merged] = field(default_factory=list)
    task: int = 0


def arrival(bed: Bed, number: int, message: Bundle, sent: Bundle | None = None) -> Arrival:
    """A message of the client with this number."""
    return Arrival(assignment=Assignment(client=bed.context.clients[number]), sent=sent or Bundle(), message=message)


def arrivals_of(bed: Bed, so_far: Run, merge: int = 0) -> list[Arrival]:
    """What came in for a merge in which all clients took part."""
    pairs = zip(so_far.sent[merge], so_far.replies[merge], strict=True)
    return [arrival(bed, number, reply.message, sent) for number, (sent, reply) in enumerate(pairs)]


def run(
    bed: Bed, method: Algorithm, rounds: int = 1, *, sampled: Sequence[Sequence[int]] | None = None, weight: float = 1.0
) -> Run:
    """`sampled` lists the clients of each round; all of them by default."""
    method.check()
    so_far = Run(method.setup())
    for round_ in range(rounds):
        numbers = range(len(bed.context.clients)) if sampled is None else sampled[round_]
        for stage in method.needs.stages:
            advance(bed, method, so_far, [bed.context.clients[n] for n in numbers], stage, weight, round_ + 1)
    return so_far


def begin_anew(bed: Bed, method: Algorithm, so_far: Run, smaller: Client) -> list[Client]:
    """Have the second client step down to a variant for which it keeps nothing of use; return the clients."""
    assert method.step_down(so_far.kept[smaller.number], smaller) is None
    del so_far.kept[smaller.number]
    clients = [bed.context.clients[0], smaller]
    method.reassign(clients)
    return clients


def advance(
    bed: Bed,
    method: Algorithm,
    so_far: Run,
    clients: Sequence[Client],
    stage: str = "train",
    weight: float = 1.0,
    round_: int = 1,
) -> None:
    """One stage of a round: everyone is sent something, works, and is merged."""
    before = frozen(so_far.state)
    arrivals, replies = [], []
    for client in clients:
        assignment = Assignment(client=client, task=so_far.task, stage=stage, round=round_)
        work = method.work(so_far.state, assignment)
        message = method.send(so_far.state, assignment)
        untouched = frozen(message)
        job = bed.job(client, travelled(message), so_far.kept.get(client.number), so_far.task, stage, round_)
        torch.manual_seed(job.seed("model"))
        reply = method.client(job)
        assert (job.steps, job.samples) == (work.all_steps, work.all_samples), "declared other work than it did"
        check_bytes(bed, work, client, message, reply)
        assert same(job.message, untouched), "the client changed what it was sent"
        assert flaw(method, client, stage, message, work, reply) is None
        sent = Bundle(dict(message.tensors), message.values)
        arrived = travelled(reply.message)
        arrivals.append(Arrival(assignment=assignment, sent=sent, message=arrived, weight=weight))
        replies.append(reply)
        so_far.task += 1
    handed_in = [frozen(a.message) for a in arrivals]
    merged = method.merge(so_far.state, arrivals)
    assert same(so_far.state, before), "the merge changed a state that others may hold"
    assert all(same(a.message, was) for a, was in zip(arrivals, handed_in, strict=True))
    assert merged.state.first_not_finite() is None
    for client, reply in zip(clients, replies, strict=True):
        if reply.keep is not None:
            so_far.kept[client.number] = frozen(reply.keep)
    so_far.state = merged.state
    so_far.sent.append([a.sent for a in arrivals])
    so_far.replies.append(replies)
    so_far.merged.append(merged)


def resumed(bed: Bed, name: str, rounds: int, after: int, **params: Any) -> Run:
    """The same rounds, but after some of them all that lasts is stored, and a new method goes on with it."""
    so_far = run(bed, bed.method(name, **params), after)
    so_far.state = travelled(so_far.state)
    so_far.kept = {number: travelled(kept) for number, kept in so_far.kept.items()}
    method = bed.method(name, **params)
    for round_ in range(after, rounds):
        advance(bed, method, so_far, bed.context.clients, round_=round_ + 1)
    return so_far


def trained(
    method: Algorithm,
    state: Bundle,
    client: Client,
    by: float | Callable[[str], float],
    *,
    round_: int = 1,
    extras: Mapping[str, Tensor] | None = None,
    **more: float,
) -> Arrival:
    """A result whose every float tensor has moved by `by`, or by what it gives for the tensor's name."""
    assignment = Assignment(client=client, round=round_)
    sent = method.send(state, assignment)
    moved = {}
    for name, t in sent.tensors.items():
        step = by(name) if callable(by) else by
        moved[name] = t + step if t.is_floating_point() else t + int(step)
    return Arrival(assignment=assignment, sent=sent, message=Bundle({**moved, **(extras or {})}), **more)


def server_flops(bed: Bed, work: ServerWork) -> float:
    """The FLOPs of a merge, those of its passes through models included."""
    optimizer = bed.training.optimizer
    return work.flops + sum(cost(bed.family, v, bed.spec, each, optimizer).flops for v, each in work.models)


def check_bytes(bed: Bed, work: Work, client: Client, message: Bundle, reply: Reply) -> None:
    """No message is larger than declared; where nothing is declared it is a whole model."""
    model = Bundle(dict(bed.family.build(client.variant, bed.spec).state_dict())).nbytes()
    for declared, sent in ((work.bytes_down, message), (work.bytes_up, reply.message)):
        assert sent.nbytes() <= (model if declared is None else declared), "a message is larger than declared"


def flaw(
    method: Algorithm, client: Client, stage: str, sent: Bundle, work: Work, reply: Reply, **meters: Any
) -> Flaw | None:
    """What the server would say of a reply that comes with these `meters`."""
    task = make_task(
        client=client.number,
        variant=client.variant,
        stage=stage,
        declared_steps=work.all_steps,
        declared_samples=work.all_samples,
    )
    answer = Trained(
        task=0,
        keep=None,
        metrics=reply.metrics,
        steps=work.all_steps,
        samples=work.all_samples,
        seconds=0.0,
        cpu_s=0.0,
        throttled_s=None,
        peak_bytes=None,
        anon_bytes=None,
    )
    answer = msgspec.structs.replace(answer, **meters)
    return flaw_in(method, task, client, sent, answer, travelled(reply.message))


def travelled(bundle: Bundle) -> Bundle:
    """As it arrives at the other side of a wire."""
    return codec.unpack([bytes(frame) for frame in codec.pack(bundle)])


def frozen(bundle: Bundle) -> Bundle:
    return Bundle({name: t.clone() for name, t in bundle.tensors.items()}, dict(bundle.values))


def same(a: Bundle, b: Bundle) -> bool:
    return a.values == b.values and equal(a.tensors, b.tensors)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def tensors_of(bed: Bed, target: Target, so_far: Run) -> dict[str, Tensor]:
    """The model that a target means, by the contract's own words."""
    kept = so_far.kept.get(target.client) if target.client is not None else None
    own = kept.under(target.prefix) if kept is not None else {}
    return {**bed.context.initial(target.variant), **own, **(target.tensors or {})}


def accuracy(bed: Bed, method: Algorithm, so_far: Run) -> float:
    """The mean over all targets, on all data."""
    scores = []
    for target in method.targets(so_far.state):
        net = bed.family.build(target.variant, bed.spec)
        net.load_state_dict(tensors_of(bed, target, so_far))
        if target.recalibrate:
            recalibrate(net, [bed.data.x])
        with torch.no_grad():
            logits = method.predict(net.eval(), bed.data.x, target.extras)
        scores.append(float((logits.argmax(1) == bed.data.y).float().mean()))
    return sum(scores) / len(scores)
