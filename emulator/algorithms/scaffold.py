"""SCAFFOLD: layer-wise averaging whose clients correct their drift by control variates.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, Algorithm 1 with
option II. Unlike HeteroAvg the server holds a control variate c and sends it with the weights x, and each client keeps
one of its own, c_i. Both are of the trainable tensors and begin as zeros. A client makes tau steps from y = x, sends y
and dc, and keeps c_i + dc:

    y    <- optimiser step, then y <- y - lr (c - c_i)
    dc   =  (x - y) / (tau lr) - c
    w_l  <- w_l + server_lr * (mean of y_l - x_l over the clients of the merge that hold l)
    c_l  <- c_l + (1 / N_l) * (sum of dc_l over the clients of the merge),   N_l: clients of the fleet that hold l

The correction is applied to the update, not to the gradient. So c_i is the mean of the client's updates divided by lr
for any optimiser: a mean gradient under plain SGD, a mean direction under momentum or Adam. A late result's dc counts
in full, whatever weight the policy gives to its change. The first round is HeteroAvg, as c and c_i are 0.

A client that steps down to a smaller variant begins with c_i = 0 again. What it had added to c stays there, because the
server does not know c_i; `variates_lost` counts such clients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from fleetbed.emulator.bases.averaging import Averaging, Means, trained_shapes
from fleetbed.emulator.method.algorithm import Arrival, Assignment, Expected, Job, like
from fleetbed.emulator.method.bundle import Bundle, Scalar, prefixed
from fleetbed.emulator.method.description import Description
from fleetbed.emulator.method.local_training import Step, kept_models
from fleetbed.emulator.method.optimizers import Stepper
from fleetbed.models.base import Index, Net, Tensors, gather, scatter_add
from fleetbed.models.work import Work
from fleetbed.profiles.types import Positive

VARIATE = "variate/"
HAD_VARIATE, CONTRIBUTORS = "had_variate", "contributors"


ABOUT = Description(
    paper="Karimireddy et al., ICML 2020, layer-wise",
    down="2P + b",
    up="2P + b, and whether it had a variate",
    client="its control variate, P",
    server="as heteroavg, a control variate, and who contributed to it",
)


class Params(Means, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Means`, and:"""

    server_lr: Positive = 1.0  # multiplies the mean change of the trainable tensors, not that of running statistics


