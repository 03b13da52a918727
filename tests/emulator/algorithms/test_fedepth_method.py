"""FeDepth: the whole model on every client, trained segment by segment."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from algorithm_harness import (
    ADAM,
    SGD,
    Bed,
    ToySegments,
    accuracy,
    advance,
    equal,
    resumed,
    run,
    same,
    small_resnets,
    toy_depths,
    trained,
    weights,
    wire_sizes,
)
from msgspec.structs import replace
from torch.nn import functional as F

from fleetbed.emulator.method.algorithm import ALL_POLICIES, Assignment, Client
from fleetbed.models.base import InputSpec
from fleetbed.models.cost.choose import choose_variant
from fleetbed.models.cost.predict import cost
from fleetbed.models.families.lookup import family
from fleetbed.models.work import Work
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Budgets, Optimizer, Training
from fleetbed.profiles.resolve import load_device, load_link

DECAYED = Optimizer(lr=0.05, momentum=0.9, weight_decay=0.1)
CIFAR = InputSpec((3, 32, 32), 10)
MIB = 1 << 20
toy = partial(toy_depths, nets=ToySegments)


# what it reduces to


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
@pytest.mark.parametrize("weighting", ["clients", "samples"])
def test_in_one_segment_it_is_fedavg(weighting: str, optimizer: Optimizer) -> None:
    bed = toy("in-1", "in-1", optimizer=optimizer, epochs=2)
    found = run(bed, bed.method("fedepth", weighting=weighting), 3).state
    assert same(found, run(bed, bed.method("heteroavg", weighting=weighting), 3).state)
    alone = run(bed, bed.method("fedavg", weighting=weighting), 3).state
    assert equal(found.tensors, alone.under("in-1/"))


def test_a_resnet_in_one_segment_is_heteroavg() -> None:
    bed = small_resnets("resnet-segment", "resnet26-in-1", "resnet26-in-1")
    assert same(run(bed, bed.method("fedepth")).state, run(bed, bed.method("heteroavg")).state)


# the segments


@pytest.mark.parametrize("optimizer", [DECAYED, replace(ADAM, weight_decay=0.1)], ids=["momentum and decay", "adam"])
def test_what_is_not_trained_stays_bit_for_bit(optimizer: Optimizer) -> None:
    """A task that is cut after each segment shows what the next one changes: its own tensors and the classifier."""
    bed = toy("in-3", optimizer=optimizer)
    method, client = bed.method("fedepth"), bed.context.clients[0]
    message = method.send(method.setup(), Assignment(client=client))
    ends = [message, *(method.client(bed.job(client, message, most_steps=3 * n)).message for n in (1, 2, 3))]
    for number, own in enumerate((("stem.", "blocks.0."), ("blocks.1.",), ("blocks.2.",))):
        before, after = ends[number].tensors, ends[number + 1].tensors
        for name, _ in bed.family.outline("in-3", bed.spec).named_parameters():
            assert torch.equal(before[name], after[name]) is not name.startswith((*own, "fc.")), (number, name)


def test_the_segments_by_hand() -> None:
    """Against torch's own optimiser, one for each segment."""
    bed = toy("in-3", optimizer=DECAYED)
    method, client = bed.method("fedepth"), bed.context.clients[0]
    so_far = run(bed, method)
    net = bed.family.build("in-3", bed.spec).train()
    net.load_state_dict(weights(so_far.sent[0][0]))
    job = bed.job(client, so_far.sent[0][0])
    for number, phase in ((1, "segment-1"), (2, "segment-2"), (3, "")):
        own = [*net.stem.parameters()] if number == 1 else []
        trained_now = [*own, *net.blocks[number - 1].parameters(), *net.fc.parameters()]
        optimizer = torch.optim.SGD(trained_now, lr=0.05, momentum=0.9, weight_decay=0.1)
        for x, y in job.batches(phase=phase):
            f = net.stem(x)
            for block in net.blocks[: number - 1]:
                f = block(f)
            optimizer.zero_grad()
            F.cross_entropy(net.fc(net.blocks[number - 1](f)), y).backward()
            optimizer.step()
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(so_far.replies[0][0].message.tensors[name], tensor, rtol=1e-4, atol=1e-6)


def test_each_segment_sees_the_data_in_an_order_of_its_own() -> None:
    bed = toy("in-3")
    job = bed.job(bed.context.clients[0], bed.method("fedepth").setup())
    orders = [[y.tolist() for _, y in job.batches(phase=phase)] for phase in ("segment-1", "segment-2", "")]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_the_declared_work_is_a_phase_for_each_segment() -> None:
    bed = toy("in-3", "in-1", samples=27, epochs=2)
    method = bed.method("fedepth")
    three, one = (method.work(method.setup(), Assignment(client=c)) for c in bed.context.clients)
    assert [(p.trains, p.steps, p.batch) for p in three.phases] == [(1, 6, 8), (2, 6, 8), (3, 6, 8)]
    assert [(p.trains, p.steps, p.batch) for p in one.phases] == [(1, 6, 8)]
    assert (three.held_models, three.held_values, three.once, three.all_steps) == (1, 0, (), 18)
    p, b, counters = wire_sizes(bed, "in-3")
    assert three.bytes_down == three.bytes_up == one.bytes_up == 4 * (p + b) + 8 * counters


