"""FedHe: asynchronous; only the mean logits of each class travel.

Chan and Ngai, "FedHe: Heterogeneous Models and Communication-Efficient Federated Learning", MSN 2021.
Unlike FedAvg no weights are ever sent, so that clients may have any models: a client uploads the mean
logit vector of each class that it saw, C(C+1) values, and trains with the server's mean of all uploads
(Eq. 13):

    L = CE(z, y) + alpha * mean over i, j of (z_ij - p_s[y_i]_j)^2

The server keeps sums and counts. As in the released code nothing is sent until as many results came as
there are clients, and now and then the sums collapse to their mean, which lets old logits fade. Where the
paper is silent: l_logit is the squared error, a class that the server does not know yet gets cross
entropy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from msgspec import Meta, Struct
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator.method.algorithm import (
    Algorithm,
    Arrival,
    Assignment,
    Expected,
    Job,
    Merged,
    Needs,
    Reply,
    Spec,
    Target,
)
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.description import Description
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

FORGET_PER_CLIENT = 10  # the released code collapses the sums every 10 K turns


Results = Annotated[int, Meta(ge=0, le=1_000_000_000)]


ABOUT = Description(
    paper="Chan and Ngai, MSN 2021",
    down="C(C+1), after as many results as there are clients",
    up="C(C+1), without classes that it did not see",
    client="its model and optimiser",
    server="sums and counts of logits, C(C+1)",
)


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The paper's optimiser is Adam at 1e-3 (`training.optimizer`); its state lives on between turns."""

    alpha: NonNegative = 1.0  # weight of the logit loss; 0 is private training
    steps: Steps = 3  # random batches of a turn
    batch: Batch = 50  # their size; a client with fewer samples takes all of them
    cold_start: Results | None = None  # results before logits are sent; None: one per client
    forget_every: Results | None = None  # results between collapses; 0 never, None: 10 per client
    plus_one: bool = False  # divide by V + 1 as Eq. 8 does, which shrinks the logits and sends zeros for unseen classes


class Method(Algorithm):
    params: Params

    @property
    def needs(self) -> Needs:
        return Needs(initial_on_client=True)

    def setup(self) -> Bundle:
        classes = self.context.spec.classes
        sums = torch.zeros(classes, classes, dtype=torch.float64)
        return Bundle({"sum": sums, "count": torch.zeros(classes, dtype=torch.int64)}, {"turns": 0})

    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        cold = len(self.context.clients) if self.params.cold_start is None else self.params.cold_start
        if state.value("turns", int) < cold:
            return Bundle()
        known = state.tensors["count"].nonzero().flatten()
        means = state.tensors["sum"][known] / state.tensors["count"][known, None]
        return _records(known, means)

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
        model = job.model(own_tensors(job))
        optimizer = own_optimizer(job, model)
        classes = self.context.spec.classes
        sums, counts = torch.zeros(classes, classes), torch.zeros(classes, dtype=torch.int64)
        received = job.message.tensors if self.params.alpha else {}
        targets = torch.full((classes, classes), torch.nan)
        if received:
            targets[received["class"].long()] = received["logits"]

        def step(optimizer: Stepper, x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            z = model(x)
            loss = entropy = F.cross_entropy(z, y)
            if received:
                loss = entropy + self.params.alpha * logit_loss(z, targets.to(z.device)[y])
            loss.backward()
            optimizer.step()
            sums.index_add_(0, y.cpu(), z.detach().cpu())
            counts.add_(torch.bincount(y.cpu(), minlength=classes))
            return entropy.detach()

        metrics = train(job, model, step, optimizer=optimizer, steps=self.params.steps, batch=self.params.batch)
        seen = torch.arange(classes) if self.params.plus_one else counts.nonzero().flatten()
        means = sums[seen] / (counts[seen, None] + int(self.params.plus_one))
        return Reply(message=_records(seen, means), keep=keep_model(model, optimizer), metrics=metrics)

    def expects(self, assignment: Assignment, sent: Bundle) -> Expected | None:
        classes = self.context.spec.classes
        return Expected(tensors={"class": Spec(torch.int32, (None,)), "logits": Spec(torch.float32, (None, classes))})

    def objection(self, assignment: Assignment, message: Bundle) -> str | None:
        classes, logits, known = message.tensors["class"], message.tensors["logits"], self.context.spec.classes
        if len(classes) != len(logits):
            return f"{len(classes)} classes with {len(logits)} vectors of logits"
        if len(classes) > known or len({*classes.tolist()} & {*range(known)}) < len(classes):
            return f"its classes must differ and lie between 0 and {known - 1}"
        return None

    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        """Every upload counts once: a policy's mixing weight is for methods that move weights."""
        sums, counts = state.tensors["sum"].clone(), state.tensors["count"].clone()
        turns = state.value("turns", int)
        forget = self.params.forget_every
        every = FORGET_PER_CLIENT * len(self.context.clients) if forget is None else forget
        for arrival in arrivals:
            uploaded = arrival.message.tensors
            classes = uploaded["class"].long()
            sums.index_add_(0, classes, uploaded["logits"].double())
            counts.index_add_(0, classes, torch.ones_like(classes))
            turns += 1
            if every and turns % every == 0:
                sums /= counts.clamp_min(1)[:, None]
                counts.clamp_(max=1)
        return Merged(state=Bundle({"sum": sums, "count": counts}, {"turns": turns}))

    def targets(self, state: Bundle) -> list[Target]:
        return own_targets(self.context)


def logit_loss(z: Tensor, target: Tensor) -> Tensor:
    """The mean squared error over batch and classes; a sample without a target (NaN) adds nothing."""
    return torch.where(target.isnan(), 0.0, z - target.nan_to_num()).square().mean()


def _records(classes: Tensor, logits: Tensor) -> Bundle:
    """C records of a class and its mean logits: C(C+1) values of 4 bytes."""
    return Bundle({"class": classes.int(), "logits": logits.float()})
