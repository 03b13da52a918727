"""Fed-ET: small models on the clients, and a large one at the server that learns from their votes on public samples.

Cho et al., "Heterogeneous Ensemble Knowledge Transfer for Training Large Models in Federated Learning", IJCAI 2022.
Clients train the small model of their variant as in HeteroAvg. Let s_k(x) be the logits of the arrival k for a public
sample x, v_k(x) their variance over the classes, and a_k = v_k / sum v: who is sure of itself counts more. Then

    y      = argmax of sum_k a_k s_k                                   the consensus
    s_div  = sum of (v_k / sum of these v) s_k  over those k whose argmax is not y
    L      = CE(o, y) + lambda KL(softmax(s_div) || softmax(o))        o = the large model's logits of x

trains the large model for `server_steps`, from the mean of the arrivals' classifiers and its own other layers; where
nobody disagrees there is no KL. Afterwards its classifier replaces that of the small models, whose other layers are
averaged: layer-wise, or with `aggregation: same-architecture`, as in the paper, within each variant. The public samples
need no labels. No code of the authors was found: the numbers are those of a re-implementation by others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from msgspec import Meta, field
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator.bases.averaging import Averaging, Means, weights_of
from fleetbed.emulator.bases.features import check_widths
from fleetbed.emulator.bases.server_training import (
    ENSEMBLE_POLICIES,
    ENSEMBLE_WHY,
    MERGES,
    merges_of,
    section_names,
    seeded,
    server_net,
)
from fleetbed.emulator.method.algorithm import Arrival, Context, Merged, Needs, Target
from fleetbed.emulator.method.bundle import Bundle, prefixed
from fleetbed.emulator.method.description import Description
from fleetbed.emulator.method.optimizers import SGD
from fleetbed.emulator.randomness import derive, torch_rng
from fleetbed.models.base import Tensors
from fleetbed.models.work import Pass, ServerWork, Work
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.types import NonNegative, Positive

SERVER = "server/"
FORWARD_BATCH = 64
TINY = 1e-30


ABOUT = Description(
    paper="Cho et al., IJCAI 2022 (Fed-ET), layer-wise",
    down="P + b",
    up="P + b",
    client="nothing",
    server="as heteroavg, and one large model; uses public samples without labels",
    policies="all but async",
)


class Params(Means, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Means`, and:"""

    public: Annotated[int, Meta(ge=2, le=1_000_000)] = 5000  # public samples of a merge, drawn anew for each
    server_steps: Annotated[int, Meta(ge=0, le=1_000_000)] = 128  # of the large model in a merge
    server_batch: Annotated[int, Meta(ge=2, le=1_000_000)] = 64  # public samples in a step of it
    server_lr: Positive = 0.005  # of its SGD
    server_momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.9  # the same
    lambda_: NonNegative = field(default=0.05, name="lambda")  # weight of those who disagree
    server_variant: str | None = None  # the large model; None: the family's largest


