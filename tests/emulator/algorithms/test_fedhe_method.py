"""FedHe against its equations and the released schedule."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from algorithm_harness import (
    ADAM,
    SPEC,
    Bed,
    ToyDropout,
    ToyStrangers,
    accuracy,
    run,
    same,
)
from torch.nn import functional as F

from fleetbed.emulator.bases.class_means import squared_error
from fleetbed.emulator.method.algorithm import Arrival, Assignment
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.models.base import InputSpec
from fleetbed.profiles.experiment import Training

TRAINING = Training(batch=4, optimizer=ADAM)


def strangers(clients: int = 2, samples: int = 40) -> Bed:
    return Bed(ToyStrangers(None), ["thin", "thick"] * (clients // 2), samples=samples, training=TRAINING)


def upload(bed: Bed, number: int, classes: list[int], logits: list[list[float]]) -> Arrival:
    tensors = {"class": torch.tensor(classes, dtype=torch.int32), "logits": torch.tensor(logits)}
    return Arrival(assignment=Assignment(client=bed.context.clients[number]), sent=Bundle(), message=Bundle(tensors))


def test_a_message_is_c_times_c_plus_one_values() -> None:
    """110 values, 440 bytes at 10 classes, whatever the models are."""
    bed = Bed(ToyStrangers(None), ["thin", "thick"], samples=200, spec=InputSpec((1, 4, 4), 10), training=TRAINING)
    so_far = run(bed, bed.method("fedhe", batch=100), 2)
    for bundle in [*so_far.sent[1], *(r.message for r in so_far.replies[0])]:
        assert bundle.nbytes() == 440
        assert sum(t.numel() for t in bundle.tensors.values()) == 110
    assert all(b.nbytes() == 0 for b in so_far.sent[0])


def test_uploads_are_the_mean_logits_before_each_step() -> None:
    bed = strangers()
    client = bed.context.clients[0]
    reply = bed.method("fedhe", steps=3, batch=8).client(bed.job(client, Bundle()))
    net = bed.family.build("thin", SPEC).train()
    net.load_state_dict(bed.context.initial("thin"))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    logits, labels = [], []
    for x, y in bed.job(client, Bundle()).batches(steps=3, batch=8):
        optimizer.zero_grad()
        z = net(x)
        F.cross_entropy(z, y).backward()
        optimizer.step()
        logits.append(z.detach())
        labels.append(y)
    z, y = torch.cat(logits), torch.cat(labels)
    assert len(z) == 24
    for c, p in zip(reply.message.tensors["class"], reply.message.tensors["logits"], strict=True):
        torch.testing.assert_close(p, z[y == c].mean(0))
    assert set(reply.message.tensors["class"].tolist()) == set(y.tolist())


def test_the_loss_is_eq_13() -> None:
    """A turn with the server's logits, by hand."""
    bed = strangers()
    client = bed.context.clients[1]
    logits = torch.tensor([[3.0, -1.0, 0.5], [0.0, 2.0, -2.0], [-1.0, 0.0, 4.0]])
    message = Bundle({"class": torch.arange(3).int(), "logits": logits})
    reply = bed.method("fedhe", steps=2, batch=8, alpha=0.7).client(bed.job(client, message))
    net = bed.family.build("thick", SPEC).train()
    net.load_state_dict(bed.context.initial("thick"))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for x, y in bed.job(client, message).batches(steps=2, batch=8):
        optimizer.zero_grad()
        z = net(x)
        squared = sum((z[i, j] - logits[y[i], j]) ** 2 for i in range(8) for j in range(3)) / 24
        (F.cross_entropy(z, y) + 0.7 * squared).backward()
        optimizer.step()
    for n, t in net.state_dict().items():
        torch.testing.assert_close(reply.keep.under("model/")[n], t, rtol=1e-4, atol=1e-6)


def test_a_class_that_the_server_does_not_know_gets_cross_entropy_alone() -> None:
    z = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    target = torch.tensor([[0.0, 0.0], [torch.nan, torch.nan]])
    loss = squared_error(z, target)
    assert loss.item() == (1 + 4) / 4
    loss.backward()
    assert torch.equal(z.grad[1], torch.zeros(2))
    bed = strangers()
    message = Bundle({"class": torch.tensor([1], dtype=torch.int32), "logits": torch.ones(1, 3)})
    bed.method("fedhe").client(bed.job(bed.context.clients[0], message))  # raises nothing


def test_the_server_holds_the_exact_mean_of_the_uploads() -> None:
    bed = strangers(4)
    method = bed.method("fedhe", cold_start=0, forget_every=0)
    uploads = [
        upload(bed, 0, [0, 2], [[1, 2, 3], [4, 5, 6]]),
        upload(bed, 1, [0], [[3, 2, 1]]),
        upload(bed, 2, [2, 0], [[0, 0, 0], [5, 5, 5]]),
    ]
    wanted = {0: [3.0, 3.0, 3.0], 2: [2.0, 2.5, 3.0]}
    for order in permutations(uploads):
        for split in (1, 2, 3):  # in one merge or in several
            state = method.setup()
            for part in (order[:split], order[split:]):
                state = method.merge(state, part).state if part else state
            sent = method.send(state, Assignment(client=bed.context.clients[0], task=0)).tensors
            assert sent["class"].tolist() == [0, 2]  # class 1 is not known, so it is not sent
            assert [row.tolist() for row in sent["logits"]] == [wanted[0], wanted[2]]


