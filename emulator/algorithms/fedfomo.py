"""FedFomo: every client mixes a model for itself out of its own and those of a few others.

Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021. Unlike FedAvg there is
no common model. The server holds the newest uploads and sends each client i some of them. On a part of its data that
it never trains on, the client weighs each candidate n, its own model among them, by how much it lowers the loss L of
b, which is its own model as it was before its last training:

    w_n = (L(b) - L(n)) / ||n - b||
    model <- b + sum_n w_n+ (n - b),    w_n+ = max(0, w_n) / sum_m max(0, w_m)

and goes on training from there. Because the shares w+ add up to 1, the mixture is the mean of the candidates. Where no
weight is positive the client goes on with its own model. It uploads what training made of it, and w before it was
clipped, which the server adds to p_i: the next time it sends the models that p_i prefers, each with probability
epsilon_t replaced by one at random; epsilon_t falls by `epsilon_decay` in each round.

Variants need not be equal. A client is sent those tensors, or parts of tensors, of another model that its own variant
has, and lays them over its own model: that is the candidate, so a small device never runs a larger net. In the mixture
each tensor is the mean over those who hold it, with shares that add up to 1 again; a tensor that is held by no
candidate of positive weight stays as it was. Distances are of trainable tensors. Counters stay the client's own.

A client that was never part of it begins with the initial model, for b as well. With `models: 0` nothing is ever
compared, and it is Private on the rest of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from msgspec import Meta, Struct
from torch import Tensor

from fleetbed.emulator.bases.averaging import trained_shapes
from fleetbed.emulator.method.algorithm import (
    Algorithm,
    Arrival,
    Assignment,
    Client,
    Expected,
    Job,
    Merged,
    Needs,
    Reply,
    Spec,
    Target,
    like,
)
from fleetbed.emulator.method.bundle import Bundle, Scalar, prefixed
from fleetbed.emulator.method.description import Description
from fleetbed.emulator.method.local_training import (
    cross_entropy_step,
    frozen,
    keep_model,
    on_both_test_sets,
    own_targets,
    own_tensors,
    train,
)
from fleetbed.emulator.method.schedule import batch_of, held_out_of, steps_of
from fleetbed.emulator.randomness import numpy_rng
from fleetbed.models.base import Tensors, label_loss
from fleetbed.models.work import Pass, Work
from fleetbed.profiles.types import NonNegative

BEFORE = "before/"  # a client's model as it was before its last training
WEIGHTS = "weights/received"  # those of the models that a client received, in their order
PREFERENCE = "preference"  # of row i: how much client i gained from each of the others
STORED, SENT = "stored", "sent"  # the clients whose uploads the server holds, oldest first; those in a message

ABOUT = Description(
    paper="Zhang et al., ICLR 2021",
    down="at most M(P + b), of what its variant has of M other models",
    up="P + b + M",
    client="its model, and that before its last training",
    server="the newest uploads, and K² preferences",
)


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    models: Annotated[int, Meta(ge=0, le=1000)] = 5  # M, how many models of others a client is sent
    epsilon: Annotated[float, Meta(ge=0, le=1)] = 0.3  # chance in round 1 that one of them is drawn at random
    epsilon_decay: NonNegative = 0.05  # what epsilon loses in each round
    validation: Annotated[float, Meta(gt=0, lt=1)] = 0.2  # share of a client's data that it weighs models on
    norm: Literal["l2", "l1"] = "l2"  # of the distance between models
    #: how many uploads the server holds; None: as many as clients take part in a round
    store: Annotated[int, Meta(ge=1, le=100_000)] | None = None


class Method(Algorithm):
    params: Params

    @property
    def needs(self) -> Needs:
        return Needs(initial_on_client=True, reported="personal-own")

    # the server's half

    def setup(self) -> Bundle:
        size = 1 + max((client.number for client in self.context.clients), default=0)
        return Bundle({PREFERENCE: torch.zeros(size, size)}, {STORED: []})

    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        others = self.chosen(state, assignment)
        parts = [self.part(state, number, assignment.client.variant) for number in others]
        tensors = {name: t for place, part in enumerate(parts) for name, t in prefixed(f"{place}/", part).items()}
        sent: list[Scalar] = [*others]
        return Bundle(tensors, {SENT: sent})

    def chosen(self, state: Bundle, assignment: Assignment) -> list[int]:
        """The clients whose models are sent: those that gained most so far, or one at random; ties are drawn."""
        own, rng = assignment.client.number, numpy_rng(self.context.seed, assignment.task, "models")
        gained = state.tensors[PREFERENCE][own].tolist()
        others = [n for n in stored(state) if n != own and self.has_part(state, n, assignment.client.variant)]
        left = sorted((others[i] for i in rng.permutation(len(others))), key=lambda n: -gained[n])
        epsilon = self.params.epsilon - self.params.epsilon_decay * (assignment.round - 1)
        chosen: list[int] = []
        while left and len(chosen) < self.params.models:
            chosen.append(left.pop(int(rng.integers(len(left))) if rng.random() < epsilon else 0))
        return chosen

    def has_part(self, state: Bundle, number: int, variant: str) -> bool:
        """Variants of a family without shared tensors have nothing in common but with themselves."""
        return self.context.family.shared or state.values[f"variant/{number}"] == variant

    def part(self, state: Bundle, number: int, variant: str) -> Tensors:
        """What a variant has of the model that a client uploaded: the first channels, where they are not all."""
        tensors, upload = self.context.family.tensors(variant, self.context.spec), state.under(f"{number}/")
        common = {name: (t, leading(t.shape, tensors[name].shape)) for name, t in upload.items() if name in tensors}
        return {name: t[region].contiguous() for name, (t, region) in common.items()}

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        parts = [self.part(state, n, assignment.client.variant) for n in self.chosen(state, assignment)]
        return self._work(assignment.client, len(parts), sum(Bundle(part).nbytes() for part in parts))

    def heaviest(self, state: Bundle, client: Client) -> Work:
        models = min(self.params.models, self.context.most_clients - 1)
        return self._work(client, models, models * self.model_bytes(client.variant))

    def _work(self, client: Client, models: int, bytes_down: int) -> Work:
        training, aside = self.context.training, held_out_of(client.samples, self.params.validation)
        # b, the client's own model and the received ones go through the part that was set aside
        weighing = (Pass("forward", "all", (models + 2) * aside),) if models and aside else ()
        return Work(
            steps=steps_of(client.samples - aside, training),
            batch=batch_of(client.samples - aside, training.batch),
            once=weighing,
            held_models=models + 2 + bool(models),  # the received ones, both kept ones, and their mixture
            bytes_down=bytes_down,
            bytes_up=self.model_bytes(client.variant) + 4 * models,
        )

    def model_bytes(self, variant: str) -> int:
        return Bundle(self.context.family.tensors(variant, self.context.spec)).nbytes()

    def expects(self, assignment: Assignment, sent: Bundle) -> Expected:
        tensors = self.context.family.tensors(assignment.client.variant, self.context.spec)
        weights = Spec(torch.float32, (len(numbers(sent, SENT)),))
        return Expected(tensors={**like(tensors), WEIGHTS: weights})

    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        """Each result counts once: a policy's mixing weight is for methods that move weights."""
        tensors, values = dict(state.tensors), dict(state.values)
        preference = state.tensors[PREFERENCE].clone()
        order = stored(state)
        for a in arrivals:
            number = a.client.number
            others = torch.tensor(numbers(a.sent, SENT), dtype=torch.int64)
            preference[number].index_add_(0, others, a.message.tensors[WEIGHTS])
            order = [*(n for n in order if n != number), number]
            tensors = without(tensors, number)
            tensors |= prefixed(f"{number}/", {n: t for n, t in a.message.tensors.items() if n != WEIGHTS})
            values[f"variant/{number}"] = a.client.variant
        most = self.params.store or max(1, int(self.context.ratio * len(self.context.clients)))
        for number in order[:-most]:
            tensors = without(tensors, number)
            del values[f"variant/{number}"]
        kept: list[Scalar] = [*order[-most:]]
        return Merged(state=Bundle({**tensors, PREFERENCE: preference}, {**values, STORED: kept}))

    def targets(self, state: Bundle) -> list[Target]:
        return on_both_test_sets(own_targets(self.context))

    # the client's half

    def client(self, job: Job) -> Reply:
        job.hold_out(self.params.validation)
        start, weights = self.mixed(job)
        model = job.model(start)
        metrics = train(job, model, cross_entropy_step(model))
        keep = Bundle({**keep_model(model).tensors, **prefixed(BEFORE, start)})
        metrics["models_used"] = float((weights > 0).sum())
        return Reply(message=Bundle({**model.state_dict(), WEIGHTS: weights}), keep=keep, metrics=metrics)

    def mixed(self, job: Job) -> tuple[Tensors, Tensor]:
        """The model that a client begins with, and the weights of those that it received."""
        own, received = own_tensors(job), len(numbers(job.message, SENT))
        if not received:
            return own, torch.zeros(0)
        parts = [job.message.under(f"{place}/") for place in range(received)]
        device = next(iter(parts[0].values())).device
        own = {name: t.to(device) for name, t in own.items()}
        before = own if job.kept is None else job.kept.under(BEFORE)
        loss = validation_loss(job, before)
        if loss is None:  # the client has a single sample
            return own, torch.zeros(received)

        def weight(candidate: Tensors) -> float:
            lower = validation_loss(job, candidate)
            assert lower is not None
            return weight_of(loss - lower, self.distance(job, candidate, before))

        weights = [weight(own), *(weight(overlay(own, part)) for part in parts)]
        return mixture(own, parts, weights), torch.tensor(weights[1:])

    def distance(self, job: Job, a: Tensors, b: Tensors) -> float:
        names = trained_shapes(job.context.family, job.client.variant, job.context.spec)
        order = 1 if self.params.norm == "l1" else 2
        return float(torch.stack([torch.linalg.vector_norm(a[n] - b[n], order) for n in names]).norm(order))