def test_the_messages_are_whole_models() -> None:
    bed = small_resnets("resnet-segment", "resnet26-in-12", "resnet26-in-3")
    method = bed.method("fedepth")
    so_far = run(bed, method)
    p, b, counters = wire_sizes(bed, "resnet26-in-12")
    for sent, reply in zip(so_far.sent[0], so_far.replies[0], strict=True):
        assert sent.nbytes() == reply.message.nbytes() == 4 * (p + b) + 8 * counters
    assert so_far.kept == {}


# memory


@pytest.mark.slow
def test_a_device_trains_in_as_few_segments_as_its_memory_allows() -> None:
    nets = family("resnet-segment")
    bed = Bed(nets, ["resnet26-in-1"], samples=16, spec=CIFAR, training=Training(batch=16))
    method = bed.method("fedepth")
    state = method.setup()

    def work(variant: str) -> Work:
        return method.heaviest(state, Client(0, variant, 16))

    peaks = {v: cost(nets, v, CIFAR, work(v), SGD).memory_bytes / MIB for v in nets.variants}
    assert list(peaks.values()) == sorted(peaks.values())
    assert peaks["resnet26-in-12"] < 0.65 * peaks["resnet26-in-1"]
    pi = load_device("raspberry-pi-4b-4gb")
    for variant, peak in peaks.items():
        chosen = choose_variant(
            device=replace(pi, memory=replace(pi.memory, available_mib=100 + 1.001 * peak, runtime_mib=100)),
            link=load_link("wifi5"),
            family=nets,
            spec=CIFAR,
            work=work,
            optimizer=SGD,
            budgets=Budgets(memory_margin=0.0),
            seconds=lambda *_: 0.0,
        )
        assert chosen.variant == variant


# the server


def test_all_clients_count_in_every_tensor() -> None:
    bed = toy("in-3", "in-1")
    method = bed.method("fedepth")
    state = method.setup()
    arrivals = [trained(method, state, c, by) for c, by in zip(bed.context.clients, (1.0, 3.0), strict=True)]
    after = method.merge(state, arrivals).state.tensors
    for name, tensor in state.tensors.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(after[name], tensor + 2)


def test_one_model_is_evaluated() -> None:
    bed = toy("in-3", "in-1")
    method = bed.method("fedepth")
    (target,) = method.targets(method.setup())
    assert target.variant == "in-1"
    assert equal(target.tensors, method.setup().tensors)
    alone = toy("in-3", "in-3")
    assert [t.variant for t in alone.method("fedepth").targets(alone.method("fedepth").setup())] == ["in-3"]


# who takes part


def test_every_policy_and_partial_work() -> None:
    bed = toy("in-3")
    method, client = bed.method("fedepth"), bed.context.clients[0]
    assert method.needs.policies == ALL_POLICIES
    task = Assignment(client=client)
    message = method.send(method.setup(), task)
    job = bed.job(client, message, most_steps=5)
    reply = method.client(job)
    assert job.steps == 5
    cut = method.work(method.setup(), task).cut(5)
    assert [phase.steps for phase in cut.phases] == [3, 2, 0]
    assert torch.equal(reply.message.tensors["blocks.2.0.weight"], message.tensors["blocks.2.0.weight"])


def test_a_model_that_is_trained_as_a_whole_is_refused() -> None:
    bed = Bed(family("resnet-stage", {"base_width": 4}), ["resnet10"], samples=4, spec=CIFAR)
    with pytest.raises(BadInput, match=r"resnet-stage, whose variants are trained as a whole.*choose resnet-segment"):
        bed.method("fedepth").check()


def test_the_first_message_is_the_initial_model() -> None:
    bed = toy("in-3", "in-1")
    method = bed.method("fedepth")
    for client in bed.context.clients:
        assert equal(method.send(method.setup(), Assignment(client=client)).tensors, bed.context.initial("in-1"))


def test_a_client_that_steps_down_goes_on_with_the_same_model_in_more_segments() -> None:
    bed = toy("in-1", "in-1")
    method = bed.method("fedepth")
    so_far = run(bed, method)
    smaller = [Client(0, "in-3", 24), bed.context.clients[1]]
    method.reassign(smaller)
    bed.context = method.context
    before = so_far.state.tensors
    advance(bed, method, so_far, smaller, round_=2)
    assert equal(so_far.sent[1][0].tensors, before)
    assert [target.variant for target in method.targets(so_far.state)] == ["in-1"]


def test_a_resumed_run_ends_alike() -> None:
    bed = toy("in-3", "in-1")
    assert same(resumed(bed, "fedepth", 4, 2).state, run(bed, bed.method("fedepth"), 4).state)


def test_it_learns_and_repeats() -> None:
    bed = toy("in-3", "in-1", samples=48)
    method = bed.method("fedepth")
    so_far = run(bed, method, 6)
    assert same(so_far.state, run(bed, bed.method("fedepth"), 6).state)
    assert accuracy(bed, method, so_far) > 0.7


def test_inco_over_it_changes_merges_alone() -> None:
    bed = small_resnets("resnet-segment", "resnet26-in-6", "resnet26-in-1")
    plain, crossed = run(bed, bed.method("fedepth")), run(bed, bed.method("inco", base="fedepth"))
    assert all(same(a.message, b.message) for a, b in zip(plain.replies[0], crossed.replies[0], strict=True))
    moved = {n for n, t in plain.state.tensors.items() if not torch.equal(t, crossed.state.tensors[n])}
    assert moved
    assert moved <= bed.family.cross_layers(plain.state.tensors).keys()
