"""DepthFL: exits that teach each other, FedDyn over layers, the mean of all exits as prediction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from algorithm_harness import (
    ADAM,
    SGD,
    Bed,
    ToyExits,
    ToyPoint,
    accuracy,
    advance,
    equal,
    exit_logits,
    resumed,
    run,
    same,
    small_resnets,
    trained,
    weights,
    wire_sizes,
)
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator.algorithms.depthfl import Method, consistency
from fleetbed.emulator.method.algorithm import ALL_POLICIES, Assignment, Client
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Optimizer, Training

MIXED = ["one", "three", "two"]
SMALL = InputSpec((1, 8, 8), 3)


class Point(ToyPoint):
    has_exits = True


def toy(variants: list[str] | None = None, **more: Any) -> Bed:
    return Bed(ToyExits(None), variants or MIXED, **more)


def loss_of(round_: int, exits: list[Tensor], y: Tensor, **params: Any) -> Tensor:
    method = toy().method("depthfl", **params)
    assert isinstance(method, Method)
    return method.loss(round_, exits, y)


# what it reduces to


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
def test_with_one_exit_it_is_heteroavg(optimizer: Optimizer) -> None:
    bed = toy(["one", "one"], training=Training(batch=8, epochs=2, optimizer=optimizer))
    plain = run(bed, bed.method("heteroavg"), 3)
    found = run(bed, bed.method("depthfl"), 3)
    assert same(found.state, plain.state)
    assert found.kept == {}


def test_without_mutual_learning_the_ramp_does_nothing() -> None:
    bed = toy()
    plain = run(bed, bed.method("depthfl", mutual=False), 2).state
    assert same(run(bed, bed.method("depthfl", mutual=False, ramp=1), 2).state, plain)
    assert not same(run(bed, bed.method("depthfl"), 2).state, plain)


def test_training_the_last_exit_alone_is_heteroavg_on_the_same_family() -> None:
    """The paper's reading of InclusiveFL: other exits than a client's last get no gradient."""
    bed = toy(["three", "three"])
    so_far = run(bed, bed.method("heteroavg"))
    first = bed.context.initial("three")
    for name in ("heads.0.weight", "heads.1.weight"):
        assert torch.equal(so_far.state.tensors[name], first[name])
    assert not torch.equal(so_far.state.tensors["heads.2.weight"], first["heads.2.weight"])


# the loss


def test_the_weight_of_the_others_grows() -> None:
    values = [round(consistency(t, 300), 4) for t in (0, 100, 150, 300, 999)]
    assert values == [0.0067, 0.1084, 0.2865, 1.0, 1.0]


def test_the_loss_by_hand() -> None:
    exits, y = exit_logits()
    exits = [o.detach() for o in exits]
    ce = sum(float(F.cross_entropy(o, y)) for o in exits)
    p = [torch.softmax(o, 1) for o in exits]
    kl = sum(float((p[j] * (p[j] / p[i]).log()).sum()) / 4 for i in range(3) for j in range(3) if i != j)
    for round_, weight in ((1, 0.006738), (101, 0.108368), (301, 1.0)):
        assert float(loss_of(round_, exits, y)) == pytest.approx(ce + weight * kl / 2, rel=1e-4)
    assert float(loss_of(301, exits, y, mutual=False)) == pytest.approx(ce)
    assert float(loss_of(3, exits, y, ramp=2)) == pytest.approx(ce + kl / 2)


def test_an_exit_learns_from_the_others_but_does_not_teach_by_its_gradient() -> None:
    exits, y = exit_logits()
    loss_of(301, exits, y).backward()
    own = exits[0].detach().clone().requires_grad_()
    others = [torch.softmax(o.detach(), 1) for o in exits[1:]]
    kl = sum((q * (q.log() - F.log_softmax(own, 1))).sum() / 4 for q in others)
    (F.cross_entropy(own, y) + kl / 2).backward()
    torch.testing.assert_close(exits[0].grad, own.grad)


def test_predictions_are_the_mean_of_all_exits() -> None:
    bed = toy()
    net, x = bed.family.build("three", bed.spec).eval(), bed.data.x[:5]
    found = bed.method("depthfl").predict(net, x, {})
    torch.testing.assert_close(found, sum(net.exits(x)) / 3)
    assert not torch.allclose(found, net(x))


# FedDyn


def test_two_quadratics_under_feddyn_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """f_i = (y - b_i)^2 / 2 with b = (0, 2), alpha 1, one step of 1/2: the mean is at the optimum from round 1 on."""
    monkeypatch.setattr(F, "cross_entropy", lambda out, b, **_: ((out - b[:, None]) ** 2).mean() / 2)
    plain = Training(batch=2, optimizer=Optimizer(lr=0.5, momentum=0.0))
    bed = Bed(Point(None), ["point", "point"], samples=2, training=plain)
    bed.data.y = torch.tensor([0, 0, 2, 2])
    so_far = run(bed, bed.method("depthfl", alpha=1.0), 3)
    ends = [[float(r.message.tensors["weight"]) for r in replies] for replies in so_far.replies]
    own = [[float(r.keep.tensors["gradient/weight"]) for r in replies] for replies in so_far.replies]
    assert ends == [[0.0, 1.0], [0.5, 1.0], [0.75, 1.0]]
    assert own == [[0.0, -1.0], [0.5, -1.0], [0.75, -1.0]]
    assert [float(m.state.tensors["drift/weight"]) for m in so_far.merged] == [-0.5, -0.25, -0.125]
    assert [float(m.state.tensors["weight"]) for m in so_far.merged] == [1.0, 1.0, 1.0]


def test_the_pull_towards_what_was_received_by_hand() -> None:
    """Against torch's own optimiser on the loss with FedDyn's terms written out."""
    bed = toy(["two"], training=Training(batch=8, optimizer=Optimizer(lr=0.1, momentum=0.0)))
    method = bed.method("depthfl", alpha=0.3, ramp=1)
    so_far = run(bed, method, 2)
    message, client = so_far.sent[1][0], bed.context.clients[0]
    net = bed.family.build("two", bed.spec).train()
    net.load_state_dict(weights(message))
    g = so_far.replies[0][0].keep.under("gradient/")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in bed.job(client, message, None, 1).batches():
        exits = net.exits(x)
        loss = sum(F.cross_entropy(o, y) for o in exits)
        for own, other in (exits, exits[::-1]):
            target = torch.softmax(other.detach(), 1)
            loss = loss + F.kl_div(F.log_softmax(own, 1), target, reduction="batchmean")
        for name, p in net.named_parameters():
            loss = loss - (g[name] * p).sum() + 0.15 * ((p - message.tensors[name]) ** 2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    reply = so_far.replies[1][0]
    for name, p in net.named_parameters():
        torch.testing.assert_close(reply.message.tensors[name], p.detach(), rtol=1e-4, atol=1e-5)
        wanted = g[name] - 0.3 * (p.detach() - message.tensors[name])
        torch.testing.assert_close(reply.keep.tensors[f"gradient/{name}"], wanted, rtol=1e-3, atol=1e-5)


def test_h_is_of_the_whole_fleet_and_moves_weights_that_somebody_held() -> None:
    """Two of K = 3 clients come: h = -alpha (1 + 3) / 3 where both hold a tensor, -alpha 3 / 3 where one does."""
    bed = toy(["one", "three", "three"])
    method = bed.method("depthfl", alpha=0.5)
    state = method.setup()
    arrivals = [trained(method, state, c, by) for c, by in zip(bed.context.clients[:2], (1.0, 3.0), strict=True)]
    after = method.merge(state, arrivals).state.tensors
    for name, mean, total in (("heads.0.bias", 2.0, 4.0), ("heads.2.bias", 3.0, 3.0)):
        torch.testing.assert_close(after[f"drift/{name}"], torch.full((3,), -0.5 * total / 3))
        torch.testing.assert_close(after[name], state.tensors[name] + mean + total / 3)
    # running statistics are averaged plainly, and have no h
    torch.testing.assert_close(after["stem.2.running_mean"], state.tensors["stem.2.running_mean"] + 2)
    assert not any("running" in name for name in after if name.startswith("drift/"))
    # what nobody holds in the next merge stays, and so does its h
    second = method.merge(
        Bundle(after, state.values), [trained(method, Bundle(after, state.values), arrivals[0].client, 1.0)]
    )
    for name in ("heads.2.bias", "drift/heads.2.bias"):
        assert torch.equal(second.state.tensors[name], after[name])


def test_a_late_result_and_its_correction_are_weighed_alike() -> None:
    bed = toy(["one", "one"])
    method = bed.method("depthfl", alpha=0.5)
    state = method.setup()
    late = trained(method, state, bed.context.clients[0], 2.0, weight=0.25)
    after = method.merge(state, [late]).state.tensors
    torch.testing.assert_close(after["drift/heads.0.bias"], torch.full((3,), -0.5))  # -alpha 2 / 2, in full
    torch.testing.assert_close(after["heads.0.bias"], state.tensors["heads.0.bias"] + 0.25 * (2 + 1))


# what travels and lasts


@pytest.mark.parametrize("alpha", [None, 0.1])
def test_the_messages_are_those_of_the_formula(alpha: float | None) -> None:
    bed = small_resnets("resnet-depth", "depth1", "depth3", "depth4")
    method = bed.method("depthfl", alpha=alpha)
    so_far = run(bed, method, 2)
    for client, sent, reply in zip(bed.context.clients, so_far.sent[1], so_far.replies[1], strict=True):
        p, b, counters = wire_sizes(bed, client.variant)
        work = method.work(so_far.state, Assignment(client=client))
        assert sent.nbytes() == reply.message.nbytes() == work.bytes_down == work.bytes_up == 4 * (p + b) + 8 * counters
        assert (work.trains, work.held_models, work.parameter_passes) == (
            "exits",
            1 if alpha is None else 2,
            4 * bool(alpha),
        )
        if alpha is not None:
            assert so_far.kept[client.number].nbytes() == 4 * p
    assert (so_far.kept == {}) is (alpha is None)
    whole = wire_sizes(bed, "depth4")[0]
    assert sum(t.numel() for t in so_far.state.under("drift/").values()) == (0 if alpha is None else whole)


def test_it_runs_under_every_policy() -> None:
    assert toy().method("depthfl", alpha=0.1).needs.policies == ALL_POLICIES


def test_a_family_without_exits_is_refused() -> None:
    bed = Bed(family("resnet-stage", {"base_width": 4}), ["resnet10"], samples=4, spec=SMALL)
    with pytest.raises(BadInput, match=r"resnet-stage, whose models have no early exits.*resnet-depth"):
        bed.method("depthfl").check()


def test_a_client_begins_without_g_and_one_that_was_away_has_its_own() -> None:
    bed = toy()
    so_far = run(bed, bed.method("depthfl", alpha=0.1), 3, sampled=[[0], [1], [0]])
    sent, reply = so_far.sent[0][0], so_far.replies[0][0]
    for name, g in reply.keep.under("gradient/").items():
        torch.testing.assert_close(g, -0.1 * (reply.message.tensors[name] - sent.tensors[name]))
    last, before = so_far.replies[2][0], reply.keep.under("gradient/")
    for name, g in last.keep.under("gradient/").items():
        moved = last.message.tensors[name] - so_far.sent[2][0].tensors[name]
        torch.testing.assert_close(g, before[name] - 0.1 * moved, rtol=1e-4, atol=1e-6)


def test_a_client_that_steps_down_goes_on_with_the_part_that_it_needs() -> None:
    bed = toy(["three", "three"])
    method = bed.method("depthfl", alpha=0.1)
    so_far = run(bed, method)
    smaller = [Client(0, "two", 24), bed.context.clients[1]]
    kept = method.step_down(so_far.kept[0], smaller[0])
    assert kept is not None
    two = {name for name, _ in bed.family.outline("two", bed.spec).named_parameters()}
    assert equal(kept.under("gradient/"), {n: t for n, t in so_far.kept[0].under("gradient/").items() if n in two})
    so_far.kept[0] = kept
    method.reassign(smaller)
    bed.context = method.context
    advance(bed, method, so_far, smaller, round_=2)
    assert so_far.kept[0].under("gradient/").keys() == two
    assert [target.variant for target in method.targets(so_far.state)] == ["two", "three"]
    assert method.step_down(Bundle(), smaller[0]) is None


@pytest.mark.parametrize("params", [{}, {"alpha": 0.1}])
def test_a_resumed_run_ends_alike(params: dict[str, Any]) -> None:
    bed = toy()
    assert same(resumed(bed, "depthfl", 4, 2, **params).state, run(bed, bed.method("depthfl", **params), 4).state)


@pytest.mark.parametrize("params", [{}, {"alpha": 0.1}])
def test_it_learns_and_repeats(params: dict[str, Any]) -> None:
    bed = toy(samples=48)
    method = bed.method("depthfl", **params)
    so_far = run(bed, method, 6)
    assert same(so_far.state, run(bed, bed.method("depthfl", **params), 6).state)
    assert accuracy(bed, method, so_far) > 0.7


def test_inco_over_it_leaves_exits_alone() -> None:
    bed = small_resnets("resnet-depth", "depth2", "depth4")
    plain, crossed = run(bed, bed.method("depthfl")), run(bed, bed.method("inco", base="depthfl"))
    assert all(same(a.message, b.message) for a, b in zip(plain.replies[0], crossed.replies[0], strict=True))
    moved = {n for n, t in plain.state.tensors.items() if not torch.equal(t, crossed.state.tensors[n])}
    assert moved
    assert all(name.startswith("layer") for name in moved)
