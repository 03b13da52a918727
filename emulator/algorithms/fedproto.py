"""FedProto: clients keep their models and exchange the mean features of each class.

Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022. Unlike FedAvg no weights
are ever sent, so that clients may have any models whose features h (what the classifier reads) have the same width d. A
client pulls its features to the server's prototypes p,

    L = CE(z, y) + lambda * mean over i, j of (h_ij - p[y_i]_j)^2

and uploads the mean of its own h for each class, over the last epoch and taken before each step. The server's p[c] is
the mean over clients of what they sent for class c, unweighted. The release takes the clients of the last round; here
it is the newest upload of every client, so that results may come one by one. A class that nobody sent has no prototype,
and its samples get cross entropy alone. Models are tested by their classifier or by the nearest prototype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from msgspec import Struct, field
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator.bases.class_means import CLASS, ClassMeans, by_class, expected, objection, squared_error
from fleetbed.emulator.bases.features import cut_shapes
from fleetbed.emulator.method.algorithm import (
    Algorithm,
    Arrival,
    Assignment,
    Expected,
    Job,
    Merged,
    Needs,
    Reply,
    Target,
)
from fleetbed.emulator.method.bundle import Bundle, prefixed
from fleetbed.emulator.method.description import Description
from fleetbed.emulator.method.local_training import keep_model, on_both_test_sets, own_targets, own_tensors, train
from fleetbed.emulator.method.optimizers import Stepper
from fleetbed.emulator.method.schedule import batch_of, steps_of
from fleetbed.models.base import Net, Tensors
from fleetbed.models.work import Work
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.types import NonNegative

PROTOTYPES, CLASSES = "prototypes", "classes"


ABOUT = Description(
    paper="Tan et al., AAAI 2022",
    down="C·d, from the second round on",
    up="C(d+1), without classes that it did not see",
    client="its model",
    server="the newest C(d+1) of each client",
)


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lambda_: NonNegative = field(default=1.0, name="lambda")  # weight of the prototypes; 0 is private training
    predictor: Literal["classifier", "prototype"] = "classifier"  # by what a model is tested


class Method(Algorithm):
    params: Params

    @property
    def needs(self) -> Needs:
        return Needs(cuts=True, classes=True, initial_on_client=True, reported="personal-own")

    def check(self) -> None:
        widths = {v: self.width(v) for v in self.context.variants}
        if len({*widths.values()}) > 1:
            raise BadInput(
                f"model.family is {self.context.family.name}, but fedproto needs features of one width in all variants "
                f"({', '.join(f'{v} has {width}' for v, width in widths.items())}): choose a family such as "
                f"resnet-stage, vit-layer, fedin-v1 or lstm, or variants of one width by model.variants."
            )

    def width(self, variant: str) -> int:
        """d, the width of the features."""
        (width,) = cut_shapes(self.context.family, variant, self.context.spec)[1]
        return width

    def setup(self) -> Bundle:
        return Bundle()

    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        means = self.prototypes(state)
        return Bundle({PROTOTYPES: means.means.float()}, {CLASSES: means.known.tolist()}) if state.tensors else Bundle()

    def prototypes(self, state: Bundle) -> ClassMeans:
        """The mean over clients of the newest that each sent."""
        means = ClassMeans.empty(self.context.spec.classes, self.width(self.context.variants[0]), torch.float64)
        for client in self.context.clients:
            if f"{client.number}/{CLASS}" in state.tensors:
                means.add(state.tensors[f"{client.number}/{CLASS}"], state.tensors[f"{client.number}/{PROTOTYPES}"])
        return means

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        client, training = assignment.client, self.context.training
        classes, width = self.context.spec.classes, self.width(client.variant)
        return Work(
            steps=steps_of(client.samples, training),
            batch=batch_of(client.samples, training.batch),
            held_models=1,  # what was kept
            held_values=2 * classes * width,  # the server's prototypes and its own
            bytes_down=4 * classes * width,
            bytes_up=4 * classes * (width + 1),
        )

    def client(self, job: Job) -> Reply:
        model = job.model(own_tensors(job))
        own = ClassMeans.empty(self.context.spec.classes, self.width(job.client.variant))
        prototypes = None
        if self.params.lambda_ and job.message.tensors:
            known = torch.tensor(job.message.values[CLASSES])
            prototypes = by_class(known, job.message.tensors[PROTOTYPES], self.context.spec.classes)
        epoch = job.client.samples // batch_of(job.client.samples, self.context.training.batch)

        def step(optimizer: Stepper, x: Tensor, y: Tensor) -> Tensor:
            if job.steps % epoch == 0:
                own.clear()
            optimizer.zero_grad()
            h = model.features(x)
            loss = entropy = F.cross_entropy(model.classify(h), y)
            if prototypes is not None:
                loss = entropy + self.params.lambda_ * squared_error(h, prototypes[y])
            loss.backward()
            optimizer.step()
            own.add(y, h)
            return entropy.detach()

        metrics = train(job, model, step)
        return Reply(message=own.records(PROTOTYPES), keep=keep_model(model), metrics=metrics)

    def expects(self, assignment: Assignment, sent: Bundle) -> Expected | None:
        return expected(PROTOTYPES, self.width(assignment.client.variant))

    def objection(self, assignment: Assignment, message: Bundle) -> str | None:
        return objection(message, PROTOTYPES, self.context.spec.classes)

    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        """Keep the newest upload of every client: a policy's mixing weight is for methods that move weights."""
        tensors = dict(state.tensors)
        for arrival in arrivals:
            tensors |= prefixed(f"{arrival.client.number}/", arrival.message.tensors)
        return Merged(state=Bundle(tensors))

    def targets(self, state: Bundle) -> list[Target]:
        by_distance = self.params.predictor == "prototype" and state.tensors
        extras = self.prototypes(state).records(PROTOTYPES).tensors if by_distance else {}
        return on_both_test_sets([replace(target, extras=extras) for target in own_targets(self.context)])

    def predict(self, model: Net, x: Tensor, extras: Tensors) -> Tensor:
        """By the classifier, or by the distance to each prototype; a class that has none is never the nearest."""
        if not extras:
            return super().predict(model, x, extras)
        h = model.features(x)
        known = -torch.stack([(h - p).square().mean(1) for p in extras[PROTOTYPES]], 1)
        scores = (
            known.min() - 1 + known.new_zeros(len(x), self.context.spec.classes)
        )  # finite, or the loss would not be
        scores[:, extras[CLASS].long()] = known
        return scores
