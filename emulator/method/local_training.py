"""Parts that client halves share: the training loop, a proximal term, batches from elsewhere, personal models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fleetbed.emulator.method.algorithm import Context, Job, Target
from fleetbed.emulator.method.bundle import Bundle, prefixed
from fleetbed.emulator.method.optimizers import Stepper
from fleetbed.models.base import Net, Tensors, label_loss
from fleetbed.profiles.experiment import Optimizer

Step = Callable[[Stepper, Tensor, Tensor], Tensor]
#: where a client keeps its own model and the state of its optimiser
MODEL, OPTIMIZER = "model/", "optimizer/"


def train(
    job: Job,
    model: Net,
    step: Step,
    *,
    optimizer: Stepper | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    batch: int | None = None,
    phase: str = "",
) -> dict[str, float]:
    """Run `step` on every mini-batch; the metrics hold the mean of what it returns."""
    optimizer = optimizer or job.optimizer(model)
    batches = job.batches(epochs=epochs, steps=steps, batch=batch, phase=phase)
    losses = [float(step(optimizer, x, y)) for x, y in batches]
    return {"loss": sum(losses) / len(losses)} if losses else {}


def cross_entropy_step(
    model: Callable[[Tensor], Tensor],
    regularise: Callable[[], None] = lambda: None,
    loss_of: Callable[[Tensor, Tensor], Tensor] = label_loss,
) -> Step:
    """One step of plain local training; `regularise` changes the gradients before the optimiser uses them.

    Where labels are numbers the loss is the squared error.
    """

    def step(optimizer: Stepper, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        regularise()
        optimizer.step()
        return loss.detach()

    return step


def proximal(model: Net, anchor: Tensors, mu: float) -> Callable[[], None]:
    """Adds the gradient of (mu/2) ||w - anchor||^2 over the trainable tensors to what is there.

    Written out, for through autograd the differences of all tensors would be held at once.
    """
    pairs = [(p, anchor[name].to(p.device)) for name, p in model.named_parameters() if p.requires_grad]

    @torch.no_grad()
    def regularise() -> None:
        for p, start in pairs:
            if mu and p.grad is not None:
                p.grad.add_(p - start, alpha=mu)

    return regularise


def batch_norms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


@contextmanager
def foreign_batch(model: nn.Module, own_statistics: bool = True) -> Iterator[None]:
    """Batch norm uses the batch's own statistics, in evaluation mode too, and does not count it as the client's data.

    Without `own_statistics` nothing is changed.
    """
    norms: list[Any] = batch_norms(model) if own_statistics else []
    before = [(norm.track_running_stats, norm.training) for norm in norms]
    for norm in norms:
        norm.track_running_stats, norm.training = False, True
    try:
        yield
    finally:
        for norm, (tracking, training) in zip(norms, before, strict=True):
            norm.track_running_stats, norm.training = tracking, training


@torch.no_grad()
def recalibrate(model: Net, batches: Iterable[Tensor]) -> None:
    """Set batch norm's running statistics to the mean of those of the batches, in all exits; nothing else changes.

    They become new tensors, for those that the model was loaded with may belong to others.
    """
    norms: list[Any] = batch_norms(model)
    if not norms:
        return
    was_training = model.training
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        for name, buffer in list(norm.named_buffers(recurse=False)):
            setattr(norm, name, torch.empty_like(buffer))
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean over the batches
    model.eval()
    for norm in norms:
        norm.train()
    for x in batches:
        model.exits(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.train(was_training)


def own_tensors(job: Job) -> Tensors:
    """Return the tensors of the client's own model: those that it kept, or the initial ones before its first task."""
    return job.kept.under(MODEL) if job.kept is not None else job.context.initial(job.client.variant)


def frozen(job: Job, tensors: Tensors) -> Net:
    """Return the client's model on these tensors themselves, which must not be changed."""
    net = job.context.family.load(job.client.variant, job.context.spec, tensors, "a model of the client")
    return net.eval().requires_grad_(False)


def keep_model(model: Net, optimizer: Stepper | None = None) -> Bundle:
    """Return the state to keep: the model, and the optimiser's state if it lasts from task to task."""
    slots = {} if optimizer is None else prefixed(OPTIMIZER, slots_of(model, optimizer))
    return Bundle({**prefixed(MODEL, dict(model.state_dict())), **slots})


def own_optimizer(job: Job, model: Net, prefix: str = OPTIMIZER) -> Stepper:
    """Return the client's optimiser as its last task left it, with its state below `prefix`."""
    optimizer = job.optimizer(model)
    if job.kept is not None:
        restore_slots(model, optimizer, job.kept.under(prefix))
    return optimizer


def slots_of(model: nn.Module, optimizer: Stepper) -> Tensors:
    """The state of an optimiser, by the names of the model's parameters."""
    named = model.named_parameters()
    return {f"{name}/{key}": slot for name, p in named for key, slot in optimizer.state.get(p, {}).items()}


def restore_slots(model: nn.Module, optimizer: Stepper, slots: Tensors) -> None:
    """Give a new optimiser a copy of the state that another one had."""
    parameters = dict(model.named_parameters())
    for path, slot in slots.items():
        name, key = path.rsplit("/", 1)
        optimizer.state[parameters[name]][key] = slot.clone()


def kept_models(optimizer: Optimizer) -> int:
    """Return how many times the size of a model a client keeps, including its optimiser's state."""
    return 3 if optimizer.name == "adam" else 1 + bool(optimizer.momentum)


def own_targets(context: Context, *, local: bool = False) -> list[Target]:
    """Every client's own model."""
    return [
        Target(name=f"client-{c.number:03d}", variant=c.variant, client=c.number, prefix=MODEL, local=local)
        for c in context.clients
    ]


def on_both_test_sets(personal: list[Target]) -> list[Target]:
    """Return the targets that test each client's model on its own test data, and on the whole test set."""
    own = [replace(target, name=f"{target.name}-own", local=True) for target in personal]
    return [*own, *personal]
