"""HeteroFL: windows of channels, the masked loss, rows of own classes, statistics that do not travel."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from algorithm_harness import (
    ADAM,
    SGD,
    SPEC,
    Bed,
    ToyWidth,
    accuracy,
    advance,
    equal,
    flaw,
    run,
    same,
    trained,
    travelled,
)
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator.algorithms.heterofl import CLASSES
from fleetbed.emulator.method.algorithm import ALL_POLICIES, Arrival, Assignment, Client, Reply
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.profiles.experiment import Optimizer, Training

MIXED = ["half", "full", "half"]
CIFAR = InputSpec((3, 32, 32), 10)
SIZES = (69_822, 275_762, 1_096_026, 4_370_090, 17_452_362)  # of the five rates
GRID = ["resnet10-half", "resnet26-quarter"]


def toy(variants: list[str] | None = None, *, lacking: tuple[int, ...] = (), **more: Any) -> Bed:
    """The clients in `lacking` have no samples of the last class."""
    bed = Bed(ToyWidth(None), variants or MIXED, **more)
    for number in lacking:
        bed.data.y[bed.parts[number]] %= SPEC.classes - 1
    return bed


def classes(*own: int) -> dict[str, Tensor]:
    return {CLASSES: torch.tensor(own, dtype=torch.int8)}


def grid_bed() -> Bed:
    """Deeper blocks are held in fewer channels than the first ones, and nobody holds the whole model."""
    nets = family("resnet-grid", {"base_width": 8})
    return Bed(nets, GRID, samples=8, spec=InputSpec((1, 16, 16), 3), training=Training(batch=4, max_steps=2))


# what it reduces to


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
@pytest.mark.parametrize("variants", [["full", "full"], MIXED])
def test_with_all_classes_it_is_heteroavg(variants: list[str], optimizer: Optimizer) -> None:
    bed = toy(variants, training=Training(batch=8, epochs=2, optimizer=optimizer))
    plain = run(bed, bed.method("heteroavg"), 3).state
    averaged = run(bed, bed.method("heterofl", statistics="averaged"), 3).state
    assert same(averaged, plain)
    recalibrated = run(bed, bed.method("heterofl"), 3).state.tensors
    parameters = dict(bed.family.outline("full", SPEC).named_parameters())
    assert recalibrated.keys() == parameters.keys()
    assert equal(recalibrated, {name: plain.tensors[name] for name in parameters})


def test_without_mask_it_is_heteroavg_whatever_classes_clients_have() -> None:
    bed = toy(lacking=(0, 1))
    plain = run(bed, bed.method("heteroavg"), 2).state
    assert same(run(bed, bed.method("heterofl", mask=False, statistics="averaged"), 2).state, plain)
    assert not same(run(bed, bed.method("heterofl", statistics="averaged"), 2).state, plain)


def test_clients_count_alike_unless_it_is_told_otherwise() -> None:
    bed = toy(["full", "full"], samples=[8, 24])
    for weighting, wanted in ((None, 2.0), ("clients", 2.0), ("samples", 2.5)):
        method = bed.method("heterofl", weighting=weighting)
        state = method.setup()
        both = [
            trained(method, state, c, by, extras=classes(1, 1, 1))
            for c, by in zip(bed.context.clients, (1.0, 3.0), strict=True)
        ]
        after = method.merge(state, both).state.tensors["fc.bias"]
        torch.testing.assert_close(after, state.tensors["fc.bias"] + wanted)


# the mean


def test_ones_of_which_a_full_client_makes_twos_and_a_half_one_fours() -> None:
    name = "layer1.0.conv2.weight"
    nets = family("resnet-width", {"base_width": 4})
    bed = Bed(nets, ["resnet26-full", "resnet26-half"], samples=4, spec=InputSpec((1, 8, 8), 3))
    method = bed.method("heterofl")
    first = method.setup()
    state = Bundle({n: torch.ones_like(t) for n, t in first.tensors.items()}, first.values)
    assert state.tensors[name].shape == (4, 4, 3, 3)
    full, half = bed.context.clients
    arrivals = [trained(method, state, full, 1.0, extras=classes(1, 1, 1)), trained(method, state, half, 3.0)]
    after = method.merge(state, arrivals).state.tensors[name]
    wanted = torch.full((4, 4, 3, 3), 2.0)
    wanted[:2, :2] = 3.0
    assert torch.equal(after, wanted)


def test_what_nobody_holds_stays_to_the_bit() -> None:
    bed = toy()
    method = bed.method("heterofl")
    first = method.setup()
    state = run(bed, method, 2, sampled=[[0, 2], [0]]).state.tensors
    assert torch.equal(state["fc.weight"][:, 2:], first.tensors["fc.weight"][:, 2:])
    assert torch.equal(state["blocks.0.0.weight"][2:], first.tensors["blocks.0.0.weight"][2:])
    assert torch.equal(state["blocks.0.0.weight"][:, 3:], first.tensors["blocks.0.0.weight"][:, 3:])
    assert not torch.equal(state["blocks.0.0.weight"][:2, :3], first.tensors["blocks.0.0.weight"][:2, :3])


def test_rows_of_a_class_are_averaged_over_those_who_have_it() -> None:
    bed = toy(["half", "full"])
    method = bed.method("heterofl")
    state = method.setup()
    half, full = bed.context.clients
    arrivals = [
        trained(method, state, half, 1.0, extras=classes(1, 0, 0)),
        trained(method, state, full, 3.0, extras=classes(1, 1, 0)),
    ]
    after = method.merge(state, arrivals).state.tensors
    moved = after["fc.weight"] - state.tensors["fc.weight"]
    wanted = torch.tensor([[2.0, 2.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(moved, wanted)
    torch.testing.assert_close(after["fc.bias"] - state.tensors["fc.bias"], torch.tensor([2.0, 3.0, 0.0]))
    assert torch.equal(after["fc.weight"][2], state.tensors["fc.weight"][2])
    assert torch.equal(after["fc.bias"][2], state.tensors["fc.bias"][2])
    # all other layers do not ask for classes
    torch.testing.assert_close(after["blocks.0.0.weight"][0, 0], state.tensors["blocks.0.0.weight"][0, 0] + 2)


def test_the_order_of_arrivals_does_not_matter() -> None:
    bed = toy()
    method = bed.method("heterofl")
    first = method.setup()
    state = Bundle({n: torch.ones_like(t) for n, t in first.tensors.items()}, first.values)
    own = (classes(1, 1, 0), classes(1, 1, 1), classes(0, 1, 1))
    arrivals = [
        trained(method, state, client, by, extras=extras)
        for client, by, extras in zip(bed.context.clients, (0.25, 0.5, 1.5), own, strict=True)
    ]
    merged = [method.merge(state, list(order)).state.tensors for order in permutations(arrivals)]
    for other in merged[1:]:
        for name, tensor in merged[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-6, atol=0)


def test_running_variances_stay_at_zero_or_above() -> None:
    bed = toy()
    method = bed.method("heterofl", statistics="averaged")
    state = method.setup()
    arrivals = [trained(method, state, c, -5.0, extras=classes(1, 1, 1)) for c in bed.context.clients]
    after = method.merge(state, arrivals).state.tensors
    assert float(after["stem.2.running_var"].min()) == 0.0


# the client


def test_an_absent_class_stays_in_the_denominator_and_gets_no_gradient() -> None:
    """Its score is 0, not minus infinity: log(e + e^2 + 1) - 1 = 1.41 for scores 1, 2, 3, and not log(e + e^2) - 1."""
    bed = toy(
        ["full"], lacking=(0,), training=Training(batch=8, max_steps=1, optimizer=Optimizer(lr=0.1, momentum=0.0))
    )
    client, method = bed.context.clients[0], bed.method("heterofl")
    job = bed.job(client, method.send(method.setup(), Assignment(client=client)))
    model = job.model(bed.context.initial("full"))
    with torch.no_grad():
        model.fc.weight.zero_()
        model.fc.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    before = model.fc.bias.detach().clone()
    x, _ = next(job.batches())
    y = torch.zeros(len(x), dtype=torch.long)
    loss = method.local_step(job, model, {})(job.optimizer(model), x, y)
    assert float(loss) == pytest.approx(1.40760596)
    e = torch.tensor([1.0, 2.0, 0.0]).exp()
    gradient = e / e.sum() - torch.tensor([1.0, 0.0, 0.0])
    torch.testing.assert_close(model.fc.bias.detach()[:2], (before - 0.1 * gradient)[:2])
    assert float(model.fc.bias.detach()[2]) == 3.0


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
def test_rows_of_a_class_that_nobody_has_stay_to_the_bit(optimizer: Optimizer) -> None:
    training = Training(batch=8, epochs=3, optimizer=optimizer)
    bed = toy(lacking=(0, 1, 2), training=training)
    method = bed.method("heterofl")
    first, so_far = method.setup().tensors, run(bed, method, 3)
    for reply, sent in zip(so_far.replies[2], so_far.sent[2], strict=True):
        assert torch.equal(reply.message.tensors["fc.weight"][2], sent.tensors["fc.weight"][2])
        assert reply.message.tensors[CLASSES].tolist() == [1, 1, 0]
    for name in ("fc.weight", "fc.bias"):
        assert torch.equal(so_far.state.tensors[name][2], first[name][2])
        assert not torch.equal(so_far.state.tensors[name][:2], first[name][:2])


def test_gradients_are_clipped_before_the_step() -> None:
    bed = toy(["full"], training=Training(batch=8, optimizer=Optimizer(lr=0.5, momentum=0.0)))
    method = bed.method("heterofl", clip=0.01)
    client = bed.context.clients[0]
    message = method.send(method.setup(), Assignment(client=client))
    reply = method.client(bed.job(client, message))
    net = bed.family.build("full", SPEC).train()
    net.load_state_dict(bed.context.initial("full"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for x, y in bed.job(client, message).batches():
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        norm = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).norm()
        assert norm > 0.01
        for p in net.parameters():
            assert p.grad is not None
            p.grad *= 0.01 / (norm + 1e-6)
        optimizer.step()
    for name, p in net.named_parameters():
        torch.testing.assert_close(reply.message.tensors[name], p.detach())
    assert method.work(method.setup(), Assignment(client=client)).parameter_passes == 2
    assert bed.method("heterofl").work(method.setup(), Assignment(client=client)).parameter_passes == 0


def test_a_client_that_is_cut_short_sends_what_it_has() -> None:
    bed = toy(lacking=(0,), samples=40)
    method = bed.method("heterofl")
    state, client = method.setup(), bed.context.clients[0]
    assignment = Assignment(client=client)
    message = method.send(state, assignment)
    job = bed.job(client, message, most_steps=1)
    reply = method.client(job)
    assert job.steps == 1 < method.work(state, assignment).steps
    assert flaw(method, client, "train", message, method.work(state, assignment), reply) is None
    merged = method.merge(state, [Arrival(assignment=assignment, sent=message, message=travelled(reply.message))])
    assert not torch.equal(merged.state.tensors["fc.weight"][:2], state.tensors["fc.weight"][:2])
    assert torch.equal(merged.state.tensors["fc.weight"][2], state.tensors["fc.weight"][2])


# what travels


def test_the_messages_are_those_of_the_formula() -> None:
    """4 P(r) down; 4 P(r) and a byte for each class up."""
    nets = family("resnet-width")
    bed = Bed(nets, nets.variants, samples=2, spec=CIFAR, training=Training(batch=2, max_steps=1))
    method = bed.method("heterofl")
    state = method.setup()
    for client, size in zip(bed.context.clients, SIZES, strict=True):
        work = method.work(state, Assignment(client=client))
        assert (work.bytes_down, work.bytes_up) == (4 * size, 4 * size + 10)
        assert method.send(state, Assignment(client=client)).nbytes() == 4 * size
        assert (work.held_models, work.held_values, work.each_step, work.once) == (1, 0, (), ())
    small = Bed(nets, nets.variants[:2], samples=2, spec=CIFAR, training=Training(batch=2, max_steps=1))
    for options, more in (({}, 10), ({"mask": False}, 0)):
        so_far = run(small, small.method("heterofl", **options))
        assert [reply.message.nbytes() for reply in so_far.replies[0]] == [4 * size + more for size in SIZES[:2]]
    norms = sum(isinstance(m, torch.nn.BatchNorm2d) for m in nets.outline(nets.variants[0], CIFAR).modules())
    floats = sum(b.numel() for b in nets.outline(nets.variants[0], CIFAR).buffers() if b.is_floating_point())
    averaged = small.method("heterofl", statistics="averaged").work(state, Assignment(client=small.context.clients[0]))
    assert averaged.bytes_down == 4 * (SIZES[0] + floats) + 8 * norms


def test_a_reply_without_sense_is_refused() -> None:
    bed = toy()
    method = bed.method("heterofl")
    client, state = bed.context.clients[0], method.setup()
    sent = method.send(state, Assignment(client=client))
    work = method.work(state, Assignment(client=client))

    def said(labels: dict[str, Tensor]) -> str:
        found = flaw(method, client, "train", sent, work, Reply(message=Bundle({**sent.tensors, **labels})))
        return "" if found is None else f"{found.outcome}: {found.detail}"

    assert said(classes(1, 0, 1)) == ""
    assert "other numbers than 0 and 1" in said(classes(1, 2, 0))
    assert "other numbers than 0 and 1" in said(classes(1, -1, 0))
    assert "names no class" in said(classes(0, 0, 0))
    assert "classes/own is missing" in said({})
    assert "should have [3]" in said(classes(1, 1))
    assert "classes/own is float32 and should be int8" in said({CLASSES: torch.ones(3)})
    plain = bed.method("heterofl", mask=False)
    found = flaw(plain, client, "train", sent, work, Reply(message=Bundle({**sent.tensors, **classes(1, 1, 1)})))
    assert found is not None
    assert "was not asked for" in found.detail


def test_it_runs_under_every_policy() -> None:
    assert toy().method("heterofl").needs.policies == ALL_POLICIES


# clients that come, stay away and step down


def test_the_first_message_is_a_part_of_the_largest_ones_draw() -> None:
    bed = toy()
    method = bed.method("heterofl")
    for client in bed.context.clients:
        sent = method.send(method.setup(), Assignment(client=client)).tensors
        start = bed.context.initial(client.variant)
        assert equal(sent, {name: start[name] for name in sent})


def test_one_who_was_away_for_long_gets_the_present_weights_and_nothing_else() -> None:
    bed = toy()
    method = bed.method("heterofl")
    so_far = run(bed, method, 4, sampled=[[1], [1, 2], [1], [0]])
    fresh = run(bed, method, 3, sampled=[[1], [1, 2], [1]])
    assert same(so_far.sent[3][0], method.send(fresh.state, Assignment(client=bed.context.clients[0], round=4)))
    assert so_far.kept == {}


def test_a_late_result_counts_by_what_it_changed() -> None:
    bed = toy(["half", "full"])
    method = bed.method("heterofl")
    first = method.setup()
    late = trained(method, first, bed.context.clients[0], 1.0, extras=classes(1, 0, 1), weight=0.5)
    second = method.merge(first, [trained(method, first, bed.context.clients[1], 4.0, extras=classes(1, 1, 1))]).state
    after = method.merge(second, [late]).state.tensors["fc.bias"]
    torch.testing.assert_close(after, first.tensors["fc.bias"] + torch.tensor([4.5, 4.0, 4.5]))


def test_a_client_steps_down_in_the_middle() -> None:
    bed = toy(["full", "full"])
    method = bed.method("heterofl")
    so_far = run(bed, method, 1)
    smaller = [Client(0, "half", 24), bed.context.clients[1]]
    method.reassign(smaller)
    assert method.step_down(Bundle(), smaller[0]) is None
    before = so_far.state.tensors
    bed.context = method.context
    advance(bed, method, so_far, smaller, round_=2)
    assert so_far.sent[1][0].tensors["fc.weight"].shape == (3, 2)
    # the columns that only the full client holds are its own
    reply = so_far.replies[1][1].message.tensors["fc.weight"]
    torch.testing.assert_close(so_far.state.tensors["fc.weight"][:, 2:], reply[:, 2:])
    assert not torch.allclose(so_far.state.tensors["fc.weight"][:, :2], reply[:, :2])
    assert not torch.equal(so_far.state.tensors["fc.weight"], before["fc.weight"])
    assert [target.variant for target in method.targets(so_far.state)] == ["half", "full"]


# evaluation


@pytest.mark.parametrize("statistics", ["recalibrated", "averaged"])
def test_it_learns_and_repeats(statistics: str) -> None:
    bed = toy(samples=48)
    method = bed.method("heterofl", statistics=statistics)
    so_far = run(bed, method, 6)
    assert same(so_far.state, run(bed, bed.method("heterofl", statistics=statistics), 6).state)
    assert all(target.recalibrate == (statistics == "recalibrated") for target in method.targets(so_far.state))
    assert accuracy(bed, method, so_far) > 0.7


# InCo over it


@pytest.mark.parametrize("base", ["heterofl", "fedrolex"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "paper"},
        {"mode": "theorem"},
        {"mode": "theorem", "per": "kernel"},
        {"per": "layer"},
        {"optimise": False},
        {"optimise": False, "normalise": False},
    ],
)
def test_inco_leaves_elements_that_nobody_held(base: str, options: dict[str, Any]) -> None:
    """layer1.1 is held in 2 of 8 channels, its base layer1.0 in 4."""
    bed = grid_bed()
    inco = bed.method("inco", base=base, **options)
    first = inco.setup().tensors
    after = run(bed, inco).state.tensors
    crossed = 0
    for name in bed.family.cross_layers(first):
        held = torch.zeros(first[name].shape, dtype=torch.bool)
        if name in bed.family.index("resnet26-quarter", bed.spec):
            held[: len(held) // 4, : held.shape[1] // 4] = True
        assert torch.equal(after[name][~held], first[name][~held]), name
        crossed += not torch.equal(after[name][held], first[name][held])
    assert crossed
