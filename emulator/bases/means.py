"""The mean of what clients made of a tensor, element by element where not all of them hold all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fleetbed.models.base import Index, scatter_add

#: so many elements are averaged over all clients before the next ones: what is summed up stays in the cache
CHUNK = 1 << 18
LEAST_MASS = 1e-30


class Share(NamedTuple):
    """What one client says about one tensor: `scale` is omega times the policy's weight and the method's factor."""

    after: Tensor
    sent: Tensor
    omega: float
    scale: float
    rows: Index
    mask: Tensor | None


def after_mean(full: Tensor, parts: list[Share]) -> Tensor:
    """One tensor after the mean change, as a fresh tensor: the mean itself, if this is what all were sent."""
    if not full.is_floating_point():  # a counter: it becomes the largest
        return torch.stack([full, *(p.after for p in parts)]).amax(0)
    if any(p.mask is not None for p in parts):
        return _mean_masked_change(full, parts).add_(full)
    if _were_all_sent(full, parts):
        return _mean_after(parts)
    is_whole = all(rows is None for p in parts for rows in p.rows)
    return (_mean_change(parts) if is_whole else _mean_change_by_element(full, parts)).add_(full)


def _were_all_sent(tensor: Tensor, parts: list[Share]) -> bool:
    """Whether all got this very tensor, and none of their answers is stale."""
    return all(
        p.scale == p.omega and p.sent.data_ptr() == tensor.data_ptr() and p.sent.shape == tensor.shape for p in parts
    )


def _mean_masked_change(full: Tensor, parts: list[Share]) -> Tensor:
    """The mean of the changes over those whose element counts; where nobody's does, 0."""
    change, mass = torch.zeros(full.shape), torch.zeros(full.shape)
    for p in parts:
        mask = torch.ones(()) if p.mask is None else p.mask
        scatter_add({"": change}, {"": (p.after - p.sent) * mask * p.scale}, {"": p.rows})
        scatter_add({"": mass}, {"": (mask * p.omega).expand(p.after.shape)}, {"": p.rows})
    return change.div_(mass.clamp_(min=LEAST_MASS))


def elements_held(full: Tensor, parts: list[Share]) -> Tensor | None:
    """Which elements of a tensor count for somebody; None: all of them."""
    if any(p.mask is None and all(rows is None for rows in p.rows) for p in parts):
        return None
    mass = torch.zeros(full.shape)
    for p in {(id(p.rows), id(p.mask)): p for p in parts}.values():
        mask = torch.ones(()) if p.mask is None else p.mask
        scatter_add({"": mass}, {"": mask.expand(p.after.shape)}, {"": p.rows})
    return mass > 0


def _mean_change_by_element(full: Tensor, parts: list[Share]) -> Tensor:
    """The mean of the changes of what not all hold alike, as a tensor of the full shape."""
    same_rows: dict[int, list[Share]] = {}
    for p in parts:
        same_rows.setdefault(id(p.rows), []).append(p)
    # who holds an element is the same along the dimensions that nobody is cut in, such as those of a kernel
    cut = [any(p.rows[dim] is not None for p in parts) for dim in range(full.ndim)]

    def counted(shape: Sequence[int]) -> list[int]:
        return [size if is_cut else 1 for size, is_cut in zip(shape, cut, strict=True)]

    mean, mass = torch.zeros(full.shape), torch.zeros(counted(full.shape))
    for group in same_rows.values():
        rows, omega = group[0].rows, sum(p.omega for p in group)
        scatter_add({"": mean}, {"": _mean_change(group).mul_(omega)}, {"": rows})
        scatter_add({"": mass}, {"": torch.full((), omega).expand(counted(group[0].after.shape))}, {"": rows})
    return mean.div_(mass.clamp_(min=LEAST_MASS))  # where nobody holds an element its sum is 0


def _mean_change(parts: list[Share]) -> Tensor:
    """The mean of the changes of what all hold alike. What nobody changed moves by 0, to the bit."""
    sent = parts[0].sent
    if _were_all_sent(sent, parts):
        return _mean_after(parts).sub_(sent)
    total = sum(p.omega for p in parts)
    sums, buffer = torch.zeros(sent.shape), torch.empty(CHUNK)
    for chunk, *both in _chunks(sums, *(tensor for p in parts for tensor in (p.after, p.sent))):
        change = buffer[: chunk.numel()].view(chunk.shape)
        for p, after, before in zip(parts, both[::2], both[1::2], strict=True):
            torch.sub(after, before, out=change)
            chunk.add_(change, alpha=p.scale / total)
    return sums


def _mean_after(parts: list[Share]) -> Tensor:
    """The weighted mean of what came back. It moves towards each next value by its share: where all agree, by 0."""
    mean = torch.empty(parts[0].after.shape)
    for chunk, first, *others in _chunks(mean, *(p.after for p in parts)):
        total, at = parts[0].omega, first
        for p, after in zip(parts[1:], others, strict=True):
            total += p.omega
            at = torch.lerp(at, after, p.omega / total, out=chunk)
        if at is first:
            chunk.copy_(first)
    return mean


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape, piece by piece."""
    if tensors[0].numel() <= CHUNK:
        return iter([tensors])
    return zip(*(tensor.reshape(-1).split(CHUNK) for tensor in tensors), strict=True)
