"""What training a variant costs, before it is trained: peak memory, FLOPs, the bytes of a model on the wire.

Memory is what a client's process adds after its fork while it trains, the same definition as the cap's and the
meter's. A step is rehearsed on tensors without data, in the order in which a client does it: the model stands beside
what the method holds (the received weights, for one), then come the batch, a forward pass that saves activations, a
backward pass that frees them while gradients appear, and the update. The largest moment counts, not the sum of parts.

FLOPs are two per multiply-add and count matrix products and convolutions; elementwise work is left out, as fvcore,
torch's counter and the papers do.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fleetbed.models.base import Family, InputSpec, Net
from fleetbed.models.counting import FLOAT_BYTES, Ledger
from fleetbed.models.flops import TRAINING_RULES, forward_macs, input_dtype
from fleetbed.models.work import Pass, Work
from fleetbed.profiles.experiment import Optimizer

#: what a process costs that trains next to nothing: pages of Python and torch that it writes to, thread stacks,
#: ZeroMQ, kernels compiled at run time. `fleetbed models check-memory` shows how far off it is.
PROCESS_BYTES = 14 << 20
#: an elementwise pass multiplies and adds once per parameter
PARAMETER_PASS_FLOPS = 2.0


class Cost(Struct, frozen=True, kw_only=True):
    """`memory` splits the peak `memory_bytes` by what is alive at that moment."""

    memory_bytes: int
    memory: dict[str, int]
    flops: float  # of the whole work
    forward_flops: float  # of one sample
    parameters: int
    state_bytes: int  # parameters and buffers that travel: what a message with the whole model weighs


def cost(family: Family, variant: str, spec: InputSpec, work: Work, optimizer: Optimizer) -> Cost:
    """The cost of `work` on a client. Quick, and remembered: a step is the same however many there are."""
    one = replace(work, steps=min(1, work.steps), parameter_passes=0, server_flops=0.0)
    found = _rehearse(family, variant, spec, one, optimizer)
    passes = PARAMETER_PASS_FLOPS * work.parameter_passes * found.parameters
    return Cost(
        memory_bytes=sum(found.memory.values()),
        memory=found.memory,
        flops=work.steps * (found.step_flops + passes) + found.once_flops + work.server_flops,
        forward_flops=forward_flops(family, variant, spec),
        parameters=found.parameters,
        state_bytes=found.state_bytes,
    )


@lru_cache(maxsize=1024)
def forward_flops(family: Family, variant: str, spec: InputSpec) -> float:
    """Of one sample, by fvcore."""
    return 2.0 * forward_macs(family.empty(variant, spec), spec)


class _Rehearsal(Struct, frozen=True):
    memory: dict[str, int]
    step_flops: float
    once_flops: float
    parameters: int
    state_bytes: int


@lru_cache(maxsize=4096)
def _rehearse(family: Family, variant: str, spec: InputSpec, work: Work, optimizer: Optimizer) -> _Rehearsal:
    outline = family.outline(variant, spec)
    state_bytes = sum(t.numel() * t.element_size() for t in outline.state_dict().values())
    flops = FlopCounterMode(display=False, custom_mapping=TRAINING_RULES)
    with FakeTensorMode(), flops, Ledger() as ledger:
        ledger.hold("process", PROCESS_BYTES)
        ledger.hold("held", work.held_models * state_bytes + work.held_values * FLOAT_BYTES)
        with ledger.role("model"):
            net = outline._apply(lambda t: torch.empty(t.shape, dtype=t.dtype)).train()  # type: ignore[no-untyped-call]
        parameters = [p for p in net.parameters() if p.requires_grad]
        if work.steps:
            sizes = [p.numel() * p.element_size() for p in parameters]
            ledger.hold("optimizer", _kept_copies(optimizer) * sum(sizes))
            _train(net, spec, (Pass("train", "all", work.batch), *work.each_step), ledger)
            ledger.scratch(_update_copies(optimizer) * max(sizes))
        step_flops = flops.get_total_flops()
        once_flops = 0.0
        for each in work.once:
            part = replace(each, samples=min(each.samples, work.batch))
            before = flops.get_total_flops()
            _train(net, spec, (part,), ledger)
            once_flops += (flops.get_total_flops() - before) * each.samples / part.samples
    return _Rehearsal(
        memory={role: size for role, size in ledger.at_peak.items() if size},
        step_flops=step_flops,
        once_flops=once_flops,
        parameters=sum(p.numel() for p in parameters),
        state_bytes=state_bytes,
    )


def _kept_copies(optimizer: Optimizer) -> int:
    """Tensors that the optimiser keeps per parameter."""
    if optimizer.name == "adam":
        return 2
    return 1 if optimizer.momentum else 0


def _update_copies(optimizer: Optimizer) -> int:
    """Copies of one parameter that live while it is updated: Adam's denominator in two steps, decayed gradients."""
    return (2 if optimizer.name == "adam" else 0) + (1 if optimizer.weight_decay else 0)


def _train(net: Net, spec: InputSpec, passes: tuple[Pass, ...], ledger: Ledger) -> None:
    """All passes forward, then one backward through those that train."""

    def accumulated(parameter: Tensor) -> None:
        assert parameter.grad is not None
        ledger.rebook(parameter.grad, "gradients")

    hooks = [p.register_post_accumulate_grad_hook(accumulated) for p in net.parameters() if p.requires_grad]
    losses = [_forward(net, _input(net, spec, each, ledger), each) for each in passes]
    if trained := [loss for loss in losses if loss.requires_grad]:
        torch.autograd.backward(trained)
    for hook in hooks:
        hook.remove()


def _input(net: Net, spec: InputSpec, each: Pass, ledger: Ledger) -> Tensor:
    with ledger.role("batch"):
        x = torch.empty(each.samples, *spec.shape, dtype=input_dtype(spec))
    if each.part != "intermediate":
        return x
    with ledger.role(None), torch.no_grad():
        return torch.empty_like(net.extract(x))


def _forward(net: Net, x: Tensor, each: Pass) -> Tensor:
    """The loss of a pass; one without gradients where it does not train, or trains no parameter."""
    run = {"all": net.forward, "features": net.features, "intermediate": net.intermediate}[each.part]
    with torch.set_grad_enabled(each.kind == "train"):
        out = run(x)
        if each.part != "all":
            return out.square().mean()
        return F.cross_entropy(out, torch.empty(each.samples, dtype=torch.int64))
