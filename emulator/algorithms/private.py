"""Private: every client trains its own model alone; nothing is ever sent.

The control of FedHe (Chan and Ngai, MSN 2021), FedHeNN (Makhija et al., ICML 2022) and of every
personalised method: what a client reaches without the others. Unlike FedAvg no weights travel (0 bytes
either way) and each client's own model is evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

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
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.description import Description
from fleetbed.emulator.method.local_training import (
    cross_entropy_step,
    keep_model,
    kept_models,
    own_optimizer,
    own_targets,
    own_tensors,
    train,
)
from fleetbed.emulator.method.schedule import batch_of, steps_of
from fleetbed.models.work import Work
from fleetbed.profiles.experiment import Batch, Steps

ABOUT = Description(
    paper="the control of FedHe and FedHeNN",
    down="0",
    up="0",
    client="its model, and its optimiser if asked for",
    server="nothing",
)


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The defaults are the experiment's own training; FedHe's control takes 3, 50 and true."""

    steps: Steps | None = None  # so many random batches instead of the experiment's epochs
    batch: Batch | None = None  # their size, instead of the experiment's
    keep_optimizer: bool = False  # carry the optimiser's state over from task to task


class Method(Algorithm):
    params: Params

    @property
    def needs(self) -> Needs:
        return Needs(initial_on_client=True)

    def setup(self) -> Bundle:
        return Bundle()

    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        return Bundle()

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        client, training = assignment.client, self.context.training
        return Work(
            steps=self.params.steps or steps_of(client.samples, training),
            batch=batch_of(client.samples, self.params.batch or training.batch),
            held_models=kept_models(training.optimizer) if self.params.keep_optimizer else 1,  # what was kept
            bytes_down=0,
            bytes_up=0,
        )

    def client(self, job: Job) -> Reply:
        model = job.model(own_tensors(job))
        optimizer = own_optimizer(job, model)
        metrics = train(
            job,
            model,
            cross_entropy_step(model),
            optimizer=optimizer,
            steps=self.params.steps,
            batch=self.params.batch,
        )
        kept = keep_model(model, optimizer if self.params.keep_optimizer else None)
        return Reply(message=Bundle(), keep=kept, metrics=metrics)

    def expects(self, assignment: Assignment, sent: Bundle) -> Expected | None:
        return Expected()

    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        return Merged(state=state)

    def targets(self, state: Bundle) -> list[Target]:
        return own_targets(self.context)
