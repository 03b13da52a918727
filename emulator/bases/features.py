"""Features at the model's cuts: their shapes, and FedIN's pairs, with noise, drawn from many clients'."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fleetbed.emulator.method.algorithm import Context
from fleetbed.models.base import Family, InputSpec, Tensors
from fleetbed.profiles.errors import BadInput


@lru_cache(maxsize=256)
def cut_shapes(family: Family, variant: str, spec: InputSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of s_in and s_out of one sample. Not for clients: torch imports its compiler for it, 100 MB."""
    net = family.outline(variant, spec).eval()
    kind = torch.long if spec.vocabulary else torch.float
    with torch.no_grad():
        s_in = net.extract(torch.zeros(1, *spec.shape, dtype=kind, device="meta"))
        return tuple(s_in.shape[1:]), tuple(net.intermediate(s_in).shape[1:])


def check_cuts(context: Context) -> None:
    """Features can be exchanged only where they have the same shape in all variants."""
    shapes = {variant: cut_shapes(context.family, variant, context.spec) for variant in context.variants}
    first = context.variants[0]
    for variant, (s_in, s_out) in shapes.items():
        if (s_in, s_out) != shapes[first]:
            raise BadInput(
                f"model.family is {context.family.name}, but fedin exchanges features at two cuts that all variants "
                f"must share: {first} has {shapes[first][0]} and {shapes[first][1]} there, {variant} has {s_in} and "
                f"{s_out}: choose a family such as resnet-stage."
            )


def feature_width(context: Context, variant: str) -> int:
    """d, the width of what the classifier reads."""
    (width,) = cut_shapes(context.family, variant, context.spec)[1]
    return width


def check_widths(context: Context, method: str, *more: str) -> None:
    """Classifiers and mean features can be exchanged only where features have one width, in `more` variants too."""
    widths = {v: feature_width(context, v) for v in dict.fromkeys((*context.variants, *more))}
    if len({*widths.values()}) > 1:
        raise BadInput(
            f"model.family is {context.family.name}, but {method} needs features of one width in all variants "
            f"({', '.join(f'{v} has {width}' for v, width in widths.items())}): choose a family such as "
            f"resnet-stage, vit-layer, fedin-v1 or lstm, or variants of one width by model.variants."
        )


def draw_pairs(inputs: Tensors, outputs: Tensors, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` pairs, uniformly from the pooled batches; an input stays with its output."""
    pool = [(name, row) for name, batch in inputs.items() for row in range(len(batch))]
    drawn = [pool[i] for i in torch.randperm(len(pool), generator=generator)[:count].tolist()]
    return (
        torch.stack([inputs[name][row] for name, row in drawn]),
        torch.stack([outputs[name][row] for name, row in drawn]),
    )


def noisy(s: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """`s` with Gaussian noise of `noise` times its own standard deviation."""
    if not noise:
        return s
    return s + noise * s.detach().std() * torch.randn(s.shape, generator=generator).to(s.device)


def projected(g_in: Tensor, g_local: Tensor) -> Tensor:
    """Eq. 12: the gradient nearest to g_in that does not point against g_local."""
    a, b = (g_local * g_local).sum(), (g_local * g_in).sum()
    return g_in if b >= 0 else g_in - (b / a) * g_local
