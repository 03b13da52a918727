"""InclusiveFL: layer-wise averaging, momentum from the next larger variant, blocks that a variant has for itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
from algorithm_harness import ADAM, SGD, Bed, ToyDepth, accuracy, advance, flaw, run, same, trained, travelled

from fleetbed.emulator.algorithms.inclusivefl import teachers
from fleetbed.emulator.method.algorithm import ALL_POLICIES, Arrival, Assignment, Client
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.profiles.experiment import Optimizer, Training

SPEC = InputSpec((1, 16, 16), 3)
NORM, LINEAR = "blocks.0.1.weight", "blocks.0.0.weight"  # the second has no equal in the blocks above
VIT = {"width": 8, "heads": 2, "patch": 8}


def toy(variants: Sequence[str] = ("one", "two"), **more: Any) -> Bed:
    return Bed(ToyDepth(None), variants, **more)


def resnets(*variants: str) -> Bed:
    nets = family("resnet-stage", {"base_width": 4})
    return Bed(nets, variants, samples=4, spec=SPEC, training=Training(batch=4, max_steps=1))


def by_block(first: float, second: float) -> Any:
    return lambda name: second if name.startswith("blocks.1") else first


# what it reduces to


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
@pytest.mark.parametrize("weighting", ["clients", "samples"])
def test_without_momentum_and_own_blocks_it_is_heteroavg(weighting: str, optimizer: Optimizer) -> None:
    training = Training(batch=8, optimizer=optimizer)
    bed = toy(["one", "two", "three", "one"], samples=[16, 24, 40, 8], training=training)
    sampled = [[0, 1, 2, 3], [0, 2], [1, 2, 3]]
    plain = run(bed, bed.method("heteroavg", weighting=weighting), 3, sampled=sampled)
    reduced = run(bed, bed.method("inclusivefl", beta=0, own="none", weighting=weighting), 3, sampled=sampled)
    assert same(reduced.state, plain.state)
    assert not same(run(bed, bed.method("inclusivefl", own="none"), 3, sampled=sampled).state, plain.state)


def test_in_resnets_all_is_shared_by_default() -> None:
    bed = resnets("resnet10", "resnet18")
    assert same(run(bed, bed.method("inclusivefl", beta=0), 2).state, run(bed, bed.method("heteroavg"), 2).state)


def test_with_everything_its_own_it_is_fedavg() -> None:
    """One block, and stem and classifier held by this variant alone."""
    bed = toy(["two", "two"], samples=[8, 24])
    own = run(bed, bed.method("inclusivefl", own="top", own_classifier=True), 2).state
    plain = run(bed, bed.method("fedavg", weighting="clients"), 2).state.under("two/")
    found = {**{n: t for n, t in own.tensors.items() if "/" not in n}, **own.under("own/two/")}
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())


def test_one_variant_has_nobody_to_learn_from() -> None:
    bed = toy(["two", "two"])
    state = run(bed, bed.method("inclusivefl", own="none"), 3).state
    assert same(state, run(bed, bed.method("heteroavg"), 3).state)


# momentum


def test_a_small_top_block_moves_by_its_own_change_and_by_what_the_larger_blocks_did() -> None:
    """g_small = 1 and g_large = 2 and 4: 0.8 * 1 + 0.2 * 3 = 1.4, from the second merge on."""
    bed = toy()
    method = bed.method("inclusivefl", own="none")
    small, large = bed.context.clients
    first = method.setup()
    assert not first.under("momentum/")
    second = method.merge(first, [trained(method, first, large, by_block(2.0, 4.0))]).state
    torch.testing.assert_close(second.tensors[NORM], first.tensors[NORM] + 2)
    torch.testing.assert_close(second.tensors[f"momentum/one/{NORM}"], torch.full((5,), 3.0))
    torch.testing.assert_close(second.tensors[f"momentum/one/{LINEAR}"], torch.full((5, 6), 2.0))
    third = method.merge(second, [trained(method, second, small, 1.0)]).state
    torch.testing.assert_close(third.tensors[NORM], second.tensors[NORM] + 1.4)
    torch.testing.assert_close(third.tensors[LINEAR], second.tensors[LINEAR] + 0.8 * 1 + 0.2 * 2)
    torch.testing.assert_close(third.tensors["fc.weight"], second.tensors["fc.weight"] + 1)


def test_it_serves_from_the_next_merge_on_and_stays_while_the_larger_variant_is_away() -> None:
    bed = toy()
    method = bed.method("inclusivefl", own="none")
    small, large = bed.context.clients
    state = method.setup()
    both = [trained(method, state, small, 1.0), trained(method, state, large, by_block(2.0, 4.0))]
    after = method.merge(state, both).state
    torch.testing.assert_close(after.tensors[NORM], state.tensors[NORM] + 1.5)  # the plain mean of 1 and 2
    for _ in range(5):
        before, after = after, method.merge(after, [trained(method, after, small, 1.0)]).state
        torch.testing.assert_close(after.tensors[NORM], before.tensors[NORM] + 1.4)
    assert torch.equal(after.tensors[f"momentum/one/{NORM}"], before.tensors[f"momentum/one/{NORM}"])
    changed = method.merge(after, [trained(method, after, large, by_block(6.0, 8.0))]).state
    torch.testing.assert_close(changed.tensors[f"momentum/one/{NORM}"], torch.full((5,), 7.0))


def test_it_touches_the_top_block_only() -> None:
    bed = resnets("resnet10", "resnet18", "resnet26")
    method, plain = bed.method("inclusivefl"), bed.method("heteroavg")
    so_far = run(bed, method, 1)
    sent = Bundle({n: t for n, t in so_far.state.tensors.items() if "/" not in n}, so_far.state.values)
    arrivals = [trained(method, so_far.state, client, 0.25) for client in bed.context.clients]
    mixed = method.merge(so_far.state, arrivals).state.tensors
    average = plain.merge(sent, arrivals).state.tensors
    touched = {name for name, tensor in average.items() if not torch.equal(tensor, mixed[name])}
    trainable = set(dict(bed.family.outline("resnet26", SPEC).named_parameters()))
    # resnet10 has layer4.0 on top, resnet18 layer4.1, and the largest is changed by nobody
    assert touched == {name for name in trainable if name.startswith(("layer4.0.", "layer4.1."))}


def test_the_largest_variant_is_never_changed() -> None:
    bed = toy(["one", "two", "three"])
    method = bed.method("inclusivefl", own="top")
    so_far = run(bed, method, 3)
    assert {name.split("/")[1] for name in so_far.state.tensors if name.startswith("momentum/")} == {"one", "two"}
    largest = [trained(method, so_far.state, bed.context.clients[2], 0.5)]
    assert method.incoming(so_far.state, largest)[0] is largest[0]  # type: ignore[attr-defined]
    after = method.merge(so_far.state, largest).state.tensors
    name = "own/three/blocks.2.0.weight"
    torch.testing.assert_close(after[name], so_far.state.tensors[name] + 0.5)


def test_it_is_the_mean_over_the_clients_of_the_larger_variant() -> None:
    bed = toy(["one", "two", "two"], samples=[8, 8, 24])
    for weighting, wanted in (("clients", 2.0), ("samples", 2.5)):
        method = bed.method("inclusivefl", weighting=weighting)
        state = method.setup()
        arrivals = [trained(method, state, bed.context.clients[n], by) for n, by in ((1, 1.0), (2, 3.0))]
        after = method.merge(state, arrivals).state.tensors
        torch.testing.assert_close(after[f"momentum/one/{NORM}"], torch.full((5,), wanted))


def test_what_a_variant_passes_on_has_its_own_momentum_in_it() -> None:
    bed = toy(["one", "two", "three"])
    method = bed.method("inclusivefl")
    one, two, three = bed.context.clients
    state = method.setup()
    state = method.merge(state, [trained(method, state, three, 5.0)]).state
    assert f"momentum/one/{NORM}" not in state.tensors  # from the next larger one only
    state = method.merge(state, [trained(method, state, two, 1.0)]).state
    # blocks.1 is on top of two and moves by 0.8 * 1 + 0.2 * 5 = 1.8; blocks.0 by 1
    torch.testing.assert_close(state.tensors[f"momentum/one/{NORM}"], torch.full((5,), 1.4))
    assert one.variant == "one"


def test_a_late_result_takes_its_policys_weight_and_leaves_its_momentum_in_full() -> None:
    bed = toy()
    method = bed.method("inclusivefl", own="none")
    small, large = bed.context.clients
    state = method.setup()
    state = method.merge(state, [trained(method, state, large, by_block(2.0, 4.0), weight=0.5)]).state
    torch.testing.assert_close(state.tensors[f"momentum/one/{NORM}"], torch.full((5,), 3.0))
    after = method.merge(state, [trained(method, state, small, 1.0, weight=0.5)]).state
    torch.testing.assert_close(after.tensors[NORM], state.tensors[NORM] + 0.5 * 1.4)


def test_counters_and_running_statistics_take_no_momentum() -> None:
    bed = toy()
    method = bed.method("inclusivefl")
    state = run(bed, method, 1).state
    assert state.under("momentum/one/").keys() == {
        name for name, _ in bed.family.outline("one", bed.spec).named_parameters() if name.startswith("blocks.0")
    }
    arrivals = [trained(method, state, client, -5.0) for client in bed.context.clients]
    after = method.merge(state, arrivals).state.tensors
    assert all(float(t.min()) >= 0 for name, t in after.items() if name.endswith("running_var"))


def test_who_learns_from_whom() -> None:
    nets = family("resnet-stage", {"base_width": 4})
    found = teachers(nets, SPEC, "resnet10", "resnet14")
    assert found["layer4.0.conv2.weight"] == ["layer4.0.conv2.weight", "layer4.1.conv2.weight"]
    assert found["layer4.0.conv1.weight"] == ["layer4.0.conv1.weight"]  # that of block 1 has other inputs
    assert found["layer4.0.downsample.0.weight"] == ["layer4.0.downsample.0.weight"]
    assert set(teachers(nets, SPEC, "resnet14", "resnet18")) == {
        f"layer4.1.{name}"
        for name in ("conv1.weight", "conv2.weight", "bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias")
    }
    vits = family("vit-layer", VIT)
    found = teachers(vits, InputSpec((3, 16, 16), 3), "vit8", "vit11")
    assert found["blocks.7.norm1.weight"] == [f"blocks.{n}.norm1.weight" for n in (7, 8, 9, 10)]


# what a variant has for its own


def test_an_own_block_is_averaged_within_its_variant() -> None:
    bed = toy(["one", "one", "two"])
    method = bed.method("inclusivefl", own="top", beta=0)
    state = method.setup()
    arrivals = [trained(method, state, c, by) for c, by in zip(bed.context.clients, (1.0, 2.0, 6.0), strict=True)]
    after = method.merge(state, arrivals).state.tensors
    torch.testing.assert_close(after[f"own/one/{NORM}"], state.tensors[f"own/one/{NORM}"] + 1.5)
    torch.testing.assert_close(after[NORM], state.tensors[NORM] + 6.0)  # two shares its first block, with nobody
    torch.testing.assert_close(after["own/two/blocks.1.0.weight"], state.tensors["own/two/blocks.1.0.weight"] + 6.0)
    torch.testing.assert_close(after["fc.bias"], state.tensors["fc.bias"] + 3.0)
    alone = method.merge(state, arrivals[:2]).state.tensors
    assert all(alone[name] is tensor for name, tensor in state.tensors.items() if name.startswith("own/two/"))
    sent = method.send(Bundle(after, state.values), Assignment(client=bed.context.clients[0])).tensors
    assert torch.equal(sent[NORM], after[f"own/one/{NORM}"])


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ({"own": "none"}, set()),
        ({"own": "top"}, {"layer4.1"}),
        ({"own": "stages"}, {"layer1.0", "layer2.0", "layer3.1", "layer4.1"}),
        ({"own_classifier": True}, {"fc.weight", "fc.bias"}),
    ],
)
def test_what_is_own_in_resnets(options: dict[str, Any], own: set[str]) -> None:
    bed = resnets("resnet14", "resnet26")
    state = bed.method("inclusivefl", **options).setup()
    assert {".".join(name.split(".")[:2]) for name in state.under("own/resnet14/")} == own


def test_in_vits_the_top_block_is_own_by_default() -> None:
    nets = family("vit-layer", VIT)
    bed = Bed(nets, ["vit8", "vit12"], samples=4, spec=InputSpec((3, 16, 16), 3), training=Training(batch=4))
    state = bed.method("inclusivefl").setup()
    assert {name.split(".")[1] for name in state.under("own/vit8/")} == {"7"}
    assert "blocks.7.norm1.weight" in state.tensors  # vit12 and those between share it
    assert "blocks.11.norm1.weight" not in state.tensors  # nobody would


@pytest.mark.parametrize(
    ("variant", "share"),
    [("resnet10", 74.8), ("resnet14", 43.7), ("resnet18", 42.2), ("resnet22", 27.6), ("resnet26", 27.0)],
)
def test_why_resnets_share_their_top_block(variant: str, share: float) -> None:
    nets, spec = family("resnet-stage"), InputSpec((3, 32, 32), 10)
    sizes = {name: p.numel() for name, p in nets.outline(variant, spec).named_parameters()}
    top = nets.blocks(sizes)[-1][-1]
    part = sum(size for name, size in sizes.items() if name.startswith(top)) / sum(sizes.values())
    assert 100 * part == pytest.approx(share, abs=0.06)


# what travels, and who takes part


@pytest.mark.parametrize("own", ["none", "stages"])
def test_the_messages_and_the_work_are_those_of_heteroavg(own: str) -> None:
    bed = resnets("resnet10", "resnet18")
    so_far = run(bed, bed.method("inclusivefl", own=own), 2)
    for client, sent, reply in zip(bed.context.clients, so_far.sent[1], so_far.replies[1], strict=True):
        net = bed.family.outline(client.variant, SPEC)
        floats = sum(t.numel() for t in net.state_dict().values() if t.is_floating_point())
        norms = sum(isinstance(m, torch.nn.BatchNorm2d) for m in net.modules())
        assert sent.nbytes() == reply.message.nbytes() == 4 * floats + 8 * norms
        task, plain = Assignment(client=client), bed.method("heteroavg")
        assert bed.method("inclusivefl", own=own).work(so_far.state, task) == plain.work(plain.setup(), task)
    assert so_far.kept == {}


def test_it_runs_under_every_policy() -> None:
    assert toy().method("inclusivefl").needs.policies == ALL_POLICIES


def test_the_order_of_arrivals_does_not_matter() -> None:
    bed = toy(["one", "two", "three"])
    method = bed.method("inclusivefl")
    state = run(bed, method, 1).state
    arrivals = [trained(method, state, c, 0.25 + c.number) for c in bed.context.clients]
    merged = [method.merge(state, list(order)).state.tensors for order in permutations(arrivals)]
    for other in merged[1:]:
        for name, tensor in merged[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-6, atol=1e-6)


def test_a_client_that_is_cut_short_or_lacks_classes_is_merged_as_it_is() -> None:
    bed = toy(samples=40)
    bed.data.y[bed.parts[0]] = 1
    method = bed.method("inclusivefl")
    state, client = run(bed, method, 1).state, bed.context.clients[0]
    task = Assignment(client=client)
    message = method.send(state, task)
    job = bed.job(client, message, most_steps=1)
    reply = method.client(job)
    assert job.steps == 1
    assert flaw(method, client, "train", message, method.work(state, task), reply) is None
    merged = method.merge(state, [Arrival(assignment=task, sent=message, message=travelled(reply.message))]).state
    change = reply.message.tensors[NORM] - message.tensors[NORM]
    wanted = 0.8 * change + 0.2 * state.tensors[f"momentum/one/{NORM}"]
    torch.testing.assert_close(merged.tensors[f"own/one/{NORM}"], state.tensors[f"own/one/{NORM}"] + wanted)


def test_a_client_steps_down_to_a_variant_that_nobody_had() -> None:
    bed = toy(["two", "three"])
    method = bed.method("inclusivefl")
    so_far = run(bed, method, 2)
    smaller = [Client(0, "one", 24), bed.context.clients[1]]
    method.reassign(smaller)
    assert method.step_down(Bundle(), smaller[0]) is None
    bed.context = method.context
    first = method.setup().tensors
    for round_ in (3, 4):
        advance(bed, method, so_far, smaller, round_=round_)
    # its top block begins as at first, and three, now the next larger one, teaches it
    assert torch.equal(so_far.sent[2][0].tensors[NORM], first[f"own/one/{NORM}"])
    assert f"momentum/one/{NORM}" in so_far.state.tensors
    assert [target.variant for target in method.targets(so_far.state)] == ["one", "three"]


def test_the_state_of_a_copy_goes_on_alike() -> None:
    bed = toy(["one", "two"])
    so_far = run(bed, bed.method("inclusivefl"), 2)
    method, fresh = bed.method("inclusivefl"), bed.method("inclusivefl")
    arrivals = [trained(method, so_far.state, client, 0.5) for client in bed.context.clients]
    assert same(method.merge(so_far.state, arrivals).state, fresh.merge(travelled(so_far.state), arrivals).state)


@pytest.mark.parametrize("own", ["none", "top"])
def test_it_learns_and_repeats(own: str) -> None:
    bed = toy(["one", "two", "three"], samples=48)
    method = bed.method("inclusivefl", own=own)
    so_far = run(bed, method, 6)
    assert same(so_far.state, run(bed, bed.method("inclusivefl", own=own), 6).state)
    assert accuracy(bed, method, so_far) > 0.7


# InCo over it


def test_inco_gives_an_own_block_the_base_that_its_variant_uses() -> None:
    """With `stages` resnet10 has layer4.0 for its own; resnet26 crosses its own layer4.2 with the shared layer4.0."""
    bed = resnets("resnet10", "resnet26")
    inco = bed.method("inco", base="inclusivefl", base_params={"own": "stages", "beta": 0}, mode="theorem")
    state = inco.setup()
    small, large = bed.context.clients

    def step(name: str) -> float:
        return -0.5 if name.startswith("layer4.2") else 1.0

    arrivals = [trained(inco, state, small, 100.0), trained(inco, state, large, step)]
    merged = inco.merge(state, arrivals)
    name = "own/resnet26/layer4.2.conv1.weight"
    # g_k = -0.5 and g_0 = 1 in every element: theta = -0.5, so that nothing is left; against 100 it would be -0.005
    torch.testing.assert_close(merged.metrics[f"theta/{name.removesuffix('.weight')}"], -0.5)
    torch.testing.assert_close(merged.state.tensors[name], state.tensors[name], rtol=0, atol=1e-6)
    shared = "layer4.1.conv1.weight"
    torch.testing.assert_close(merged.state.tensors[shared], state.tensors[shared] + 1.0)


@pytest.mark.parametrize("options", [{}, {"mode": "paper"}, {"mode": "theorem"}, {"optimise": False}])
def test_inco_leaves_blocks_that_nobody_held(options: dict[str, Any]) -> None:
    bed = resnets("resnet10", "resnet18", "resnet26")
    inco = bed.method("inco", base="inclusivefl", **options)
    first = inco.setup().tensors
    after = run(bed, inco, 2, sampled=[[0, 1], [0, 1]]).state.tensors
    unheld = [name for name in first if name.startswith(("layer1.2", "layer2.2", "layer3.2", "layer4.2"))]
    assert unheld
    assert all(after[name] is first[name] or torch.equal(after[name], first[name]) for name in unheld)
    assert not torch.equal(after["layer1.1.conv1.weight"], first["layer1.1.conv1.weight"])
