"""MOON: layer-wise averaging whose clients draw their features towards the global model's.

Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021. Unlike HeteroAvg a client contrasts the features of
its batch under three models: z of the one that it trains, z_g of the received one and z_p of its own previous one, as
its last training left it. The latter two are frozen. It minimises, with cosine similarity and temperature T,

    L = CE(f(x), y) - mu log( exp(cos(z, z_g)/T) / (exp(cos(z, z_g)/T) + exp(cos(z, z_p)/T)) )

Weights are averaged as in HeteroAvg, which it is if mu is 0. The features are those that the classifier reads; MOON's
projection head is left out, as in FedIN (2024), whose Table 3 gives MOON the size of FedAvg.

In its first turn, or after it stepped down to a smaller variant, a client's previous model is the initial one. Where
the previous model equals the received one, as in the first round, the term is ln 2 with a gradient of 0 and is left
out. Batch norm in the frozen models uses the statistics of the batch, as in the model that is trained: running
statistics that few steps have fed are far off, and would contrast modes instead of models. `statistics: running` is
what MOON's code does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Literal

import torch
from msgspec.structs import replace as replace_fields
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator.bases.averaging import Averaging, Means
from fleetbed.emulator.bases.features import cut_shapes
from fleetbed.emulator.method.algorithm import Arrival, Assignment, Client, Job, Needs
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.description import Description
from fleetbed.emulator.method.local_training import Step, foreign_batch, frozen, keep_model, own_tensors
from fleetbed.emulator.method.optimizers import Stepper
from fleetbed.models.base import Net, Tensors, label_loss
from fleetbed.models.work import Pass, Work
from fleetbed.profiles.types import NonNegative, Positive

MERGED = "merged"


ABOUT = Description(
    paper="Li et al., CVPR 2021, layer-wise",
    down="P + b",
    up="P + b",
    client="its last model",
    server="as heteroavg",
)


class Params(Means, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Means`, and:"""

    mu: NonNegative = 1.0  # weight of the contrastive term; the paper's best on CIFAR-10 is 5
    temperature: Positive = 0.5  # T
    statistics: Literal["batch", "running"] = "batch"  # by which batch norm works in the two frozen models


class Method(Averaging):
    params: Params

    @property
    def needs(self) -> Needs:
        return replace(super().needs, cuts=True, initial_on_client=self.params.mu > 0)

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        plain = super().work(state, assignment)
        # before the first merge everyone receives the initial model, and the term is left out
        return self._contrasting(plain, assignment.client) if MERGED in state.values else plain

    def heaviest(self, state: Bundle, client: Client) -> Work:
        return self._contrasting(super().heaviest(state, client), client)

    def _contrasting(self, plain: Work, client: Client) -> Work:
        if not self.params.mu:
            return plain
        _, features = cut_shapes(self.context.family, client.variant, self.context.spec)
        return replace_fields(
            plain,
            held_models=2,  # what was received, and the previous model
            held_values=2 * plain.batch * prod(features),
            each_step=(Pass("forward", "features", plain.batch),) * 2,
        )

    def local_step(self, job: Job, model: Net, start: Tensors) -> Step:
        plain = super().local_step(job, model, start)
        if not self.params.mu:
            return plain
        own = {name: tensor.to(start[name].device) for name, tensor in own_tensors(job).items()}
        if all(torch.equal(own[name], tensor) for name, tensor in start.items()):
            return plain
        received, previous = frozen(job, start), frozen(job, own)

        def step(optimizer: Stepper, x: Tensor, y: Tensor) -> Tensor:
            z_g, z_p = self.features(received, x), self.features(previous, x)
            optimizer.zero_grad()
            z = model.features(x)
            loss = label_loss(model.classify(z), y)
            (loss + self.params.mu * contrast(z, z_g, z_p, self.params.temperature)).backward()
            optimizer.step()
            return loss.detach()

        return step

    @torch.no_grad()
    def features(self, net: Net, x: Tensor) -> Tensor:
        """What a frozen model makes of a batch."""
        with foreign_batch(net, self.params.statistics == "batch"):
            return net.features(x)

    def kept(self, job: Job, model: Net, start: Tensors) -> Bundle | None:
        return keep_model(model) if self.params.mu else None

    def remember(self, state: Bundle, arrivals: Sequence[Arrival]) -> Bundle:
        return Bundle(state.tensors, {**state.values, MERGED: True})


def contrast(z: Tensor, z_g: Tensor, z_p: Tensor, temperature: float) -> Tensor:
    """-log of the share of z_g: log(1 + exp((cos(z, z_p) - cos(z, z_g)) / T)), the mean over the batch."""
    return F.softplus((F.cosine_similarity(z, z_p) - F.cosine_similarity(z, z_g)) / temperature).mean()
