"""FedProto against its equations: features that are pulled to the classes' mean features."""

from __future__ import annotations

from math import isfinite, nan

import pytest
import torch
from algorithm_harness import (
    SPEC,
    Bed,
    ToyDepth,
    ToyDropout,
    ToyStrangers,
    ToyWidth,
    accuracy,
    advance,
    begin_anew,
    run,
    same,
)
from torch.nn import functional as F

from fleetbed.emulator.method.algorithm import ALL_POLICIES, Arrival, Assignment, Client
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.models.base import InputSpec
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Optimizer, Training

PLAIN = Optimizer(lr=0.05, momentum=0.0)


def depths(**more: int) -> Bed:
    return Bed(ToyDepth(None), ["one", "three"], training=Training(batch=8, optimizer=PLAIN, **more))


def upload(bed: Bed, number: int, rows: dict[int, float], weight: float = 1.0) -> Arrival:
    """Prototypes whose 5 values are all the same."""
    values = torch.tensor([[value] * 5 for value in rows.values()])
    message = Bundle({"class": torch.tensor([*rows], dtype=torch.int32), "prototypes": values})
    return Arrival(
        assignment=Assignment(client=bed.context.clients[number]), sent=Bundle(), message=message, weight=weight
    )


def sent(bed: Bed, state: Bundle) -> list[float | None]:
    """The first value of each class's prototype, None where it has none."""
    message = bed.method("fedproto").send(state, Assignment(client=bed.context.clients[0]))
    rows = dict(zip(message.values["classes"], message.tensors["prototypes"][:, 0].tolist(), strict=True))
    return [rows.get(c) for c in range(3)]


@pytest.mark.parametrize("classes", [3, 10])
def test_bytes_are_c_d_down_and_c_times_d_plus_one_up(classes: int) -> None:
    bed = Bed(ToyDepth(None), ["one", "three"], samples=240, spec=InputSpec((1, 4, 4), classes))
    method = bed.method("fedproto")
    so_far = run(bed, method, 2)
    assert [b.nbytes() for b in so_far.sent[0]] == [0, 0]
    assert {b.nbytes() for b in so_far.sent[1]} == {4 * classes * 5}
    assert {r.message.nbytes() for r in so_far.replies[0]} == {4 * classes * (5 + 1)}
    work = method.work(so_far.state, Assignment(client=bed.context.clients[0]))
    assert (work.bytes_down, work.bytes_up) == (4 * classes * 5, 4 * classes * 6)
    assert (work.held_models, work.held_values, work.each_step, work.once) == (1, 2 * classes * 5, (), ())


