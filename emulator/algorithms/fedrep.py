"""FedRep: a common representation is learnt together, the head of each client by itself.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021. A model is a
representation w_r and a head w_h. As in FedPer only w_r travels; unlike FedPer, where both are trained together, a
client first fits its head to the representation that it received, and then moves the representation under that head:

    head phase            w_h <- w_h - lr grad CE(w_r, w_h)    for `head_epochs`, w_r frozen
    representation phase  w_r <- w_r - lr grad CE(w_r, w_h)    for `rep_epochs`, w_h frozen
    server                w_r <- the mean over the clients that hold it

Each phase has an optimiser and an order of the data of its own. While the representation is frozen its batch norm uses
the statistics of the batch and leaves the running ones alone. A client that has not taken part yet has the initial
head. The release ends with a round in which all clients train their heads alone: evaluation here is always of the
server's representation under the head that a client kept.
"""

from __future__ import annotations

from typing import Annotated

import torch
from msgspec import Meta
from msgspec.structs import replace
from torch import Tensor

from fleetbed.emulator.bases.averaging import Means, weights_of
from fleetbed.emulator.bases.personal import PersonalHead
from fleetbed.emulator.method.algorithm import Assignment, Job, Reply
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.description import Description
from fleetbed.emulator.method.local_training import Step, cross_entropy_step, foreign_batch, own_tensors, train
from fleetbed.emulator.method.optimizers import Stepper
from fleetbed.emulator.method.schedule import steps_of
from fleetbed.models.base import Net, label_loss
from fleetbed.models.work import Pass, Phase, Work
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Steps

Epochs = Annotated[int, Meta(ge=0, le=100_000)]


ABOUT = Description(
    paper="Collins et al., ICML 2021",
    down="P + b of all but the head",
    up="P + b of all but the head",
    client="its head",
    server="one representation, of which each variant's is a part",
)


class Params(Means, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Means`, and: (epochs are these, not those of `training`)"""

    head_epochs: Epochs = 10  # epochs in which the head alone is trained
    rep_epochs: Epochs = 1  # 0: the server's representation never changes
    steps: Steps | None = None  # so many random batches in each phase that has epochs, instead of those


class Method(PersonalHead):
    params: Params

    def check(self) -> None:
        super().check()
        if not self.params.head_epochs and not self.params.rep_epochs:
            raise BadInput("params.head_epochs and params.rep_epochs are both 0, so that nothing would be trained.")

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        plain = super().work(state, assignment)
        samples, training = assignment.client.samples, self.context.training

        def steps(epochs: int) -> int:
            if epochs and self.params.steps:
                return self.params.steps
            return steps_of(samples, replace(training, epochs=epochs, max_steps=None))

        head = Phase(
            steps=steps(self.params.head_epochs),
            batch=plain.batch,
            trains="classifier",
            each_step=(Pass("forward", "features", plain.batch),),
        )
        return replace(plain, earlier=(head,), steps=steps(self.params.rep_epochs))

    def client(self, job: Job) -> Reply:
        start = {**own_tensors(job), **weights_of(job.message)}
        model = job.model(start)
        metrics: dict[str, float] = {}
        head_epochs, rep_epochs, steps = self.params.head_epochs, self.params.rep_epochs, self.params.steps
        if head_epochs:
            train_only(model, head=True)
            metrics |= train(job, model, head_step(model), epochs=head_epochs, steps=steps, phase="head")
        if rep_epochs:
            train_only(model, head=False)
            metrics |= train(job, model, cross_entropy_step(model), epochs=rep_epochs, steps=steps)
        return self.reply(job, model, start, metrics)


def train_only(model: Net, *, head: bool) -> None:
    """Freeze the representation, or else the head. An optimiser made after this knows nothing of what is frozen."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_((model.section(name) == "classifier") is head)


def head_step(model: Net) -> Step:
    """One step of the head on features of the frozen representation."""

    def step(optimizer: Stepper, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.no_grad(), foreign_batch(model):
            features = model.features(x)
        loss = label_loss(model.classify(features), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
