"""What FedHe and FD share: clients keep their models, and the mean logits of each class are all that travels."""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator.bases.class_means import CLASS, ClassMeans, by_class, expected, objection, squared_error
from fleetbed.emulator.method.algorithm import (
    Algorithm,
    Arrival,
    Assignment,
    Expected,
    Job,
    Needs,
    Reply,
    Target,
)
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.local_training import (
    keep_model,
    kept_models,
    own_optimizer,
    own_targets,
    own_tensors,
    train,
)
from fleetbed.emulator.method.optimizers import Stepper
from fleetbed.emulator.method.schedule import batch_of
from fleetbed.models.work import Work
from fleetbed.profiles.experiment import Batch, Steps
from fleetbed.profiles.types import NonNegative

LOGITS = "logits"


class Turn(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of a client's turn. Its optimiser's state lives on from turn to turn."""

    alpha: NonNegative = 1.0  # weight of the logit loss; 0 is private training
    steps: Steps = 3  # random batches of a turn
    batch: Batch = 50  # their size; a client with fewer samples takes all of them


class MeanLogits(Algorithm):
    """A turn with the server's logits, whose state is sums and counts by class."""

    params: Turn

    @property
    def needs(self) -> Needs:
        return Needs(classes=True, initial_on_client=True)

    def setup(self) -> Bundle:
        return stored(self.nothing())

    def nothing(self) -> ClassMeans:
        classes = self.context.spec.classes
        return ClassMeans.empty(classes, classes, torch.float64)

    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        means = held(state)
        return means.records(LOGITS) if len(means.known) else Bundle()

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        classes = self.context.spec.classes
        size = 4 * classes * (classes + 1)  # at most: of all classes
        return Work(
            steps=self.params.steps,
            batch=batch_of(assignment.client.samples, self.params.batch),
            held_models=kept_models(self.context.training.optimizer),
            bytes_down=size,
            bytes_up=size,
        )

    def client(self, job: Job) -> Reply:
        """Train with the logits that were received, and send the mean of one's own, each taken before its step."""
        model = job.model(own_tensors(job))
        optimizer = own_optimizer(job, model)
        classes = self.context.spec.classes
        seen = ClassMeans.empty(classes, classes)
        told, wanted = job.message.tensors, None
        if self.params.alpha and told:
            wanted = by_class(told[CLASS], told[LOGITS], classes)

        def step(optimizer: Stepper, x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            z = model(x)
            loss = entropy = F.cross_entropy(z, y)
            if wanted is not None:
                loss = entropy + self.params.alpha * squared_error(z, wanted[y])
            loss.backward()
            optimizer.step()
            seen.add(y, z)
            return entropy.detach()

        metrics = train(job, model, step, optimizer=optimizer, steps=self.params.steps, batch=self.params.batch)
        return Reply(message=self.upload(seen), keep=keep_model(model, optimizer), metrics=metrics)

    def upload(self, seen: ClassMeans) -> Bundle:
        """What a client sends of the logits that it saw."""
        return seen.records(LOGITS)

    def expects(self, assignment: Assignment, sent: Bundle) -> Expected | None:
        return expected(LOGITS, self.context.spec.classes)

    def objection(self, assignment: Assignment, message: Bundle) -> str | None:
        return objection(message, LOGITS, self.context.spec.classes)

    def targets(self, state: Bundle) -> list[Target]:
        return own_targets(self.context)


def stored(means: ClassMeans) -> Bundle:
    """Sums and counts as a server's state."""
    return Bundle({"sum": means.sums, "count": means.counts})


def held(state: Bundle) -> ClassMeans:
    """A copy of the sums and counts of a server's state."""
    return ClassMeans(state.tensors["sum"].clone(), state.tensors["count"].clone())


def count(means: ClassMeans, arrival: Arrival) -> None:
    """Count an upload once: a policy's mixing weight is for methods that move weights."""
    means.add(arrival.message.tensors[CLASS], arrival.message.tensors[LOGITS])
