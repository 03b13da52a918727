"""InclusiveFL: the top block of a smaller model also learns from the deeper blocks of the next larger one.

Liu et al., "No One Left Behind: Inclusive Federated Learning over Heterogeneous Devices", KDD 2022. Clients train
variants that differ in depth. Unlike HeteroAvg the server mixes a momentum into the mean change g_v of a variant v, in
its top block only. Layer-wise averaging follows, with s_v the clients (or samples) of v among the results:

    g_v   <- (1 - beta) g_v + beta mom_v                        tensors of v's top block for which there is a mom_v
    w_l   <- w_l + sum_v s_v g_v,l / sum_v s_v                  layers that are shared, over the v that hold them
    w_v,l <- w_v,l + g_v,l                                      layers that v has for its own
    mom_u <- mean of g_v over v's blocks top(u) ... top(v)      u is the next smaller variant in use

mom_u serves from the next merge on. Until the larger variant has taken part there is none, and while it is away the
last one stays. The largest variant has none. The top block is the last one of the last stage; only trainable tensors of
equal shape enter the mean. The released code never gets to use its momentum, so this is the paper's description.

The original, a transformer, keeps each variant's top block out of the shared mean (`own: top`). In ResNets that would
leave little to share (the last block is 75 % of ResNet10), so all is shared there. With beta = 0 and `own: none` it is
HeteroAvg.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from fleetbed.emulator.bases.averaging import Averaging, Means
from fleetbed.emulator.method.algorithm import Arrival, Context, Needs
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.description import Description
from fleetbed.models.base import Family, InputSpec
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.types import Fraction

OWN, MOMENTUM = "own/", "momentum/"


ABOUT = Description(
    paper="Liu et al., KDD 2022",
    down="P + b",
    up="P + b",
    client="nothing",
    server="as heteroavg, each variant's own parts, and a momentum of one block for each variant but the largest",
)


class Params(Means, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Means`, and:"""

    beta: Fraction = 0.2  # the share of the momentum
    own: Literal["none", "top", "stages"] | None = None  # stages: the last block of each; None: top, in ResNets none
    own_classifier: bool = False  # each variant has a classifier of its own


class Method(Averaging):
    params: Params

    def __init__(self, params: Params, context: Context) -> None:
        super().__init__(params, context)
        self.all_own, self.apart = self.apart, False  # what is averaged among equals only is each variant's own
        self._own: dict[str, frozenset[str]] = {}

    @property
    def needs(self) -> Needs:
        return replace(super().needs, cuts=self.params.own_classifier)

    def check(self) -> None:
        super().check()
        family, spec, variants = self.context.family, self.context.spec, self.context.variants
        possible = bool(family.blocks(family.tensors(family.variants[0], spec)))
        if possible and len(variants) > 1:
            possible = any(teachers(family, spec, *two) for two in pairwise(variants))
        if not possible:
            raise BadInput(
                f"model.family is {family.name}, but inclusivefl lets the top block of a model learn from blocks of "
                f"the same shape in the next larger one, which the variants in use ({', '.join(variants)}) do not "
                f"have: choose variants of resnet-stage, resnet-grid or vit-layer that differ in depth."
            )

    # what a variant has for its own

    def setup(self) -> Bundle:
        first = super().setup()
        family, whole = self.context.family, first.value("whole", str)
        parts = [variant for variant in family.variants if family.part_of(variant, whole)]
        tensors = {self.place(v, name): first.tensors[name] for v in parts for name in self.index(v, whole)}
        return Bundle(tensors, first.values)

    def place(self, variant: str, name: str) -> str:
        return f"{OWN}{variant}/{name}" if name in self.own(variant) else name

    def own(self, variant: str) -> frozenset[str]:
        """The names of the tensors that only clients of this variant average."""
        if variant not in self._own:
            net = self.context.family.outline(variant, self.context.spec)
            stages = self.context.family.blocks(net.state_dict())
            kind = self.params.own or ("top" if len(stages) == 1 else "none")
            last = {"none": [], "top": stages[-1:], "stages": stages}[kind]
            blocks = tuple(stage[-1] for stage in last)
            self._own[variant] = frozenset(
                name
                for name in net.state_dict()
                if self.all_own
                or name.startswith(blocks)
                or (self.params.own_classifier and net.section(name) == "classifier")
            )
        return self._own[variant]

    # momentum

    def incoming(self, state: Bundle, arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
        """What came in, with the momentum mixed into the change of each top block."""
        return [self._mixed(arrival, state.under(f"{MOMENTUM}{arrival.client.variant}/")) for arrival in arrivals]

    def _mixed(self, arrival: Arrival, momentum: dict[str, Tensor]) -> Arrival:
        if not momentum:
            return arrival
        sent, message = arrival.sent.tensors, arrival.message
        mixed = {
            name: sent[name] + torch.lerp(message.tensors[name] - sent[name], mom, self.params.beta)
            for name, mom in momentum.items()
        }
        return replace(arrival, message=Bundle({**message.tensors, **mixed}, message.values))

    def remember(self, state: Bundle, arrivals: Sequence[Arrival]) -> Bundle:
        """The momentum that the variants among the arrivals leave for the next smaller ones."""
        if not self.params.beta:
            return state
        tensors, mixed = dict(state.tensors), self.incoming(state, arrivals)
        for smaller, larger in pairwise(self.context.variants):
            group = [arrival for arrival in mixed if arrival.client.variant == larger]
            if group:
                for name, blocks in teachers(self.context.family, self.context.spec, smaller, larger).items():
                    changes = [self._mean_change(group, block) for block in blocks]
                    tensors[f"{MOMENTUM}{smaller}/{name}"] = torch.stack(changes).mean(0)
        return Bundle(tensors, state.values)

    def _mean_change(self, group: Sequence[Arrival], name: str) -> Tensor:
        omegas = torch.tensor([self.omega(a) for a in group])
        changes = torch.stack([a.message.tensors[name] - a.sent.tensors[name] for a in group])
        mean: Tensor = torch.tensordot(omegas / omegas.sum(), changes, 1)
        return mean


@lru_cache(maxsize=256)
def teachers(family: Family, spec: InputSpec, smaller: str, larger: str) -> dict[str, list[str]]:
    """For each tensor of the smaller variant's top block those of the larger one's blocks that it learns from."""
    own, others = (dict(family.outline(variant, spec).named_parameters()) for variant in (smaller, larger))
    top, blocks = family.blocks(own)[-1][-1], family.blocks(others)[-1]
    above = blocks[blocks.index(top) :] if top in blocks else []
    found = {}
    for name, tensor in own.items():
        if name.startswith(top):
            names = [block + name.removeprefix(top) for block in above]
            found[name] = [n for n in names if n in others and others[n].shape == tensor.shape]
    return {name: names for name, names in found.items() if names}
