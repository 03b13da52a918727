"""Models made over and over again: what they are made of is worked out once, and a fresh one is a copy of that.

A client's task starts from a new model whose tensors it was sent. Running the constructor and `load_state_dict` for
it took a third of a short task, for both walk all layers with much to check; nothing of that differs between tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor, nn

from fleetbed.models.base import Family, InputSpec, Net

M = TypeVar("M", bound=nn.Module)


class Skeleton:
    """A model without memory, from which models with memory are made."""

    def __init__(self, net: Net) -> None:
        self._net = net
        self._shapes = {name: tensor.shape for name, tensor in net.state_dict().items()}

    def on(self, tensors: Mapping[str, Tensor]) -> Net:
        """A model of its own that stands on these very tensors; ValueError unless they are exactly what it needs."""
        found = {name: tensor.shape for name, tensor in tensors.items()}
        if found != self._shapes:
            wrong = sorted(dict(found.items() ^ self._shapes.items()))
            raise ValueError(f"the tensors are not those of the model: {', '.join(wrong)}")
        net = _twin(self._net, {})
        for path, module in net.named_modules():
            prefix = f"{path}." if path else ""
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    # by setattr, since recurrent layers keep a list of their weights beside
                    fresh = nn.Parameter(tensors[prefix + name], requires_grad=parameter.requires_grad)
                    setattr(module, name, fresh)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    constant = name in module._non_persistent_buffers_set
                    module._buffers[name] = (
                        torch.empty(buffer.shape, dtype=buffer.dtype) if constant else tensors[prefix + name]
                    )
        net.fill_constants()
        return net


@lru_cache(maxsize=64)
def skeleton(family: Family, variant: str, spec: InputSpec) -> Skeleton:
    return Skeleton(family.outline(variant, spec))


def _twin(module: M, made: dict[nn.Module, nn.Module]) -> M:
    """A copy that shares settings but no layer and no table with the original, whatever is registered on it later."""
    twin = type(module).__new__(type(module))
    made[module] = twin
    for name, value in module.__dict__.items():
        twin.__dict__[name] = value.copy() if isinstance(value, dict | set | list) else value
    for name, part in module._modules.items():
        if part is not None:
            twin._modules[name] = made.get(part) or _twin(part, made)
    return twin
