"""FedHeNN: clients of any architecture keep their own models and align their representations.

Makhija et al., "Architecture Agnostic Federated Learning for Neural Networks", ICML 2022, Algorithm 2 (heterogeneous
clients; `fedhenn_homo` is Algorithm 1). Unlike FedAvg no weights are averaged: the server draws a representation
alignment dataset (RAD) X of L unlabelled samples, takes the gram K_j = k(Phi_j(X), Phi_j(X)) of the clients' features
(all but the last layer) and sends X and the mean gram K. In round t a client goes on from its own weights with

    L = CE(f(x), y) + eta_t (1 - CKA(K, K_i(X))),        eta_t = eta_0 sqrt(t)

so that in round 0 everyone trains alone, and always if eta is 0. Raw grams are averaged, CKA centres them. The RAD of
round t+1 is drawn after the training of round t. The paper takes the mean over all clients, the released code over
those of the round. A gram that is not finite is left out: one diverging client must not spoil the mean for all.
All grams are made in the same way (`statistics`): without dropout, and batch norm with the statistics of the RAD.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

import torch
from msgspec.structs import replace
from torch import Tensor

from fleetbed.emulator.bases import alignment
from fleetbed.emulator.method.algorithm import (
    ROUND_POLICIES,
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
)
from fleetbed.emulator.method.bundle import Bundle, Value
from fleetbed.emulator.method.description import Description
from fleetbed.emulator.method.local_training import cross_entropy_step, keep_model, own_targets, own_tensors, train
from fleetbed.models.base import Net, Tensors
from fleetbed.models.work import ServerWork, Work
from fleetbed.profiles.errors import BadInput

Models = dict[int, tuple[str, Tensors]]  # by client: its variant and its weights


ABOUT = Description(
    paper="Makhija et al., ICML 2022, Algorithm 2",
    down="L·CHW + L², from the second round on",
    up="P + b (client_side_gram: 0, then L² in a stage of its own)",
    client="its model",
    server="RAD and mean gram; all models with kbar_over all",
    policies="all but async (client_side_gram: sync, deadline, over-select)",
)


class Params(alignment.Alignment, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Alignment`, and:"""

    kbar_over: Literal["sampled", "all"] = "sampled"  # mean gram over the round's clients (code) or over all (paper)
    normalise_gram: bool = False  # divide K_j by |H K_j H|: else the client with the largest features dominates
    client_side_gram: bool = False  # clients compute their grams in a stage of their own; weights stay private


