"""Tensors and scalars by name: what a message, a server's state and a client's kept state are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bool, int, float, str)
Scalar = bool | int | float | str | None
Value = Scalar | list[Scalar]


@dataclass(frozen=True)
class Bundle:
    """A flat mapping, so that wire and checkpoints are written once. Its tensors are never changed in place."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)

    def value(self, name: str, kind: type[T]) -> T:
        """Return the scalar of this name, which must be of this type."""
        value = self.values[name]
        assert isinstance(value, kind), f"{name} is {value!r}, not of type {kind.__name__}"
        return value

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def to(self, device: str) -> Bundle:
        """Return the bundle on a device; the bundle itself if it is there already."""
        if all(tensor.device.type == torch.device(device).type for tensor in self.tensors.values()):
            return self
        return Bundle({name: tensor.to(device) for name, tensor in self.tensors.items()}, self.values)

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names start with `prefix`, without the prefix."""
        return {name[len(prefix) :]: t for name, t in self.tensors.items() if name.startswith(prefix)}

    def first_not_finite(self) -> str | None:
        """Return the name of a tensor that holds NaN or infinity, if there is one."""
        for name, tensor in self.tensors.items():
            # one reduction, not an elementwise mask: a sum is finite only if all of its terms are, save for overflow
            if tensor.is_floating_point() and not math.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
                return name
        return None


def unsupported(name: str, tensor: Tensor, known: Iterable[torch.dtype]) -> TypeError:
    """Return the sentence for the author of a method that sends or keeps a tensor of this type."""
    kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in known)
    return TypeError(
        f"tensor {name!r} is {tensor.dtype}, which can be neither sent nor kept; convert it to one of {kinds}"
    )


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}
