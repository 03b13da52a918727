"""The base of methods that train all exits of a model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from msgspec.structs import replace
from torch import Tensor

from fleetbed.emulator.bases.averaging import Averaging
from fleetbed.emulator.method.algorithm import Assignment, Job
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.local_training import Step
from fleetbed.emulator.method.optimizers import Stepper
from fleetbed.models.base import Net, Tensors
from fleetbed.models.work import Work
from fleetbed.profiles.errors import BadInput


class Exits(Averaging):
    """Averages weights over those that hold them; each step goes through all exits of the client's model."""

    def check(self) -> None:
        super().check()
        family = self.context.family
        if not family.has_exits:
            raise BadInput(
                f"model.family is {family.name}, whose models have no early exits, but this method trains them: "
                f"choose resnet-exit or resnet-depth."
            )

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        return replace(super().work(state, assignment), trains="exits")

    def local_step(self, job: Job, model: Net, start: Tensors) -> Step:
        regularise = self.regularise(job, model, start)

        def step(optimizer: Stepper, x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(job.assignment.round, model.exits(x), y)
            loss.backward()
            regularise()
            optimizer.step()
            return loss.detach()

        return step

    @abstractmethod
    def loss(self, round_: int, exits: Sequence[Tensor], y: Tensor) -> Tensor:
        """Return the loss of a mini-batch in a round of the policy, from the logits of all exits, shallow to deep."""

    def regularise(self, job: Job, model: Net, start: Tensors) -> Callable[[], None]:
        """Return a function that changes the gradients before the optimiser uses them; by default it does nothing."""
        return lambda: None
