"""FedNova against its equations."""

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
    flaw,
    run,
    same,
    wire_sizes,
    without_class,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbed.emulator.algorithms.fednova import distance
from fleetbed.emulator.method.algorithm import ALL_POLICIES, Algorithm, Arrival, Assignment, Client, Reply
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import LearningRate, Optimizer, Training

PLAIN = Optimizer(lr=0.05, momentum=0.0)
OPTIMIZERS = {"plain": PLAIN, "momentum": SGD, "adam": ADAM}
DEEP, LAST = "blocks.2.0.weight", "fc.bias"


def bed_of(variants: list[str], optimizer: Optimizer, samples: int | list[int] = 24) -> Bed:
    return Bed(ToyDepth(None), variants, samples, training=Training(batch=8, optimizer=optimizer))


def done(
    method: Algorithm, state: Bundle, client: Client, by: float, steps: int, *, round_: int = 1, weight: float = 1.0
) -> Arrival:
    """A result of so many steps whose every float tensor has moved by `by`."""
    assignment = Assignment(client=client, round=round_)
    sent = method.send(state, assignment)
    moved = {n: t + by if t.is_floating_point() else t for n, t in sent.tensors.items()}
    return Arrival(assignment=assignment, sent=sent, message=Bundle(moved, {"steps": steps}), weight=weight)


# a_k


@pytest.mark.parametrize(("steps", "wanted"), [(1, 1.0), (2, 2.9), (5, 13.1441)])
def test_momentum_by_hand(steps: int, wanted: float) -> None:
    assert distance(steps, 0.9, 0.0) == pytest.approx(wanted, rel=1e-12)


@settings(deadline=None)
@given(st.integers(1, 300), st.floats(0.0, 0.99), st.floats(1e-3, 0.99))
def test_the_recurrence_is_the_closed_forms(steps: int, rho: float, pull: float) -> None:
    assert distance(steps, 0.0, 0.0) == steps
    closed = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    assert distance(steps, rho, 0.0) == pytest.approx(closed, rel=1e-6)
    assert distance(steps, 0.0, pull) == pytest.approx((1 - (1 - pull) ** steps) / pull, rel=1e-9)


@settings(deadline=None)
@given(st.integers(1, 300), st.floats(0.0, 0.99), st.floats(0.0, 0.99))
def test_a_change_is_never_divided_by_zero(steps: int, rho: float, pull: float) -> None:
    assert distance(steps, rho, pull) > 1e-9


@pytest.mark.parametrize(
    ("optimizer", "params", "wanted"),
    [
        (PLAIN, {}, 5.0),
        (SGD, {}, 13.1441),
        (ADAM, {}, 5.0),
        (ADAM, {"mu": 2.0}, 5.0),
        (Optimizer(lr=0.05, momentum=0.9, weight_decay=0.1), {}, 13.1441),
        (PLAIN, {"mu": 2.0}, (1 - 0.9**5) / 0.1),
    ],
)
def test_the_optimiser_decides(optimizer: Optimizer, params: dict[str, float], wanted: float) -> None:
    """By the ratio of two clients: one that made 5 steps, and one that made 1 (a = 1 in each case)."""
    bed = bed_of(["one", "one"], optimizer)
    method = bed.method("fednova", **params)
    state = method.setup()
    five, one = (
        done(method, state, c, by, steps) for c, by, steps in zip(bed.context.clients, (3, 0), (5, 1), strict=True)
    )
    moved = method.merge(state, [five, one]).state.tensors[LAST] - state.tensors[LAST]
    torch.testing.assert_close(moved, torch.full_like(moved, (wanted + 1) / 2 * 3 / wanted / 2))


def test_the_learning_rate_is_that_of_the_round_of_the_task() -> None:
    training = Training(batch=8, optimizer=PLAIN, schedule=(LearningRate(round=2, lr=0.2),))
    bed = Bed(ToyDepth(None), ["one", "one"], training=training)
    method = bed.method("fednova", mu=2.0)
    state = method.setup()
    first, second = bed.context.clients
    arrivals = [done(method, state, first, 1.0, 3, round_=1), done(method, state, second, 0.0, 3, round_=2)]
    a = [(1 - 0.9**3) / 0.1, (1 - 0.6**3) / 0.4]
    moved = method.merge(state, arrivals).state.tensors[LAST] - state.tensors[LAST]
    torch.testing.assert_close(moved, torch.full_like(moved, (a[0] + a[1]) / 2 / a[0] / 2))


