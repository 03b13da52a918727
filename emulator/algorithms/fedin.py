"""FedIN: unequal models learn from one batch of each other's intermediate features.

Chan et al., "FedIN: Federated Intermediate Layers Learning for Model Heterogeneity", 2023 (`v1`) and its revision of
2024 (`tmlr`, the default). A model is extractor w_e, intermediate layers w_in and classifier w_c. Unlike HeteroAvg a
client also sends one batch of pairs (s_in, s_out), what goes into its w_in and what comes out, and receives one batch
of others' pairs, on which it trains w_in beside its own data. Each mini-batch, with no update between the losses:

    L_local = CE(f(x; w), y) + (mu/2) ||w - w_received||^2        G_local = its gradient, for all weights
    L_IN    = mean((f(s_in; w_in) - s_out)^2)                     G_IN = its gradient, for w_in
    w_e and w_c step with G_local, w_in steps with Z:
    simplified   G_IN + (lambda/2) G_local                                                 (Eq. 13)
    projection   G_IN, less (b/a) G_local where b = <G_local, G_IN> < 0, a = |G_local|^2   (Eq. 12)
    none         no Z: a step of all weights with G_local, then one of w_in with G_IN      ("w/o Opt")

In the first round there are no pairs yet and training is local. In v1 only w_e and w_c travel, w_in stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import prod
from typing import Annotated, Literal

import torch
from msgspec import Meta, field
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator.bases.averaging import ALL_SECTIONS, ENDS, Aggregation, Means
from fleetbed.emulator.bases.features import check_cuts, cut_shapes, draw_pairs, noisy, projected
from fleetbed.emulator.bases.proximal import Proximal
from fleetbed.emulator.method.algorithm import Arrival, Assignment, Client, Context, Expected, Job, Needs, Spec
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.description import Description
from fleetbed.emulator.method.local_training import Step, foreign_batch, proximal
from fleetbed.emulator.method.optimizers import Stepper
from fleetbed.emulator.method.schedule import batch_of
from fleetbed.emulator.randomness import torch_rng
from fleetbed.models.base import Net, Tensors, label_loss
from fleetbed.models.work import Pass, Work
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.types import NonNegative

#: aggregation, lambda and mu of the two versions (mu/2 = 0.05 in the revision)
VERSIONS: dict[str, tuple[Aggregation, float, float]] = {"tmlr": ("layerwise", 1, 0.1), "v1": ("ends", 2, 0)}
IN, OUT, STORE = "features/in", "features/out", "store/"


ABOUT = Description(
    paper="Chan et al., 2023 (v1) and TMLR 2024",
    down="P + b, from the second round on also B(s_in + s_out)",
    up="P + b + B(s_in + s_out)",
    client="nothing (aggregation ends, or without_aggregation: its model)",
    server="as heteroavg, and the newest B pairs of each client",
)


class Params(Means, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Means`, and: (same-architecture counts clients by samples, Eq. 21, unless `weighting` is given)"""

    version: Literal["tmlr", "v1"] = "tmlr"  # sets aggregation, lambda and mu where they are not given
    lambda_: NonNegative | None = field(default=None, name="lambda")  # Z = G_IN + (lambda/2) G_local
    mu: NonNegative | None = None  # proximal term; 0 is the ablation "w/o Prox"
    z: Literal["simplified", "projection", "none"] = "simplified"  # none is the ablation "w/o Opt"
    without_in: bool = False  # the ablation "w/o IN": no features travel, it is HeteroProx
    without_aggregation: bool = False  # the ablation of v1's Figure 7b: no weights travel, each client keeps its own
    noise: NonNegative = 0.0  # +Noise: so many standard deviations of a batch's features; the paper's best is 0.8
    noise_where: Literal["upload", "upload+forward"] = "upload"  # forward: in the local forward pass as well
    batch: Annotated[int, Meta(ge=2, le=1_000_000)] | None = None  # pairs in a message; None: the training batch
    statistics: Literal["batch", "running"] = "batch"  # by which batch norm makes the features that are sent