def test_uploads_are_the_mean_features_of_the_last_epoch_before_each_step() -> None:
    bed = depths(epochs=2)
    client = bed.context.clients[0]
    reply = bed.method("fedproto").client(bed.job(client, Bundle()))
    net = bed.family.build("one", SPEC).train()
    net.load_state_dict(bed.context.initial("one"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    features, labels = [], []
    for x, y in bed.job(client, Bundle()).batches():
        optimizer.zero_grad()
        h = net.features(x)
        F.cross_entropy(net.fc(h), y).backward()
        optimizer.step()
        features.append(h.detach())
        labels.append(y)
    assert len(features) == 6
    h, y = torch.cat(features[3:]), torch.cat(labels[3:])
    assert reply.message.tensors["class"].tolist() == sorted(set(y.tolist()))
    for c, mean in zip(reply.message.tensors["class"], reply.message.tensors["prototypes"], strict=True):
        torch.testing.assert_close(mean, h[y == c].mean(0))


def test_the_loss_by_hand_where_one_class_has_no_prototype() -> None:
    bed = depths()
    client = bed.context.clients[1]
    prototypes = torch.tensor([[1.0, 0.0, 2.0, 0.0, 1.0], [nan] * 5, [0.0, 3.0, 0.0, 1.0, 0.0]])
    message = Bundle({"prototypes": prototypes[[0, 2]]}, {"classes": [0, 2]})
    reply = bed.method("fedproto", **{"lambda": 0.7}).client(bed.job(client, message))
    net = bed.family.build("three", SPEC).train()
    net.load_state_dict(bed.context.initial("three"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for x, y in bed.job(client, message).batches():
        optimizer.zero_grad()
        h = net.features(x)
        terms = [(h[i, j] - prototypes[y[i], j]) ** 2 for i in range(8) for j in range(5) if y[i] != 1]
        (F.cross_entropy(net.fc(h), y) + 0.7 * sum(terms) / 40).backward()
        optimizer.step()
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(reply.keep.under("model/")[name], tensor, rtol=1e-4, atol=1e-6)


def test_the_server_takes_the_newest_of_each_client_once() -> None:
    bed = depths()
    method = bed.method("fedproto")
    state = method.merge(method.setup(), [upload(bed, 0, {0: 1, 2: 4}), upload(bed, 1, {0: 3}, weight=0.1)]).state
    assert sent(bed, state) == [2, None, 4]  # whatever the policy's weight; nobody sent class 1
    state = method.merge(state, [upload(bed, 1, {0: 9, 1: 5})]).state
    assert sent(bed, state) == [5, 5, 4]  # the first client is away and still counts
    state = method.merge(state, [upload(bed, 0, {2: 6})]).state
    assert sent(bed, state) == [9, 5, 6]  # it no longer has class 0


def test_lambda_zero_is_private() -> None:
    bed = Bed(ToyDropout(None), ["one", "three"])
    private = run(bed, bed.method("private"), 3)
    without = run(bed, bed.method("fedproto", **{"lambda": 0}), 3)
    assert all(same(without.kept[n], private.kept[n]) for n in (0, 1))
    pulled = run(bed, bed.method("fedproto"), 2)
    assert not same(pulled.kept[0], run(bed, bed.method("private"), 2).kept[0])
    assert same(run(bed, bed.method("fedproto")).kept[0], run(bed, bed.method("private")).kept[0])  # nothing known yet


def test_a_client_that_lacks_classes_sends_none_for_them() -> None:
    bed = depths()
    bed.data.y[bed.parts[0]] = 2
    so_far = run(bed, bed.method("fedproto"), 2)
    assert so_far.replies[0][0].message.tensors["class"].tolist() == [2]
    assert so_far.replies[0][0].message.nbytes() == 4 * (5 + 1)
    assert so_far.sent[1][0].values == {"classes": [0, 1, 2]}  # the other one has them


def test_partial_work_sends_what_it_saw_of_its_last_epoch() -> None:
    bed = depths(epochs=2)
    client, method = bed.context.clients[0], bed.method("fedproto")
    job = bed.job(client, Bundle(), most_steps=4)
    reply = method.client(job)
    labels = [y for _, y in bed.job(client, Bundle()).batches()]
    assert job.steps == 4
    assert reply.message.tensors["class"].tolist() == sorted(set(labels[3].tolist()))


def test_a_client_that_steps_down_begins_anew_and_still_takes_part() -> None:
    bed = depths()
    method = bed.method("fedproto")
    so_far = run(bed, method, 2)
    clients = begin_anew(bed, method, so_far, Client(1, "two", 24))
    advance(bed, method, so_far, clients, round_=3)
    assert "model/blocks.2.0.weight" not in so_far.kept[1].tensors


@pytest.mark.parametrize(("family", "variants"), [(ToyStrangers, ["thin", "thick"]), (ToyWidth, ["half", "full"])])
def test_features_of_different_widths_are_refused(family: type, variants: list[str]) -> None:
    with pytest.raises(BadInput, match=rf"{family.name}.* of one width .*{variants[0]} has \d.* such as resnet-stage"):
        Bed(family(None), variants).method("fedproto").check()
    Bed(family(None), variants[:1] * 2).method("fedproto").check()


def test_a_step_down_to_features_of_another_width_is_refused() -> None:
    method = Bed(ToyWidth(None), ["full", "full"]).method("fedproto")
    with pytest.raises(BadInput, match=r"of one width in all variants \(half has 2, full has 4\)"):
        method.reassign([Client(0, "full", 24), Client(1, "half", 24)])


def test_the_nearest_prototype_predicts() -> None:
    bed = depths()
    method = bed.method("fedproto", predictor="prototype")
    net = bed.family.build("one", SPEC).eval()
    x = bed.data.x[:6]
    h = net.features(x).detach()
    prototypes = {0: h[0], 2: h[3] + 0.01}
    extras = {"class": torch.tensor([0, 2]).int(), "prototypes": torch.stack([*prototypes.values()])}
    scores = method.predict(net, x, extras).detach()
    assert (scores[0].argmax(), scores[3].argmax()) == (0, 2)
    for i in range(6):
        for c in (0, 2):
            assert float(scores[i, c]) == pytest.approx(-float((h[i] - prototypes[c]).square().mean()), abs=1e-6)
    assert 1 not in scores.argmax(1)
    assert isfinite(F.cross_entropy(scores, torch.full((6,), 1)))
    assert torch.equal(method.predict(net, x, {}), net(x))  # before there are any


def test_targets_bring_the_prototypes_where_these_predict() -> None:
    bed = depths()
    by_class, by_prototype = bed.method("fedproto"), bed.method("fedproto", predictor="prototype")
    so_far = run(bed, by_class)
    assert all(not t.extras for t in by_class.targets(so_far.state) + by_prototype.targets(by_prototype.setup()))
    wanted = by_class.send(so_far.state, Assignment(client=bed.context.clients[0])).tensors["prototypes"]
    targets = by_prototype.targets(so_far.state)
    assert [(t.client, t.local) for t in targets] == [(0, True), (1, True), (0, False), (1, False)]
    assert all(torch.equal(t.extras["prototypes"], wanted) for t in targets)
    assert (by_class.needs.policies, by_class.needs.reported) == (ALL_POLICIES, "personal-own")


def test_it_learns_and_repeats() -> None:
    bed = Bed(ToyDepth(None), ["one", "three"], samples=60)
    method = bed.method("fedproto")
    first, second = run(bed, method, 6), run(bed, method, 6)
    assert same(first.state, second.state)
    assert accuracy(bed, method, first) > accuracy(bed, method, run(bed, method, 1)) + 0.1
