"""What FedProx and HeteroProx share: a local step that is pulled back to where it started."""

from __future__ import annotations

from msgspec.structs import replace

from fleetbed.emulator.bases.averaging import Averaging
from fleetbed.emulator.method.algorithm import Assignment, Job
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.local_training import Step, cross_entropy_step, proximal
from fleetbed.models.base import Net, Tensors
from fleetbed.models.work import Work


class Proximal(Averaging):
    """CE + (mu/2) ||w - w_received||^2 over the trainable tensors."""

    mu: float

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        return replace(super().work(state, assignment), parameter_passes=2 if self.mu else 0)

    def local_step(self, job: Job, model: Net, start: Tensors) -> Step:
        return cross_entropy_step(model, proximal(model, start, self.mu))
