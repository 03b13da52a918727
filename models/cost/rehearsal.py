"""Rehearses a training step on tensors without data, in the order in which a client does it.

First come the model and the tensors that the method holds (the received weights, for example), then the batch, a
forward pass that saves activations, a backward pass that frees them while gradients appear, and the update. The peak
counts, not the sum of the parts.

Torch's fake mode imports its compiler on first use, which takes longer than the rehearsal.
"""

from __future__ import annotations

from functools import reduce

import torch
from msgspec import Struct
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fleetbed.models.base import Family, InputSpec, Net, any_labels, input_dtype, label_loss
from fleetbed.models.cost.counting import FLOAT_BYTES, Ledger
from fleetbed.models.cost.operations import Operations, OperatorCount, update_work
from fleetbed.models.work import Part, Pass, Work, gives_logits, through
from fleetbed.profiles.experiment import Optimizer

#: memory of a process that trains next to nothing: pages of Python and torch that it writes to, thread stacks, ZeroMQ.
#: `fleetbed models check-memory` shows the error.
PROCESS_BYTES = 8 << 20
#: memory of each parameter tensor besides its values, gradient and optimiser state: objects of Python and autograd,
#: messages, kernels compiled at run time, pages that small blocks do not fill; measured
TENSOR_BYTES = 20 << 10
#: the shapes of what goes into the parts that read features, of one sample; other parts read the model's input
Shapes = dict[Part, tuple[int, ...]]


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
    shapes = _feature_shapes(outline, spec, work)
    updated = {
        part: _updated(family, variant, spec, shapes, part) for part in {p.trains for p in work.phases if p.steps}
    }
    with FakeTensorMode(), OperatorCount() as count, Ledger() as ledger:
        ledger.keep("process", PROCESS_BYTES + TENSOR_BYTES * len(list(outline.parameters())))
        ledger.keep("model", sum(_bytes(tensor) for tensor in (*outline.parameters(), *outline.buffers())))
        ledger.keep("held", work.held_models * state_bytes + work.held_values * FLOAT_BYTES)
        with ledger.role(None):
            net = _without_data(outline)
        trained = [p for p in net.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(lambda p: ledger.rebook(p.grad, "gradients"))
        parameters = sum(p.numel() for p in trained)
        # each phase has an optimiser of its own: the largest counts
        ledger.keep("optimizer", kept_copies(optimizer) * FLOAT_BYTES * max(updated.values(), default=0))
        steps = []
        for phase in work.phases:
            start = count.total
            net.zero_grad()  # a step begins without the gradients of another phase, or it would count adding to them
            if phase.steps:
                for each in (Pass("train", phase.trains, phase.batch), *phase.each_step):
                    before = count.total
                    _pass(net, each, _input(spec, shapes, each, ledger), spec)
                    count.total += (each.times - 1) * (count.total - before)
                count.total += update_work(updated[phase.trains], kept_copies(optimizer))
            steps.append(count.total - start)
        once = []
        for each in work.once:
            before = count.total
            net.train(each.samples > 1)  # batch norm cannot train on a lone sample
            _pass(net, each, _input(spec, shapes, each, ledger, least=1), spec)
            once.append(count.total - before)
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
        labels = any_labels(spec, len(x))
        losses = [
            label_loss(out, labels) if gives_logits(each.part) else out.mean() for out in through(net, each.part)(x)
        ]
        loss = reduce(torch.add, losses)
    if loss.requires_grad:  # a part may have no parameters
        loss.backward()


def _input(spec: InputSpec, shapes: Shapes, each: Pass, ledger: Ledger, least: int = 2) -> Tensor:
    """What goes in. Features that came from elsewhere are among what the method says it holds."""
    with ledger.role(None if each.part in shapes else "batch"):
        # in a step a lone sample is shown twice, for batch norm
        return _empty(spec, shapes, each.part, max(least, each.samples))


def _empty(spec: InputSpec, shapes: Shapes, part: Part, samples: int) -> Tensor:
    dtype = torch.float32 if part in shapes else input_dtype(spec)
    return torch.empty(samples, *shapes.get(part, spec.shape), dtype=dtype)


def _updated(family: Family, variant: str, spec: InputSpec, shapes: Shapes, part: Part) -> int:
    """The number of parameters that a step through a part updates: those that its gradients reach."""
    outline = family.outline(variant, spec)
    with FakeTensorMode():
        net = _without_data(outline)
        _pass(net, Pass("train", part, 2), _empty(spec, shapes, part, 2), spec)
        return sum(p.numel() for p in net.parameters() if p.grad is not None)


def _without_data(outline: Net) -> Net:
    """The model on the CPU, inside the fake mode."""
    net: Net = outline._apply(lambda t: torch.empty(t.shape, dtype=t.dtype)).train()  # type: ignore[no-untyped-call]
    return net


def _feature_shapes(outline: Net, spec: InputSpec, work: Work) -> Shapes:
    """The shapes that the work needs. A model need not have parts that it does not use."""
    passes = [*work.once, *(extra for phase in work.phases for extra in phase.each_step)]
    if not {"intermediate", "classifier"} & {*(phase.trains for phase in work.phases), *(p.part for p in passes)}:
        return {}
    with torch.no_grad():
        x = torch.empty(2, *spec.shape, dtype=input_dtype(spec), device="meta")
        s = outline.extract(x)
        return {"intermediate": tuple(s.shape[1:]), "classifier": tuple(outline.intermediate(s).shape[1:])}


def kept_copies(optimizer: Optimizer) -> int:
    """Return the number of state tensors of the optimiser per parameter."""
    if optimizer.name == "adam":
        return 2
    return 1 if optimizer.momentum else 0


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
