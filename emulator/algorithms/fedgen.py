"""FedGen: layer-wise averaging with a generator of features, which the server trains on the clients' classifiers.

Zhu, Hong and Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021. Unlike HeteroAvg
the server also sends a generator G(eps, y) of features of class y, with noise eps uniform in [0, 1). A client, where B
is the batch and B_g the number of generated samples, minimises in round t, with alpha and beta multiplied by 0.98^t,

    L = CE(f(x), y) + beta KL(softmax(c(G(y))) || softmax(f(x))) + (B_g/B) alpha CE(c(G(y')), y'),  y' uniform

where c is its classifier; the teacher of the KL term is a constant, and G does not learn. It uploads its weights and
how often it saw each class, plus 1. The server trains G on the classifiers c_k of the arrivals:

    L_G = mean_b sum_k a_k(y_b) CE(c_k(G(y_b)), y_b) + eta exp(-mean_ij(mean|eps_i - eps_j|^2 mean|G_i - G_j|))

with a_k(y) the share of client k in the counts of class y, and y_b uniform over the classes that somebody saw. The KL
term (`latent`) is in the released code alone. In the first round there is no G yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from msgspec import Meta
from msgspec.structs import replace as replace_fields
from torch import Tensor, nn
from torch.nn import functional as F

from fleetbed.emulator.bases.averaging import Averaging, Means, weights_of
from fleetbed.emulator.bases.features import check_widths, feature_width
from fleetbed.emulator.bases.server_training import (
    ENSEMBLE_POLICIES,
    ENSEMBLE_WHY,
    MERGES,
    merges_of,
    section_names,
    seeded,
    server_net,
)
from fleetbed.emulator.method.algorithm import Arrival, Assignment, Client, Expected, Job, Merged, Needs, Reply, Spec
from fleetbed.emulator.method.bundle import Bundle, prefixed
from fleetbed.emulator.method.description import Description
from fleetbed.emulator.method.local_training import Step, own_tensors, restore_slots, slots_of, train
from fleetbed.emulator.method.optimizers import Adam, Stepper
from fleetbed.emulator.randomness import torch_rng
from fleetbed.models.base import Net, Tensors
from fleetbed.models.work import Pass, ServerWork, Work
from fleetbed.profiles.experiment import Batch
from fleetbed.profiles.types import Count, NonNegative, Positive

GENERATOR, SLOTS, COUNTS = "generator/", "generator-optimizer/", "labels/counts"
DECAY = 0.98  # of alpha, beta and the server's learning rate, in each round


ABOUT = Description(
    paper="Zhu et al., ICML 2021, layer-wise",
    down="P + b, from the second round on also the generator, (noise + C)h + 5h + hd + d with h hidden values",
    up="P + b + C: its weights and label counts",
    client="nothing",
    server="as heteroavg, the generator and its optimiser",
    policies="all but async",
)


class Params(Means, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Means`, and:"""

    alpha: NonNegative = 10.0  # weight of the cross entropy of generated features
    beta: NonNegative = 10.0  # weight of the KL term
    latent: bool = True  # false: no KL term, as in the paper
    gen_batch: Batch = 32  # B_g, generated samples of a client's step
    noise: Count = 64  # values of eps
    hidden: Count = 512  # width of the generator's hidden layer
    server_steps: Annotated[int, Meta(ge=0, le=1_000_000)] = 50  # of the generator in a merge
    server_batch: Annotated[int, Meta(ge=2, le=1_000_000)] = 32  # generated samples in a step of it
    server_lr: Positive = 3e-4  # of its Adam
    server_decay: NonNegative = 1e-2  # its weight decay
    eta: NonNegative = 1.0  # weight of the diversity of generated features


class Generator(nn.Module):
    """Noise and a class become features of that class."""

    def __init__(self, noise: int, classes: int, hidden: int, width: int) -> None:
        super().__init__()
        self.noise, self.classes = noise, classes
        self.layers = nn.Sequential(
            nn.Linear(noise + classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, width)
        )

    def forward(self, eps: Tensor, y: Tensor) -> Tensor:
        features: Tensor = self.layers(torch.cat([eps, F.one_hot(y, self.classes).float()], 1))
        return features

    def draw(self, y: Tensor, rng: torch.Generator) -> Tensor:
        """New noise for these classes."""
        return torch.rand(len(y), self.noise, generator=rng).to(y.device)


