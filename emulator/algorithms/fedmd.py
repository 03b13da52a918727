"""FedMD: clients with models of their own agree on the scores of public samples.

Li and Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", 2019. Unlike FedAvg no weights are ever
sent. A round has two stages. In `score` the server sends public samples X, drawn anew for each round, and a client
returns its logits of them; the server takes the mean zbar over the clients. In `fit` it sends zbar, and a client trains
first for `match_epochs` on X with

    L = mean over samples and classes of |f(X) - zbar|

and then on its own data with cross entropy. Each of the two losses has an optimiser of its own, which lives on. A
client keeps X between the stages.

The paper begins with transfer learning: each client trains on the public samples with their labels, then on its own
data (`pretrain_public`, `pretrain_private`). It is off by default, as FedHe, which compares with FedMD, has it. The
released code stops that training early by the accuracy on test data, which is not offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Annotated, Literal

import torch
from msgspec import Meta, Struct
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator.method.algorithm import (
    ROUND_POLICIES,
    Algorithm,
    Arrival,
    Assignment,
    Client,
    Expected,
    Job,
    Merged,
    Needs,
    PublicData,
    Reply,
    Spec,
    Target,
)
from fleetbed.emulator.method.bundle import Bundle, Value, prefixed
from fleetbed.emulator.method.description import Description
from fleetbed.emulator.method.local_training import (
    cross_entropy_step,
    keep_model,
    kept_models,
    own_optimizer,
    own_targets,
    own_tensors,
    slots_of,
    train,
)
from fleetbed.emulator.method.optimizers import Stepper
from fleetbed.emulator.method.schedule import batch_of, steps_of
from fleetbed.emulator.randomness import derive
from fleetbed.models.base import Net, Tensors, input_dtype
from fleetbed.models.work import Pass, Phase, Work
from fleetbed.profiles.experiment import Batch
from fleetbed.profiles.types import Count

X, MEAN, LOGITS, POOL_X, POOL_Y = "x", "mean", "logits", "pool/x", "pool/y"
DRAW, SCORED, PRETRAINED = "draw", "scored", "pretrained"
#: where a client keeps the state of the optimiser that matches logits
MATCHER = "matcher/"
Epochs = Annotated[int, Meta(ge=0, le=1_000_000)]


ABOUT = Description(
    paper="Li and Wang, 2019",
    down="score: n·CHW (public_on_device: 0); fit: n·C; n is the number of public samples",
    up="score: n·C; fit: 0",
    client="its model and two optimisers, between the stages also the public samples",
    server="the public samples of the round, and their mean logits",
    policies="sync, deadline (with late: drop), over-select",
)


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    public: Annotated[int, Meta(ge=1, le=1_000_000)] = 5000  # n, public samples of a round; FedHe has 10
    match_epochs: Count = 1  # over the public samples
    match_batch: Batch = 256  # public samples in a step of the match
    loss: Literal["l1", "l2"] = "l1"  # of the match: the mean of absolute (the code) or of squared differences
    pretrain_public: Epochs = 0  # epochs over all public samples, with their labels, before a client's first turn
    pretrain_private: Epochs = 0  # epochs over its own data after these
    public_on_device: bool = False  # clients have the public samples, so that they need not be sent


class Method(Algorithm):
    params: Params

    @property
    def needs(self) -> Needs:
        return Needs(
            policies=ROUND_POLICIES,
            policies_why="a round has two stages: clients score public samples, then fit the mean of the scores.",
            stages=("score", "fit"),
            public_samples=self.params.public,
            public_labels=self.params.pretrain_public > 0,
            initial_on_client=True,
        )

    @property
    def pool(self) -> PublicData:
        assert self.context.public is not None  # needs.public_samples
        return self.context.public

    def setup(self) -> Bundle:
        return self._drawn(1, [])

    def _drawn(self, draw: int, pretrained: list[str]) -> Bundle:
        """A state before `score`; `pretrained` lists clients with their variants."""
        x = {} if self.params.public_on_device else {X: self.draw(draw)}
        return Bundle(x, {DRAW: draw, SCORED: [], PRETRAINED: list(pretrained)})

    def draw(self, draw: int) -> Tensor:
        """The public samples of this draw, the same wherever they are drawn."""
        return self.pool.draw(self.params.public, derive(self.context.seed, draw, "public"))

    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        if assignment.stage == "fit":
            return Bundle({MEAN: state.tensors[MEAN]}) if self._scored(state, assignment.client) else Bundle()
        values: dict[str, Value] = {DRAW: state.values[DRAW]}
        tensors = {name: state.tensors[name] for name in (X,) if name in state.tensors}
        if self._pretrains(state, assignment.client):
            values["pretrain"] = True
            if self.params.pretrain_public and not self.params.public_on_device:
                tensors |= self._labelled()
        return Bundle(tensors, values)

    def _scored(self, state: Bundle, client: Client) -> bool:
        """Whether the client took part in the first stage, and so has the samples."""
        return client.number in self._list(state, SCORED)

    def _pretrains(self, state: Bundle, client: Client) -> bool:
        epochs = self.params.pretrain_public + self.params.pretrain_private
        return epochs > 0 and title(client) not in self._list(state, PRETRAINED)

    def _list(self, state: Bundle, name: str) -> list[object]:
        found = state.values[name]
        assert isinstance(found, list)
        return [*found]

    def _labelled(self) -> Tensors:
        """All public samples with their labels."""
        count, seed = len(self.pool), derive(self.context.seed, "pool")
        return {POOL_X: self.pool.draw(count, seed), POOL_Y: self.pool.labels(count, seed).int()}

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        client = assignment.client
        if assignment.stage == "fit":
            return self._fit(client) if self._scored(state, client) else Work(bytes_down=0, bytes_up=0)
        return self._score(client, pretrain=self._pretrains(state, client))

    def heaviest(self, state: Bundle, client: Client) -> Work:
        """A `fit`, which trains, with the samples of a pre-training if these are more."""
        fit, score = self._fit(client), self._score(client, pretrain=self._pretrains(state, client))
        return replace(
            fit,
            held_values=max(fit.held_values, score.held_values),
            bytes_down=max(fit.bytes_down or 0, score.bytes_down or 0),
            bytes_up=score.bytes_up,
        )

    def _score(self, client: Client, *, pretrain: bool) -> Work:
        params, n, size = self.params, self.params.public, prod(self.context.spec.shape)
        sent = 0 if params.public_on_device else n * size * input_dtype(self.context.spec).itemsize
        scoring = Work(
            batch=self._batch(client),
            once=(Pass("forward", "all", n),),
            held_models=self._kept_models(),
            held_values=n * (size + self.context.spec.classes),
            bytes_down=sent,
            bytes_up=4 * n * self.context.spec.classes,
        )
        if not pretrain:
            return scoring
        pool = len(self.pool)
        labelled = pool * (size * input_dtype(self.context.spec).itemsize + 4) if params.pretrain_public else 0
        batch = batch_of(pool, self.context.training.batch)
        return replace(
            scoring,
            earlier=(Phase(steps=params.pretrain_public * (pool // batch), batch=batch),),
            steps=params.pretrain_private * (client.samples // self._batch(client)),
            held_values=scoring.held_values + labelled // 4,
            bytes_down=sent + labelled * (not params.public_on_device),
        )

    def _fit(self, client: Client) -> Work:
        n, classes = self.params.public, self.context.spec.classes
        batch = batch_of(n, self.params.match_batch)
        return Work(
            earlier=(Phase(steps=self.params.match_epochs * (n // batch), batch=batch),),
            steps=steps_of(client.samples, self.context.training),
            batch=self._batch(client),
            held_models=self._kept_models(),
            held_values=n * (prod(self.context.spec.shape) + classes),
            bytes_down=4 * n * classes,
            bytes_up=0,
        )

    def _batch(self, client: Client) -> int:
        return batch_of(client.samples, self.context.training.batch)

    def _kept_models(self) -> int:
        """Copies of the model: what was kept, with the state of two optimisers, and what the first makes of its own."""
        slots = kept_models(self.context.training.optimizer) - 1
        return 1 + 3 * slots

    def client(self, job: Job) -> Reply:
        return self.fit(job) if job.assignment.stage == "fit" else self.score(job)

    def score(self, job: Job) -> Reply:
        """Send the logits of the samples. What was kept stays, and the samples are added to it."""
        model = job.model(own_tensors(job))
        draw = job.message.value(DRAW, int)
        own = {name: t for name, t in job.kept.tensors.items() if name != X} if job.kept is not None else None
        metrics: dict[str, float] = {}
        if "pretrain" in job.message.values:
            optimizer = own_optimizer(job, model)
            self._pretrain_public(job, model, optimizer)
            step, epochs = cross_entropy_step(model), self.params.pretrain_private
            metrics = train(job, model, step, optimizer=optimizer, epochs=epochs, phase="pretrain")
            own = keep_model(model, optimizer).tensors
        x = job.message.tensors[X] if X in job.message.tensors else self.draw(draw)
        logits = torch.empty(len(x), self.context.spec.classes)
        model.eval()
        with torch.no_grad():
            for rows in torch.arange(len(x)).split(self._batch(job.client)):
                logits[rows] = model(x[rows])
        samples = {} if self.params.public_on_device else {X: x}
        keep = Bundle({**(own or keep_model(model).tensors), **samples}, {DRAW: draw})
        return Reply(message=Bundle({LOGITS: logits}), keep=keep, metrics=metrics)

    def _pretrain_public(self, job: Job, model: Net, optimizer: Stepper) -> None:
        if not self.params.pretrain_public:
            return
        pool = job.message.tensors if POOL_X in job.message.tensors else self._labelled()
        step, batch = cross_entropy_step(model), self.context.training.batch
        for rows in job.foreign(len(pool[POOL_X]), epochs=self.params.pretrain_public, batch=batch, phase="public"):
            step(optimizer, pool[POOL_X][rows], pool[POOL_Y][rows].long())

    def fit(self, job: Job) -> Reply:
        """Match the mean logits, then train on the client's own data. A client without the samples does nothing."""
        if MEAN not in job.message.tensors or job.kept is None:
            return Reply(message=Bundle())
        model, wanted = job.model(own_tensors(job)), job.message.tensors[MEAN]
        x = job.kept.tensors[X] if X in job.kept.tensors else self.draw(job.kept.value(DRAW, int))
        matcher = own_optimizer(job, model, MATCHER)
        distance = F.l1_loss if self.params.loss == "l1" else F.mse_loss
        losses = []
        epochs, batch = self.params.match_epochs, self.params.match_batch
        for rows in job.foreign(len(x), epochs=epochs, batch=batch, phase="match"):
            matcher.zero_grad()
            loss = distance(model(x[rows]), wanted[rows])
            loss.backward()
            matcher.step()
            losses.append(float(loss.detach()))
        matcher.zero_grad()
        optimizer = own_optimizer(job, model)
        metrics = train(job, model, cross_entropy_step(model), optimizer=optimizer)
        kept = {**keep_model(model, optimizer).tensors, **prefixed(MATCHER, slots_of(model, matcher))}
        return Reply(message=Bundle(), keep=Bundle(kept), metrics={**metrics, "match": sum(losses) / len(losses)})

    def expects(self, assignment: Assignment, sent: Bundle) -> Expected | None:
        if assignment.stage == "fit":
            return Expected()
        return Expected(tensors={LOGITS: Spec(torch.float32, (self.params.public, self.context.spec.classes))})

    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        """After `score` the mean of the logits, each client counted once; after `fit` new samples."""
        pretrained = [str(each) for each in self._list(state, PRETRAINED)]
        if arrivals[0].assignment.stage == "fit":
            return Merged(state=self._drawn(state.value(DRAW, int) + 1, pretrained))
        mean = torch.stack([a.message.tensors[LOGITS] for a in arrivals]).mean(0)
        told: dict[str, Value] = {
            SCORED: [a.client.number for a in arrivals],
            PRETRAINED: [*sorted({*pretrained, *(title(a.client) for a in arrivals)})],
        }
        return Merged(state=Bundle({**state.tensors, MEAN: mean}, {**state.values, **told}))

    def targets(self, state: Bundle) -> list[Target]:
        return own_targets(self.context)


def title(client: Client) -> str:
    """A client as it is now: one that steps down to a smaller variant begins anew."""
    return f"{client.number}/{client.variant}"
