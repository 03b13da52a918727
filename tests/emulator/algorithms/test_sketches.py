"""The interface serves methods that are not shipped: Scaffold (client state) and FedMD (two stages, public data)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from algorithm_harness import SGD, Bed, ToyDepth, ToyStrangers, ToyWidth, accuracy, equal, run, same
from msgspec import Struct
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator.method.algorithm import (
    Algorithm,
    Arrival,
    Client,
    Expected,
    Job,
    Merged,
    Needs,
    Reply,
    Target,
    like,
)
from fleetbed.emulator.method.averaging import Averaging
from fleetbed.emulator.method.bundle import Bundle, prefixed
from fleetbed.emulator.method.local_training import cross_entropy_step, keep_model, own_targets, own_tensors, train
from fleetbed.emulator.method.optimizers import Stepper
from fleetbed.emulator.method.schedule import steps_of
from fleetbed.emulator.randomness import derive
from fleetbed.models.base import Net
from fleetbed.models.work import Pass, Work
from fleetbed.profiles.experiment import Training


class NoParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Scaffold(Averaging):
    """Karimireddy et al., 2020, layer-wise: control variates c on the server, c_i kept by each client."""

    def setup(self) -> Bundle:
        state = super().setup()
        nets = [self.context.family.outline(v, self.context.spec) for v in self.context.variants]
        trainable = {n for net in nets for n, _ in net.named_parameters()}
        zeros = {n: torch.zeros_like(t) for n, t in state.tensors.items() if n in trainable}
        return Bundle({**state.tensors, **prefixed("c/", zeros)}, state.values)

    def send(self, state: Bundle, client: Client, stage: str, task: int) -> Bundle:
        weights = super().send(state, client, stage, task).tensors
        return Bundle({**weights, **prefixed("c/", {n: c for n, c in state.under("c/").items() if n in weights})})

    def client(self, job: Job, stage: str) -> Reply:
        start = {n: t for n, t in job.message.tensors.items() if "/" not in n}
        model = job.model(start)
        lr = self.context.training.optimizer.lr
        c = job.message.under("c/")
        c_i = job.kept.tensors if job.kept is not None else {n: torch.zeros_like(t) for n, t in c.items()}
        plain = cross_entropy_step(model)

        def step(optimizer: Stepper, x: Tensor, y: Tensor) -> Tensor:
            loss = plain(optimizer, x, y)
            with torch.no_grad():
                for n, p in model.named_parameters():
                    p -= lr * (c[n] - c_i[n])
            return loss

        metrics = train(job, model, step)
        steps = steps_of(job.client.samples, self.context.training)
        after = dict(model.named_parameters())
        c_plus = {n: c_i[n] - c[n] + (start[n] - after[n].detach()) / (steps * lr) for n in c}
        change = {n: c_plus[n] - c_i[n] for n in c}
        message = Bundle({**model.state_dict(), **prefixed("c/", change)})
        return Reply(message=message, keep=Bundle(c_plus), metrics=metrics)

    def expects(self, client: Client, stage: str, sent: Bundle) -> Expected | None:
        return Expected(tensors=like(sent.tensors))  # a change of c for each c

    def merge(self, state: Bundle, arrivals: Sequence[Arrival], stage: str, version: int) -> Merged:
        merged = super().merge(state, arrivals, stage, version)
        held = [self.context.family.outline(c.variant, self.context.spec).state_dict() for c in self.context.clients]
        controls = {}
        for n, c in state.under("c/").items():
            changes = [a.message.tensors[f"c/{n}"] for a in arrivals if f"c/{n}" in a.message.tensors]
            controls[n] = c + sum(changes, torch.zeros_like(c)) / sum(n in names for names in held)
        return Merged(state=Bundle({**merged.state.tensors, **prefixed("c/", controls)}, state.values))


class FedMD(Algorithm):
    """Li and Wang, 2019: clients send logits of public samples; they digest the consensus, then train on their own."""

    samples = 10

    @property
    def needs(self) -> Needs:
        return Needs(stages=("logits", "digest"), public_samples=self.samples)

    def setup(self) -> Bundle:
        return self.drawn(0)

    def drawn(self, round_: int) -> Bundle:
        assert self.context.public is not None
        x = self.context.public.draw(self.samples, derive(self.context.seed, round_, "public"))
        return Bundle({"x": x}, {"round": round_})

    def send(self, state: Bundle, client: Client, stage: str, task: int) -> Bundle:
        return state

    def work(self, state: Bundle, client: Client, stage: str) -> Work:
        public = Pass("forward" if stage == "logits" else "train", "all", self.samples)
        if stage == "logits":
            return Work(once=(public,), held_models=1)
        training = self.context.training
        return Work(steps=steps_of(client.samples, training), batch=training.batch, once=(public,), held_models=1)

    def client(self, job: Job, stage: str) -> Reply:
        model, x = job.model(own_tensors(job)), job.message.tensors["x"]
        if stage == "logits":
            with torch.no_grad():
                return Reply(message=Bundle({"logits": model.eval()(x)}))
        self.digest(job, model, x)
        return Reply(message=Bundle(), keep=keep_model(model), metrics=train(job, model, cross_entropy_step(model)))

    def digest(self, job: Job, model: Net, x: Tensor) -> None:
        optimizer = job.optimizer(model)
        F.l1_loss(model(x), job.message.tensors["consensus"]).backward()
        optimizer.step()

    def merge(self, state: Bundle, arrivals: Sequence[Arrival], stage: str, version: int) -> Merged:
        if stage == "digest":
            return Merged(state=self.drawn(int(str(state.values["round"])) + 1))
        consensus = torch.stack([a.message.tensors["logits"] for a in arrivals]).mean(0)
        return Merged(state=Bundle({**state.tensors, "consensus": consensus}, state.values))

    def targets(self, state: Bundle) -> list[Target]:
        return own_targets(self.context)


class FedRep(Averaging):
    """Collins et al., 2021, in one line: the head stays with the client."""

    sections = frozenset({"extractor", "intermediate"})


PLAIN = Training(batch=8, epochs=2, optimizer=SGD)


def test_scaffold() -> None:
    bed = Bed(ToyDepth(None), ["one", "one", "three"], training=PLAIN)
    method = Scaffold(NoParams(), bed.context)
    so_far = run(bed, method, 3)
    plain = run(bed, bed.method("heteroavg"), 1)
    assert equal(
        {n: t for n, t in so_far.merged[0].state.tensors.items() if "/" not in n}, plain.state.tensors
    )  # c = 0
    for n, c in so_far.state.under("c/").items():  # everyone took part: c is the mean of the c_i
        own = [so_far.kept[k].tensors[n] for k in range(3) if n in so_far.kept[k].tensors]
        torch.testing.assert_close(c, sum(own) / len(own), rtol=1e-4, atol=1e-6)
    parameters = sum(p.numel() for p in bed.family.build("one", bed.spec).parameters())
    assert so_far.sent[1][0].nbytes() == plain.sent[0][0].nbytes() + 4 * parameters  # twice the parameters
    assert accuracy(bed, method, so_far) > 0.5


def test_fedmd() -> None:
    bed = Bed(ToyStrangers(None), ["thin", "thick"], samples=40, public=30, training=PLAIN)
    method = FedMD(NoParams(), bed.context)
    so_far = run(bed, method, 3)
    assert len(so_far.merged) == 6
    assert all(r.message.nbytes() == 4 * 10 * 3 for r in so_far.replies[0])  # n C logits up
    torch.testing.assert_close(
        so_far.sent[1][0].tensors["consensus"],
        (so_far.replies[0][0].message.tensors["logits"] + so_far.replies[0][1].message.tensors["logits"]) / 2,
    )
    assert not torch.equal(so_far.sent[0][0].tensors["x"], so_far.sent[2][0].tensors["x"])
    assert same(so_far.state, run(bed, method, 3).state)
    assert accuracy(bed, method, so_far) > 0.6


def test_fedrep() -> None:
    bed = Bed(ToyDepth(None), ["one", "three"], samples=40, training=PLAIN)
    method = FedRep(NoParams(), bed.context)
    so_far = run(bed, method, 3)
    assert not any("fc" in n for sent in so_far.sent for b in sent for n in b.tensors)
    assert accuracy(bed, method, so_far) > 0.5


def test_heterofl_without_its_scaler_is_layerwise_averaging_of_a_width_family() -> None:
    """At rate 1 it is FedAvg."""
    bed = Bed(ToyWidth(None), ["full", "full"], training=PLAIN)
    whole = run(bed, bed.method("heteroavg"), 2)
    assert equal(whole.state.tensors, run(bed, bed.method("fedavg", weighting="clients"), 2).state.under("full/"))
    mixed = Bed(ToyWidth(None), ["half", "full"], samples=40, training=PLAIN)
    method = mixed.method("heteroavg")
    assert accuracy(mixed, method, run(mixed, method, 4)) > 0.4
