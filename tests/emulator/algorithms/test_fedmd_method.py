"""FedMD against its equations: scores of public samples go up, their mean comes down and is fitted."""

from __future__ import annotations

import pytest
import torch
from algorithm_harness import (
    ADAM,
    SGD,
    SPEC,
    Bed,
    ToyDepth,
    ToyStrangers,
    advance,
    begin_anew,
    equal,
    run,
    without_class,
)
from torch.nn import functional as F

from fleetbed.emulator.method.algorithm import ROUND_POLICIES, Arrival, Assignment, Client
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.models.base import InputSpec
from fleetbed.models.families import lookup
from fleetbed.models.work import Pass, Phase
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Optimizer, Training

DIM = 16  # values of a sample
N = 12


def strangers(optimizer: Optimizer = SGD, **more: int) -> Bed:
    training = Training(batch=8, optimizer=optimizer, **more)
    return Bed(ToyStrangers(None), ["thin", "thick"], public=40, training=training)


def test_bytes_are_those_of_table_3_of_fedhe() -> None:
    bed = strangers()
    method = bed.method("fedmd", public=N)
    so_far = run(bed, method, 2)
    for stage, down, up in ((0, N * DIM, N * 3), (1, N * 3, 0), (2, N * DIM, N * 3), (3, N * 3, 0)):
        assert {b.nbytes() for b in so_far.sent[stage]} == {4 * down}
        assert {r.message.nbytes() for r in so_far.replies[stage]} == {4 * up}
    client = bed.context.clients[0]
    score, fit = (method.work(so_far.merged[2].state, Assignment(client=client, stage=s)) for s in ("score", "fit"))
    assert (score.bytes_down, score.bytes_up) == (4 * N * DIM, 4 * N * 3)
    assert (fit.bytes_down, fit.bytes_up) == (4 * N * 3, 0)
    assert (score.all_steps, score.once) == (0, (Pass("forward", "all", N),))
    assert (fit.earlier, fit.steps, fit.batch) == ((Phase(steps=1, batch=N),), 3, 8)
    assert fit.held_values == score.held_values == N * (DIM + 3)


@pytest.mark.parametrize(("shape", "wanted"), [((1, 28, 28), 7_940), ((3, 32, 32), 30_820)])
def test_a_round_at_the_scale_of_fedhe(shape: tuple[int, ...], wanted: int) -> None:
    """10 public samples: their scores up, and the samples down."""
    bed = Bed(lookup.family("fedhe-cnn"), ["model9"], public=10, spec=InputSpec(shape, 10))
    score = bed.method("fedmd", public=10).work(
        Bundle(values={"draw": 1, "scored": [], "pretrained": []}),
        Assignment(client=bed.context.clients[0], stage="score"),
    )
    assert (score.bytes_down + score.bytes_up) // 4 == wanted


def test_scores_are_of_the_own_model_and_their_mean_is_sent() -> None:
    bed = strangers()
    method = bed.method("fedmd", public=N)
    so_far = run(bed, method)
    x = so_far.sent[0][0].tensors["x"]
    scores = []
    for client, reply in zip(bed.context.clients, so_far.replies[0], strict=True):
        net = bed.family.build(client.variant, SPEC).eval()
        net.load_state_dict(bed.context.initial(client.variant))
        with torch.no_grad():
            scores.append(net(x))
        torch.testing.assert_close(reply.message.tensors["logits"], scores[-1])
        assert torch.equal(reply.keep.tensors["x"], x)
    for sent in so_far.sent[1]:
        torch.testing.assert_close(sent.tensors["mean"], (scores[0] + scores[1]) / 2)


