"""DepthFL: clients of different depth, whose exits teach each other.

Kim et al., "DepthFL: Depthwise Federated Learning for Heterogeneous Clients", ICLR 2023. A client holds the first n
stages of the model and an exit after each. Unlike HeteroAvg it trains all exits, and each learns from every other, with
their logits o_i and t the round from 0:

    L   = sum_i [ CE(o_i, y) + w_t / (n - 1) sum_{j != i} KL(softmax(o_j) || softmax(o_i)) ]     no gradient through o_j
    w_t = exp(-5 (1 - min(t, ramp) / ramp)^2)

Every tensor is averaged over the clients that hold it. Predictions are the mean of the logits of all exits. With
`alpha` it averages as FedDyn (Acar et al., ICLR 2021) does: client i keeps g_i and the server holds h, both at first 0.
A client starts from x and ends with y; K is the number of clients of the fleet:

    L   <- L - <g_i, w> + (alpha / 2) ||w - x||^2,    g_i <- g_i - alpha (y - x)
    h_l <- h_l - (alpha / K) (sum of y_l - x_l over the clients of the merge that hold l)
    w_l <- w_l + mean over them of (y_l - x_l) - h_l / alpha

of the trainable tensors. Where a policy weighs a late result, its change and the correction by h / alpha are weighed
alike, while h itself takes every change in full. A client that steps down goes on with the part of g_i that it needs.

`mutual: false` is the paper's control without KL. The control that trains the last exit alone is `heteroavg` on the
same family. Tensors are matched by name, where the released code goes by their positions in a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import exp
from typing import Annotated

import torch
from msgspec import Meta
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator.bases.averaging import Means, trained_shapes
from fleetbed.emulator.bases.exits import Exits
from fleetbed.emulator.method.algorithm import Arrival, Assignment, Client, Job
from fleetbed.emulator.method.bundle import Bundle, prefixed
from fleetbed.emulator.method.description import Description
from fleetbed.emulator.method.local_training import proximal
from fleetbed.models.base import Net, Tensors, label_loss, scatter_add
from fleetbed.models.work import Work
from fleetbed.profiles.types import Positive

GRADIENT, DRIFT = "gradient/", "drift/"  # g_i and h


ABOUT = Description(
    paper="Kim et al., ICLR 2023",
    down="P + b, exits included",
    up="P + b, exits included",
    client="nothing; with `alpha` its g, P",
    server="one model with all exits, of which each variant is a part; with `alpha` h, P of it",
)


class Params(Means, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Means`, and:"""

    mutual: bool = True  # exits learn from each other
    ramp: Annotated[int, Meta(ge=1)] = 300  # the round from which on they do so in full
    alpha: Positive | None = None  # FedDyn's; the paper has 0.1; None: plain averaging


class Method(Exits):
    params: Params

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        plain = super().work(state, assignment)
        if self.params.alpha is None:
            return plain
        # what was received, and g; each step adds both to the gradients
        return replace(plain, held_models=2, parameter_passes=4)

    # the client's half

    def loss(self, round_: int, exits: Sequence[Tensor], y: Tensor) -> Tensor:
        losses = [label_loss(logits, y) for logits in exits]
        if self.params.mutual and len(exits) > 1:
            weight = consistency(round_ - 1, self.params.ramp) / (len(exits) - 1)
            logs = [F.log_softmax(logits, 1) for logits in exits]
            losses += [
                weight * F.kl_div(own, other.detach(), reduction="batchmean", log_target=True)
                for own in logs
                for other in logs
                if other is not own
            ]
        return reduce(torch.add, losses)

    def regularise(self, job: Job, model: Net, start: Tensors) -> Callable[[], None]:
        alpha, g = self.params.alpha, own_gradient(job)
        if alpha is None:
            return super().regularise(job, model, start)
        pull = proximal(model, start, alpha)

        @torch.no_grad()
        def dynamic() -> None:
            pull()
            for name, p in model.named_parameters():
                if name in g and p.grad is not None:
                    p.grad.sub_(g[name])

        return dynamic

    def kept(self, job: Job, model: Net, start: Tensors) -> Bundle | None:
        if self.params.alpha is None:
            return None
        model.zero_grad()  # training is over, and memory is short
        old = own_gradient(job)
        g = {n: (start[n] - p.detach()).mul_(self.params.alpha) for n, p in model.named_parameters()}
        return Bundle(prefixed(GRADIENT, {n: t.add_(old[n]) if n in old else t for n, t in g.items()}))

    def step_down(self, kept: Bundle, client: Client) -> Bundle | None:
        shapes = trained_shapes(self.context.family, client.variant, self.context.spec)
        own = {n: t for n, t in kept.under(GRADIENT).items() if shapes.get(n) == t.shape}
        return Bundle(prefixed(GRADIENT, own)) if own else None

    # the server's half

    def remember(self, state: Bundle, arrivals: Sequence[Arrival]) -> Bundle:
        """The state with the new h, and its weights corrected by it."""
        alpha = self.params.alpha
        if alpha is None:
            return state
        changes: Tensors = {}
        holders: Tensors = {}
        weights: Tensors = {}
        for a in arrivals:
            variant = a.client.variant
            for name in trained_shapes(self.context.family, variant, self.context.spec):
                place = self.place(variant, name)
                rows = {place: self.index(variant, self.whole(state, variant))[name]}
                change = a.message.tensors[name] - a.sent.tensors[name]
                for sums, part in ((changes, change), (holders, torch.ones(())), (weights, torch.tensor(a.weight))):
                    sums.setdefault(place, torch.zeros_like(state.tensors[place]))
                    scatter_add(sums, {place: part.expand(change.shape)}, rows)
        known = state.under(DRIFT)
        h = {
            place: known.get(place, torch.zeros_like(change)) - alpha / len(self.context.clients) * change
            for place, change in changes.items()
        }
        corrected = {
            place: state.tensors[place] - weights[place] / holders[place].clamp(min=1) * drift / alpha
            for place, drift in h.items()
        }
        return Bundle({**state.tensors, **corrected, **prefixed(DRIFT, h)}, state.values)

    def predict(self, model: Net, x: Tensor, extras: Tensors) -> Tensor:
        """The mean of the logits of all exits."""
        return torch.stack(model.exits(x)).mean(0)


def consistency(t: int, ramp: int) -> float:
    """w_t, which grows from 0.0067 to 1."""
    return exp(-5 * (1 - min(t, ramp) / ramp) ** 2)


def own_gradient(job: Job) -> Tensors:
    """g_i; empty stands for zeros."""
    return {} if job.kept is None else job.kept.under(GRADIENT)
