"""FD: federated distillation in rounds, by the mean logits of each class.

Jeong et al., "Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation under Non-IID
Private Data", 2018 (without the augmentation), as the synchronous sibling of FedHe. A client does what it does there:
it trains its own model, of any architecture, with

    L = CE(z, y) + alpha * mean over i, j of (z_ij - p_s[y_i]_j)^2

and uploads the mean logit vector p_k[c] of each class c that it saw. Unlike FedHe, whose server keeps all uploads and
lets them fade, the server takes those of one round alone, and they replace what it had:

    p_s[c] = mean of p_k[c] over the clients of the last round that saw c

A class that none of them saw has no logits in the next round, and its samples get cross entropy alone. The paper leaves
a client's own upload out of the mean that it receives and compares the outputs by cross entropy; here both are FedHe's,
so that the two methods differ in what the server remembers and in nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fleetbed.emulator.bases.mean_logits import MeanLogits, Turn, count, stored
from fleetbed.emulator.method.algorithm import ROUND_POLICIES, Arrival, Merged, Needs
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.description import Description

ABOUT = Description(
    paper="Jeong et al., 2018 (FedDistill), FedHe's synchronous sibling",
    down="C(C+1), without classes that nobody of the last round saw; 0 at first",
    up="C(C+1), without classes that it did not see",
    client="its model and optimiser",
    server="sums and counts of logits, C(C+1)",
    policies="sync, deadline, over-select",
)


class Params(Turn, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Turn`, with FedHe's defaults."""


class Method(MeanLogits):
    params: Params

    @property
    def needs(self) -> Needs:
        return replace(
            super().needs,
            policies=ROUND_POLICIES,
            policies_why="a merge replaces all logits, so it has to bring those of a whole round; "
            "fedhe is the same method without rounds.",
        )

    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        means = self.nothing()
        for arrival in arrivals:
            count(means, arrival)
        return Merged(state=stored(means))
