"""FedTGP: FedProto with prototypes that the server trains.

Zhang et al., "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data and Model
Heterogeneity in Federated Learning", AAAI 2024. A client trains as in FedProto, and sends the mean of its features for
each class by one pass over all of its data after training. The server does not average them. It trains prototypes
q = MLP(embedding), which it sends, on the uploads (p, y) of a merge, such that q keeps the classes apart:

    L = CE(-(|p - q_c| + m [c = y]) over classes c, y)

so that p has to be nearer to its own q than to any other by a margin m: the largest distance, over the classes, between
the mean upload of a class and that of the class nearest to it, at most `margin`. The embedding has a row for each
class, the MLP two layers of the features' width. Both live on from merge to merge; their optimiser, SGD without
momentum, has no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from msgspec import field
from msgspec.structs import replace as replace_fields
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator.bases.class_means import CLASS, ClassMeans
from fleetbed.emulator.bases.features import feature_width
from fleetbed.emulator.bases.prototypes import PROTOTYPES, Known, Prototypes, Pull
from fleetbed.emulator.bases.server_training import ENSEMBLE_POLICIES, ENSEMBLE_WHY, MERGES, merges_of, seeded
from fleetbed.emulator.method.algorithm import Arrival, Assignment, Job, Merged, Needs
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.description import Description
from fleetbed.emulator.method.optimizers import SGD
from fleetbed.emulator.method.schedule import batch_of
from fleetbed.emulator.randomness import torch_rng
from fleetbed.models.base import Net
from fleetbed.models.work import Pass, ServerWork, Work
from fleetbed.profiles.experiment import Batch
from fleetbed.profiles.types import Count, NonNegative, Positive

#: below this the square root of a distance has no usable gradient
SMALLEST_SQUARE = 1e-12


ABOUT = Description(
    paper="Zhang et al., AAAI 2024",
    down="C·d, from the second round on",
    up="C(d+1), without classes that it does not have",
    client="its model",
    server="an embedding and an MLP, C·d + 2d(d+1)",
    policies="all but async",
)


class Params(Pull, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Pull`, and:"""

    lambda_: NonNegative = field(default=10.0, name="lambda")  # weight of the prototypes; 0 is private training
    server_epochs: Count = 100  # of the server over the uploads of a merge
    server_batch: Batch = 10  # uploads in a step of it
    server_lr: Positive = 0.01  # its learning rate
    margin: NonNegative = 100.0  # the most that the adaptive margin may be


class Trainable(torch.nn.Module):
    """The prototypes of all classes."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(classes, width)
        self.middle = torch.nn.Linear(width, width)
        self.last = torch.nn.Linear(width, width)

    def forward(self) -> Tensor:
        q: Tensor = self.last(F.relu(self.middle(self.embedding.weight)))
        return q


class Method(Prototypes):
    params: Params
    name = "fedtgp"

    @property
    def needs(self) -> Needs:
        return replace(super().needs, policies=ENSEMBLE_POLICIES, policies_why=ENSEMBLE_WHY, long_merges=True)

    def setup(self) -> Bundle:
        """`known` lists the classes that somebody has sent so far."""
        return Bundle(dict(self._fresh().state_dict()), {"known": [], MERGES: 0})

    def _fresh(self) -> Trainable:
        classes, width = self.context.spec.classes, feature_width(self.context, self.context.variants[0])
        with seeded(self.context.seed, "prototypes"):
            return Trainable(classes, width)

    def prototypes(self, state: Bundle) -> Known:
        known = torch.tensor(state.values["known"], dtype=torch.int64)
        if not len(known):
            return known, torch.empty(0)
        q = self._fresh()
        q.load_state_dict(state.tensors)
        with torch.no_grad():
            return known, q()[known]

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        plain = super().work(state, assignment)
        return replace_fields(plain, once=(Pass("forward", "features", assignment.client.samples),))

    @torch.no_grad()
    def trained(self, job: Job, own: ClassMeans, model: Net) -> None:
        model.eval()
        for x, y in job.ordered(batch_of(job.client.samples, self.context.training.batch)):
            own.add(y, model.features(x))

    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        p = torch.cat([a.message.tensors[PROTOTYPES] for a in arrivals])
        y = torch.cat([a.message.tensors[CLASS] for a in arrivals]).long()
        m = margin(p, y, self.params.margin)
        q = self._fresh()
        q.load_state_dict(state.tensors)
        optimizer = SGD(q.parameters(), self.params.server_lr, 0.0, 0.0)
        rng = torch_rng(self.context.seed, merges_of(state), "prototypes")
        loss = torch.zeros(())
        for _ in range(self.params.server_epochs):
            for rows in torch.randperm(len(p), generator=rng).split(self.params.server_batch):
                optimizer.zero_grad()
                loss = contrast(p[rows], y[rows], q(), m)
                loss.backward()
                optimizer.step()
        known = torch.cat([self.prototypes(state)[0], y]).unique().tolist()
        after = Bundle(dict(q.state_dict()), {"known": known, MERGES: merges_of(state) + 1})
        return Merged(state=after, metrics={"margin": m, "server_loss": float(loss.detach())})

    def foresee(self, state: Bundle, arrivals: Sequence[Arrival]) -> Bundle:
        return Bundle(state.tensors, {**state.values, "known": [*range(self.context.spec.classes)]})

    def server_work(self, state: Bundle, arrivals: Sequence[Arrival]) -> ServerWork:
        classes, width = self.context.spec.classes, feature_width(self.context, self.context.variants[0])
        rows = sum(len(a.message.tensors[CLASS]) for a in arrivals)
        steps = -(-rows // self.params.server_batch)
        # forward and backward: of all prototypes through both layers in each step, of every row to every prototype
        epoch = 3 * 2.0 * classes * (2 * width**2 * steps + width * rows)
        return ServerWork(flops=self.params.server_epochs * epoch)


def margin(p: Tensor, y: Tensor, most: float) -> float:
    """The largest distance between the mean of a class and that of the nearest other one; `most` for a single class."""
    means = torch.stack([p[y == c].mean(0) for c in y.unique()])
    if len(means) == 1:
        return most
    apart = torch.cdist(means, means) + torch.diag(torch.full((len(means),), torch.inf))
    return min(float(apart.amin(1).max()), most)


def contrast(p: Tensor, y: Tensor, q: Tensor, m: float) -> Tensor:
    """The cross entropy of minus the distances, those to the own class enlarged by m."""
    square = p.square().sum(1, keepdim=True) - 2 * p @ q.T + q.square().sum(1)
    distance = square.clamp_min(SMALLEST_SQUARE).sqrt()  # rounding may have made it negative
    return F.cross_entropy(-(distance + m * F.one_hot(y, len(q))), y)