# the merge


@pytest.mark.parametrize(("name", "wanted"), [("fednova", -3.0), ("heteroavg", -3.5)])
def test_one_weight_by_hand(name: str, wanted: float) -> None:
    """x = 0, y = (-1, -6) after (1, 3) steps with equally many samples."""
    bed = Bed(ToyPoint(None), ["point", "point"], training=Training(optimizer=PLAIN))
    method = bed.method(name, weighting="samples")
    state = method.setup()
    arrivals = [
        done(method, state, client, by, steps)
        for client, by, steps in zip(bed.context.clients, (-1.0, -6.0), (1, 3), strict=True)
    ]
    assert float(method.merge(state, arrivals).state.tensors["weight"]) == wanted


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_with_equally_many_steps_it_is_heteroavg_by_samples(kind: str, optimizer: Optimizer) -> None:
    bed = bed_on(kind, optimizer, samples=[24, 25, 31])  # batches of 8: three steps each
    nova, plain = run(bed, bed.method("fednova"), 2), run(bed, bed.method("heteroavg", weighting="samples"), 2)
    assert same(nova.state, plain.state)
    unequal = bed_on(kind, optimizer, samples=[8, 24, 31])
    nova, plain = (run(unequal, unequal.method(n, weighting="samples")) for n in ("fednova", "heteroavg"))
    assert not equal(nova.state.tensors, plain.state.tensors)


def test_with_equally_many_steps_of_one_variant_it_is_fedavg() -> None:
    bed = bed_of(["two", "two"], SGD, [24, 31])
    nova, plain = run(bed, bed.method("fednova"), 3), run(bed, bed.method("fedavg"), 3)
    assert equal(nova.state.tensors, plain.state.under("two/"))


