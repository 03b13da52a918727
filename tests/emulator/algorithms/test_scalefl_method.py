"""ScaleFL: levels by depth and width, weighted exits, the last one as teacher."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from algorithm_harness import (
    ADAM,
    SGD,
    Bed,
    ToyExits,
    accuracy,
    advance,
    equal,
    exit_logits,
    resumed,
    run,
    same,
    small_resnets,
    trained,
)
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator.algorithms.scalefl import Method
from fleetbed.emulator.method.algorithm import ALL_POLICIES, Assignment, Client
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Optimizer, Training

MIXED = ["one", "three", "two"]
SMALL = InputSpec((1, 8, 8), 3)
#: parameters of the levels on CIFAR-10, and values of their running statistics
SIZES = {"level1": 1_825_213, "level2": 3_270_648, "level3": 10_491_150, "level4": 28_085_608}


def toy(variants: list[str] | None = None, **more: Any) -> Bed:
    return Bed(ToyExits(None), variants or MIXED, **more)


def loss_of(bed: Bed, round_: int, exits: list[Tensor], y: Tensor, **params: Any) -> Tensor:
    method = bed.method("scalefl", **params)
    assert isinstance(method, Method)
    return method.loss(round_, exits, y)


# what it reduces to


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
def test_with_one_exit_it_is_heteroavg(optimizer: Optimizer) -> None:
    bed = toy(["one", "one"], training=Training(batch=8, epochs=2, optimizer=optimizer))
    plain = run(bed, bed.method("heteroavg"), 3).state
    assert same(run(bed, bed.method("scalefl", gamma=1.0, start=0.0, statistics="averaged"), 3).state, plain)
    recalibrated = run(bed, bed.method("scalefl"), 3).state.tensors
    parameters = dict(bed.family.outline("one", bed.spec).named_parameters())
    assert equal(recalibrated, {name: plain.tensors[name] for name in parameters})


def test_the_first_level_alone_is_heteroavg() -> None:
    bed = small_resnets("resnet-exit", "level1", "level1")
    plain = run(bed, bed.method("heteroavg"), 2).state
    assert same(run(bed, bed.method("scalefl", statistics="averaged"), 2).state, plain)


def test_without_divergence_its_settings_do_nothing() -> None:
    bed = toy()
    plain = run(bed, bed.method("scalefl"), 2).state
    others = {"temperature": 7.0, "start": 0.0, "detach": False, "reduction": "batchmean"}
    assert same(run(bed, bed.method("scalefl", **others), 2).state, plain)
    assert not same(run(bed, bed.method("scalefl", start=0.0, gamma=1.0), 2).state, plain)


def test_the_divergence_begins_after_a_part_of_the_rounds() -> None:
    """5 rounds, start 0.4: rounds 1 and 2 are without it."""
    bed = toy()
    plain, taught = (run(bed, bed.method("scalefl", gamma=g, start=0.4), 3) for g in (0.0, 2.0))
    assert same(plain.merged[1].state, taught.merged[1].state)
    assert not same(plain.merged[2].state, taught.merged[2].state)


# the loss


def test_exits_count_by_their_number() -> None:
    exits, y = exit_logits()
    ce = [F.cross_entropy(o, y) for o in exits]
    torch.testing.assert_close(loss_of(toy(), 1, exits, y), ce[0] / 6 + ce[1] / 3 + ce[2] / 2)
    torch.testing.assert_close(loss_of(toy(), 1, exits[:2], y), ce[0] / 3 + 2 * ce[1] / 3)


def test_the_divergence_by_hand() -> None:
    exits, y = exit_logits()
    ce = [float(F.cross_entropy(o.detach(), y)) for o in exits]
    p = [torch.softmax(o.detach() / 2, 1) for o in exits]
    kl = [float((p[2] * (p[2] / q).log()).sum()) for q in p[:2]]
    for reduction, count in (("mean", 4 * 3), ("batchmean", 4)):
        found = loss_of(toy(), 5, exits, y, gamma=0.5, temperature=2.0, reduction=reduction)
        first, second = (c + 0.5 * 4 * k / count for c, k in zip(ce, kl, strict=False))
        assert float(found.detach()) == pytest.approx(first / 6 + second / 3 + ce[2] / 2, rel=1e-5)


def test_the_teacher_learns_from_the_divergence_only_if_it_may() -> None:
    for detach in (True, False):
        exits, y = exit_logits()
        loss_of(toy(), 5, exits, y, gamma=1.0, detach=detach).backward()
        alone = exits[2].detach().clone().requires_grad_()
        (F.cross_entropy(alone, y) / 2).backward()
        assert torch.allclose(exits[2].grad, alone.grad) is detach


# the mean


def test_a_level_never_touches_what_lies_behind_its_exit() -> None:
    bed = small_resnets("resnet-exit", "level1", "level3", "level4")
    method = bed.method("scalefl")
    first, so_far = method.setup().tensors, run(bed, method, 2, sampled=[[0], [0]])
    held = bed.family.index("level1", SMALL)
    for name, tensor in so_far.state.tensors.items():
        assert (name in so_far.sent[0][0].tensors) == (name in held)
        if name not in held:
            assert torch.equal(tensor, first[name]), name
    assert not any(name.startswith(("layer4", "layer3.1", "exit2", "exit4")) for name in held)
    # of what it holds, the first channels: 11 of 16 in the third stage
    kernel = so_far.state.tensors["exit1.body.0.0.weight"]
    assert torch.equal(kernel[11:], first["exit1.body.0.0.weight"][11:])
    assert torch.equal(kernel[:, 11:], first["exit1.body.0.0.weight"][:, 11:])
    assert not torch.equal(kernel[:11, :11], first["exit1.body.0.0.weight"][:11, :11])


def test_every_element_is_the_mean_over_the_levels_that_hold_it() -> None:
    """Level 1 has 11 of the 16 channels of stage 3, level 3 has 12."""
    bed = small_resnets("resnet-exit", "level1", "level3", "level4")
    method = bed.method("scalefl")
    state = method.setup()
    arrivals = [trained(method, state, c, by) for c, by in zip(bed.context.clients, (1.0, 2.0, 6.0), strict=True)]
    after = method.merge(state, arrivals).state.tensors
    moved = {name: after[name] - state.tensors[name] for name in after}
    wanted = torch.full((16,), 6.0)
    wanted[:12], wanted[:11] = 4.0, 3.0
    torch.testing.assert_close(moved["layer3.0.bn1.weight"], wanted)
    torch.testing.assert_close(moved["exit1.fc.weight"], wanted.expand(3, 16))
    torch.testing.assert_close(moved["exit1.fc.bias"], torch.full((3,), 3.0))
    torch.testing.assert_close(moved["exit4.fc.bias"], torch.full((3,), 6.0))


# what travels


def test_the_messages_are_those_of_the_formula() -> None:
    """4 P of the level with its exits; running statistics and counters with `averaged`."""
    nets, spec = family("resnet-exit"), InputSpec((3, 32, 32), 10)
    bed = Bed(nets, nets.variants, samples=2, spec=spec, training=Training(batch=2, max_steps=1))
    method, averaged = bed.method("scalefl"), bed.method("scalefl", statistics="averaged")
    state = method.setup()
    for client in bed.context.clients:
        task, size = Assignment(client=client), SIZES[client.variant]
        work = method.work(state, task)
        assert work.bytes_down == work.bytes_up == 4 * size
        assert method.send(state, task).nbytes() == 4 * size
        assert (work.trains, work.held_models, work.held_values, work.parameter_passes) == ("exits", 1, 0, 0)
        norms = [m for m in nets.outline(client.variant, spec).modules() if isinstance(m, torch.nn.BatchNorm2d)]
        statistics = sum(2 * 4 * norm.num_features + 8 for norm in norms)
        assert averaged.work(state, task).bytes_up == 4 * size + statistics


def test_replies_are_as_large_as_messages_and_nothing_is_kept() -> None:
    bed = small_resnets("resnet-exit", "level1", "level4")
    so_far = run(bed, bed.method("scalefl"))
    assert [r.message.nbytes() for r in so_far.replies[0]] == [sent.nbytes() for sent in so_far.sent[0]]
    assert so_far.kept == {}


# who takes part


def test_it_runs_under_every_policy_and_asks_for_the_rounds_if_it_needs_them() -> None:
    bed = toy()
    assert bed.method("scalefl").needs.policies == ALL_POLICIES
    assert not bed.method("scalefl").needs.total_rounds
    assert bed.method("scalefl", gamma=0.1).needs.total_rounds


def test_a_family_without_exits_is_refused() -> None:
    bed = Bed(family("resnet-width", {"base_width": 4}), ["resnet26-half"], samples=4, spec=SMALL)
    with pytest.raises(BadInput, match=r"resnet-width, whose models have no early exits.*choose resnet-exit"):
        bed.method("scalefl").check()


def test_the_first_message_is_a_part_of_the_largest_levels_draw() -> None:
    bed = small_resnets("resnet-exit", "level2", "level4")
    method = bed.method("scalefl")
    for client in bed.context.clients:
        sent = method.send(method.setup(), Assignment(client=client)).tensors
        start = bed.context.initial(client.variant)
        assert equal(sent, {name: start[name] for name in sent})


def test_one_who_was_away_for_long_gets_the_present_weights() -> None:
    bed = toy()
    method = bed.method("scalefl")
    so_far = run(bed, method, 3, sampled=[[1], [1, 2], [0]])
    fresh = run(bed, method, 2, sampled=[[1], [1, 2]])
    assert same(so_far.sent[2][0], method.send(fresh.state, Assignment(client=bed.context.clients[0], round=3)))


def test_a_late_result_counts_by_what_it_changed() -> None:
    bed = toy(["one", "three"])
    method = bed.method("scalefl")
    first = method.setup()
    late = trained(method, first, bed.context.clients[0], 1.0, weight=0.5)
    second = method.merge(first, [trained(method, first, bed.context.clients[1], 4.0)]).state
    after = method.merge(second, [late]).state.tensors
    torch.testing.assert_close(after["heads.0.bias"], first.tensors["heads.0.bias"] + 4.5)
    torch.testing.assert_close(after["heads.1.bias"], first.tensors["heads.1.bias"] + 4.0)


def test_a_client_steps_down_in_the_middle() -> None:
    bed = small_resnets("resnet-exit", "level4", "level4")
    method = bed.method("scalefl")
    so_far = run(bed, method)
    smaller = [Client(0, "level2", 4), bed.context.clients[1]]
    method.reassign(smaller)
    assert method.step_down(Bundle(), smaller[0]) is None
    bed.context = method.context
    advance(bed, method, so_far, smaller, round_=2)
    assert so_far.sent[1][0].tensors["exit2.fc.weight"].shape == (3, 11)
    # what only the other client holds is its own
    torch.testing.assert_close(
        so_far.state.tensors["exit4.fc.weight"], so_far.replies[1][1].message.tensors["exit4.fc.weight"]
    )
    assert [target.variant for target in method.targets(so_far.state)] == ["level2", "level4"]


@pytest.mark.parametrize("params", [{}, {"gamma": 1.0, "statistics": "averaged"}])
def test_a_resumed_run_ends_alike(params: dict[str, Any]) -> None:
    bed = toy()
    assert same(resumed(bed, "scalefl", 4, 2, **params).state, run(bed, bed.method("scalefl", **params), 4).state)


@pytest.mark.parametrize("statistics", ["recalibrated", "averaged"])
def test_it_learns_and_repeats(statistics: str) -> None:
    bed = toy(samples=48)
    method = bed.method("scalefl", statistics=statistics, gamma=0.1)
    so_far = run(bed, method, 6)
    assert same(so_far.state, run(bed, bed.method("scalefl", statistics=statistics, gamma=0.1), 6).state)
    assert all(target.recalibrate == (statistics == "recalibrated") for target in method.targets(so_far.state))
    assert accuracy(bed, method, so_far) > 0.7


def test_inco_over_it_leaves_exits_alone() -> None:
    bed = small_resnets("resnet-exit", "level2", "level4")
    base, inco = bed.method("scalefl"), bed.method("inco", base="scalefl")
    plain, crossed = run(bed, base), run(bed, inco)
    assert inco.needs == base.needs
    task = Assignment(client=bed.context.clients[0])
    assert inco.work(plain.state, task) == base.work(plain.state, task)
    assert all(same(a, b) for a, b in zip(plain.sent[0], crossed.sent[0], strict=True))
    assert all(same(a.message, b.message) for a, b in zip(plain.replies[0], crossed.replies[0], strict=True))
    moved = {n for n, t in plain.state.tensors.items() if not torch.equal(t, crossed.state.tensors[n])}
    assert moved
    assert moved <= {n for n in moved if n.startswith("layer") and ".conv" in n}
