"""FedNova: layer-wise averaging in which a client that makes more steps does not weigh more.

Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS 2020.
Unlike HeteroAvg the server divides each client's change by a_k, which stands for the tau_k steps that the client really
made, and multiplies the mean by the mean a. For every trainable tensor l, over the clients of the merge that hold it:

    p_k = n_k / sum n,    a_l = sum p_k a_k,    w_l <- w_l + a_l * sum p_k (y_k,l - x_k,l) / a_k

    a_k = tau                                                Adam, SGD
    a_k = (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho)  SGD with momentum rho
    a_k = (1 - (1 - lr mu)^tau) / (lr mu)                    SGD with a proximal term mu

The last two are one recurrence: how far, in units of lr, a gradient that is always 1 would move a weight. lr is that of
the round in which the task was given. `mu` adds FedProx's term to the local loss; under Adam it does not change a_k.
Weight decay counts as a part of the gradient and does not change a_k either.

Running statistics are averaged plainly: the mean of the factors a_l / a_k is not 1, so variances could become negative.
Where all clients make equally many steps it is HeteroAvg by samples. In families that are cut by width, a_l is over the
clients that hold any part of the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from fleetbed.emulator.bases.averaging import Means, trained_shapes
from fleetbed.emulator.bases.proximal import Proximal
from fleetbed.emulator.method.algorithm import ALL_POLICIES, Arrival, Assignment, Context, Expected, Job, Needs, like
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.description import Description
from fleetbed.emulator.method.schedule import steps_of
from fleetbed.models.base import Net, Tensors
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.types import NonNegative

STEPS = "steps"


ABOUT = Description(
    paper="Wang et al., NeurIPS 2020, layer-wise",
    down="P + b",
    up="P + b, and its number of steps",
    client="nothing",
    server="as heteroavg",
    policies="all but async",
)


class Params(Means, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Means` (clients count by their samples unless `weighting` is clients), and:"""

    mu: NonNegative = 0.0  # strength of a proximal term as in `heteroprox`


class Method(Proximal):
    params: Params
    weighting = "samples"

    def __init__(self, params: Params, context: Context) -> None:
        super().__init__(params, context)
        self.mu = params.mu

    @property
    def needs(self) -> Needs:
        why = "it makes up for unequal steps within a merge, and a merge of a single result has none."
        return replace(super().needs, policies=ALL_POLICIES - {"async"}, policies_why=why)

    def check(self) -> None:
        super().check()
        training = self.context.training
        lr = max([training.optimizer.lr, *(change.lr for change in training.schedule)])
        if training.optimizer.name == "sgd" and lr * self.mu >= 1:
            raise BadInput(
                f"params.mu of fednova is {self.mu:g} and the largest learning rate is {lr:g}, but their product must "
                f"be below 1, or a step would go beyond what the proximal term pulls to: lower one of them."
            )

    def extras(self, job: Job, model: Net, start: Tensors) -> Bundle:
        return Bundle(values={STEPS: job.steps})

    def expects(self, assignment: Assignment, sent: Bundle) -> Expected:
        return Expected(tensors=like(sent.tensors), values={STEPS: int})

    def objection(self, assignment: Assignment, message: Bundle) -> str | None:
        steps, most = message.value(STEPS, int), steps_of(self.context.most_samples, self.context.training)
        return None if 1 <= steps <= most else f"it says {steps} steps, but a client of this fleet makes 1 to {most}"

    def factors(self, name: str, holders: Sequence[Arrival]) -> Sequence[float]:
        """a_l / a_k: exactly 1 where all a_k are equal."""
        if name not in trained_shapes(self.context.family, holders[0].client.variant, self.context.spec):
            return super().factors(name, holders)
        a, omegas = [self.a(arrival) for arrival in holders], [self.omega(arrival) for arrival in holders]
        a_l = a[0] * (sum(omega * (a_k / a[0]) for omega, a_k in zip(omegas, a, strict=True)) / sum(omegas))
        return [a_l / a_k for a_k in a]

    def a(self, arrival: Arrival) -> float:
        """a_k, by which the changes of a client are divided."""
        steps = arrival.message.value(STEPS, int)
        optimizer = self.context.training.optimizer_in(arrival.assignment.round)
        if optimizer.name == "adam":
            return float(steps)
        return distance(steps, optimizer.momentum, optimizer.lr * self.mu)


@lru_cache(maxsize=4096)
def distance(steps: int, momentum: float, pull: float) -> float:
    """How far SGD goes under a gradient that is always 1, in units of lr; `pull` is lr times the proximal mu."""
    moved = velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1 - pull * moved
        moved += velocity
    return moved