def test_nothing_is_sent_until_everyone_could_have_had_a_turn() -> None:
    bed = strangers(4)
    method = bed.method("fedhe")
    state = method.setup()
    for turn in range(6):
        sent = method.send(state, Assignment(client=bed.context.clients[0], task=turn))
        assert bool(sent.tensors) == (turn >= 4)
        state = method.merge(state, [upload(bed, turn % 4, [0], [[1, 1, 1]])]).state


def test_forgetting_changes_the_weight_of_the_past_and_not_the_mean() -> None:
    bed = strangers(2)
    method, never = bed.method("fedhe", forget_every=3, cold_start=0), bed.method("fedhe", forget_every=0, cold_start=0)
    client = bed.context.clients[0]
    states = [m.setup() for m in (method, never)]
    for value in (1.0, 2.0, 6.0):
        arrivals = [upload(bed, 0, [1], [[value] * 3])]
        states = [m.merge(s, arrivals).state for m, s in zip((method, never), states, strict=True)]
    for m, s in zip((method, never), states, strict=True):
        assert m.send(s, Assignment(client=client, task=0)).tensors["logits"].tolist() == [[3.0] * 3]
    assert states[0].tensors["count"].tolist() == [0, 1, 0]
    late = [upload(bed, 0, [1], [[7.0] * 3])]
    states = [m.merge(s, late).state for m, s in zip((method, never), states, strict=True)]
    assert method.send(states[0], Assignment(client=client, task=0)).tensors["logits"].tolist() == [
        [5.0] * 3
    ]  # (3 + 7) / 2
    assert never.send(states[1], Assignment(client=client, task=0)).tensors["logits"].tolist() == [[4.0] * 3]  # 16 / 4


def test_forgetting_comes_every_ten_turns_per_client() -> None:
    bed = strangers(2)
    method = bed.method("fedhe")
    state = method.setup()
    for turn in range(1, 21):
        state = method.merge(state, [upload(bed, 0, [0], [[1.0] * 3])]).state
        assert int(state.tensors["count"][0]) == (1 if turn == 20 else turn)


def test_plus_one_shrinks_and_sends_zeros() -> None:
    bed = Bed(ToyStrangers(None), ["thin"], samples=8, spec=InputSpec((1, 4, 4), 10), training=TRAINING)
    client = bed.context.clients[0]
    plain = bed.method("fedhe", steps=1, batch=8).client(bed.job(client, Bundle())).message.tensors
    shrunk = bed.method("fedhe", steps=1, batch=8, plus_one=True).client(bed.job(client, Bundle()))
    logits = shrunk.message.tensors["logits"]
    assert len(logits) == 10
    counts = torch.bincount(bed.data.y[:8], minlength=10)
    for c in range(10):
        if counts[c]:
            row = plain["logits"][plain["class"].tolist().index(c)]
            torch.testing.assert_close(logits[c], row * counts[c] / (counts[c] + 1))
        else:
            assert torch.equal(logits[c], torch.zeros(10))


def test_alpha_zero_is_private() -> None:
    bed = Bed(ToyDropout(None), ["one", "three"], samples=20, training=TRAINING)
    fedhe = run(bed, bed.method("fedhe", alpha=0), 3)
    private = run(bed, bed.method("private", steps=3, batch=50, keep_optimizer=True), 3)
    assert all(same(fedhe.kept[n], private.kept[n]) for n in (0, 1))
    assert not same(run(bed, bed.method("fedhe"), 3).kept[0], private.kept[0])


def test_a_turn_is_three_batches_and_a_small_client_takes_what_it_has() -> None:
    bed = strangers(2, samples=20)
    method = bed.method("fedhe")
    work = method.work(method.setup(), Assignment(client=bed.context.clients[0]))
    assert (work.steps, work.batch) == (3, 20)
    assert work.held_models == 3  # what it kept: the model and Adam's two moments


def test_a_mixing_weight_does_not_count_an_upload_twice_or_half() -> None:
    bed = strangers(2)
    method = bed.method("fedhe", cold_start=0)
    one = upload(bed, 0, [0], [[1.0] * 3])
    light = Arrival(
        assignment=Assignment(client=one.client), sent=one.sent, message=one.message, weight=0.1, staleness=7
    )
    assert same(method.merge(method.setup(), [one]).state, method.merge(method.setup(), [light]).state)


@pytest.mark.parametrize("family", [ToyStrangers, ToyDropout])
def test_it_learns_and_repeats(family: type) -> None:
    variants = family(None).variants[:2]
    bed = Bed(family(None), variants, samples=60, training=Training(batch=4, optimizer=ADAM))
    method = bed.method("fedhe", steps=8, batch=20)
    first, second = run(bed, method, 12), run(bed, method, 12)
    assert same(first.state, second.state)
    assert accuracy(bed, method, first) > accuracy(bed, method, run(bed, method, 1)) + 0.1
