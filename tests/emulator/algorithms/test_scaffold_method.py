"""SCAFFOLD against its equations."""

from __future__ import annotations

import pytest
import torch
from algorithm_harness import (
    ADAM,
    FAMILIES,
    SGD,
    Bed,
    ToyDepth,
    ToyPoint,
    ToyWidth,
    advance,
    bed_on,
    equal,
    run,
    weights,
    wire_sizes,
    without_class,
)
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator.method.algorithm import ALL_POLICIES, Arrival, Assignment, Client
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.profiles.experiment import LearningRate, Optimizer, Training

OPTIMIZERS = {"momentum": SGD, "adam": ADAM}
DEEP = "blocks.2.0.weight"
both_optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def variate(bundle: Bundle) -> dict[str, Tensor]:
    return bundle.under("variate/")


def by_hand(
    bed: Bed, message: Bundle, c_i: dict[str, Tensor], *, task: int, steps: int, lr: float, client: int = 0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the client ends with: the weights, and the mean of what its optimiser did in each step, over lr."""
    who = bed.context.clients[client]
    net = bed.family.build(who.variant, bed.spec).train()
    net.load_state_dict(weights(message))
    choice = bed.training.optimizer
    adam = choice.name == "adam"
    optimizer = (
        torch.optim.Adam(net.parameters(), lr=lr)
        if adam
        else torch.optim.SGD(net.parameters(), lr=lr, momentum=choice.momentum)
    )
    c, named = variate(message), dict(net.named_parameters())
    mean = {n: torch.zeros(p.shape) for n, p in named.items()}
    for _, (x, y) in zip(range(steps), bed.job(who, message, None, task).batches(), strict=False):
        before = {n: p.detach().clone() for n, p in named.items()}
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for n, p in named.items():
                mean[n] += (before[n] - p) / (lr * steps)
                p -= lr * (c[n] - c_i.get(n, torch.zeros(())))
    return dict(net.state_dict()), mean


def assert_as_by_hand(bed: Bed, reply: object, ended: dict[str, Tensor], mean: dict[str, Tensor]) -> None:
    for n, t in ended.items():
        torch.testing.assert_close(reply.message.tensors[n], t)
    for n, u in mean.items():
        torch.testing.assert_close(variate(reply.keep)[n], u, rtol=1e-3, atol=2e-3)


# the equations


def test_two_quadratics_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """f_i = (y - b_i)^2 / 2 with b = (0, 2): both end at 3/4 in the second round, where FedAvg's ends are apart."""
    monkeypatch.setattr(F, "cross_entropy", lambda out, b, **_: ((out - b[:, None]) ** 2).mean() / 2)
    plain = Training(batch=2, optimizer=Optimizer(lr=0.5, momentum=0.0))
    bed = Bed(ToyPoint(None), ["point", "point"], samples=2, training=plain)
    bed.data.y = torch.tensor([0, 0, 2, 2])
    method = bed.method("scaffold")
    so_far = run(bed, method, 3)
    ends = [[float(r.message.tensors["weight"]) for r in replies] for replies in so_far.replies]
    own = [[float(r.keep.tensors["variate/weight"]) for r in replies] for replies in so_far.replies]
    assert ends[:2] == [[0.0, 1.0], [0.75, 0.75]]
    assert own[:2] == [[0.0, -2.0], [0.5, -1.5]]
    assert [float(m.state.tensors["weight"]) for m in so_far.merged] == [0.5, 0.75, 0.875]
    assert float(so_far.merged[0].state.tensors["variate/weight"]) == -1.0


@both_optimizers
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_first_round_is_heteroavg(kind: str, optimizer: Optimizer) -> None:
    bed = bed_on(kind, optimizer)
    plain, so_far = run(bed, bed.method("heteroavg"), 2), run(bed, bed.method("scaffold"), 2)
    for a, b in zip(plain.replies[0], so_far.replies[0], strict=True):
        assert equal(a.message.tensors, weights(b.message))
    assert equal(plain.merged[0].state.tensors, weights(so_far.merged[0].state))
    assert not equal(plain.state.tensors, weights(so_far.state))


@both_optimizers
@pytest.mark.parametrize("kind", FAMILIES)
def test_with_all_clients_the_servers_variate_is_the_mean_of_theirs(kind: str, optimizer: Optimizer) -> None:
    bed = bed_on(kind, optimizer)
    method = bed.method("scaffold")
    so_far = run(bed, method, 3)
    whole = so_far.state.value("whole", str)
    for name, c in variate(so_far.state).items():
        total, holders = torch.zeros(c.shape), torch.zeros(c.shape)
        for client in bed.context.clients:
            rows = method.index(client.variant, whole).get(name)
            if rows is not None:
                grid = torch.meshgrid(
                    *(torch.arange(n) if r is None else r for n, r in zip(c.shape, rows, strict=True)), indexing="ij"
                )
                total[grid] += variate(so_far.kept[client.number])[name]
                holders[grid] += 1
        torch.testing.assert_close(c, total / holders.clamp(min=1), rtol=1e-4, atol=1e-4)
        assert bool(c.any()) == bool(holders.any())


@both_optimizers
def test_a_client_corrects_after_each_step_and_keeps_its_mean_update(optimizer: Optimizer) -> None:
    bed = bed_on("depth", optimizer)
    so_far = run(bed, bed.method("scaffold"), 2)
    message, c_i = so_far.sent[1][0], variate(so_far.replies[0][0].keep)
    ended, mean = by_hand(bed, message, c_i, task=3, steps=3, lr=optimizer.lr)
    assert_as_by_hand(bed, so_far.replies[1][0], ended, mean)
    dc = variate(so_far.replies[1][0].message)
    assert all(torch.equal(variate(so_far.kept[0])[n], c_i[n] + dc[n]) for n in dc)


def test_the_learning_rate_is_that_of_the_round() -> None:
    plain = Optimizer(lr=0.05, momentum=0.0)
    training = Training(batch=8, optimizer=plain, schedule=(LearningRate(round=2, lr=0.01),))
    bed = Bed(ToyDepth(None), ["one", "two"], training=training)
    so_far = run(bed, bed.method("scaffold"), 2)
    c_i = variate(so_far.replies[0][0].keep)
    assert_as_by_hand(bed, so_far.replies[1][0], *by_hand(bed, so_far.sent[1][0], c_i, task=2, steps=3, lr=0.01))


def test_each_tensor_counts_the_clients_of_the_fleet_that_hold_it() -> None:
    """Two of four took part; the deep layer is held by two of four, of which one took part."""
    bed = Bed(ToyDepth(None), ["one", "three", "three", "one"])
    so_far = run(bed, bed.method("scaffold"), sampled=[[0, 1]])
    one, three = (variate(reply.message) for reply in so_far.replies[0])
    c = variate(so_far.state)
    torch.testing.assert_close(c["fc.bias"], (one["fc.bias"] + three["fc.bias"]) / 4)
    torch.testing.assert_close(c[DEEP], three[DEEP] / 2)


def test_each_element_counts_the_clients_of_the_fleet_that_hold_it() -> None:
    bed = Bed(ToyWidth(None), ["half", "full", "half"])
    so_far = run(bed, bed.method("scaffold"), sampled=[[0, 1]])
    half, full = (variate(reply.message)["fc.weight"] for reply in so_far.replies[0])
    c = variate(so_far.state)["fc.weight"]
    torch.testing.assert_close(c[:, :2], (half + full[:, :2]) / 3)
    torch.testing.assert_close(c[:, 2:], full[:, 2:])


def test_what_nobody_held_keeps_its_variate() -> None:
    bed = Bed(ToyDepth(None), ["one", "three"])
    method = bed.method("scaffold")
    so_far = run(bed, method)
    advance(bed, method, so_far, bed.context.clients[:1], round_=2)
    before, after = (merged.state.tensors for merged in so_far.merged)
    assert after[f"variate/{DEEP}"] is before[f"variate/{DEEP}"]
    assert not torch.equal(after["variate/fc.bias"], before["variate/fc.bias"])


def test_the_servers_rate_is_of_trainable_tensors_alone() -> None:
    bed = Bed(ToyDepth(None), ["one", "two"])
    start = bed.method("heteroavg").setup().tensors
    plain, fast = run(bed, bed.method("scaffold")).state, run(bed, bed.method("scaffold", server_lr=3)).state
    for name, t in weights(plain).items():
        if "running" in name or "num_batches" in name:
            assert torch.equal(fast.tensors[name], t)
        else:
            torch.testing.assert_close(fast.tensors[name] - start[name], 3 * (t - start[name]), rtol=1e-3, atol=1e-5)
    assert equal(variate(plain), variate(fast))


# who takes part, and when


def test_a_late_result_moves_the_weights_by_its_weight_and_the_variate_in_full() -> None:
    bed = Bed(ToyDepth(None), ["one", "two"])
    start = bed.method("heteroavg").setup().tensors["fc.weight"]
    whole, late = run(bed, bed.method("scaffold")), run(bed, bed.method("scaffold"), weight=0.5)
    assert equal(variate(whole.state), variate(late.state))
    moved = [so_far.state.tensors["fc.weight"] - start for so_far in (whole, late)]
    torch.testing.assert_close(moved[1], moved[0] / 2, rtol=1e-3, atol=1e-6)


def test_the_first_turn_of_a_client_is_corrected_by_the_servers_variate_alone() -> None:
    bed = Bed(ToyDepth(None), ["one", "two"])
    so_far = run(bed, bed.method("scaffold"), 2, sampled=[[1], [0]])
    ended, mean = by_hand(bed, so_far.sent[1][0], {}, task=1, steps=3, lr=0.05)
    assert_as_by_hand(bed, so_far.replies[1][0], ended, mean)
    assert variate(so_far.sent[1][0])["fc.bias"].any()
    assert so_far.replies[1][0].message.values == {"had_variate": False}
    assert so_far.merged[1].metrics["variates_lost"] == 0


def test_a_client_that_was_away_for_long_goes_on_with_its_old_variate() -> None:
    bed = Bed(ToyDepth(None), ["one", "two"])
    so_far = run(bed, bed.method("scaffold"), 5, sampled=[[0, 1], [1], [1], [1], [0]])
    c_i = variate(so_far.replies[0][0].keep)
    ended, mean = by_hand(bed, so_far.sent[4][0], c_i, task=5, steps=3, lr=0.05)
    assert_as_by_hand(bed, so_far.replies[4][0], ended, mean)


@both_optimizers
def test_partial_work_is_divided_by_the_steps_really_done(optimizer: Optimizer) -> None:
    bed = bed_on("depth", optimizer)
    method = bed.method("scaffold")
    so_far = run(bed, method)
    client, c_i = bed.context.clients[0], variate(so_far.kept[0])
    message = method.send(so_far.state, Assignment(client=client, task=9))
    reply = method.client(bed.job(client, message, so_far.kept[0], 9, most_steps=1))
    assert_as_by_hand(bed, reply, *by_hand(bed, message, c_i, task=9, steps=1, lr=optimizer.lr))


def test_a_client_that_lacks_a_class() -> None:
    """Its variate pushes the class down, the others' correct it; the server's stays their mean."""
    bed = without_class(bed_on("depth", Optimizer(lr=0.05, momentum=0.0)), 0, 2)
    so_far = run(bed, bed.method("scaffold"), 4)
    own = [variate(so_far.kept[n])["fc.bias"] for n in range(3)]
    assert own[0][2] > 0.02  # a positive gradient: the bias falls
    torch.testing.assert_close(variate(so_far.state)["fc.bias"], sum(own) / 3, rtol=1e-4, atol=1e-5)
    free = run(bed, bed.method("heteroavg"), 4)
    drift = [
        float(s.replies[3][0].message.tensors["fc.bias"][2] - s.sent[3][0].tensors["fc.bias"][2])
        for s in (so_far, free)
    ]
    assert abs(drift[0]) < abs(drift[1])


def test_a_client_that_steps_down_begins_anew_and_is_counted() -> None:
    bed = Bed(ToyDepth(None), ["three", "three", "one"])
    method = bed.method("scaffold")
    so_far = run(bed, method, 2)
    before = variate(so_far.state)
    assert [m.metrics["variates_lost"] for m in so_far.merged] == [0, 0]
    clients = [Client(0, "two", 24), *bed.context.clients[1:]]
    method.reassign(clients)
    kept = method.step_down(so_far.kept.pop(0), clients[0])
    assert kept is None
    advance(bed, method, so_far, clients[:1], round_=3)
    assert so_far.merged[2].metrics["variates_lost"] == 1
    ended, mean = by_hand_of_variant(bed, so_far.sent[2][0], "two", task=6)
    for n, t in ended.items():
        torch.testing.assert_close(so_far.replies[2][0].message.tensors[n], t)
    for n, u in mean.items():
        torch.testing.assert_close(variate(so_far.kept[0])[n], u, rtol=1e-3, atol=2e-3)
    # its old share stays in c, and the deep layer has one holder now
    dc, after = variate(so_far.replies[2][0].message), variate(so_far.state)
    torch.testing.assert_close(after["fc.bias"], before["fc.bias"] + dc["fc.bias"] / 3)
    assert torch.equal(after[DEEP], before[DEEP])
    advance(bed, method, so_far, clients, round_=4)
    assert so_far.merged[3].metrics["variates_lost"] == 0
    old, new = variate(so_far.merged[2].state)[DEEP], variate(so_far.state)[DEEP]
    torch.testing.assert_close(new, old + variate(so_far.replies[3][1].message)[DEEP])


def by_hand_of_variant(
    bed: Bed, message: Bundle, variant: str, task: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    smaller = Bed(bed.family, [variant, *bed.variants[1:]], bed.samples, training=bed.training)
    return by_hand(smaller, message, {}, task=task, steps=3, lr=0.05)


# what it costs


def test_a_variate_travels_with_the_weights_each_way() -> None:
    """4 (2P + b) bytes and 8 for each counter: ResNet10 has P = 4,910,922."""
    bed = Bed(
        family("resnet-stage"),
        ["resnet10"],
        samples=4,
        spec=InputSpec((3, 32, 32), 10),
        training=Training(batch=2, max_steps=1),
    )
    method = bed.method("scaffold")
    so_far = run(bed, method)
    parameters, buffers, counters = wire_sizes(bed, "resnet10")
    assert parameters == 4_910_922
    wanted = 4 * (2 * parameters + buffers) + 8 * counters
    reply = so_far.replies[0][0]
    assert so_far.sent[0][0].nbytes() == reply.message.nbytes() == wanted
    assert reply.keep.nbytes() == 4 * parameters
    task = Assignment(client=bed.context.clients[0])
    work, plain = method.work(so_far.state, task), bed.method("heteroavg").work(so_far.state, task)
    assert (work.bytes_down, work.bytes_up) == (wanted, wanted)
    assert (work.held_models, work.parameter_passes, work.each_step, work.steps) == (3, 2, (), plain.steps)
    arrival = Arrival(assignment=task, sent=so_far.sent[0][0], message=reply.message)
    free = Arrival(assignment=task, sent=arrival.sent, message=Bundle(weights(reply.message)))
    extra = method.server_work(so_far.state, [arrival]).flops - method.server_work(so_far.state, [free]).flops
    assert extra == 2 * parameters


@pytest.mark.parametrize(
    ("optimizer", "models"),
    [(SGD, 3), (ADAM, 3), (Optimizer(momentum=0.0), 4)],
)
def test_the_new_variates_count_where_the_optimiser_has_no_state_to_free(optimizer: Optimizer, models: int) -> None:
    bed = bed_on("depth", optimizer)
    method = bed.method("scaffold")
    assert method.work(method.setup(), Assignment(client=bed.context.clients[0])).held_models == models


@pytest.mark.parametrize("kind", FAMILIES)
def test_variates_are_of_trainable_tensors_alone(kind: str) -> None:
    bed = bed_on(kind)
    so_far = run(bed, bed.method("scaffold"))
    for client, sent, reply in zip(bed.context.clients, so_far.sent[0], so_far.replies[0], strict=True):
        shapes = {n: p.shape for n, p in bed.family.build(client.variant, bed.spec).named_parameters()}
        for bundle in (sent, reply.message, reply.keep):
            assert {n: t.shape for n, t in variate(bundle).items()} == shapes
    assert not any("running" in n or "num_batches" in n for n in variate(so_far.state))


def test_policies() -> None:
    needs = Bed(ToyDepth(None), ["one"]).method("scaffold").needs
    assert needs.policies == ALL_POLICIES
    assert not needs.initial_on_client