class Method(Algorithm):
    params: Params

    @property
    def needs(self) -> Needs:
        by_client = self.params.client_side_gram
        return Needs(
            policies=ROUND_POLICIES if by_client else ROUND_POLICIES | {"buffered"},
            policies_why="the mean gram is over the clients of one merge, and eta grows with the number of merges"
            + ("; the grams are a second stage of a round." if by_client else "."),
            stages=("train", "gram") if by_client else ("train",),
            cuts=True,
            public_samples=self.params.rad,
            total_rounds=self.params.last_epochs is not None,
            initial_on_client=True,
            long_merges=not by_client,
            reported="personal-own",
        )

    def check(self) -> None:
        alignment.check_rad(self.context, self.params)
        if self.params.client_side_gram and self.params.kbar_over == "all":
            raise BadInput(
                "params.kbar_over is all, but with client_side_gram only the clients of the round give a gram: "
                "set kbar_over to sampled, or client_side_gram to false."
            )

    def setup(self) -> Bundle:
        """`round` is t. With `kbar_over: all` the server holds every model; merges bring `rad` and `gram`."""
        context = self.context.with_initial() if self.params.kbar_over == "all" else self.context
        initial = {v: context.initial(v) for v in context.variants if self.params.kbar_over == "all"}
        models = {c.number: (c.variant, initial[c.variant]) for c in self.context.clients if initial}
        return Bundle(held(models), {"round": 0})

    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        if assignment.stage == "gram":
            return Bundle({"rad": state.tensors["rad"]})
        epochs = alignment.epochs_in(self.context, self.params, state)
        told: dict[str, Value] = {} if epochs is None else {"epochs": epochs}
        if not self.aligned(state):
            return Bundle({}, told)
        return Bundle({name: state.tensors[name] for name in ("rad", "gram")}, {**told, "eta": self.eta(state)})

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        client = assignment.client
        if assignment.stage == "gram":
            values = self.params.rad * prod(self.context.spec.shape) + 3 * self.params.rad**2
            once = (alignment.rad_pass(self.params),)
            batch = alignment.at_once(self.context, client.variant, self.params)
            rad, gram = alignment.rad_bytes(self.context, self.params), 4 * self.params.rad**2
            return Work(batch=batch, once=once, held_models=1, held_values=values, bytes_down=rad, bytes_up=gram)
        aligned, epochs = self.aligned(state), alignment.epochs_in(self.context, self.params, state)
        work = alignment.work(self.context, client, self.params, aligned=aligned, epochs=epochs)
        return self._with_bytes(work, aligned)

    def heaviest(self, state: Bundle, client: Client) -> Work:
        return self._with_bytes(alignment.heaviest(self.context, client, self.params), self.params.eta > 0)

    def _with_bytes(self, work: Work, aligned: bool) -> Work:
        """The RAD and its gram down, the model up unless it stays private."""
        down = alignment.rad_bytes(self.context, self.params) + 4 * self.params.rad**2 if aligned else 0
        return replace(work, bytes_down=down, bytes_up=0 if self.params.client_side_gram else None)

    def client(self, job: Job) -> Reply:
        model = job.model(own_tensors(job))
        received = job.message.tensors
        if job.assignment.stage == "gram":
            return Reply(message=Bundle({"gram": self.gram_of(model, received["rad"])}))
        step = cross_entropy_step(model)
        if received:
            eta = job.message.value("eta", float)
            step = alignment.step(job, model, eta, received["rad"], received["gram"], self.params)
        metrics = train(job, model, step, epochs=alignment.epochs_of(job.message))
        sent = {} if self.params.client_side_gram else dict(model.state_dict())
        return Reply(message=Bundle(sent), keep=keep_model(model), metrics=metrics)

    def expects(self, assignment: Assignment, sent: Bundle) -> Expected | None:
        if assignment.stage == "gram":
            return Expected(tensors={"gram": Spec(torch.float32, (self.params.rad, self.params.rad))})
        if self.params.client_side_gram:
            return Expected()
        variant = assignment.client.variant
        return Expected(tensors=alignment.model_specs(self.context.family, variant, self.context.spec))

    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        if arrivals[0].assignment.stage == "gram":
            mean, metrics = alignment.mean_gram(a.message.tensors["gram"] for a in arrivals)
            return Merged(state=Bundle({"rad": state.tensors["rad"], **mean}, state.values), metrics=metrics)
        following = alignment.round_of(state) + 1
        rad = alignment.draw_rad(self.context, self.params, following)
        if self.params.client_side_gram:
            return Merged(state=Bundle({"rad": rad}, {"round": following}))
        arrived = {a.client.number: (a.client.variant, a.message.tensors) for a in arrivals}
        models = {**stored(state), **arrived}
        nets = (alignment.loaded(self.context, variant, tensors) for variant, tensors in models.values())
        mean, metrics = alignment.mean_gram(self.gram_of(net, rad) for net in nets)
        kept = held(models) if self.params.kbar_over == "all" else {}
        return Merged(state=Bundle({"rad": rad, **mean, **kept}, {"round": following}), metrics=metrics)

    def foresee(self, state: Bundle, arrivals: Sequence[Arrival]) -> Bundle:
        """A gram of zeros: computing it takes as long as the merge, and its size is all that counts."""
        if self.params.client_side_gram:
            return super().foresee(state, arrivals)
        following = alignment.round_of(state) + 1
        rad = alignment.draw_rad(self.context, self.params, following)
        gram = torch.zeros(self.params.rad, self.params.rad)
        arrived = {a.client.number: (a.client.variant, a.message.tensors) for a in arrivals}
        kept = held({**stored(state), **arrived}) if self.params.kbar_over == "all" else {}
        return Bundle({"rad": rad, "gram": gram, **kept}, {"round": following})

    def server_work(self, state: Bundle, arrivals: Sequence[Arrival]) -> ServerWork:
        if self.params.client_side_gram:
            return super().server_work(state, arrivals)
        whose = [a.client for a in arrivals] if self.params.kbar_over == "sampled" else self.context.clients
        return alignment.gram_work(self.context, [client.variant for client in whose], self.params)

    def targets(self, state: Bundle) -> list[Target]:
        return own_targets(self.context, local=True)

    def eta(self, state: Bundle) -> float:
        return self.params.strength(alignment.round_of(state))

    def aligned(self, state: Bundle) -> bool:
        return "gram" in state.tensors and self.eta(state) > 0

    def gram_of(self, model: Net, rad: Tensor) -> Tensor:
        return alignment.gram_of(model, rad, self.params, normalise=self.params.normalise_gram)


def held(models: Models) -> Tensors:
    """The models as tensors of the server's state."""
    return {f"w/{n}/{variant}/{name}": t for n, (variant, tensors) in models.items() for name, t in tensors.items()}


def stored(state: Bundle) -> Models:
    """The models that the server's state holds: the reverse of `held`."""
    models: Models = {}
    for path, tensor in state.under("w/").items():
        number, variant, name = path.split("/", 2)
        models.setdefault(int(number), (variant, {}))[1][name] = tensor
    return models
