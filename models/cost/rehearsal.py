"""Rehearses a training step on tensors without data, in the order in which a client does it.

First come the model and the tensors that the method holds (the received weights, for example), then the batch, a
forward pass that saves activations, a backward pass that frees them while gradients appear, and the update. The peak
counts, not the sum of the parts.

Torch's fake mode imports its compiler on first use, which takes longer than the rehearsal.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fleetbed.models.base import Family, InputSpec, Net, any_labels, input_dtype, label_loss
from fleetbed.models.cost.counting import FLOAT_BYTES, Ledger
from fleetbed.models.cost.operations import Operations, OperatorCount, update_work
from fleetbed.models.work import Part, Pass, Work, through
from fleetbed.profiles.experiment import Optimizer

#: memory of a process that trains next to nothing: pages of Python and torch that it writes to, thread stacks, ZeroMQ.
#: `fleetbed models check-memory` shows the error.
PROCESS_BYTES = 8 << 20
#: memory of each parameter tensor besides its values, gradient and optimiser state: objects of Python and autograd,
#: messages, kernels compiled at run time, pages that small blocks do not fill; measured
TENSOR_BYTES = 20 << 10


class Rehearsal(Struct, frozen=True):
    memory: dict[str, int]
    steps: tuple[Operations, ...]  # one optimiser step of each phase, with what the method adds to it
    once: tuple[Operations, ...]  # of each pass
    unknown: tuple[str, ...]  # operators in no class; counted as memory-bound
    parameters: int
    state_bytes: int


def rehearse(family: Family, variant: str, spec: InputSpec, work: Work, optimizer: Optimizer) -> Rehearsal:
    """The moments of one step of each phase, and of what comes once, on tensors without data."""
    outline = family.outline(variant, spec)
    state_bytes = sum(_bytes(tensor) for tensor in outline.state_dict().values())
    shapes = _input_shapes(outline, spec, work)
    with FakeTensorMode(), OperatorCount() as count, Ledger() as ledger:
        ledger.keep("process", PROCESS_BYTES + TENSOR_BYTES * len(list(outline.parameters())))
        ledger.keep("model", sum(_bytes(tensor) for tensor in (*outline.parameters(), *outline.buffers())))
        ledger.keep("held", work.held_models * state_bytes + work.held_values * FLOAT_BYTES)
        with ledger.role(None):
            net = outline._apply(lambda t: torch.empty(t.shape, dtype=t.dtype)).train()  # type: ignore[no-untyped-call]
        trained = [p for p in net.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(lambda p: ledger.rebook(p.grad, "gradients"))
        parameters = sum(p.numel() for p in trained)
        phases = [phase for phase in work.phases if phase.steps]
        # each phase has an optimiser of its own: the largest counts
        updated = max((_trained(net, phase.trains, _bytes) for phase in phases), default=0)
        ledger.keep("optimizer", kept_copies(optimizer) * updated)
        steps = []
        for phase in work.phases:
            start = count.total
            net.zero_grad()  # a step begins without the gradients of another phase, or it would count adding to them
            if phase.steps:
                for each in (Pass("train", phase.trains, phase.batch), *phase.each_step):
                    _pass(net, each, _input(spec, shapes, each, ledger), spec)
                count.total += update_work(_trained(net, phase.trains, Tensor.numel), kept_copies(optimizer))
            steps.append(count.total - start)
        once = []
        for each in work.once:
            # without gradients the samples need not go through all at once
            samples = each.samples if each.kind == "train" else min(each.samples, work.batch)
            before = count.total
            x = _input(spec, shapes, replace(each, samples=samples), ledger)
            _pass(net, each, x, spec)
            once.append(each.samples / len(x) * (count.total - before))
    return Rehearsal(
        memory={role: size for role, size in ledger.at_peak.items() if size},
        steps=tuple(steps),
        once=tuple(once),
        unknown=tuple(sorted(count.unknown)),
        parameters=parameters,
        state_bytes=state_bytes,
    )


def _pass(net: Net, each: Pass, x: Tensor, spec: InputSpec) -> None:
    """Forward, and backward where it trains."""
    with torch.set_grad_enabled(each.kind == "train"):
        out = through(net, each.part)(x)
        is_logits = each.part in ("all", "classifier")
        loss = label_loss(out, any_labels(spec, len(x))) if is_logits else out.mean()
    if loss.requires_grad:  # a part may have no parameters
        loss.backward()


def _input(spec: InputSpec, shapes: dict[str, tuple[int, ...]], each: Pass, ledger: Ledger) -> Tensor:
    """What goes in. Features that came from elsewhere are among what the method says it holds."""
    samples = max(2, each.samples)  # a lone sample is shown twice, for batch norm
    inside = each.part in ("intermediate", "classifier")
    with ledger.role(None if inside else "batch"):
        dtype = torch.float32 if inside else input_dtype(spec)
        return torch.empty(samples, *shapes[each.part], dtype=dtype)


def _trained(net: Net, part: Part, size: Callable[[Tensor], int]) -> int:
    """The size of the parameters that a step through a part updates."""
    everything = part != "classifier"
    return sum(
        size(p)
        for name, p in net.named_parameters()
        if p.requires_grad and (everything or net.section(name) == "classifier")
    )


def _input_shapes(outline: Net, spec: InputSpec, work: Work) -> dict[str, tuple[int, ...]]:
    """The shape of what goes into each part, of one sample. A model need not have parts that the work does not use."""
    shapes: dict[str, tuple[int, ...]] = {"all": spec.shape, "features": spec.shape}
    passes = [*work.once, *(extra for phase in work.phases for extra in phase.each_step)]
    if {*(phase.trains for phase in work.phases), *(each.part for each in passes)} <= shapes.keys():
        return shapes
    with torch.no_grad():
        x = torch.empty(2, *spec.shape, dtype=input_dtype(spec), device="meta")
        s = outline.extract(x)
        inner = {"intermediate": tuple(s.shape[1:]), "classifier": tuple(outline.intermediate(s).shape[1:])}
        return {**shapes, **inner}


def kept_copies(optimizer: Optimizer) -> int:
    """Return the number of state tensors of the optimiser per parameter."""
    if optimizer.name == "adam":
        return 2
    return 1 if optimizer.momentum else 0


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
