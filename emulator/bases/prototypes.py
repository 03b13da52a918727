"""What FedProto and FedTGP share: clients keep their models, and pull their features to a prototype of each class."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from msgspec import Struct, field
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator.bases.class_means import (
    CLASS,
    ClassMeans,
    by_class,
    expected,
    objection,
    records,
    squared_error,
)
from fleetbed.emulator.bases.features import check_widths, feature_width
from fleetbed.emulator.method.algorithm import Algorithm, Assignment, Client, Expected, Job, Needs, Reply, Target
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.local_training import keep_model, on_both_test_sets, own_targets, own_tensors, train
from fleetbed.emulator.method.optimizers import Stepper
from fleetbed.emulator.method.schedule import batch_of, steps_of
from fleetbed.models.base import Net, Tensors
from fleetbed.models.work import Work
from fleetbed.profiles.types import NonNegative

PROTOTYPES, CLASSES = "prototypes", "classes"
Known = tuple[Tensor, Tensor]  # the classes that have a prototype, and the prototype of each


class Pull(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters that both have."""

    lambda_: NonNegative = field(default=1.0, name="lambda")  # weight of the prototypes; 0 is private training
    predictor: Literal["classifier", "prototype"] = "classifier"  # by what a model is tested


class Prototypes(Algorithm):
    """A client trains with L = CE(z, y) + lambda * mean over i, j of (h_ij - p[y_i]_j)^2, where h are its features.

    It sends a mean of its own h for each class. A method says which, and what the server makes of them.
    """

    params: Pull
    #: as the method is called in messages
    name: str

    @abstractmethod
    def prototypes(self, state: Bundle) -> Known:
        """What the server has for each class that it knows."""

    def saw(self, job: Job, own: ClassMeans, y: Tensor, h: Tensor) -> None:
        """Note the features of a training step, as they were before it."""

    def trained(self, job: Job, own: ClassMeans, model: Net) -> None:
        """Note the features of the trained model."""

    @property
    def needs(self) -> Needs:
        return Needs(cuts=True, classes=True, initial_on_client=True, reported="personal-own")

    def check(self) -> None:
        check_widths(self.context, self.name)

    def reassign(self, clients: Sequence[Client]) -> None:
        super().reassign(clients)
        self.check()  # a client may have stepped down to features of another width

    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        classes, vectors = self.prototypes(state)
        return Bundle({PROTOTYPES: vectors.float()}, {CLASSES: classes.tolist()}) if len(classes) else Bundle()

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        client, training = assignment.client, self.context.training
        classes, width = self.context.spec.classes, feature_width(self.context, client.variant)
        return Work(
            steps=steps_of(client.samples, training),
            batch=batch_of(client.samples, training.batch),
            held_models=1,  # what was kept
            held_values=2 * classes * width,  # the server's prototypes and its own
            bytes_down=4 * classes * width,
            bytes_up=4 * classes * (width + 1),
        )

    def client(self, job: Job) -> Reply:
        model, classes = job.model(own_tensors(job)), self.context.spec.classes
        own = ClassMeans.empty(classes)
        wanted = None
        if self.params.lambda_ and job.message.tensors:
            wanted = by_class(torch.tensor(job.message.values[CLASSES]), job.message.tensors[PROTOTYPES], classes)

        def step(optimizer: Stepper, x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            h = model.features(x)
            loss = entropy = F.cross_entropy(model.classify(h), y)
            if wanted is not None:
                loss = entropy + self.params.lambda_ * squared_error(h, wanted[y])
            loss.backward()
            optimizer.step()
            self.saw(job, own, y, h)
            return entropy.detach()

        metrics = train(job, model, step)
        self.trained(job, own, model)
        return Reply(message=own.records(PROTOTYPES), keep=keep_model(model), metrics=metrics)

    def expects(self, assignment: Assignment, sent: Bundle) -> Expected | None:
        return expected(PROTOTYPES, feature_width(self.context, assignment.client.variant))

    def objection(self, assignment: Assignment, message: Bundle) -> str | None:
        return objection(message, PROTOTYPES, self.context.spec.classes)

    def targets(self, state: Bundle) -> list[Target]:
        extras: Tensors = {}
        if self.params.predictor == "prototype" and len((known := self.prototypes(state))[0]):
            extras = records(PROTOTYPES, *known).tensors
        return on_both_test_sets([replace(target, extras=extras) for target in own_targets(self.context)])

    def predict(self, model: Net, x: Tensor, extras: Tensors) -> Tensor:
        """By the classifier, or by the distance to each prototype; a class that has none is never the nearest."""
        if not extras:
            return super().predict(model, x, extras)
        h = model.features(x)
        known = -torch.stack([(h - p).square().mean(1) for p in extras[PROTOTYPES]], 1)
        # finite, or the loss would not be
        scores = known.min() - 1 + known.new_zeros(len(x), self.context.spec.classes)
        scores[:, extras[CLASS].long()] = known
        return scores