class Method(Averaging):
    params: Params

    @property
    def alpha(self) -> float:
        return self.params.alpha

    @property
    def beta(self) -> float:
        return self.params.beta if self.params.latent else 0.0

    @property
    def generates(self) -> bool:
        """Whether there is a generator at all; without it this is HeteroAvg."""
        return self.alpha > 0 or self.beta > 0

    @property
    def needs(self) -> Needs:
        return replace(
            super().needs,
            cuts=True,
            classes=True,
            policies=ENSEMBLE_POLICIES,
            policies_why=ENSEMBLE_WHY,
            long_merges=self.generates,
        )

    def check(self) -> None:
        super().check()
        check_widths(self.context, "fedgen")

    def setup(self) -> Bundle:
        state = super().setup()
        if not self.generates:
            return state
        with seeded(self.context.seed, "generator"):
            generator = self._empty(self._width())
        return Bundle({**state.tensors, **tensors_of(generator)}, {**state.values, MERGES: 0})

    def _width(self) -> int:
        return feature_width(self.context, self.context.family.variants[-1])

    def _empty(self, width: int) -> Generator:
        return Generator(self.params.noise, self.context.spec.classes, self.params.hidden, width)

    def generator(self, bundle: Bundle) -> Generator:
        """A copy of the generator in a state or a message."""
        own = {name: tensor.clone() for name, tensor in bundle.under(GENERATOR).items()}
        with torch.device("meta"):
            made = self._empty(len(own["layers.3.bias"]))
        made.load_state_dict(own, strict=False, assign=True)  # the counter of its batch norm is not needed
        return made

    # the client's half

    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        message = super().send(state, assignment)
        if not self._is_trained(state):
            return message
        return Bundle({**message.tensors, **prefixed(GENERATOR, state.under(GENERATOR))}, message.values)

    def _is_trained(self, state: Bundle) -> bool:
        return self.generates and merges_of(state) > 0

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        return self._with_generator(super().work(state, assignment), self._is_trained(state))

    def heaviest(self, state: Bundle, client: Client) -> Work:
        return self._with_generator(super().work(state, Assignment(client=client)), self.generates)

    def _with_generator(self, plain: Work, received: bool) -> Work:
        if not self.generates:
            return plain
        assert plain.bytes_up is not None
        plain = replace_fields(plain, bytes_up=plain.bytes_up + 4 * self.context.spec.classes)
        if not received:
            return plain
        values, generated = (
            self._values(),
            (plain.batch if self.beta else 0, self.params.gen_batch if self.alpha else 0),
        )
        forward = (Pass("forward", "classifier", generated[0]),) if self.beta else ()
        train_ = (Pass("train", "classifier", generated[1]),) if self.alpha else ()
        assert plain.bytes_down is not None
        return replace_fields(
            plain,
            each_step=forward + train_,
            flops=2.0 * values * sum(generated),
            held_values=values,
            bytes_down=plain.bytes_down + 4 * values,
        )

    def _values(self) -> int:
        """The values of the generator, running statistics included."""
        with torch.device("meta"):
            return sum(t.numel() for t in tensors_of(self._empty(self._width())).values())

    def client(self, job: Job) -> Reply:
        if not self.generates:
            return super().client(job)
        start = weights_of(job.message)
        if self.is_partial:
            start = {**own_tensors(job), **start}
        model = job.model(start)
        counts = torch.ones(self.context.spec.classes, dtype=torch.int32)
        step = self.local_step(job, model, start)

        def counted(optimizer: Stepper, x: Tensor, y: Tensor) -> Tensor:
            counts.add_(torch.bincount(y.cpu(), minlength=len(counts)))
            return step(optimizer, x, y)

        metrics = train(job, model, counted)
        reply = self.reply(job, model, start, metrics)
        return replace(reply, message=Bundle({**reply.message.tensors, COUNTS: counts}, reply.message.values))

    def local_step(self, job: Job, model: Net, start: Tensors) -> Step:
        if not job.message.under(GENERATOR):
            return super().local_step(job, model, start)
        fade = DECAY ** (job.assignment.round - 1)
        alpha, beta, rng = self.alpha * fade, self.beta * fade, job.generator("noise")
        generator = self.generator(job.message).eval().requires_grad_(False).to(next(model.parameters()).device)

        def generated(y: Tensor) -> Tensor:
            features: Tensor = generator(generator.draw(y, rng), y)
            return features

        def step(optimizer: Stepper, x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            z = model(x)
            loss = entropy = F.cross_entropy(z, y)
            if beta:
                with torch.no_grad():
                    teacher = F.softmax(model.classify(generated(y)), 1)
                loss = loss + beta * F.kl_div(F.log_softmax(z, 1), teacher, reduction="batchmean")
            if alpha:
                drawn = torch.randint(generator.classes, (self.params.gen_batch,), generator=rng).to(y.device)
                ratio = self.params.gen_batch / len(y)
                loss = loss + ratio * alpha * F.cross_entropy(model.classify(generated(drawn)), drawn)
            loss.backward()
            optimizer.step()
            return entropy.detach()

        return step

    def expects(self, assignment: Assignment, sent: Bundle) -> Expected | None:
        weights = super().expects(assignment, sent)
        if not self.generates or weights is None:
            return weights
        return Expected(tensors={**weights.tensors, COUNTS: Spec(torch.int32, (self.context.spec.classes,))})

    def objection(self, assignment: Assignment, message: Bundle) -> str | None:
        if self.generates and int(message.tensors[COUNTS].min()) < 1:
            return "a label count is below 1"
        return None

    # the server's half

    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        merged = super().merge(state, arrivals)
        if not self.generates:
            return merged
        generator, metrics = self._trained(state, arrivals)
        after = Bundle({**merged.state.tensors, **generator}, {**merged.state.values, MERGES: merges_of(state) + 1})
        return Merged(state=after, metrics={**merged.metrics, **metrics})

    def _trained(self, state: Bundle, arrivals: Sequence[Arrival]) -> tuple[Tensors, dict[str, float]]:
        """The generator and its optimiser's state after training on the classifiers of the arrivals."""
        shares, seen = label_shares([a.message.tensors[COUNTS] for a in arrivals])
        heads = [self._head(a) for a in arrivals]
        generator = self.generator(state).train()
        fade = DECAY ** (max(a.assignment.round for a in arrivals) - 1)
        optimizer = Adam(generator.parameters(), self.params.server_lr * fade, self.params.server_decay)
        restore_slots(generator, optimizer, state.under(SLOTS))
        rng = torch_rng(self.context.seed, merges_of(state), "generator")
        losses = []
        for _ in range(self.params.server_steps if len(seen) else 0):
            y = seen[torch.randint(len(seen), (self.params.server_batch,), generator=rng)]
            eps = generator.draw(y, rng)
            optimizer.zero_grad()
            features = generator(eps, y)
            errors = torch.stack([F.cross_entropy(c.classify(features), y, reduction="none") for c in heads], 1)
            loss = (shares[y] * errors).sum(1).mean()
            if self.params.eta:
                loss = loss + self.params.eta * diversity(eps, features)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        metrics = {"server_loss": sum(losses) / len(losses)} if losses else {}
        return {**tensors_of(generator), **prefixed(SLOTS, slots_of(generator, optimizer))}, metrics

    def _head(self, arrival: Arrival) -> Net:
        """A network of which only the classifier is filled."""
        names = section_names(self.context, arrival.client.variant, "classifier")
        own = {name: arrival.message.tensors[name] for name in names}
        return server_net(self.context, arrival.client.variant, own).requires_grad_(False)

    def foresee(self, state: Bundle, arrivals: Sequence[Arrival]) -> Bundle:
        state = super().foresee(state, arrivals)
        return Bundle(state.tensors, {**state.values, MERGES: 1}) if self.generates else state

    def server_work(self, state: Bundle, arrivals: Sequence[Arrival]) -> ServerWork:
        """The mean, and the generator: forward and backward through itself and through every classifier."""
        mean = super().server_work(state, arrivals)
        if not self.generates:
            return mean
        sample = 6.0 * self._values() + 4.0 * len(arrivals) * self._width() * self.context.spec.classes
        return ServerWork(flops=mean.flops + self.params.server_steps * self.params.server_batch * sample)


def tensors_of(generator: Generator) -> Tensors:
    """The generator as tensors of a state, without its batch norm's counter, which nothing reads."""
    own = generator.state_dict()
    return prefixed(GENERATOR, {name: t for name, t in own.items() if t.is_floating_point()})


def label_shares(counts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The share of each client in the counts of each class, [classes, clients], and the classes that somebody saw."""
    table = torch.stack([*counts], 1).float()
    return table / table.sum(1, keepdim=True), (table.amax(1) > 1).nonzero().flatten()


def diversity(eps: Tensor, features: Tensor) -> Tensor:
    """Small where different noise makes different features."""
    noise = (eps[:, None] - eps[None]).square().mean(2)
    made = (features[:, None] - features[None]).abs().mean(2)
    return torch.exp(-(noise * made).mean())