class Method(Averaging):
    params: Params

    def __init__(self, params: Params, context: Context) -> None:
        super().__init__(params, context)
        self.server_variant = params.server_variant or context.family.variants[-1]

    @property
    def needs(self) -> Needs:
        return replace(
            super().needs,
            cuts=True,
            classes=True,
            policies=ENSEMBLE_POLICIES,
            policies_why=ENSEMBLE_WHY,
            public_samples=self.params.public,
            long_merges=True,
        )

    def check(self) -> None:
        super().check()
        self.context.family.check_variant(self.server_variant)
        if self.is_partial:
            raise BadInput(
                "params.aggregation of fedet is ends, but its server runs the clients' whole models: "
                "choose layerwise or same-architecture."
            )
        check_widths(self.context, "fedet", self.server_variant)

    def setup(self) -> Bundle:
        state, initial = super().setup(), self.context.with_initial().initial(self.server_variant)
        return Bundle({**state.tensors, **prefixed(SERVER, initial)}, {**state.values, MERGES: 0})

    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        merged = super().merge(state, arrivals)
        head = self._mean_head(merged.state, arrivals)
        server, metrics = self._trained({**state.under(SERVER), **head}, merges_of(state), arrivals)
        tensors = {**merged.state.tensors, **prefixed(SERVER, server)}
        for variant in (v for v in self.context.family.variants if self.place(v, next(iter(head))) in tensors):
            tensors |= {self.place(variant, name): server[name] for name in head}
        after = Bundle(tensors, {**merged.state.values, MERGES: merges_of(state) + 1})
        return Merged(state=after, metrics={**merged.metrics, **metrics})

    def _mean_head(self, state: Bundle, arrivals: Sequence[Arrival]) -> Tensors:
        """The classifier that the mean of the arrivals made."""
        names = section_names(self.context, self.server_variant, "classifier")
        if not self.apart:
            return {name: state.tensors[name] for name in names}
        total = sum(self.omega(a) for a in arrivals)
        return {
            name: torch.stack([self.omega(a) / total * a.message.tensors[name] for a in arrivals]).sum(0)
            for name in names
        }

    def _trained(self, server: Tensors, merges: int, arrivals: Sequence[Arrival]) -> tuple[Tensors, dict[str, float]]:
        """The large model after learning from the votes of the arrivals."""
        steps, seed = self.params.server_steps, self.context.seed
        if not steps:
            return server, {}
        assert self.context.public is not None  # needs.public_samples
        x = self.context.public.draw(self.params.public, derive(seed, merges, "public"))
        y, diverse, disputed = votes(torch.stack([self._scores(a, x) for a in arrivals]))
        net = server_net(self.context, self.server_variant, server)
        optimizer = SGD(net.parameters(), self.params.server_lr, self.params.server_momentum, 0.0)
        rng = torch_rng(seed, merges, "server")
        losses = []
        with seeded(seed, merges, "layers"):
            for _ in range(steps):
                rows = torch.randperm(len(x), generator=rng)[: self.params.server_batch]
                optimizer.zero_grad()
                o = net(x[rows])
                loss = F.cross_entropy(o, y[rows])
                if self.params.lambda_:
                    loss = loss + self.params.lambda_ * divergence(diverse[rows], o, disputed[rows])
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
        disagreement = float(disputed.float().mean())
        return dict(net.state_dict()), {"server_loss": sum(losses) / len(losses), "disagreement": disagreement}

    @torch.no_grad()
    def _scores(self, arrival: Arrival, x: Tensor) -> Tensor:
        """The logits of a client's model."""
        net = self.context.family.load(
            arrival.client.variant, self.context.spec, weights_of(arrival.message), "what the client sent"
        ).eval()
        return torch.cat([net(part) for part in x.split(FORWARD_BATCH)])

    def server_work(self, state: Bundle, arrivals: Sequence[Arrival]) -> ServerWork:
        """The mean, the votes of every arrival, and the training of the large model."""
        mean = super().server_work(state, arrivals)
        if not self.params.server_steps:
            return mean
        vote = Work(batch=FORWARD_BATCH, once=(Pass("forward", "all", self.params.public),))
        training = Work(steps=self.params.server_steps, batch=min(self.params.server_batch, self.params.public))
        models = (*((a.client.variant, vote) for a in arrivals), (self.server_variant, training))
        return ServerWork(models=models, flops=mean.flops)

    def targets(self, state: Bundle) -> list[Target]:
        """The small models, and the large one."""
        server = Target(name="server", variant=self.server_variant, tensors=state.under(SERVER))
        return [*super().targets(state), server]


def votes(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the logits [clients, samples, classes]: the consensus, those who disagree, and where there are any."""
    sureness = scores.var(2, keepdim=True)
    consensus = weighted(scores, sureness).argmax(1)
    others = scores.argmax(2) != consensus
    return consensus, weighted(scores, sureness * others[..., None]), others.any(0)


def weighted(scores: Tensor, weights: Tensor) -> Tensor:
    """The mean over the clients by these weights; where all are 0 it is 0."""
    return (scores * weights).sum(0) / weights.sum(0).clamp_min(TINY)


def divergence(teacher: Tensor, logits: Tensor, counts: Tensor) -> Tensor:
    """KL(softmax(teacher) || softmax(logits)), the mean over the batch; samples that do not count add 0."""
    each = F.kl_div(F.log_softmax(logits, 1), F.softmax(teacher, 1), reduction="none").sum(1)
    return torch.where(counts, each, 0.0).mean()