@torch.no_grad()
def validation_loss(job: Job, tensors: Tensors) -> float | None:
    """The mean loss of a model on what the client set aside; None if that is nothing."""
    net, total, count = frozen(job, tensors), 0.0, 0
    for x, y in job.held_out(job.context.training.batch):
        total += float(label_loss(net(x), y, reduction="sum"))
        count += len(y)
    return total / count if count else None


def weight_of(gain: float, distance: float) -> float:
    """The gain for each unit of distance; 0 for a model that is b itself, or whose loss is not finite."""
    weight = torch.tensor(gain / distance if distance else 0.0)  # in the type in which it travels
    return float(weight) if torch.isfinite(weight) else 0.0


def shares_of(weights: Sequence[float]) -> list[float]:
    """The positive weights, such that they add up to 1; all 0 where none is positive."""
    total = sum(max(0.0, w) for w in weights)
    return [max(0.0, w) / total if total else 0.0 for w in weights]


def overlay(own: Tensors, part: Tensors) -> Tensors:
    """The client's own model with what it received of another one laid over it."""
    laid = dict(own)
    for name, tensor in part.items():
        if tensor.shape == own[name].shape:
            laid[name] = tensor
        else:
            laid[name] = own[name].clone()
            laid[name][leading(tensor.shape, own[name].shape)] = tensor
    return laid