def test_one_result_alone_is_taken_as_it_is() -> None:
    bed = bed_of(["two", "three"], SGD)
    so_far = run(bed, bed.method("fednova"), sampled=[[0]])
    reply = so_far.replies[0][0].message.tensors
    assert all(torch.equal(so_far.state.tensors[n], t) for n, t in reply.items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_local_step_is_plain_or_that_of_heteroprox(optimizer: Optimizer) -> None:
    bed = bed_of(["one", "two"], optimizer)
    for params, other in (({}, "heteroavg"), ({"mu": 0.5}, "heteroprox")):
        nova, same_step = run(bed, bed.method("fednova", **params)), run(bed, bed.method(other, **params))
        for a, b in zip(nova.replies[0], same_step.replies[0], strict=True):
            assert equal(a.message.tensors, b.message.tensors)
        task = Assignment(client=bed.context.clients[0])
        assert bed.method("fednova", **params).work(nova.state, task) == bed.method(other, **params).work(
            same_step.state, task
        )


def test_running_statistics_are_averaged_plainly() -> None:
    """With a = (1, 10) the normalised mean of a variance that fell from 1 to (0.1, 0.5) would be -1.61."""
    bed = bed_of(["one", "one"], PLAIN)
    method = bed.method("fednova")
    state = method.setup()
    arrivals = [
        done(method, state, client, by, steps)
        for client, by, steps in zip(bed.context.clients, (-0.9, -0.5), (1, 10), strict=True)
    ]
    after = method.merge(state, arrivals).state.tensors
    torch.testing.assert_close(after["stem.2.running_var"], torch.full((6,), 0.3))
    torch.testing.assert_close(after["stem.2.running_mean"], torch.full((6,), -0.7))
    torch.testing.assert_close(after["stem.2.weight"], torch.full((6,), 1 - 2.75 * 0.9 - 0.275 * 0.5))


def test_a_layer_is_normalised_over_those_who_hold_it() -> None:
    """By hand: n = (1, 1, 2), a = (1, 2, 4), changes (1, 2, 6)."""
    bed = bed_of(["one", "one", "three"], PLAIN, [8, 8, 16])
    method = bed.method("fednova")
    state = method.setup()
    arrivals = [
        done(method, state, client, by, steps)
        for client, by, steps in zip(bed.context.clients, (1.0, 2.0, 6.0), (1, 2, 4), strict=True)
    ]
    after = method.merge(state, arrivals).state.tensors
    a_l = 1 / 4 + 2 / 4 + 2 * 4 / 4
    torch.testing.assert_close(after[LAST], state.tensors[LAST] + a_l * (1 / 1 + 2 / 2 + 2 * 6 / 4) / 4)
    torch.testing.assert_close(after[DEEP], state.tensors[DEEP] + 6.0)  # one holder: its change in full
    by_clients = bed.method("fednova", weighting="clients").merge(state, arrivals).state.tensors
    torch.testing.assert_close(by_clients[LAST], state.tensors[LAST] + 7 / 3 * (1 / 1 + 2 / 2 + 6 / 4) / 3)


def test_in_a_width_family_a_is_that_of_the_whole_tensor() -> None:
    bed = Bed(ToyWidth(None), ["half", "full"], training=Training(batch=8, optimizer=PLAIN))
    method = bed.method("fednova")
    state = method.setup()
    half, full = bed.context.clients
    arrivals = [done(method, state, half, 1.0, 1), done(method, state, full, 6.0, 3)]
    moved = method.merge(state, arrivals).state.tensors["fc.weight"] - state.tensors["fc.weight"]
    torch.testing.assert_close(moved, torch.tensor([[3.0, 3.0, 4.0, 4.0]] * 3))  # a = 2; 2 (1/1 + 6/3)/2, 2 * 6/3


def test_with_a_fixed_number_of_epochs_it_is_a_scaled_uniform_mean() -> None:
    """a is proportional to n then, and the factor is 1 + CV^2(n): here n = (1, 3, 5) has 1 + (8/3)/9."""
    bed = bed_of(["two"] * 3, PLAIN, [8, 24, 40])
    so_far = run(bed, bed.method("fednova"))
    start = bed.method("fednova").setup().tensors["fc.weight"]
    mean = sum(r.message.tensors["fc.weight"] - start for r in so_far.replies[0]) / 3
    assert [r.message.values["steps"] for r in so_far.replies[0]] == [1, 3, 5]
    torch.testing.assert_close(so_far.state.tensors["fc.weight"] - start, (1 + 8 / 27) * mean, rtol=1e-4, atol=1e-6)


def test_a_mixing_weight_scales_the_step() -> None:
    bed = bed_of(["one", "one"], PLAIN)
    method = bed.method("fednova")
    state = method.setup()
    both = [
        done(method, state, client, by, steps, weight=weight)
        for client, by, steps, weight in zip(bed.context.clients, (1.0, 6.0), (1, 3), (0.5, 1.0), strict=True)
    ]
    after = method.merge(state, both).state.tensors
    torch.testing.assert_close(after[LAST], state.tensors[LAST] + 2 * (0.5 * 1 / 1 + 6 / 3) / 2)


# clients


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_partial_work_is_reported_and_counts_by_its_steps(optimizer: Optimizer) -> None:
    bed = bed_of(["two", "two"], optimizer)
    method = bed.method("fednova")
    state = method.setup()
    arrivals = []
    for client, most in zip(bed.context.clients, (1, None), strict=True):
        sent = method.send(state, Assignment(client=client))
        reply = method.client(bed.job(client, sent, most_steps=most))
        arrivals.append(Arrival(assignment=Assignment(client=client), sent=sent, message=reply.message))
    assert [a.message.values for a in arrivals] == [{"steps": 1}, {"steps": 3}]
    a = (1, 1 + 1.9 + 2.71) if optimizer is SGD else (1, 3)
    start = state.tensors["fc.weight"]
    short, full = (arrival.message.tensors["fc.weight"] - start for arrival in arrivals)
    wanted = sum(a) / 2 * (short / a[0] + full / a[1]) / 2
    moved = method.merge(state, arrivals).state.tensors["fc.weight"] - start
    torch.testing.assert_close(moved, wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("steps", [0, -1, 10**12])
def test_steps_that_no_client_makes_are_refused(steps: int) -> None:
    bed = bed_of(["one"], SGD)
    method = bed.method("fednova")
    state, client = method.setup(), bed.context.clients[0]
    task = Assignment(client=client)
    sent = method.send(state, task)
    reply = method.client(bed.job(client, sent))
    wrong = Reply(message=Bundle(reply.message.tensors, {"steps": steps}))
    found = flaw(method, client, "train", sent, method.work(state, task), wrong)
    assert found is not None
    assert found.outcome == "refused"
    assert f"it says {steps} steps" in found.detail
    without = Reply(message=Bundle(reply.message.tensors))
    found = flaw(method, client, "train", sent, method.work(state, task), without)
    assert found is not None
    assert "the scalar steps is None" in found.detail


def test_a_turn_depends_on_the_message_alone() -> None:
    """So a first turn, or one after a long absence, is like any other."""
    bed = bed_of(["one", "two"], SGD, [8, 24])
    method = bed.method("fednova")
    so_far = run(bed, method, 4, sampled=[[0, 1], [1], [1], [0, 1]])
    assert so_far.kept == {}
    again = method.client(bed.job(bed.context.clients[0], so_far.sent[3][0], None, 4, round_=4))
    assert same(again.message, so_far.replies[3][0].message)


def test_a_client_that_lacks_a_class() -> None:
    """Its many steps do not outweigh the one that knows the class."""
    bed = without_class(bed_of(["one", "one"], PLAIN, [80, 8]), 0, 2)
    nova, plain = run(bed, bed.method("fednova"), 3), run(bed, bed.method("heteroavg", weighting="samples"), 3)
    pushed = [float(so_far.state.tensors[LAST][2]) for so_far in (nova, plain)]
    assert nova.state.first_not_finite() is None
    start = float(bed.method("fednova").setup().tensors[LAST][2])
    assert pushed[0] - start > pushed[1] - start


def test_a_client_that_steps_down_goes_on() -> None:
    bed = bed_of(["three", "two"], SGD, [8, 24])
    method = bed.method("fednova")
    so_far = run(bed, method)
    clients = [Client(0, "one", 8), bed.context.clients[1]]
    method.reassign(clients)
    before = so_far.state.tensors
    advance(bed, method, so_far, clients, round_=2)
    assert so_far.state.tensors[DEEP] is before[DEEP]
    assert not torch.equal(so_far.state.tensors[LAST], before[LAST])
    assert method.step_down(Bundle(), clients[0]) is None


# what it asks for


def test_bytes_are_those_of_the_weights() -> None:
    bed = Bed(
        family("resnet-stage"),
        ["resnet10"],
        samples=4,
        spec=InputSpec((3, 32, 32), 10),
        training=Training(batch=2, max_steps=1),
    )
    method = bed.method("fednova")
    so_far = run(bed, method)
    parameters, buffers, counters = wire_sizes(bed, "resnet10")
    wanted = 4 * (parameters + buffers) + 8 * counters
    reply = so_far.replies[0][0]
    assert so_far.sent[0][0].nbytes() == reply.message.nbytes() == wanted
    assert (reply.message.values, reply.keep) == ({"steps": 1}, None)
    work = method.work(so_far.state, Assignment(client=bed.context.clients[0]))
    assert (work.bytes_down, work.bytes_up, work.held_models, work.parameter_passes) == (wanted, wanted, 1, 0)


def test_policies() -> None:
    needs = bed_of(["one"], SGD).method("fednova").needs
    assert needs.policies == ALL_POLICIES - {"async"}
    assert "merge of a single result" in needs.policies_why
    assert needs.shared_tensors


def test_a_pull_that_overshoots_is_refused() -> None:
    bed = bed_of(["one"], SGD)
    with pytest.raises(BadInput, match=r"params\.mu of fednova is 20 .* 0\.05, but their product must be below 1"):
        bed.method("fednova", mu=20).check()
    bed.method("fednova", mu=19).check()
    bed_of(["one"], ADAM).method("fednova", mu=5000).check()
