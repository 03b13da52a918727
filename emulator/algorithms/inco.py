"""InCo: cross-layer gradients on the server, an add-on to any method that averages weights.

Chan et al., "Internal Cross-Layer Gradients for Extending Homogeneity to Heterogeneity in Federated
Learning", ICLR 2024. What the clients do and what travels is the base method's (HeteroAvg gives InCoAvg,
HeteroProx InCoProx): only the mean delta g of the deeper blocks is changed before the weights move by it.
Layer k takes from the base layer 0 of its stage; always the unmodified g is read. With alpha = <g_0, g_0>
and beta = <g_0, g_k>:

    released  u = (g_k/|g_k| + clamp(|beta|/alpha, 0, 5) g_0/|g_0|) (|g_k| + |g_0|)/2, then clamped to +-0.1
    paper     u = (g'_k - theta g'_0) (|g_k| + |g_0|)/2 with g' = g/|g| and theta = <g'_0, g'_k>/<g'_0, g'_0>
    theorem   u = g_k where beta >= 0, else g_k - (beta/alpha) g_0

`released` is what the authors' code does, for each 3x3 kernel by itself; `paper` is Algorithm 1,
`theorem` is Theorem 3.1, both for the layer as a whole.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

from fleetbed.emulator.algorithms import load_method
from fleetbed.emulator.bases.averaging import Averaging
from fleetbed.emulator.method.algorithm import Context
from fleetbed.emulator.method.description import Description
from fleetbed.models.base import Tensors
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import AlgorithmChoice
from fleetbed.profiles.types import Positive

EPSILON, LARGEST_THETA, LARGEST_UPDATE = 1e-7, 5.0, 0.1  # of the released code
TINY = torch.finfo(torch.float32).tiny


ABOUT = Description(
    paper="Chan et al., ICLR 2024",
    down="its base's",
    up="its base's",
    client="its base's",
    server="its base's",
    policies="its base's",
)


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    base: str = "heteroavg"  # the method that it adds to, one that averages weights
    base_params: dict[str, Any] = {}  # the parameters of that method
    mode: Literal["released", "paper", "theorem"] = "released"  # which of the three definitions above
    per: Literal["kernel", "layer"] | None = None  # what has its own alpha and beta; None: as the mode has it
    normalise: bool = True  # released only: false is the ablation "w/o Normalization", g_k + theta g_0
    optimise: bool = True  # released only: false is the ablation "w/o Optimization", theta = 1
    delta_scale: Positive | None = None  # that of the base; None: as base_params says


def Method(params: Params, context: Context) -> Averaging:
    """The base method, whose merges cross layers."""
    if params.delta_scale is not None and "delta_scale" in params.base_params:
        raise BadInput("inco has both params.delta_scale and params.base_params.delta_scale: leave one out.")
    base = load_method(AlgorithmChoice(name=params.base, params=params.base_params), context, "params.base")
    if not isinstance(base, Averaging):
        raise BadInput(
            f"params.base of inco is {params.base}, which does not average weights: "
            f"choose a method that does, such as heteroavg, heteroprox or fedavg."
        )
    if params.delta_scale is not None:
        base.delta_scale = params.delta_scale
    base.add_on = CrossLayers(params, base)
    return base


class CrossLayers:
    """The add-on of a method that averages weights."""

    def __init__(self, params: Params, base: Averaging) -> None:
        self.params = params
        self.base = base

    def check(self) -> None:
        context, params = self.base.context, self.params
        family, variants = context.family, context.variants
        largest = family.variants[-1]
        if not family.cross_layers(family.tensors(largest, context.spec)):
            raise BadInput(
                f"model.family is {family.name}, but inco knows no cross-layer gradients there: "
                f"choose a ResNet or ViT family."
            )
        if "intermediate" not in self.base.sections:
            raise BadInput(
                f"params.base of inco is {params.base}, whose intermediate layers do not reach the server here, "
                f"so that inco would change nothing: choose another base such as heteroavg or heteroprox, or for fedin "
                f"set base_params.aggregation to layerwise or same-architecture (as its version tmlr has it)."
            )
        if not any(family.cross_layers(self.base.index(variant, variant)) for variant in variants):
            raise BadInput(
                f"inco takes gradients from one block of a stage for the next, but the variants in use "
                f"({', '.join(variants)}) have one block in each stage, so that it would change nothing: "
                f"use larger variants, or the method {params.base} itself."
            )
        if params.mode != "released" and not (params.normalise and params.optimise):
            raise BadInput(
                f"params.mode of inco is {params.mode}, but the ablations (normalise, optimise: false) are "
                f"those of mode released: set that mode, or leave them true."
            )

    def adjust(self, before: Tensors, moved: Tensors) -> dict[str, float]:
        """Move the deeper blocks by their crossed delta instead; report theta and beta of each that took part."""
        pairs = self._pairs(moved)
        g = {name: moved[name] - before[name] for pair in pairs.items() for name in pair}
        metrics = {}
        for layer, base in pairs.items():
            crossed = cross_layer(g[layer], g[base], self.params)
            moved[layer] = before[layer] + crossed.update
            title = layer.removesuffix(".weight")
            metrics[f"theta/{title}"] = float(crossed.theta.mean())
            metrics[f"beta/{title}"] = float(crossed.beta.mean())
            metrics[f"beta_positive/{title}"] = float((crossed.beta > 0).float().mean())
        return metrics

    def _pairs(self, moved: Tensors) -> dict[str, str]:
        """The layers that moved and take a cross-layer gradient, each with its base layer, by their names there."""
        base, context, pairs = self.base, self.base.context, {}
        for variant in context.variants:
            own = {name: base.place(variant, name) for name in base.index(variant, variant)}
            held = [name for name, place in own.items() if place in moved]
            pairs.update({own[layer]: own[first] for layer, first in context.family.cross_layers(held).items()})
        return pairs


class Crossed(NamedTuple):
    update: Tensor
    theta: Tensor  # one for each kernel, or for the layer
    beta: Tensor


def cross_layer(g_k: Tensor, g_0: Tensor, params: Params) -> Crossed:
    """The delta of layer k after it took from its base layer."""
    per = params.per or ("kernel" if params.mode == "released" else "layer")
    kernels = per == "kernel" and g_k.ndim == 4 and g_k[0, 0].numel() > 1
    dims = (2, 3) if kernels else tuple(range(g_k.ndim))

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(dims, keepdim=True)

    alpha, beta = dot(g_0, g_0), dot(g_0, g_k)
    norm_k, norm_0 = dot(g_k, g_k).sqrt(), alpha.sqrt()
    size = (norm_k + norm_0) / 2
    if params.mode == "theorem":
        theta = (beta / alpha.clamp_min(TINY)).clamp(max=0)
        return Crossed(g_k - theta * g_0, theta, beta)
    if params.mode == "paper":
        unit_k, unit_0 = g_k / norm_k.clamp_min(TINY), g_0 / norm_0.clamp_min(TINY)
        theta = dot(unit_0, unit_k) / dot(unit_0, unit_0).clamp_min(TINY)
        return Crossed((unit_k - theta * unit_0) * size, theta, beta)
    theta = (beta.abs() / (alpha + EPSILON)).clamp(0, LARGEST_THETA)
    if not params.optimise:
        theta = torch.ones_like(theta)
    if not params.normalise:
        return Crossed(g_k + theta * g_0, theta, beta)
    update = (g_k / (norm_k + EPSILON) + theta * g_0 / (norm_0 + EPSILON)) * size
    return Crossed(update.clamp_(-LARGEST_UPDATE, LARGEST_UPDATE), theta, beta)
