"""The optimisers of the clients: torch's own fused kernels, without what `torch.optim` brings along.

Making or stepping a `torch.optim.Optimizer` imports the compiler of torch: more than a second at every start and 96 MB
in whichever process does it. Its kernels need none of that, and update all tensors in one call without a copy of any.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from fleetbed.models.base import Net
from fleetbed.profiles.experiment import Optimizer

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # torch's defaults, and those of the papers


class Stepper(Protocol):
    """What a method asks of an optimiser. `state` is by parameter, and empty before its first step."""

    state: dict[Tensor, dict[str, Tensor]]

    def zero_grad(self) -> None: ...
    def step(self) -> None: ...


class _Parameters(ABC):
    """`undecayed` are those that weight decay spares."""

    def __init__(
        self, parameters: Iterable[Parameter], weight_decay: float, undecayed: Collection[Parameter] = ()
    ) -> None:
        self._all = list(parameters)
        self.state: dict[Tensor, dict[str, Tensor]] = {p: {} for p in self._all}
        spared = {id(p) for p in undecayed}
        decayed = [p for p in self._all if id(p) not in spared]
        groups = [(decayed, weight_decay), ([p for p in self._all if id(p) in spared], 0.0)]
        self._groups = [(group, decay) for group, decay in groups if group]

    def zero_grad(self) -> None:
        for p in self._all:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for group, decay in self._groups:
            # those that the loss reached
            pairs = [(p, p.grad) for p in group if p.grad is not None]
            if pairs:
                self._update([p for p, _ in pairs], [gradient for _, gradient in pairs], decay)

    @abstractmethod
    def _update(self, used: list[Tensor], gradients: list[Tensor], weight_decay: float) -> None: ...


class SGD(_Parameters):
    def __init__(
        self,
        parameters: Iterable[Parameter],
        lr: float,
        momentum: float,
        weight_decay: float,
        undecayed: Collection[Parameter] = (),
    ) -> None:
        super().__init__(parameters, weight_decay, undecayed)
        self._lr, self._momentum = lr, momentum

    def _update(self, used: list[Tensor], gradients: list[Tensor], weight_decay: float) -> None:
        if self._momentum:
            for p in used:
                if not self.state[p]:  # from zero the first step is the plain gradient, as it is to be
                    self.state[p] = {"momentum_buffer": torch.zeros_like(p)}
        torch._fused_sgd_(
            used,
            gradients,
            [self.state[p]["momentum_buffer"] for p in used] if self._momentum else [],
            lr=self._lr,
            momentum=self._momentum,
            weight_decay=weight_decay,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


class Adam(_Parameters):
    def __init__(
        self, parameters: Iterable[Parameter], lr: float, weight_decay: float, undecayed: Collection[Parameter] = ()
    ) -> None:
        super().__init__(parameters, weight_decay, undecayed)
        self._lr = lr

    def _update(self, used: list[Tensor], gradients: list[Tensor], weight_decay: float) -> None:
        for p in used:
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.zeros((), device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        slots = [self.state[p] for p in used]
        counts = [slot["step"] for slot in slots]
        torch._foreach_add_(counts, 1)
        torch._fused_adam_(
            used,
            gradients,
            [slot["exp_avg"] for slot in slots],
            [slot["exp_avg_sq"] for slot in slots],
            [],
            counts,
            lr=self._lr,
            beta1=BETA1,
            beta2=BETA2,
            weight_decay=weight_decay,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )


def make_optimizer(choice: Optimizer, model: Net) -> Stepper:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    biases = [] if choice.decay_biases else [p for name, p in named if "bias" in name]
    if choice.name == "adam":
        return Adam(parameters, choice.lr, choice.weight_decay, biases)
    return SGD(parameters, choice.lr, choice.momentum, choice.weight_decay, biases)