def mixture(own: Tensors, parts: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """The mean of the candidates by their shares, the own one first, each element over those who hold it."""
    shares = shares_of(weights)
    mixed = dict(own)
    for name, tensor in own.items():
        if not tensor.is_floating_point():
            continue
        sums, mass = tensor * shares[0], torch.full_like(tensor, shares[0])
        for share, part in zip(shares[1:], parts, strict=True):
            if share and name in part:
                region = leading(part[name].shape, tensor.shape)
                sums[region] += share * part[name]
                mass[region] += share
        mixed[name] = torch.where(mass > 0, sums / mass, tensor)
    return mixed


def leading(a: Sequence[int], b: Sequence[int]) -> tuple[slice, ...]:
    """The part of a tensor that one of the other shape has as well: variants hold the first channels of a layer."""
    return tuple(slice(min(sizes)) for sizes in zip(a, b, strict=True))


def numbers(bundle: Bundle, name: str) -> list[int]:
    """The list of client numbers of this name."""
    listed = bundle.values[name]
    assert isinstance(listed, list)
    return [number for number in listed if isinstance(number, int)]


def stored(state: Bundle) -> list[int]:
    return numbers(state, STORED)


def without(tensors: Tensors, number: int) -> Tensors:
    """The server's tensors without the upload of a client."""
    return {name: t for name, t in tensors.items() if not name.startswith(f"{number}/")}
