"""The interface serves methods that are not shipped: FedMD has two stages and public data."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from algorithm_harness import SGD, Bed, ToyStrangers, ToyWidth, accuracy, equal, run, same
from msgspec import Struct
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator.method.algorithm import (
    Algorithm,
    Arrival,
    Assignment,
    Job,
    Merged,
    Needs,
    Reply,
    Target,
)
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.local_training import cross_entropy_step, keep_model, own_targets, own_tensors, train
from fleetbed.emulator.method.schedule import steps_of
from fleetbed.emulator.randomness import derive
from fleetbed.models.base import Net
from fleetbed.models.work import Pass, Work
from fleetbed.profiles.experiment import Training


class NoParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


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

    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        return state

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        client, stage = assignment.client, assignment.stage
        public = Pass("forward" if stage == "logits" else "train", "all", self.samples)
        values = self.samples * prod(self.context.spec.shape)
        logits = self.samples * self.context.spec.classes
        if stage == "logits":
            return Work(once=(public,), held_models=1, bytes_down=4 * values, bytes_up=4 * logits)
        training = self.context.training
        return Work(
            steps=steps_of(client.samples, training),
            batch=training.batch,
            once=(public,),
            held_models=1,
            bytes_down=4 * (values + logits),
            bytes_up=0,
        )

    def client(self, job: Job) -> Reply:
        model, x = job.model(own_tensors(job)), job.message.tensors["x"]
        if job.assignment.stage == "logits":
            with torch.no_grad():
                return Reply(message=Bundle({"logits": model.eval()(x)}))
        self.digest(job, model, x)
        return Reply(message=Bundle(), keep=keep_model(model), metrics=train(job, model, cross_entropy_step(model)))

    def digest(self, job: Job, model: Net, x: Tensor) -> None:
        optimizer = job.optimizer(model)
        F.l1_loss(model(x), job.message.tensors["consensus"]).backward()
        optimizer.step()

    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        if arrivals[0].assignment.stage == "digest":
            return Merged(state=self.drawn(state.value("round", int) + 1))
        consensus = torch.stack([a.message.tensors["logits"] for a in arrivals]).mean(0)
        return Merged(state=Bundle({**state.tensors, "consensus": consensus}, state.values))

    def targets(self, state: Bundle) -> list[Target]:
        return own_targets(self.context)


PLAIN = Training(batch=8, epochs=2, optimizer=SGD)


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


def test_heterofl_without_its_scaler_is_layerwise_averaging_of_a_width_family() -> None:
    """At rate 1 it is FedAvg."""
    bed = Bed(ToyWidth(None), ["full", "full"], training=PLAIN)
    whole = run(bed, bed.method("heteroavg"), 2)
    assert equal(whole.state.tensors, run(bed, bed.method("fedavg", weighting="clients"), 2).state.under("full/"))
    mixed = Bed(ToyWidth(None), ["half", "full"], samples=40, training=PLAIN)
    method = mixed.method("heteroavg")
    assert accuracy(mixed, method, run(mixed, method, 4)) > 0.4
