"""FedGKT: clients train small networks, the server a large one on their features, and they teach each other by logits.

He, Annavaram and Avestimehr, "Group Knowledge Transfer: Federated Learning of Large CNNs at the Edge", NeurIPS 2020.
Unlike FedAvg no weights are ever sent. After its training a client uploads, for each of its samples and without
augmentation, the features s_in at its first cut, its logits z and the label y. The server trains the layers behind
that cut of a large variant on them, and returns its own logits zs for each sample:

    client   L = CE(z, y) + alpha T^2 KL(softmax(zs/T) || softmax(z/T))        once it has received zs
    server   L = T^2 KL(softmax(z/T) || softmax(o/T)) + alpha CE(o, y),  o = net(s_in)

for `server_epochs` over the clients by number, batches in order. zs are the o of the last epoch, each taken before its
step. They are matched by sample: the released code matches them by batch, while its loaders shuffle. Both sides keep
their network and optimiser. A model is tested by itself, and as a client's extractor with the server's network behind
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Annotated, Literal

import torch
from msgspec import Meta, Struct
from msgspec.structs import replace as replace_fields
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator.bases.features import cut_shapes
from fleetbed.emulator.bases.server_training import (
    ENSEMBLE_POLICIES,
    ENSEMBLE_WHY,
    MERGES,
    merges_of,
    section_names,
    seeded,
    server_net,
)
from fleetbed.emulator.method.algorithm import (
    Algorithm,
    Arrival,
    Assignment,
    Client,
    Context,
    Expected,
    Job,
    Merged,
    Needs,
    Reply,
    Spec,
    Target,
)
from fleetbed.emulator.method.bundle import Bundle, prefixed
from fleetbed.emulator.method.description import Description
from fleetbed.emulator.method.local_training import (
    keep_model,
    kept_models,
    own_optimizer,
    own_targets,
    own_tensors,
    restore_slots,
    slots_of,
    train,
)
from fleetbed.emulator.method.optimizers import Stepper, make_optimizer
from fleetbed.emulator.method.schedule import batch_of, steps_of
from fleetbed.models.base import Net, Tensors
from fleetbed.models.work import Pass, ServerWork, Work
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.types import Count, NonNegative, Positive

FEATURES, LOGITS, LABELS = "features", "logits", "labels"
NET, SLOTS, ANSWERS = "net/", "optimizer/", "logits/"
LEAST_PROBABILITY = 1e-7  # the released code adds it to the teacher's


ABOUT = Description(
    paper="He et al., NeurIPS 2020",
    down="n·C, from a client's second turn on",
    up="n(s_in + C + 1): features, logits and labels of its n samples",
    client="its model and optimiser",
    server="the layers behind the cut of one large variant, their optimiser, and n·C logits of each client",
    policies="all but async",
)


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    temperature: Positive = 3.0  # T
    alpha: NonNegative = 1.0  # on a client the weight of the server's logits, at the server that of the labels
    server_epochs: Annotated[int, Meta(ge=0, le=1_000_000)] = 10  # of the server over what arrived
    client_epochs: Count | None = None  # instead of the experiment's
    server_variant: str | None = None  # whose layers the server trains; None: the family's largest
    #: last_epoch: the server's logits as its last epoch made them (the code); final: by a pass of the trained network
    logits: Literal["last_epoch", "final"] = "last_epoch"


class Method(Algorithm):
    params: Params

    def __init__(self, params: Params, context: Context) -> None:
        super().__init__(params, context)
        self.server_variant = params.server_variant or context.family.variants[-1]
        training = context.training
        if params.client_epochs is not None:
            training = replace_fields(training, epochs=params.client_epochs, max_steps=None)
        self.training = training

    @property
    def needs(self) -> Needs:
        return Needs(
            cuts=True,
            classes=True,
            policies=ENSEMBLE_POLICIES,
            policies_why=ENSEMBLE_WHY,
            initial_on_client=True,
            long_merges=True,
            reported="global",
        )

    def check(self) -> None:
        family, spec = self.context.family, self.context.spec
        family.check_variant(self.server_variant)
        wanted = cut_shapes(family, self.server_variant, spec)[0]
        for variant in self.context.variants:
            if (found := cut_shapes(family, variant, spec)[0]) != wanted:
                raise BadInput(
                    f"model.family is {family.name}, but fedgkt needs features of one shape at the first cut: "
                    f"{variant} has {found} there, {self.server_variant}, which the server trains, {wanted}: choose a "
                    f"family such as resnet-stage, or other variants."
                )

    def setup(self) -> Bundle:
        initial = self.context.with_initial().initial(self.server_variant)
        names = section_names(self.context, self.server_variant, "intermediate", "classifier")
        return Bundle(prefixed(NET, {name: initial[name] for name in names}), {MERGES: 0})

    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        return (
            Bundle({LOGITS: state.tensors[self._answer(assignment.client)]})
            if self._knows(state, assignment)
            else Bundle()
        )

    def _knows(self, state: Bundle, assignment: Assignment) -> bool:
        """Whether the server has logits that the client would use."""
        return self.params.alpha > 0 and self._answer(assignment.client) in state.tensors

    def _answer(self, client: Client) -> str:
        return f"{ANSWERS}{client.number}"

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        return self._work(assignment.client, told=self._knows(state, assignment))

    def heaviest(self, state: Bundle, client: Client) -> Work:
        return self._work(client, told=self.params.alpha > 0)

    def _work(self, client: Client, *, told: bool) -> Work:
        samples, classes = client.samples, self.context.spec.classes
        features = prod(cut_shapes(self.context.family, client.variant, self.context.spec)[0])
        return Work(
            steps=steps_of(samples, self.training),
            batch=batch_of(samples, self.training.batch),
            once=(Pass("forward", "all", samples),),
            held_models=kept_models(self.training.optimizer),
            held_values=samples * (classes * told + features + classes),
            bytes_down=4 * samples * classes * told,
            bytes_up=4 * samples * (features + classes + 1),
        )

    def client(self, job: Job) -> Reply:
        model = job.model(own_tensors(job))
        optimizer = own_optimizer(job, model)
        told = job.message.tensors.get(LOGITS)

        def step(optimizer: Stepper, x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            z = model(x)
            loss = entropy = F.cross_entropy(z, y)
            if told is not None:
                loss = entropy + self.params.alpha * self.distance(told[job.rows], z)
            loss.backward()
            optimizer.step()
            return entropy.detach()

        metrics = train(job, model, step, optimizer=optimizer, epochs=self.params.client_epochs)
        return Reply(message=self.upload(job, model), keep=keep_model(model, optimizer), metrics=metrics)

    @torch.no_grad()
    def upload(self, job: Job, model: Net) -> Bundle:
        """All samples in stored order: what the trained model makes of them, and their labels."""
        samples, start = job.client.samples, 0
        features, logits = torch.empty(0), torch.empty(samples, self.context.spec.classes)
        labels = torch.empty(samples, dtype=torch.int32)
        model.eval()
        for x, y in job.ordered(batch_of(samples, self.training.batch)):
            rows = slice(start, start := start + len(y))
            s = model.extract(x)
            features = torch.empty(samples, *s.shape[1:]) if rows.start == 0 else features
            features[rows], logits[rows], labels[rows] = s, model.classify(model.intermediate(s)), y
        return Bundle({FEATURES: features, LOGITS: logits, LABELS: labels})

    def distance(self, teacher: Tensor, logits: Tensor) -> Tensor:
        """T^2 KL(softmax(teacher/T) || softmax(logits/T)), the mean over the batch."""
        t = self.params.temperature
        wanted = F.softmax(teacher / t, 1) + LEAST_PROBABILITY
        return t * t * F.kl_div(F.log_softmax(logits / t, 1), wanted, reduction="batchmean")

    def expects(self, assignment: Assignment, sent: Bundle) -> Expected | None:
        client, classes = assignment.client, self.context.spec.classes
        shape = cut_shapes(self.context.family, client.variant, self.context.spec)[0]
        return Expected(
            tensors={
                FEATURES: Spec(torch.float32, (client.samples, *shape)),
                LOGITS: Spec(torch.float32, (client.samples, classes)),
                LABELS: Spec(torch.int32, (client.samples,)),
            }
        )

    def objection(self, assignment: Assignment, message: Bundle) -> str | None:
        labels, classes = message.tensors[LABELS], self.context.spec.classes
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            return f"its labels must lie between 0 and {classes - 1}"
        return None

    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        net = server_net(self.context, self.server_variant, state.under(NET))
        now = max(a.assignment.round for a in arrivals)
        optimizer = make_optimizer(self.context.training.optimizer_in(now), net)
        restore_slots(net, optimizer, state.under(SLOTS))
        arrivals = sorted(arrivals, key=lambda a: a.client.number)
        answers: Tensors = {}
        losses: list[float] = []
        with seeded(self.context.seed, merges_of(state), "server"):
            for _ in range(self.params.server_epochs):
                losses = []
                for a in arrivals:
                    steps = [self._step(net, optimizer, a.message, rows) for rows in self._slices(a)]
                    losses += [loss for _, loss in steps]
                    answers[self._answer(a.client)] = torch.cat([o for o, _ in steps])[: a.client.samples]
        if self.params.logits == "final":
            answers = {self._answer(a.client): self._final(net.eval(), a) for a in arrivals}
        names = section_names(self.context, self.server_variant, "intermediate", "classifier")
        trained = {name: net.state_dict()[name] for name in names}
        after = {**state.tensors, **prefixed(NET, trained), **prefixed(SLOTS, slots_of(net, optimizer)), **answers}
        metrics = {"server_loss": sum(losses) / len(losses)} if losses else {}
        return Merged(state=Bundle(after, {MERGES: merges_of(state) + 1}), metrics=metrics)

    def _slices(self, arrival: Arrival) -> list[Tensor]:
        """All samples in order, in batches of at least two as batch norm needs: a lone sample is shown twice."""
        samples = arrival.client.samples
        rows = torch.arange(samples) if samples > 1 else torch.zeros(2, dtype=torch.int64)
        count = -(-samples // self.training.batch)
        return [*rows.tensor_split(max(1, min(count, samples // 2)))]

    def _step(self, net: Net, optimizer: Stepper, message: Bundle, rows: Tensor) -> tuple[Tensor, float]:
        """Train on these samples; returns the logits from before, and the loss."""
        features, teacher, y = (message.tensors[name][rows] for name in (FEATURES, LOGITS, LABELS))
        optimizer.zero_grad()
        o = net.classify(net.intermediate(features))
        loss = self.distance(teacher, o)
        if self.params.alpha:
            loss = loss + self.params.alpha * F.cross_entropy(o, y.long())
        loss.backward()
        optimizer.step()
        return o.detach(), float(loss.detach())

    @torch.no_grad()
    def _final(self, net: Net, arrival: Arrival) -> Tensor:
        parts = arrival.message.tensors[FEATURES].split(self.training.batch)
        return torch.cat([net.classify(net.intermediate(part)) for part in parts])

    def foresee(self, state: Bundle, arrivals: Sequence[Arrival]) -> Bundle:
        """Logits of zeros, whose sizes are all that counts."""
        told = self.params.server_epochs > 0 or self.params.logits == "final"
        classes = self.context.spec.classes
        zeros = {self._answer(a.client): torch.zeros(a.client.samples, classes) for a in arrivals if told}
        return Bundle({**state.tensors, **zeros}, state.values)

    def server_work(self, state: Bundle, arrivals: Sequence[Arrival]) -> ServerWork:
        samples, batch = sum(a.client.samples for a in arrivals), self.training.batch
        steps = -(-samples * self.params.server_epochs // batch)
        # the classifier's backward pass is the beginning of the other layers'
        training = Work(
            steps=steps, batch=batch, trains="intermediate", each_step=(Pass("train", "classifier", batch),)
        )
        return ServerWork(models=((self.server_variant, training),))

    def targets(self, state: Bundle) -> list[Target]:
        """Every client's own model, and its extractor with the server's network behind it."""
        own, net = own_targets(self.context), state.under(NET)
        return [*own, *(replace(each, name=f"{each.name}-server", shared=True, extras=net) for each in own)]

    def predict(self, model: Net, x: Tensor, extras: Tensors) -> Tensor:
        if not extras:
            return super().predict(model, x, extras)
        net = server_net(self.context, self.server_variant, extras).eval()
        scores: Tensor = net.classify(net.intermediate(model.extract(x)))
        return scores