@pytest.mark.parametrize("loss", ["l1", "l2"])
def test_the_fit_by_hand(loss: str) -> None:
    """Two rounds against torch's own Adam, one for each loss, both of which live on."""
    bed = strangers(ADAM, epochs=2)
    method = bed.method("fedmd", public=N, match_batch=5, match_epochs=2, loss=loss)
    so_far = run(bed, method, 2)
    net = bed.family.build("thin", SPEC).train()
    net.load_state_dict(bed.context.initial("thin"))
    matcher, classes = (torch.optim.Adam(net.parameters(), lr=1e-3) for _ in range(2))
    client = bed.context.clients[0]
    for round_ in (0, 1):
        x, wanted = so_far.sent[2 * round_][0].tensors["x"], so_far.sent[2 * round_ + 1][0].tensors["mean"]
        job = bed.job(client, Bundle(), task=4 * round_ + 2, stage="fit")
        for rows in job.foreign(N, epochs=2, batch=5, phase="match"):
            matcher.zero_grad()
            apart = net(x[rows]) - wanted[rows]
            (apart.abs() if loss == "l1" else apart**2).mean().backward()
            matcher.step()
        for own, y in job.batches():
            classes.zero_grad()
            F.cross_entropy(net(own), y).backward()
            classes.step()
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(so_far.kept[0].under("model/")[name], tensor, rtol=1e-3, atol=1e-5)
    assert "x" not in so_far.kept[0].tensors  # only between the stages


def test_alone_a_client_agrees_with_itself() -> None:
    """With one client and no batch norm or dropout the match has a gradient of 0: it is private training."""
    bed = Bed(
        lookup.family("fedhenn-cnn"),
        ["conv1-fc1"],
        spec=InputSpec((3, 32, 32), 3),
        public=8,
        training=Training(batch=8, optimizer=SGD),
    )
    alone = run(bed, bed.method("fedmd", public=8, match_batch=4), 1)
    net = bed.family.build("conv1-fc1", bed.spec)
    net.load_state_dict(bed.context.initial("conv1-fc1"))
    optimizer = bed.job(bed.context.clients[0], Bundle()).optimizer(net)
    for x, y in bed.job(bed.context.clients[0], Bundle(), task=1, stage="fit").batches():
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    # the scores of a slice of 8 and of a batch of 4 may differ by rounding, whose sign is all that l1 sees
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(alone.kept[0].under("model/")[name], tensor, rtol=1e-3, atol=1e-4)
    assert alone.replies[1][0].metrics["match"] < 1e-6


def test_every_round_has_other_samples_and_a_seed_the_same_ones() -> None:
    bed = strangers()
    method = bed.method("fedmd", public=N)
    drawn = [sent[0].tensors["x"] for sent in run(bed, method, 3).sent[::2]]
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
    again = [sent[0].tensors["x"] for sent in run(bed, method, 3).sent[::2]]
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))


def test_samples_on_the_device_need_not_be_sent() -> None:
    bed = strangers()
    sent, there = (run(bed, bed.method("fedmd", public=N, public_on_device=on), 2) for on in (False, True))
    assert [b.nbytes() for b in there.sent[0]] == [0, 0]
    assert "x" not in there.replies[0][0].keep.tensors
    assert all(equal(there.kept[n].tensors, sent.kept[n].tensors) for n in (0, 1))


def test_who_did_not_score_skips_the_fit() -> None:
    bed = strangers()
    method = bed.method("fedmd", public=N)
    so_far = run(bed, method)
    first, second = bed.context.clients
    advance(bed, method, so_far, [first], "score", round_=2)
    before = so_far.kept[1]
    advance(bed, method, so_far, [first, second], "fit", round_=2)
    assert so_far.sent[-1][1].tensors == {}
    assert equal(so_far.kept[1].tensors, before.tensors)
    assert not equal(so_far.kept[0].under("model/"), so_far.replies[2][0].keep.under("model/"))


def test_pre_training_is_on_labelled_public_samples_and_then_on_own_ones() -> None:
    bed = strangers()
    plain = {"public": N, "pretrain_public": 2, "pretrain_private": 1}
    method = bed.method("fedmd", **plain)
    so_far = run(bed, method, 2)
    assert so_far.sent[0][0].nbytes() == 4 * (N * DIM + 40 * (DIM + 1))
    assert so_far.sent[2][0].nbytes() == 4 * N * DIM  # once
    message = so_far.sent[0][0].tensors
    labels = {tuple(x.flatten().tolist()): int(y) for x, y in zip(bed.data.x, bed.data.y, strict=True)}
    pool = zip(message["pool/x"], message["pool/y"], strict=True)
    assert all(labels[tuple(x.flatten().tolist())] == int(y) for x, y in pool)
    net = bed.family.build("thin", SPEC).train()
    net.load_state_dict(bed.context.initial("thin"))
    job = bed.job(bed.context.clients[0], Bundle(), stage="score")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    batches = [
        (message["pool/x"][rows], message["pool/y"][rows].long())
        for rows in job.foreign(40, epochs=2, batch=8, phase="public")
    ]
    for x, y in [*batches, *job.batches(epochs=1, phase="pretrain")]:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(so_far.replies[0][0].keep.under("model/")[name], tensor, rtol=1e-4, atol=1e-5)
    there = run(bed, bed.method("fedmd", **plain, public_on_device=True), 2)
    assert equal(there.kept[1].tensors, so_far.kept[1].tensors)


