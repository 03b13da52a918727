"""FedRolex: windows that roll with the policy's round, each result merged where its own window was."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from algorithm_harness import ADAM, SGD, Bed, ToyWidth, accuracy, advance, equal, run, same, trained, travelled
from torch import Tensor

from fleetbed.emulator.algorithms.heterofl import CLASSES
from fleetbed.emulator.bases.averaging import MOST_INDICES
from fleetbed.emulator.method.algorithm import ALL_POLICIES, Arrival, Assignment, Client
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.models.base import Index, InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.profiles.experiment import Optimizer, Training

MIXED = ["half", "full", "half"]
ALL = {CLASSES: torch.ones(3, dtype=torch.int8)}
SMALL = InputSpec((1, 8, 8), 3)
BASE = 16  # the width of the first stage: the smallest variant has one channel of it


def toy(variants: list[str] | None = None, **more: int) -> Bed:
    return Bed(ToyWidth(None), variants or MIXED, **more)


def resnets(*variants: str, base: int = BASE) -> Bed:
    nets = family("resnet-width", {"base_width": base})
    return Bed(nets, variants or nets.variants, samples=4, spec=SMALL, training=Training(batch=4, max_steps=1))


def numbered(state: Bundle) -> Bundle:
    """The state with every element of a vector as its own position, so that a message shows its window."""
    tensors = {n: torch.arange(len(t)).float() if t.ndim == 1 else t for n, t in state.tensors.items()}
    return Bundle(tensors, state.values)


# what it reduces to


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
def test_the_first_round_is_that_of_heterofl(optimizer: Optimizer) -> None:
    bed = Bed(ToyWidth(None), MIXED, training=Training(batch=8, optimizer=optimizer))
    rolled, still = run(bed, bed.method("fedrolex")), run(bed, bed.method("heterofl"))
    assert equal(rolled.state.tensors, still.state.tensors)
    for a, b in zip(rolled.sent[0], still.sent[0], strict=True):
        assert same(a, b)
    for a, b in zip(rolled.replies[0], still.replies[0], strict=True):
        assert same(a.message, b.message)
    second = run(bed, bed.method("fedrolex"), 2).state.tensors
    assert not equal(second, run(bed, bed.method("heterofl"), 2).state.tensors)


def test_at_full_rate_it_is_heterofl_in_all_rounds() -> None:
    bed = toy(["full", "full"])
    rolled, still = run(bed, bed.method("fedrolex"), 3), run(bed, bed.method("heterofl"), 3)
    assert equal(rolled.state.tensors, still.state.tensors)


# the windows


def test_in_as_many_rounds_as_a_layer_has_channels_each_is_sent_equally_often() -> None:
    bed = resnets("resnet26-quarter", "resnet26-half", "resnet26-full", base=4)
    method = bed.method("fedrolex")
    state = numbered(method.setup())
    for client, part in zip(bed.context.clients, (1 / 4, 1 / 2, 1), strict=True):
        sent = [method.send(state, Assignment(client=client, round=round_)).tensors for round_ in range(5, 5 + 32)]
        for name, width in (("bn1.weight", 4), ("layer2.1.bn2.weight", 8), ("layer4.0.bn1.weight", 32)):
            seen = torch.zeros(width)
            for tensors in sent[:width]:
                seen[tensors[name].long()] += 1
            assert torch.equal(seen, torch.full((width,), part * width)), (client.variant, name)


def test_the_window_rolls_forward_by_one_channel_a_round_and_comes_back() -> None:
    bed = resnets("resnet26-quarter", "resnet26-full")
    method = bed.method("fedrolex")
    state = numbered(method.setup())

    def sent(round_: int) -> dict[str, Tensor]:
        return method.send(state, Assignment(client=bed.context.clients[0], round=round_)).tensors

    assert [sent(round_)["bn1.weight"].tolist() for round_ in (1, 2, 15)] == [
        [0, 1, 2, 3],
        [1, 2, 3, 4],
        [14, 15, 0, 1],
    ]
    assert torch.equal(sent(1 + BASE)["bn1.weight"], sent(1)["bn1.weight"])  # for this width
    assert not torch.equal(sent(1 + BASE)["layer2.0.bn1.weight"], sent(1)["layer2.0.bn1.weight"])
    assert equal(sent(1 + 8 * BASE), sent(1))  # for all


def test_what_a_residual_addition_adds_comes_from_the_same_channels() -> None:
    bed = resnets()
    for shift in (0, 3, 37, 127):
        index = bed.family.index("resnet26-eighth", SMALL, shift)
        before = rows_of(index, "conv1.weight", 0)
        for stage in (1, 2, 3, 4):
            own = rows_of(index, f"layer{stage}.0.conv2.weight", 0)
            if stage > 1:
                assert torch.equal(rows_of(index, f"layer{stage}.0.downsample.0.weight", 0), own)
                assert torch.equal(rows_of(index, f"layer{stage}.0.downsample.0.weight", 1), before)
                assert torch.equal(rows_of(index, f"layer{stage}.0.downsample.1.weight", 0), own)
            assert torch.equal(rows_of(index, f"layer{stage}.0.conv1.weight", 1), before)
            for block in (1, 2):
                assert torch.equal(rows_of(index, f"layer{stage}.{block}.conv1.weight", 1), own)
                assert torch.equal(rows_of(index, f"layer{stage}.{block}.conv2.weight", 0), own)
                assert torch.equal(rows_of(index, f"layer{stage}.{block}.bn2.weight", 0), own)
            before = own
        assert torch.equal(rows_of(index, "fc.weight", 1), before)


def rows_of(index: dict[str, Index], name: str, dim: int) -> Tensor:
    rows = index[name][dim]
    assert rows is not None
    return rows


@pytest.mark.parametrize(
    ("variant", "rolling", "still"),
    [("half", 99.7, 25.0), ("quarter", 52.0, 6.3), ("eighth", 26.0, 1.6), ("sixteenth", 13.0, 0.4)],
)
def test_small_windows_never_reach_all_weights(variant: str, rolling: float, still: float) -> None:
    """All layers roll together: channels are covered evenly, weights between distant ones are not."""
    nets, spec = family("resnet-width"), InputSpec((3, 32, 32), 10)
    sizes = {name: p.shape for name, p in nets.outline("resnet26-full", spec).named_parameters()}
    # tensors with the same channels are covered alike: one of each kind is looked at
    kinds: dict[tuple[int, ...], list[str]] = {}
    for name, size in sizes.items():
        kinds.setdefault(tuple(size[:2]), []).append(name)
    touched = {kind: torch.zeros(kind, dtype=torch.bool) for kind in kinds}

    def reached() -> float:
        """The part of all parameters that was ever within a window, in per cent."""
        values = sum(float(touched[tuple(size[:2])].float().mean()) * size.numel() for size in sizes.values())
        return 100 * values / sum(size.numel() for size in sizes.values())

    index = {shift: nets.index(f"resnet26-{variant}", spec, shift) for shift in (0, 77, 511)}
    for shift in range(512):
        for kind, (first, *_) in kinds.items():
            rows = [
                torch.arange(n) if r is None else (r + shift) % n for n, r in zip(kind, index[0][first], strict=False)
            ]
            touched[kind][torch.meshgrid(*rows, indexing="ij")] = True
            for own, said in zip(rows, index.get(shift, {}).get(first, ()), strict=False):
                assert said is None or torch.equal(own, said)
        if shift == 0:
            assert reached() == pytest.approx(still, abs=0.06)
    assert reached() == pytest.approx(rolling, abs=0.5)


# the merge


def test_a_result_is_merged_where_its_own_window_was() -> None:
    """The stem has 6 channels: rounds 1, 3 and 5 give those from 0, 2 and 4 on."""
    bed = toy(["half", "half", "half", "full"])
    method = bed.method("fedrolex")
    state = method.setup()
    name = "stem.1.weight"
    arrivals = [
        trained(method, state, client, by, round_=round_, extras=ALL)
        for client, by, round_ in zip(bed.context.clients, (1.0, 2.0, 4.0), (1, 3, 5), strict=False)
    ]
    moved = method.merge(state, arrivals).state.tensors[name] - state.tensors[name]
    torch.testing.assert_close(moved[:, 0], torch.tensor([2.5, 1.0, 1.5, 2.0, 3.0, 4.0]))


def test_a_stale_result_goes_to_its_own_window_although_the_server_has_gone_on() -> None:
    bed = toy(["half", "full"])
    method = bed.method("fedrolex")
    first = method.setup()
    half, full = bed.context.clients
    late = trained(method, first, half, 1.0, round_=2, extras=ALL, weight=0.5, staleness=3)
    assert late.sent.values == {"shift": 1}
    state = first
    for round_ in (2, 3, 4):
        state = method.merge(state, [trained(method, state, full, 1.0, round_=round_, extras=ALL)]).state
    after = method.merge(state, [late]).state
    moved = after.tensors["stem.1.weight"] - first.tensors["stem.1.weight"]
    torch.testing.assert_close(moved[:, 3], torch.tensor([3.0, 3.5, 3.5, 3.5, 3.0, 3.0]))
    assert torch.equal(after.tensors["stem.1.weight"][4:], state.tensors["stem.1.weight"][4:])
    assert after.value("next_round", int) == 5  # a late result does not turn it back


def test_what_no_window_reaches_stays_to_the_bit() -> None:
    bed = toy(["half", "full"])
    method = bed.method("fedrolex")
    first = method.setup().tensors["stem.1.weight"]
    after = run(bed, method, 2, sampled=[[0], [0]]).state.tensors["stem.1.weight"]
    assert torch.equal(after[4:], first[4:])
    assert all(not torch.equal(after[row], first[row]) for row in range(4))


def test_the_order_of_arrivals_does_not_matter() -> None:
    bed = toy()
    method = bed.method("fedrolex")
    state = method.setup()
    arrivals = [trained(method, state, c, 0.5 + c.number, round_=1 + c.number, extras=ALL) for c in bed.context.clients]
    one, other = (method.merge(state, order).state for order in (arrivals, arrivals[::-1]))
    assert one.values == other.values
    for name, tensor in one.tensors.items():
        torch.testing.assert_close(other.tensors[name], tensor, rtol=1e-6, atol=1e-7)


def test_running_variances_stay_at_zero_or_above() -> None:
    bed = toy()
    method = bed.method("fedrolex", statistics="averaged")
    state = method.setup()
    arrivals = [trained(method, state, c, -5.0, round_=2 + c.number, extras=ALL) for c in bed.context.clients]
    assert float(method.merge(state, arrivals).state.tensors["stem.2.running_var"].min()) == 0.0


def test_rows_of_a_class_that_nobody_has_stay_to_the_bit() -> None:
    bed = toy()
    bed.data.y %= 2
    method = bed.method("fedrolex")
    first = method.setup().tensors
    after = run(bed, method, 3).state.tensors
    assert torch.equal(after["fc.weight"][2], first["fc.weight"][2])
    assert not torch.equal(after["fc.weight"][:2], first["fc.weight"][:2])


# what travels, and who takes part


def test_the_shift_is_all_that_it_adds_to_heterofl() -> None:
    bed = resnets()
    method, still = bed.method("fedrolex"), bed.method("heterofl")
    state = method.setup()
    for client in bed.context.clients:
        task = Assignment(client=client, round=4)
        message = method.send(state, task)
        assert message.values == {"shift": 3}
        parameters = sum(p.numel() for p in bed.family.outline(client.variant, SMALL).parameters())
        assert message.nbytes() == 4 * parameters
        assert method.work(state, task) == still.work(state, task)
        assert method.work(state, task).bytes_up == 4 * parameters + 3
    so_far = run(bed, method, 2)
    for reply, message in zip(so_far.replies[1], so_far.sent[1], strict=True):
        assert reply.message.nbytes() == message.nbytes() + 3


def test_it_goes_by_the_rounds_of_every_policy() -> None:
    bed = toy()
    method = bed.method("fedrolex")
    assert method.needs.policies == ALL_POLICIES
    # as in a stream: single results, of rounds that overlap
    state = method.setup()
    for number, round_ in ((0, 1), (2, 2), (0, 1), (1, 2), (2, 4)):
        client = bed.context.clients[number]
        task = Assignment(client=client, task=number, round=round_)
        message = method.send(state, task)
        reply = method.client(bed.job(client, travelled(message), round_=round_, most_steps=1))
        arrival = Arrival(assignment=task, sent=message, message=travelled(reply.message), weight=0.6)
        state = method.merge(state, [arrival]).state
    assert state.value("next_round", int) == 5
    assert state.first_not_finite() is None


def test_one_who_was_away_for_long_gets_the_window_of_the_round() -> None:
    bed = toy()
    method = bed.method("fedrolex")
    so_far = run(bed, method, 4, sampled=[[1], [1], [1], [0]])
    last = so_far.sent[3][0]
    before = run(bed, method, 3, sampled=[[1], [1], [1]]).state.tensors["stem.1.weight"]
    assert last.values == {"shift": 3}
    assert torch.equal(last.tensors["stem.1.weight"], before[3:])


def test_a_client_steps_down_in_the_middle() -> None:
    bed = toy(["full", "full"])
    method = bed.method("fedrolex")
    so_far = run(bed, method, 1)
    smaller = [Client(0, "half", 24), bed.context.clients[1]]
    method.reassign(smaller)
    bed.context = method.context
    advance(bed, method, so_far, smaller, round_=2)
    reply = so_far.replies[1][1].message.tensors["stem.1.weight"]
    after = so_far.state.tensors["stem.1.weight"]
    for row in range(6):  # the window of round 2 is 1, 2, 3
        assert torch.allclose(after[row], reply[row], atol=1e-6) == (row not in (1, 2, 3))


def test_the_state_of_a_copy_goes_on_alike_and_many_rounds_do_not_pile_up() -> None:
    bed = toy()
    method = bed.method("fedrolex")
    state, client = method.setup(), bed.context.clients[0]
    for round_ in range(1, MOST_INDICES + 40):
        state = method.merge(state, [trained(method, state, client, 0.1, round_=round_, extras=ALL)]).state
    assert len(method._index) <= MOST_INDICES  # type: ignore[attr-defined]
    task = Assignment(client=client, round=200)
    assert same(method.send(state, task), bed.method("fedrolex").send(travelled(state), task))


# evaluation


def test_each_variant_is_evaluated_at_the_window_it_would_be_sent_next() -> None:
    bed = toy()
    method = bed.method("fedrolex")
    start = method.targets(method.setup())
    assert [target.variant for target in start] == ["half", "full"]
    so_far = run(bed, method, 2)
    half, full = method.targets(so_far.state)
    assert half.recalibrate
    assert full.recalibrate
    sent = method.send(so_far.state, Assignment(client=bed.context.clients[0], round=3))
    assert half.tensors is not None
    assert full.tensors is not None
    assert equal(half.tensors, sent.tensors)
    assert equal(full.tensors, so_far.state.tensors)


def test_the_whole_model_is_evaluated_although_nobody_holds_it() -> None:
    bed = resnets("resnet26-eighth", "resnet26-half")
    method = bed.method("fedrolex")
    variants = [target.variant for target in method.targets(run(bed, method).state)]
    assert variants == ["resnet26-eighth", "resnet26-half", "resnet26-full"]
    still = bed.method("heterofl")
    assert [target.variant for target in still.targets(still.setup())] == variants[:2]


def test_it_learns_and_repeats() -> None:
    bed = toy(samples=48)
    method = bed.method("fedrolex")
    so_far = run(bed, method, 12)
    assert same(so_far.state, run(bed, bed.method("fedrolex"), 12).state)
    assert accuracy(bed, method, so_far) > 0.7
    states = [merged.state for merged in so_far.merged]
    assert all(not equal(a.tensors, b.tensors) for a, b in pairwise(states))
