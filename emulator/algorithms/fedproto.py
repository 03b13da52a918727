"""FedProto: clients keep their models and exchange the mean features of each class.

Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022. Unlike FedAvg no weights
are ever sent, so that clients may have any models whose features h (what the classifier reads) have the same width d. A
client pulls its features to the server's prototypes p,

    L = CE(z, y) + lambda * mean over i, j of (h_ij - p[y_i]_j)^2

and uploads the mean of its own h for each class, over the last epoch and taken before each step. The server's p[c] is
the mean over clients of what they sent for class c, unweighted. The release takes the clients of the last round; here
it is the newest upload of every client, so that results may come one by one. A class that nobody sent has no prototype,
and its samples get cross entropy alone. Models are tested by their classifier or by the nearest prototype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fleetbed.emulator.bases.class_means import CLASS, ClassMeans
from fleetbed.emulator.bases.features import feature_width
from fleetbed.emulator.bases.prototypes import PROTOTYPES, Known, Prototypes, Pull
from fleetbed.emulator.method.algorithm import Arrival, Job, Merged
from fleetbed.emulator.method.bundle import Bundle, prefixed
from fleetbed.emulator.method.description import Description
from fleetbed.emulator.method.schedule import batch_of

ABOUT = Description(
    paper="Tan et al., AAAI 2022",
    down="C·d, from the second round on",
    up="C(d+1), without classes that it did not see",
    client="its model",
    server="the newest C(d+1) of each client",
)


class Params(Pull, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Pull`."""


class Method(Prototypes):
    params: Params
    name = "fedproto"

    def setup(self) -> Bundle:
        return Bundle()

    def prototypes(self, state: Bundle) -> Known:
        """The mean over clients of the newest that each sent."""
        width = feature_width(self.context, self.context.variants[0])
        means = ClassMeans.empty(self.context.spec.classes, width, torch.float64)
        for client in self.context.clients:
            if f"{client.number}/{CLASS}" in state.tensors:
                means.add(state.tensors[f"{client.number}/{CLASS}"], state.tensors[f"{client.number}/{PROTOTYPES}"])
        return means.known, means.means

    def saw(self, job: Job, own: ClassMeans, y: Tensor, h: Tensor) -> None:
        """Collect over the last epoch."""
        if job.steps % (job.client.samples // batch_of(job.client.samples, self.context.training.batch)) == 0:
            own.clear()
        own.add(y, h)

    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        """Keep the newest upload of every client: a policy's mixing weight is for methods that move weights."""
        tensors = dict(state.tensors)
        for arrival in arrivals:
            tensors |= prefixed(f"{arrival.client.number}/", arrival.message.tensors)
        return Merged(state=Bundle(tensors))