def test_a_client_that_steps_down_begins_anew() -> None:
    bed = Bed(ToyDepth(None), ["one", "two"], public=40)
    method = bed.method("fedmd", public=N, pretrain_public=1)
    so_far = run(bed, method)
    clients = begin_anew(bed, method, so_far, Client(1, "one", 24))
    for stage in method.needs.stages:
        advance(bed, method, so_far, clients, stage, round_=2)
    assert "pool/x" in so_far.sent[2][1].tensors  # its new model is pre-trained
    assert "pool/x" not in so_far.sent[2][0].tensors
    assert "model/blocks.1.0.weight" not in so_far.kept[1].tensors


def test_a_client_that_lacks_a_class_takes_part() -> None:
    bed = without_class(strangers(), 0, 1)
    run(bed, bed.method("fedmd", public=N), 2)


def test_partial_work_may_end_within_the_match() -> None:
    bed = strangers()
    method = bed.method("fedmd", public=N, match_batch=4)
    so_far = run(bed, method)
    advance(bed, method, so_far, bed.context.clients, "score", round_=2)
    client = bed.context.clients[0]
    message = method.send(so_far.state, Assignment(client=client, stage="fit"))
    job = bed.job(client, message, so_far.kept[0], task=9, stage="fit", most_steps=2)
    reply = method.client(job)
    assert job.steps == 2
    assert "loss" not in reply.metrics
    assert reply.keep.under("optimizer/").keys() == so_far.kept[0].under("optimizer/").keys()


def test_its_heaviest_task_is_the_fit() -> None:
    bed = strangers(ADAM)
    method = bed.method("fedmd", public=N)
    state, client = method.setup(), bed.context.clients[0]
    heaviest = method.heaviest(state, client)
    assert (heaviest.earlier, heaviest.steps) == ((Phase(steps=1, batch=N),), 3)
    assert heaviest.held_models == 1 + 2 * 2 + 2  # what was kept, with two Adams, and the state of the first one
    assert (heaviest.bytes_down, heaviest.bytes_up) == (4 * N * DIM, 4 * N * 3)
    more = bed.method("fedmd", public=N, pretrain_public=1).heaviest(state, client)
    assert more.held_values == N * (DIM + 3) + 40 * (DIM + 1)


def test_the_mean_counts_each_client_once() -> None:
    bed = strangers()
    method = bed.method("fedmd", public=2)
    task = Assignment(client=bed.context.clients[0], stage="score")
    arrivals = [
        Arrival(assignment=task, sent=Bundle(), message=Bundle({"logits": torch.full((2, 3), value)}), weight=weight)
        for value, weight in ((1.0, 1.0), (4.0, 0.1))
    ]
    assert float(method.merge(method.setup(), arrivals).state.tensors["mean"][0, 0]) == 2.5


def test_what_it_needs_and_refuses() -> None:
    bed = strangers()
    needs = bed.method("fedmd").needs
    assert (needs.policies, needs.stages, needs.public_samples) == (ROUND_POLICIES, ("score", "fit"), 5000)
    assert not needs.public_labels
    assert bed.method("fedmd", pretrain_public=1).needs.public_labels
    with pytest.raises(BadInput, match="public"):
        bed.method("fedmd", public=0)
    with pytest.raises(BadInput, match=r"params.base of inco is fedmd, which does not average weights"):
        bed.method("inco", base="fedmd")
    with pytest.raises(AssertionError):  # labels only on request
        bed.method("fedmd").context.public.labels(1, 0)
