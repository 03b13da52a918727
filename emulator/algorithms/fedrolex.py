"""FedRolex: HeteroFL whose channel windows roll on from round to round.

Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction", NeurIPS 2022. In
round t (from 0) a client of rate r holds, of the c channels of a layer, not the first ones as in HeteroFL but

    (t + 0) mod c, (t + 1) mod c, ..., (t + ceil(r c) - 1) mod c

so that in c rounds every channel is trained equally often, and the server's model may be larger than any client's.
Layers of the same width share a window, as residual additions need. Everything else is HeteroFL's: the masked loss, the
mean by element, statistics that are estimated for evaluation. In the first round it is HeteroFL.

All layers roll together, so coverage is even for channels but not for weights: one between two channels that are far
apart is never within a small window.

A result belongs to the window that its client was sent, however late it comes: the shift travels with the weights, and
rounds are those of the policy. The released code rolls backwards, which covers the same. There later clients of a round
count more in norms and classifier, by mistake; here all count the same.

The whole model is evaluated, also where no client can hold it, and each variant in use at the window that comes next.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetbed.emulator.algorithms import heterofl
from fleetbed.emulator.method.algorithm import Arrival, Assignment, Target
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.description import Description

NEXT = "next_round"


ABOUT = Description(
    paper="Alam et al., NeurIPS 2022",
    down="P, and the shift",
    up="P, and a byte for each class",
    client="nothing",
    server="as heterofl, and the next round",
)


class Params(heterofl.Params, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `heterofl.Params`."""


class Method(heterofl.Method):
    params: Params

    def setup(self) -> Bundle:
        first = super().setup()
        return Bundle(first.tensors, {**first.values, NEXT: 1})

    def shift(self, assignment: Assignment) -> int:
        return assignment.round - 1

    def remember(self, state: Bundle, arrivals: Sequence[Arrival]) -> Bundle:
        """The round after the newest one that results have come from."""
        newest = max(a.assignment.round for a in arrivals)
        return Bundle(state.tensors, {**state.values, NEXT: max(state.value(NEXT, int), newest + 1)})

    def targets(self, state: Bundle) -> list[Target]:
        """Each variant with the window that it would be sent next, and the whole model, which nobody may hold."""
        shift = state.value(NEXT, int) - 1
        variants = dict.fromkeys((*self.context.variants, state.value("whole", str)))
        return [self.target(state, variant, shift) for variant in variants]
