"""FedTGP against its equations: prototypes that the server trains to keep the classes apart."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from algorithm_harness import (
    SPEC,
    Bed,
    ToyDepth,
    ToyDropout,
    ToyStrangers,
    accuracy,
    advance,
    arrival,
    begin_anew,
    frozen,
    run,
    same,
    server_flops,
    toy_depths,
    without_class,
)
from torch.nn import functional as F

from fleetbed.emulator.algorithms.fedtgp import Trainable, contrast, margin
from fleetbed.emulator.method.algorithm import ALL_POLICIES, Arrival, Assignment, Client
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.models.base import InputSpec
from fleetbed.models.work import Pass
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Optimizer

PLAIN = Optimizer(lr=0.05, momentum=0.0)
depths = partial(toy_depths, "one", "three", optimizer=PLAIN)


def upload(bed: Bed, number: int, rows: dict[int, list[float]]) -> Arrival:
    vectors = torch.tensor([*rows.values()])
    return arrival(bed, number, Bundle({"class": torch.tensor([*rows], dtype=torch.int32), "prototypes": vectors}))


@pytest.mark.parametrize("classes", [3, 10])
def test_bytes_are_those_of_fedproto(classes: int) -> None:
    bed = Bed(ToyDepth(None), ["one", "three"], samples=240, spec=InputSpec((1, 4, 4), classes))
    method = bed.method("fedtgp", server_epochs=1)
    so_far = run(bed, method, 2)
    assert [b.nbytes() for b in so_far.sent[0]] == [0, 0]
    assert {b.nbytes() for b in so_far.sent[1]} == {4 * classes * 5}
    assert {r.message.nbytes() for r in so_far.replies[0]} == {4 * classes * (5 + 1)}
    work = method.work(so_far.state, Assignment(client=bed.context.clients[0]))
    assert (work.bytes_down, work.bytes_up, work.held_values) == (4 * classes * 5, 4 * classes * 6, 2 * classes * 5)
    assert (work.held_models, work.once) == (1, (Pass("forward", "features", 240),))


def test_the_server_holds_as_many_values_as_the_paper_has() -> None:
    assert sum(p.numel() for p in Trainable(10, 512).parameters()) == 530_432


def test_uploads_are_means_over_all_own_data_after_training() -> None:
    bed = depths(epochs=2)
    client = bed.context.clients[0]
    reply = bed.method("fedtgp").client(bed.job(client, Bundle()))
    net = bed.family.build("one", SPEC)
    net.load_state_dict(reply.keep.under("model/"))
    x, y = bed.data.x[bed.parts[0]], bed.data.y[bed.parts[0]]
    with torch.no_grad():
        h = net.eval().features(x)
    assert reply.message.tensors["class"].tolist() == sorted(set(y.tolist()))
    for c, mean in zip(reply.message.tensors["class"], reply.message.tensors["prototypes"], strict=True):
        torch.testing.assert_close(mean, h[y == c].mean(0))


def test_the_margin_by_hand() -> None:
    p = torch.tensor([[0.0, 0.0], [0.0, 2.0], [4.0, 1.0], [0.0, 7.0]])
    y = torch.tensor([0, 0, 1, 2])  # means (0, 1), (4, 1), (0, 7): the nearest are 4, 4 and 6 away
    assert margin(p, y, 100.0) == 6.0
    assert margin(p, y, 5.0) == 5.0
    assert margin(p[:2], y[:2], 100.0) == 100.0  # one class alone


def test_the_loss_by_hand() -> None:
    p, q = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    # the distances are 5 and 1; with a margin of 2 the own class, the first, is at 7
    wanted = -torch.log_softmax(torch.tensor([-7.0, -1.0]), 0)[0]
    torch.testing.assert_close(contrast(p, torch.tensor([0]), q, 2.0), wanted)


def test_a_distance_that_rounds_below_zero_gives_no_nan() -> None:
    p = torch.full((1, 512), 1234.567)
    q = torch.nn.Parameter(torch.cat([p * (1 + 1e-7), -p]))
    contrast(p, torch.tensor([0]), q, 1.0).backward()
    assert torch.isfinite(q.grad).all()


def test_the_server_trains_by_its_equations() -> None:
    bed = depths()
    method = bed.method("fedtgp", server_epochs=3, server_lr=0.1)
    rows = {0: [1.0, 0, 0, 0, 0], 2: [0, 0, 0, 2.0, 0]}
    state = method.setup()
    merged = method.merge(state, [upload(bed, 0, rows)])
    net = Trainable(3, 5)
    net.load_state_dict(state.tensors)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    p, y = torch.tensor([*rows.values()]), torch.tensor([0, 2])
    for _ in range(3):
        optimizer.zero_grad()
        q = net.last(F.relu(net.middle(net.embedding.weight)))
        distance = torch.cdist(p, q, compute_mode="donot_use_mm_for_euclid_dist")
        distance = distance + 5**0.5 * F.one_hot(y, 3)
        F.cross_entropy(-distance, y).backward()
        optimizer.step()
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(merged.state.tensors[name], tensor, rtol=1e-4, atol=1e-6)
    assert merged.metrics["margin"] == pytest.approx(5**0.5)


def test_only_classes_that_somebody_has_sent_have_a_prototype() -> None:
    bed = depths()
    method = bed.method("fedtgp", server_epochs=1)
    state = method.merge(method.setup(), [upload(bed, 0, {2: [1.0] * 5})]).state
    assert method.send(state, Assignment(client=bed.context.clients[0])).values == {"classes": [2]}
    state = method.merge(state, [upload(bed, 1, {0: [1.0] * 5})]).state
    assert method.send(state, Assignment(client=bed.context.clients[0])).values == {"classes": [0, 2]}


def test_lambda_zero_is_private() -> None:
    bed = Bed(ToyDropout(None), ["one", "three"])
    private = run(bed, bed.method("private"), 3)
    without = run(bed, bed.method("fedtgp", **{"lambda": 0, "server_epochs": 2}), 3)
    assert all(same(without.kept[n], private.kept[n]) for n in (0, 1))
    pulled = run(bed, bed.method("fedtgp", server_epochs=2), 2)
    assert not same(pulled.kept[0], run(bed, bed.method("private"), 2).kept[0])
    assert same(run(bed, bed.method("fedtgp")).kept[0], run(bed, bed.method("private")).kept[0])  # nothing known yet


def test_a_client_that_lacks_a_class_sends_none_for_it() -> None:
    bed = without_class(depths(), 0, 1)
    so_far = run(bed, bed.method("fedtgp", server_epochs=1), 2)
    assert so_far.replies[0][0].message.tensors["class"].tolist() == [0, 2]
    assert so_far.sent[1][0].values == {"classes": [0, 1, 2]}  # the other one has it


def test_a_client_that_steps_down_begins_anew_and_still_takes_part() -> None:
    bed = depths()
    method = bed.method("fedtgp", server_epochs=1)
    so_far = run(bed, method, 2)
    clients = begin_anew(bed, method, so_far, Client(1, "two", 24))
    advance(bed, method, so_far, clients, round_=3)
    assert "model/blocks.2.0.weight" not in so_far.kept[1].tensors


def test_a_merge_repeats_and_is_seeded_by_its_number() -> None:
    bed = depths()
    method = bed.method("fedtgp", server_epochs=2, server_batch=1)
    state, arrivals = method.setup(), [upload(bed, 0, {0: [1.0] * 5, 1: [0.0] * 5, 2: [2.0, 0, 0, 0, 1]})]
    torch.manual_seed(1)
    first = method.merge(state, arrivals)
    torch.manual_seed(2)
    assert same(method.merge(state, arrivals).state, first.state)
    later = replace(frozen(state), values={**state.values, "merges": 1})
    assert not same(Bundle(method.merge(later, arrivals).state.tensors), Bundle(first.state.tensors))


def test_the_server_pays_for_its_training() -> None:
    bed = depths()
    method = bed.method("fedtgp", server_epochs=7, server_batch=2)
    arrivals = [upload(bed, 0, {0: [1.0] * 5, 1: [0.0] * 5, 2: [2.0] * 5})]
    layers, distances = 2 * 3 * 5 * 5, 3 * 3 * 5  # multiply-adds: of 2 steps each through both layers, and of 3 rows
    wanted = 7 * 3 * 2 * (2 * layers + distances)
    assert server_flops(bed, method.server_work(method.setup(), arrivals)) == wanted


def test_what_it_needs_and_refuses() -> None:
    needs = depths().method("fedtgp").needs
    assert needs.policies == ALL_POLICIES - {"async"}
    assert needs.long_merges
    with pytest.raises(BadInput, match=r"toy-strangers, but fedtgp needs features of one width"):
        Bed(ToyStrangers(None), ["thin", "thick"]).method("fedtgp").check()


def test_it_learns_and_repeats() -> None:
    bed = Bed(ToyDepth(None), ["one", "three"], samples=60)
    method = bed.method("fedtgp", **{"lambda": 1})  # so small a network cannot follow the default
    first, second = run(bed, method, 6), run(bed, method, 6)
    assert same(first.state, second.state)
    assert accuracy(bed, method, first) > accuracy(bed, method, run(bed, method, 1)) + 0.1