class Method(Proximal):
    params: Params

    def __init__(self, params: Params, context: Context) -> None:
        super().__init__(params, context)
        aggregation, lambda_, mu = VERSIONS[params.version]
        self.aggregation = params.aggregation or aggregation
        self.lambda_ = lambda_ if params.lambda_ is None else params.lambda_
        self.mu = mu if params.mu is None else params.mu
        self.apart = self.aggregation == "same-architecture"
        self.sections = ENDS if self.aggregation == "ends" else ALL_SECTIONS
        if params.without_aggregation:
            self.sections = frozenset()
        self.weighting = params.weighting or ("samples" if self.apart else "clients")
        # a batch: two at least, for batch norm, and no more than the client with the most samples has
        self.pairs = max(2, batch_of(context.most_samples, params.batch or context.training.batch))
        self.everywhere = params.noise_where == "upload+forward"

    @property
    def needs(self) -> Needs:
        return dataclasses.replace(super().needs, cuts=True)

    def check(self) -> None:
        super().check()
        check_cuts(self.context)
        if self.params.without_aggregation and self.params.aggregation is not None:
            raise BadInput(
                f"fedin has both params.without_aggregation and params.aggregation {self.params.aggregation}: "
                f"leave one of them out."
            )

    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        message = super().send(state, assignment)
        inputs, outputs = state.under(f"{STORE}in/"), state.under(f"{STORE}out/")
        if not inputs:
            return message
        rng = torch_rng(self.context.seed, assignment.task, "features")
        s_in, s_out = draw_pairs(inputs, outputs, self.pairs, rng)
        return Bundle({**message.tensors, IN: s_in, OUT: s_out})

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        received = any(name.startswith(STORE) for name in state.tensors)
        return self._with_pairs(super().work(state, assignment), assignment.client, received)

    def heaviest(self, state: Bundle, client: Client) -> Work:
        return self._with_pairs(super().work(state, Assignment(client=client)), client, received=True)

    def _with_pairs(self, plain: Work, client: Client, received: bool) -> Work:
        if self.params.without_in:
            return plain
        s_in, s_out = cut_shapes(self.context.family, client.variant, self.context.spec)
        values = self.pairs * (prod(s_in) + prod(s_out))
        size = self.weight_bytes(client.variant)
        return replace(
            plain,
            bytes_down=size + 4 * values * received,
            bytes_up=size + 4 * values,
            each_step=(Pass("train", "intermediate", self.pairs),) if received else (),
            once=(Pass("forward", "features", self.pairs),),
            held_values=values if received else 0,
            held_models=plain.held_models + (self.params.z == "projection"),  # G_IN beside G_local
        )

    def local_step(self, job: Job, model: Net, start: Tensors) -> Step:
        regularise = proximal(model, start, self.mu)
        w_in = [p for n, p in model.named_parameters() if model.section(n) == "intermediate" and p.requires_grad]
        received, mode = job.message.tensors, self.params.z
        rng, noise = job.generator("noise"), self.params.noise if self.everywhere else 0.0

        def in_loss() -> Tensor:
            with foreign_batch(model):
                s_out = model.intermediate(received[IN].to(w_in[0].device))
            return F.mse_loss(s_out, received[OUT].to(s_out.device))

        def step(optimizer: Stepper, x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            s_out = model.intermediate(noisy(model.extract(x), noise, rng))
            loss = label_loss(model.classify(noisy(s_out, noise, rng)), y)
            loss.backward()
            regularise()
            g_local = [p.grad for p in w_in if p.grad is not None]
            if IN in received and mode == "projection":
                for p, g_in, g in zip(w_in, torch.autograd.grad(in_loss(), w_in), g_local, strict=True):
                    p.grad = projected(g_in, g)
            elif IN in received:
                if mode == "simplified":
                    for g in g_local:
                        g.mul_(self.lambda_ / 2)
                else:
                    optimizer.step()
                    optimizer.zero_grad()
                in_loss().backward()  # adds G_IN to what is there
            optimizer.step()
            return loss.detach()

        return step

    @torch.no_grad()
    def extras(self, job: Job, model: Net, start: Tensors) -> Bundle:
        """One batch of the client's features, of the trained model.

        Running statistics that few steps have fed are far off, deep features explode, and with them the others' L_IN.
        """
        if self.params.without_in:
            return Bundle()
        x, _ = job.sample(self.pairs, "features")
        rng, noise = job.generator("upload"), self.params.noise
        model.eval()
        with foreign_batch(model, self.params.statistics == "batch"):
            clean = model.extract(x)
            s_in = noisy(clean, noise, rng)
            s_out = model.intermediate(s_in if self.everywhere else clean)
        return Bundle({IN: s_in, OUT: noisy(s_out, noise, rng)})

    def expects(self, assignment: Assignment, sent: Bundle) -> Expected | None:
        """The weights, and one batch of pairs."""
        weights = super().expects(assignment, sent)
        assert weights is not None
        if self.params.without_in:
            return weights
        shapes = cut_shapes(self.context.family, assignment.client.variant, self.context.spec)
        features = {n: Spec(torch.float32, (self.pairs, *s)) for n, s in zip((IN, OUT), shapes, strict=True)}
        return Expected(tensors={**weights.tensors, **features})

    def remember(self, state: Bundle, arrivals: Sequence[Arrival]) -> Bundle:
        """The newest batch of pairs of every client."""
        tensors = dict(state.tensors)
        for a in arrivals:
            if IN in a.message.tensors:
                tensors[f"{STORE}in/{a.client.number}"] = a.message.tensors[IN]
                tensors[f"{STORE}out/{a.client.number}"] = a.message.tensors[OUT]
        return Bundle(tensors, state.values)
