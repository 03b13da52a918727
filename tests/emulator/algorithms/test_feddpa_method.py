"""FedDPA: the Fisher information says which entries are a client's own; each side is trained in a phase."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from algorithm_harness import (
    ADAM,
    SGD,
    Bed,
    Run,
    ToyDepth,
    ToyDropout,
    accuracy,
    advance,
    bed_on,
    equal,
    run,
    same,
    tensors_of,
    trained,
    weights,
    wire_sizes,
)
from msgspec.structs import replace as replace_fields
from torch.nn import functional as F

from fleetbed.emulator.algorithms.feddpa import Method, fisher, pull, scaled
from fleetbed.emulator.bases.masks import MASK, packed, unpacked
from fleetbed.emulator.method.algorithm import ALL_POLICIES, Arrival, Assignment, Client
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.models.base import InputSpec
from fleetbed.models.cost.predict import cost
from fleetbed.models.families.lookup import family
from fleetbed.models.work import Pass, Phase, Work
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Optimizer, Training

both_optimizers = pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
PLAIN = {"lambda1": 0.0, "lambda2": 0.0}


def dpa(bed: Bed, **params: object) -> Method:
    method = bed.method("feddpa", **params)
    assert isinstance(method, Method)
    return method


# the Fisher information


def test_fisher_is_of_single_samples_and_leaves_the_model_alone() -> None:
    bed = Bed(ToyDropout(None), ["two"])
    net = bed.job(bed.context.clients[0], Bundle()).model(bed.context.initial("two"))
    before = {n: t.clone() for n, t in net.state_dict().items()}
    x, y = bed.data.x[:5], bed.data.y[:5]
    found = fisher(net, x, y)
    assert net.training
    assert equal(dict(net.state_dict()), before)
    assert all(p.grad is None for p in net.parameters())
    net.eval()
    by_hand = torch.zeros(3, 5)
    for i in range(5):
        (gradient,) = torch.autograd.grad(F.log_softmax(net(x[i : i + 1]), 1)[0, y[i]], net.fc.weight)
        by_hand += gradient**2
    torch.testing.assert_close(found["fc.weight"], by_hand)
    together = torch.autograd.grad(F.cross_entropy(net(x), y, reduction="sum"), net.fc.weight)[0] ** 2
    assert not torch.allclose(found["fc.weight"], together)  # the square of a sum is something else


def test_it_is_scaled_to_one_in_each_tensor_and_a_constant_one_is_common() -> None:
    assert scaled(torch.tensor([3.0, 1.0, 2.0])).tolist() == [1.0, 0.0, 0.5]
    assert scaled(torch.full((4,), 0.2)).tolist() == [0.0] * 4
    bed = Bed(ToyDepth(None), ["one"])
    net = bed.job(bed.context.clients[0], Bundle()).model(bed.context.initial("one"))
    with torch.no_grad():
        net.fc.weight.zero_()  # nothing below gets a gradient: F is 0 everywhere in these tensors
    masks = dpa(bed).own_entries(bed.job(bed.context.clients[0], Bundle()), net)
    assert not masks["stem.1.weight"].any()
    assert masks["fc.weight"].any()
    assert not masks["fc.weight"].all()


def test_the_samples_are_drawn_anew_for_each_task_and_capped() -> None:
    bed = Bed(ToyDepth(None), ["one"], samples=24)
    assert [dpa(bed).fisher_samples(n) for n in (24, 500)] == [24, 128]
    assert dpa(bed, fisher_samples=None).fisher_samples(500) == 500
    few, client = dpa(bed, fisher_samples=4), bed.context.clients[0]
    net = bed.job(client, Bundle()).model(bed.context.initial("one"))
    masks = [few.own_entries(bed.job(client, Bundle(), task=t), net)["fc.weight"] for t in range(4)]
    assert any(not torch.equal(masks[0], other) for other in masks[1:])


# the phases


@both_optimizers
def test_from_a_threshold_of_one_on_it_is_heteroavg_by_samples(optimizer: Optimizer) -> None:
    for kind in ("depth", "width", "resnet"):
        bed = bed_on(kind, replace_fields(optimizer, weight_decay=0.01), samples=[24, 8, 16])
        so_far = run(bed, dpa(bed, threshold=1.0, **PLAIN), 3)
        plain = run(bed, bed.method("heteroavg", weighting="samples"), 3)
        assert equal(so_far.state.tensors, plain.state.tensors), kind


@both_optimizers
def test_below_zero_everyone_trains_alone(optimizer: Optimizer) -> None:
    bed = bed_on("depth", optimizer)
    so_far, private = run(bed, dpa(bed, threshold=-1.0, **PLAIN), 3), run(bed, bed.method("private"), 3)
    for number, variant in enumerate(bed.variants):
        mine, alone = (r.kept[number].under("model/") for r in (so_far, private))
        for name, _ in bed.family.build(variant, bed.spec).named_parameters():
            torch.testing.assert_close(mine[name], alone[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [replace_fields(SGD, weight_decay=0.1), replace_fields(ADAM, weight_decay=0.1)],
    ids=["momentum and decay", "adam and decay"],
)
def test_each_phase_moves_its_own_side_alone(optimizer: Optimizer) -> None:
    bed = bed_on("depth", optimizer)
    method = dpa(bed, share_personal=False)
    so_far = run(bed, method, 2)
    client, kept = bed.context.clients[1], so_far.kept[1]
    message = method.send(so_far.state, Assignment(client=client))

    def turn(steps: int) -> tuple[Bundle, dict[str, torch.Tensor]]:
        reply = method.client(bed.job(client, message, kept, 9, most_steps=steps))
        return reply.message, weights(reply.message)

    whole, begun = turn(0)
    masks = {n: unpacked(bits, begun[n].shape) for n, bits in whole.under(MASK).items()}
    own = kept.under("model/")
    for name, mask in masks.items():  # it begins with its own entries, and what was received
        assert torch.equal(begun[name], torch.where(mask, own[name], message.tensors[name])), name
    (_, first), (_, second) = turn(3), turn(6)
    for name, mask in masks.items():
        assert torch.equal(first[name][~mask], begun[name][~mask]), name
        assert torch.equal(second[name][mask], first[name][mask]), name
    assert any((first[n] != begun[n]).any() for n in masks)
    assert any((second[n] != first[n]).any() for n in masks)


def test_the_phases_see_different_orders() -> None:
    bed = Bed(ToyDepth(None), ["two"])
    job = bed.job(bed.context.clients[0], Bundle())
    orders = [[y.tolist() for _, y in job.batches(phase=phase)] for phase in ("own", "")]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("bound", [0.0, 0.5, 500.0])
def test_the_pull_is_the_gradient_of_its_term(bound: float) -> None:
    bed = Bed(ToyDepth(None), ["two"])
    net = bed.family.build("two", bed.spec)
    anchor = {n: t.clone() for n, t in bed.context.initial("two").items()}
    anchor["fc.bias"] = net.fc.bias.detach().clone()  # at no distance: no gradient
    parameters = dict(net.named_parameters())
    distance = sum((p - anchor[n]).norm() for n, p in parameters.items() if n != "fc.bias")
    ((0.3 / 2) * (distance - bound).abs()).backward()
    wanted = {n: p.grad for n, p in parameters.items()}
    for p in parameters.values():
        p.grad = torch.zeros_like(p)
    pull(net, anchor, 0.3, bound)()
    for name, p in parameters.items():
        if name == "fc.bias":
            assert not p.grad.any()
        else:
            torch.testing.assert_close(p.grad, wanted[name])


def test_a_strong_pull_holds_the_own_entries_near_the_received_ones() -> None:
    bed = bed_on("depth")

    def distance(lambda1: float) -> float:
        method = dpa(bed, lambda1=lambda1, lambda2=0.0, share_personal=False)
        so_far = run(bed, method, 3)
        message = so_far.replies[2][0].message
        masks = {n: unpacked(b, message.tensors[n].shape) for n, b in message.under(MASK).items()}
        changes = [(message.tensors[n] - so_far.sent[2][0].tensors[n])[m] for n, m in masks.items()]
        return float(torch.cat(changes).norm())

    assert distance(1.0) < distance(0.0)


# the server


def test_own_entries_stay_out_of_the_mean_if_asked() -> None:
    bed = Bed(ToyDepth(None), ["one", "one"], samples=[8, 24])
    method = dpa(bed, share_personal=False)
    state = method.setup()

    def arrival(number: int, by: float, own: list[int]) -> Arrival:
        masks = {n: torch.zeros(s, dtype=torch.bool) for n, s in method.may_be_own("one").items()}
        masks["fc.bias"][own] = True
        return trained(method, state, bed.context.clients[number], by, extras=packed(masks))

    merged = method.merge(state, [arrival(0, 1.0, [0, 1]), arrival(1, 3.0, [1])]).state.tensors
    change = merged["fc.bias"] - state.tensors["fc.bias"]
    torch.testing.assert_close(change, torch.tensor([3.0, 0.0, 2.5]))  # 8 and 24 samples
    everything = dpa(bed)
    plain = everything.merge(
        state, [trained(everything, state, c, b) for c, b in zip(bed.context.clients, (1.0, 3.0), strict=True)]
    )
    torch.testing.assert_close(plain.state.tensors["fc.bias"] - state.tensors["fc.bias"], torch.full((3,), 2.5))


def test_changes_are_clipped_to_the_bound() -> None:
    bed = Bed(ToyDepth(None), ["one"])
    method, state = dpa(bed, clip=True), dpa(bed).setup()
    (client,) = bed.context.clients
    parameters, _, _ = wire_sizes(bed, "one")

    def norm(by: float) -> float:
        merged = method.merge(state, [trained(method, state, client, by)]).state.tensors
        names = method.may_be_own("one")
        assert torch.allclose(merged["stem.2.running_mean"], state.tensors["stem.2.running_mean"] + by)  # no weight
        return float(torch.cat([(merged[n] - state.tensors[n]).flatten() for n in names]).norm())

    assert norm(1.0) == pytest.approx(0.5, rel=1e-4)
    small = 0.1 / parameters**0.5
    assert norm(small) == pytest.approx(0.1, rel=1e-3)


def test_noise_has_the_stated_deviation_and_repeats() -> None:
    bed = Bed(ToyDepth(None), ["three"] * 4, spec=InputSpec((1, 4, 4), 3))
    method, state = dpa(bed, clip=True, noise=2.0), dpa(bed).setup()

    def moved(task: int) -> torch.Tensor:
        one = trained(method, state, bed.context.clients[0], 0.0)
        one = replace(one, assignment=replace(one.assignment, task=task))
        merged = method.merge(state, [one]).state.tensors
        return torch.cat([(merged[n] - state.tensors[n]).flatten() for n in method.may_be_own("three")])

    changes = torch.cat([moved(task) for task in range(40)])
    assert float(changes.std()) == pytest.approx(0.5 * 2.0 / 4**0.5, rel=0.05)
    assert torch.equal(moved(1), moved(1))
    assert not torch.equal(moved(1), moved(2))
    with pytest.raises(BadInput, match=r"params\.noise is 2 but params\.clip is false"):
        dpa(bed, noise=2.0).check()


# cost


def test_bytes_and_work() -> None:
    bed = Bed(ToyDepth(None), ["two"], samples=30)
    client = bed.context.clients[0]
    parameters, buffers, counters = wire_sizes(bed, "two")
    size = 4 * (parameters + buffers) + 8 * counters
    bits = sum(-(-p.numel() // 8) for p in bed.family.build("two", bed.spec).parameters())
    for share, extra in ((True, 0), (False, bits)):
        method = dpa(bed, share_personal=share)
        so_far = run(bed, method, 2)
        work = method.work(so_far.state, Assignment(client=client))
        assert so_far.sent[1][0].nbytes() == work.bytes_down == size
        assert so_far.replies[1][0].message.nbytes() == work.bytes_up == size + extra
        assert so_far.replies[1][0].keep.nbytes() == size
    assert work.earlier == (Phase(steps=3, batch=8, parameter_passes=2),)
    assert (work.steps, work.parameter_passes, work.held_models, work.held_values) == (
        3,
        2,
        3,
        30 * 16 + parameters // 2,
    )
    assert work.once == (Pass("train", "all", 1, 30),)
    common = dpa(bed, threshold=1.0, lambda2=0).work(method.setup(), Assignment(client=client))
    assert (common.earlier, common.steps, common.parameter_passes) == ((), 3, 0)


def test_single_samples_cost_as_many_passes() -> None:
    nets, spec = family("resnet-stage", {"base_width": 8}), InputSpec((3, 32, 32), 10)
    works = [Work(steps=1, batch=8), *(Work(steps=1, batch=8, once=(Pass("train", "all", 1, n),)) for n in (1, 40))]
    plain, one, forty = (cost(nets, "resnet10", spec, work, SGD) for work in works)
    assert forty.flops - plain.flops == pytest.approx(40 * (one.flops - plain.flops))
    assert forty.operations.calls - plain.operations.calls == pytest.approx(
        40 * (one.operations.calls - plain.operations.calls)
    )
    assert one.flops - plain.flops == pytest.approx(plain.flops / 8, rel=0.05)  # a sample of eight
    assert forty.memory_bytes == one.memory_bytes
    assert one.memory_bytes == pytest.approx(plain.memory_bytes, rel=0.01)  # a pass of one needs less than a step


# over time


def test_a_first_model_is_what_was_received_and_an_absent_client_keeps_its_own() -> None:
    bed = bed_on("depth")
    method = dpa(bed)
    so_far = run(bed, method, 3, sampled=[[0, 1], [1], [1]])
    targets = {t.client: t for t in method.targets(so_far.state) if t.local}
    assert equal(tensors_of(bed, targets[0], so_far), so_far.replies[0][0].keep.under("model/"))
    assert equal(tensors_of(bed, targets[2], so_far), bed.context.initial("three"))
    client = bed.context.clients[2]
    message = method.send(so_far.state, Assignment(client=client))
    reply = method.client(bed.job(client, message, None, 7, most_steps=0))
    assert equal(weights(reply.message), message.tensors)


def test_a_client_that_steps_down_begins_with_what_it_receives() -> None:
    bed = Bed(ToyDepth(None), ["three", "two"])
    method = dpa(bed)
    so_far = run(bed, method, 2)
    clients = [Client(0, "one", 24), bed.context.clients[1]]
    assert method.step_down(so_far.kept.pop(0), clients[0]) is None
    method.reassign(clients)
    advance(bed, method, so_far, clients, round_=3)
    assert so_far.kept[0].under("model/").keys() == bed.context.initial("one").keys()


def test_a_run_goes_on_from_its_state_and_what_clients_keep() -> None:
    bed = bed_on("depth")
    whole, so_far = run(bed, dpa(bed), 3), run(bed, dpa(bed), 2)
    resumed = Run(Bundle(dict(so_far.state.tensors), dict(so_far.state.values)), kept=so_far.kept, task=so_far.task)
    advance(bed, dpa(bed), resumed, bed.context.clients, round_=3)
    assert same(resumed.state, whole.state)


def test_policies_and_the_series_of_the_paper() -> None:
    method = dpa(bed_on("depth"))
    assert (method.needs.policies, method.needs.reported) == (ALL_POLICIES, "personal-own")


def test_it_learns() -> None:
    bed = Bed(ToyDepth(None), ["one", "three"], samples=60, training=Training(batch=8, optimizer=SGD))
    method = dpa(bed)
    assert accuracy(bed, method, run(bed, method, 6)) > 0.6
