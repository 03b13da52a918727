"""FedHeNN for clients of one architecture: FedAvg whose clients align their representations with the global model's.

Makhija et al., "Architecture Agnostic Federated Learning for Neural Networks", ICML 2022, Algorithm 1. Unlike FedAvg
the server also sends a representation alignment dataset (RAD) X of L unlabelled samples, new in every round, and a
client minimises, with K the gram of the features that the received global model gives to X,

    L = CE(f(x), y) + eta_t (1 - CKA(K, K_i(X))),        eta_t = eta_0 sqrt(t)

Weights are averaged as in FedAvg, which it is in round 0, and always if eta is 0. Each client keeps its model as it is
after its local training: that is the personalised model of the paper, the average is its "Global".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from msgspec.structs import replace as replace_fields

from fleetbed.emulator.bases import alignment
from fleetbed.emulator.bases.averaging import Averaging, Weighting
from fleetbed.emulator.method.algorithm import (
    ROUND_POLICIES,
    Arrival,
    Assignment,
    Client,
    Context,
    Job,
    Needs,
    Target,
)
from fleetbed.emulator.method.bundle import Bundle, Value
from fleetbed.emulator.method.description import Description
from fleetbed.emulator.method.local_training import Step, keep_model, own_targets
from fleetbed.models.base import Net, Tensors
from fleetbed.models.work import Work
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.types import Positive

RAD, NEWEST = "rad/x", "newest/"


ABOUT = Description(
    paper="Makhija et al., ICML 2022, Algorithm 1",
    down="P + b, from the second round on also L·CHW",
    up="P + b",
    client="its last model",
    server="one model, RAD",
    policies="all but async",
)


class Params(alignment.Alignment, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Alignment`, and:"""

    weighting: Weighting = "samples"  # samples: by their number of samples (paper); clients: all the same (code)
    delta_scale: Positive = 1.0  # as in `Means`
    #: "Global" is the mean over the newest models of all clients that ever took part (the last line of Algorithm 1)
    final_average: bool = False


class Method(Averaging):
    params: Params

    def __init__(self, params: Params, context: Context) -> None:
        super().__init__(params, context)
        self.weighting, self.delta_scale = params.weighting, params.delta_scale

    @property
    def needs(self) -> Needs:
        return Needs(
            policies=ROUND_POLICIES | {"buffered"},
            policies_why="eta grows with the number of merges, which under async is that of single results.",
            cuts=True,
            public_samples=self.params.rad,
            initial_on_client=True,
            total_rounds=self.params.last_epochs is not None,
            reported="personal-own",
        )

    def check(self) -> None:
        alignment.check_rad(self.context, self.params)
        if len(self.context.variants) > 1:
            raise BadInput(
                f"fedhenn_homo needs clients of one variant, but {', '.join(self.context.variants)} are in use: "
                f"set the algorithm's variant to one of them, or choose fedhenn, which takes any."
            )

    def setup(self) -> Bundle:
        state = super().setup()
        return Bundle(state.tensors, {**state.values, "round": 0})

    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        weights = super().send(state, assignment)
        epochs = alignment.epochs_in(self.context, self.params, state)
        told: dict[str, Value] = {} if epochs is None else {"epochs": epochs}
        if not self.aligned(state):
            return Bundle(weights.tensors, told)
        return Bundle({**weights.tensors, RAD: state.tensors[RAD]}, {**told, "eta": self.eta(state)})

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        client = assignment.client
        aligned = self.aligned(state)
        epochs = alignment.epochs_in(self.context, self.params, state)
        work = alignment.work(self.context, client, self.params, aligned=aligned, epochs=epochs)
        if not aligned:
            return work
        # the reference: the global model's features on the RAD
        return self._with_rad(replace_fields(work, once=(alignment.rad_pass(self.params), *work.once)), client)

    def heaviest(self, state: Bundle, client: Client) -> Work:
        return self._with_rad(alignment.heaviest(self.context, client, self.params), client)

    def _with_rad(self, work: Work, client: Client) -> Work:
        down = self.weight_bytes(client.variant) + alignment.rad_bytes(self.context, self.params)
        return replace_fields(work, bytes_down=down)

    def epochs(self, job: Job) -> int | None:
        return alignment.epochs_of(job.message)

    def local_step(self, job: Job, model: Net, start: Tensors) -> Step:
        rad = job.message.tensors.get(RAD)
        if rad is None:
            return super().local_step(job, model, start)
        reference = alignment.gram_of(model, rad, self.params)  # the model is still the global one
        return alignment.step(job, model, job.message.value("eta", float), rad, reference, self.params)

    def kept(self, job: Job, model: Net, start: Tensors) -> Bundle:
        return keep_model(model)

    def remember(self, state: Bundle, arrivals: Sequence[Arrival]) -> Bundle:
        """The RAD of the round that follows and, where they are averaged in the end, the newest models."""
        following = alignment.round_of(state) + 1
        rad = alignment.draw_rad(self.context, self.params, following)
        newest = {}
        if self.params.final_average:
            newest = {f"{NEWEST}{a.client.number}/{n}": t for a in arrivals for n, t in a.message.tensors.items()}
        return Bundle({**state.tensors, **newest, RAD: rad}, {**state.values, "round": following})

    def targets(self, state: Bundle) -> list[Target]:
        state = Bundle({**state.tensors, **self.mean_of_all(state)}, state.values)
        return [replace(target, name="global") for target in super().targets(state)] + own_targets(
            self.context, local=True
        )

    def mean_of_all(self, state: Bundle) -> Tensors:
        """The mean of all clients' newest models, where the server holds them."""
        models = [(c, state.under(f"{NEWEST}{c.number}/")) for c in self.context.clients]
        models = [(client, tensors) for client, tensors in models if tensors]
        omegas = torch.tensor([float(c.samples) if self.weighting == "samples" else 1.0 for c, _ in models])
        mean = {}
        for name in models[0][1] if models else ():
            stacked = torch.stack([tensors[name] for _, tensors in models])
            if stacked.is_floating_point():
                mean[name] = torch.tensordot(omegas / omegas.sum(), stacked, 1)
            else:
                mean[name] = stacked.amax(0)
        return mean

    def eta(self, state: Bundle) -> float:
        return self.params.strength(alignment.round_of(state))

    def aligned(self, state: Bundle) -> bool:
        return RAD in state.tensors and self.eta(state) > 0