class Method(Averaging):
    params: Params

    def setup(self) -> Bundle:
        state = super().setup()
        c = {place: t for variant in self.context.variants for place, t in self.whole_variate(state, variant).items()}
        return Bundle({**state.tensors, **prefixed(VARIATE, c)}, {**state.values, CONTRIBUTORS: []})

    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        weights, variant = super().send(state, assignment), assignment.client.variant
        whole = self.whole_variate(state, variant)
        index = self.trained_index(state, variant)
        c = gather({name: whole[self.place(variant, name)] for name in index}, index)
        return Bundle({**weights.tensors, **prefixed(VARIATE, c)}, weights.values)

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        plain = super().work(state, assignment)
        variant = assignment.client.variant
        shapes = trained_shapes(self.context.family, variant, self.context.spec).values()
        size = self.weight_bytes(variant) + 4 * sum(shape.numel() for shape in shapes)
        # x, c and c_i are held; c and c_i are added in each step. After the last one dc and the new c_i come on top of
        # them: with gradients and the optimiser's state gone that is more than in a step if the optimiser has no state
        held = 3 if kept_models(self.context.training.optimizer) > 1 else 4
        return replace(plain, held_models=held, parameter_passes=2, bytes_down=size, bytes_up=size)

    # the client's half

    def local_step(self, job: Job, model: Net, start: Tensors) -> Step:
        step, lr = super().local_step(job, model, start), learning_rate(job)
        parameters = dict(model.named_parameters())
        signed = [(job.message.under(VARIATE), -lr), (own_variate(job), lr)]
        corrections = [(parameters[n], v, by) for variate, by in signed for n, v in variate.items() if v.any()]

        def corrected(optimizer: Stepper, x: Tensor, y: Tensor) -> Tensor:
            loss = step(optimizer, x, y)
            with torch.no_grad():
                for p, variate, by in corrections:
                    p.add_(variate, alpha=by)
            return loss

        return corrected

    def extras(self, job: Job, model: Net, start: Tensors) -> Bundle:
        return Bundle(prefixed(VARIATE, change(job, model, start)), {HAD_VARIATE: job.kept is not None})

    def kept(self, job: Job, model: Net, start: Tensors) -> Bundle:
        c_i_new = change(job, model, start)
        for name, c_i in own_variate(job).items():
            c_i_new[name].add_(c_i)
        return Bundle(prefixed(VARIATE, c_i_new))

    def expects(self, assignment: Assignment, sent: Bundle) -> Expected:
        return Expected(tensors=like(sent.tensors), values={HAD_VARIATE: bool})

    # the server's half

    def factors(self, name: str, holders: Sequence[Arrival]) -> Sequence[float]:
        trained = trained_shapes(self.context.family, holders[0].client.variant, self.context.spec)
        return [self.params.server_lr if name in trained else 1.0] * len(holders)

    def remember(self, state: Bundle, arrivals: Sequence[Arrival]) -> Bundle:
        """The state with the new c, and with the numbers of all clients that ever contributed to it."""
        indices = {client.variant: self.placed_index(state, client.variant) for client in self.context.clients}
        arrived = dict.fromkeys(a.client.variant for a in arrivals)
        held = {place for variant in arrived for place in indices[variant]}
        c = {p: t for variant in arrived for p, t in self.whole_variate(state, variant).items() if p in held}
        sums, holders = ({place: torch.zeros_like(t) for place, t in c.items()} for _ in range(2))
        for a in arrivals:
            variant, dc = a.client.variant, a.message.under(VARIATE)
            scatter_add(sums, {self.place(variant, name): t for name, t in dc.items()}, indices[variant])
        for variant, count in Counter(client.variant for client in self.context.clients).items():
            index = {place: rows for place, rows in indices[variant].items() if place in c}
            scatter_add(holders, dict.fromkeys(index, torch.tensor(float(count))), index)
        c = {place: t + sums[place] / holders[place].clamp(min=1) for place, t in c.items()}
        numbers: list[Scalar] = [*sorted(contributors(state) | {a.client.number for a in arrivals})]
        return Bundle({**state.tensors, **prefixed(VARIATE, c)}, {**state.values, CONTRIBUTORS: numbers})

    def metrics(self, state: Bundle, arrivals: Sequence[Arrival]) -> dict[str, float]:
        known = contributors(state)
        lost = [a for a in arrivals if a.client.number in known and not a.message.value(HAD_VARIATE, bool)]
        return {"variates_lost": float(len(lost))}

    def whole_variate(self, state: Bundle, variant: str) -> Tensors:
        """c of the model that the variant is a part of, by the names in the state; zeros where there is none yet."""
        whole = self.whole(state, variant)
        shapes = trained_shapes(self.context.family, whole, self.context.spec)
        known = state.under(VARIATE)
        return {p: known.get(p, torch.zeros(shape)) for n, shape in shapes.items() for p in [self.place(whole, n)]}

    def placed_index(self, state: Bundle, variant: str) -> dict[str, Index]:
        return {self.place(variant, name): rows for name, rows in self.trained_index(state, variant).items()}

    def trained_index(self, state: Bundle, variant: str) -> dict[str, Index]:
        """Which part of which trainable tensor the variant holds."""
        trained = trained_shapes(self.context.family, variant, self.context.spec)
        return {n: rows for n, rows in self.index(variant, self.whole(state, variant)).items() if n in trained}


def own_variate(job: Job) -> Tensors:
    """c_i; empty stands for zeros."""
    return {} if job.kept is None else job.kept.under(VARIATE)


@torch.no_grad()
def change(job: Job, model: Net, start: Tensors) -> Tensors:
    """dc, by which the client's variate changes."""
    model.zero_grad()  # training is over, and memory is short
    c, parameters = job.message.under(VARIATE), dict(model.named_parameters())
    length = job.steps * learning_rate(job)
    return {name: (start[name] - parameters[name]).div_(length).sub_(c[name]) for name in c}


def learning_rate(job: Job) -> float:
    return job.context.training.optimizer_in(job.assignment.round).lr


def contributors(state: Bundle) -> set[int]:
    """The numbers of the clients that ever contributed to c."""
    numbers = state.values[CONTRIBUTORS]
    assert isinstance(numbers, list)
    return {number for number in numbers if isinstance(number, int)}
