"""FedHe: asynchronous; only the mean logits of each class travel.

Chan and Ngai, "FedHe: Heterogeneous Models and Communication-Efficient Federated Learning", MSN 2021.
Unlike FedAvg no weights are ever sent, so that clients may have any models: a client uploads the mean
logit vector of each class that it saw, C(C+1) values, and trains with the server's mean of all uploads
(Eq. 13):

    L = CE(z, y) + alpha * mean over i, j of (z_ij - p_s[y_i]_j)^2

The server keeps sums and counts. As in the released code nothing is sent until as many results came as
there are clients, and now and then the sums collapse to their mean, which lets old logits fade. Where the
paper is silent: l_logit is the squared error, a class that the server does not know yet gets cross
entropy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from msgspec import Meta

from fleetbed.emulator.bases.class_means import ClassMeans, records
from fleetbed.emulator.bases.mean_logits import LOGITS, MeanLogits, Turn, count, held, stored
from fleetbed.emulator.method.algorithm import Arrival, Assignment, Merged
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.description import Description

FORGET_PER_CLIENT = 10  # the released code collapses the sums every 10 K turns


Results = Annotated[int, Meta(ge=0, le=1_000_000_000)]


ABOUT = Description(
    paper="Chan and Ngai, MSN 2021",
    down="C(C+1), after as many results as there are clients",
    up="C(C+1), without classes that it did not see",
    client="its model and optimiser",
    server="sums and counts of logits, C(C+1)",
)


class Params(Turn, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Turn` (the paper's optimiser is Adam at 1e-3, `training.optimizer`), and:"""

    cold_start: Results | None = None  # results before logits are sent; None: one per client
    forget_every: Results | None = None  # results between collapses; 0 never, None: 10 per client
    plus_one: bool = False  # divide by V + 1 as Eq. 8 does, which shrinks the logits and sends zeros for unseen classes


class Method(MeanLogits):
    params: Params

    def setup(self) -> Bundle:
        return Bundle(super().setup().tensors, {"turns": 0})

    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        cold = len(self.context.clients) if self.params.cold_start is None else self.params.cold_start
        return Bundle() if state.value("turns", int) < cold else super().send(state, assignment)

    def upload(self, seen: ClassMeans) -> Bundle:
        if not self.params.plus_one:
            return super().upload(seen)
        return records(LOGITS, torch.arange(len(seen.counts)), seen.sums / (seen.counts[:, None] + 1))

    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        means, turns = held(state), state.value("turns", int)
        forget = self.params.forget_every
        every = FORGET_PER_CLIENT * len(self.context.clients) if forget is None else forget
        for arrival in arrivals:
            count(means, arrival)
            turns += 1
            if every and turns % every == 0:
                means.sums.div_(means.counts.clamp_min(1)[:, None])
                means.counts.clamp_(max=1)
        return Merged(state=Bundle(stored(means).tensors, {"turns": turns}))
