"""HeteroAvg, FedAvg, HeteroProx, FedProx and Private against their definitions."""

from __future__ import annotations

import pytest
import torch
from algorithm_harness import (
    ADAM,
    SGD,
    SPEC,
    Bed,
    ToyDepth,
    ToyDropout,
    ToyStrangers,
    ToyWidth,
    accuracy,
    equal,
    run,
    same,
    trained,
)
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator.algorithms import load_algorithm
from fleetbed.emulator.method.algorithm import Arrival, Assignment, Client
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Training

DEEP, LAST, COUNTER = "blocks.2.0.weight", "fc.bias", "num_batches_tracked"


def test_a_layer_is_averaged_over_those_who_hold_it() -> None:
    """Groups of 2 and 1: what both hold moves by the mean of three, the deep layer by that of its one holder."""
    bed = Bed(ToyDepth(None), ["one", "one", "three"])
    method = bed.method("heteroavg")
    state = method.setup()
    arrivals = [trained(method, state, c, by) for c, by in zip(bed.context.clients, (1.0, 2.0, 6.0), strict=True)]
    after = method.merge(state, arrivals).state.tensors
    torch.testing.assert_close(after[LAST], state.tensors[LAST] + 3.0)
    torch.testing.assert_close(after[DEEP], state.tensors[DEEP] + 6.0)


def test_weights_by_samples() -> None:
    bed = Bed(ToyDepth(None), ["one", "one", "three"], samples=[10, 30, 60])
    method = bed.method("heteroavg", weighting="samples")
    state = method.setup()
    arrivals = [trained(method, state, c, by) for c, by in zip(bed.context.clients, (1.0, 2.0, 6.0), strict=True)]
    after = method.merge(state, arrivals).state.tensors
    torch.testing.assert_close(after[LAST], state.tensors[LAST] + (10 * 1 + 30 * 2 + 60 * 6) / 100)
    torch.testing.assert_close(after[DEEP], state.tensors[DEEP] + 6.0)


def test_noise_is_as_wide_as_the_change_times_its_level() -> None:
    """A change of deviation 0.2 in all tensors; noise is on the 126 weights of two layers, not on statistics."""
    bed = Bed(ToyDepth(None), ["one"])
    state, draw = bed.method("heteroavg").setup(), torch.Generator().manual_seed(3)
    came = {
        n: t + 0.2 * torch.randn(t.shape, generator=draw) for n, t in state.tensors.items() if not n.endswith(COUNTER)
    }
    message = Bundle({**state.tensors, **came})
    arrival = Arrival(assignment=Assignment(client=bed.context.clients[0]), sent=state, message=message)
    methods = [bed.method("heteroavg", delta_noise=level) for level in (0.0, 1.5, 1.5)]
    plain, noisy, again = (method.merge(state, [arrival]).state.tensors for method in methods)
    noise = torch.cat([(noisy[n] - plain[n]).flatten() for n in ("stem.1.weight", "blocks.0.0.weight")])
    assert len(noise) == 126
    assert float(noise.std()) == pytest.approx(1.5 * 0.2, rel=0.25)
    assert equal(noisy, again)
    for statistic in ("stem.2.running_mean", "stem.2.running_var"):
        assert torch.equal(noisy[statistic], plain[statistic])


def test_what_nobody_held_stays_the_same_tensor() -> None:
    bed = Bed(ToyDepth(None), ["one", "three"])
    method = bed.method("heteroavg")
    state = method.setup()
    after = method.merge(state, [trained(method, state, bed.context.clients[0], 1.0)]).state
    for name in state.tensors:
        assert (after.tensors[name] is state.tensors[name]) == name.startswith(("blocks.1", "blocks.2"))


def test_what_nobody_changed_moves_by_nothing_at_all() -> None:
    """Not even by rounding: InCo divides by norms of deltas."""
    bed = Bed(ToyDepth(None), ["one"] * 7)
    method = bed.method("heteroavg")
    state = method.setup()
    after = method.merge(state, [trained(method, state, c, 0.0) for c in bed.context.clients]).state
    assert equal(after.tensors, state.tensors)


def test_a_mixing_weight_scales_the_step() -> None:
    bed = Bed(ToyDepth(None), ["one", "three"])
    method = bed.method("heteroavg")
    state = method.setup()
    one, three = bed.context.clients
    after = method.merge(state, [trained(method, state, one, 2.0, weight=0.3)]).state.tensors
    torch.testing.assert_close(after[LAST], state.tensors[LAST] + 0.6)
    both = [trained(method, state, one, 2.0, weight=0.5), trained(method, state, three, 4.0, weight=1.0)]
    after = method.merge(state, both).state.tensors
    torch.testing.assert_close(after[LAST], state.tensors[LAST] + (0.5 * 2 + 1.0 * 4) / 2)


def test_a_late_result_counts_by_what_it_changed() -> None:
    """The delta is against what was sent, not against what the server has by now."""
    bed = Bed(ToyDepth(None), ["one", "one"])
    method = bed.method("heteroavg")
    first = method.setup()
    late = trained(method, first, bed.context.clients[0], 1.0, weight=0.5)
    second = method.merge(first, [trained(method, first, bed.context.clients[1], 4.0)]).state
    after = method.merge(second, [late]).state.tensors
    torch.testing.assert_close(after[LAST], first.tensors[LAST] + 4.0 + 0.5)


def test_batch_norm_statistics() -> None:
    bed = Bed(ToyDepth(None), ["one", "one"])
    method = bed.method("heteroavg")
    state = method.setup()
    mean, var, count = (f"stem.2.{n}" for n in ("running_mean", "running_var", "num_batches_tracked"))
    arrivals = [trained(method, state, c, by) for c, by in zip(bed.context.clients, (-3.0, -2.0), strict=True)]
    arrivals[0].message.tensors[count] = torch.tensor(9)
    arrivals[1].message.tensors[count] = torch.tensor(4)
    after = method.merge(state, arrivals).state.tensors
    torch.testing.assert_close(after[mean], state.tensors[mean] - 2.5)
    assert torch.equal(after[var], torch.zeros(6))  # 1 - 2.5, but never below 0
    assert after[count].dtype == torch.int64
    assert int(after[count]) == 9
    stale = [Arrival(assignment=Assignment(client=a.client), sent=a.sent, message=state) for a in arrivals]
    again = method.merge(Bundle(after, state.values), stale).state.tensors
    assert int(again[count]) == 9


def test_parts_of_a_width_family_are_averaged_by_element() -> None:
    bed = Bed(ToyWidth(None), ["half", "full"])
    method = bed.method("heteroavg")
    state = method.setup()
    half, full = bed.context.clients
    assert method.send(state, Assignment(client=half, task=0)).tensors["fc.weight"].shape == (3, 2)
    after = method.merge(state, [trained(method, state, half, 1.0), trained(method, state, full, 4.0)])
    moved = after.state.tensors["fc.weight"] - state.tensors["fc.weight"]
    torch.testing.assert_close(moved, torch.tensor([[2.5, 2.5, 4.0, 4.0]] * 3))
    alone = method.merge(state, [trained(method, state, half, 1.0)]).state.tensors["fc.weight"]
    torch.testing.assert_close(alone[:, :2], state.tensors["fc.weight"][:, :2] + 1)
    assert torch.equal(alone[:, 2:], state.tensors["fc.weight"][:, 2:])


def test_kernels_that_are_cut_by_width_are_averaged_by_element() -> None:
    nets = family("resnet-width", {"base_width": 16})
    small, large = nets.variants[0], nets.variants[-1]
    bed = Bed(nets, [small, large, small], samples=[10, 30, 20], spec=InputSpec((1, 8, 8), 3))
    method = bed.method("heteroavg", weighting="samples")
    state = method.setup()
    arrivals = [trained(method, state, c, by) for c, by in zip(bed.context.clients, (1.0, 2.0, 6.0), strict=True)]
    after = method.merge(state, arrivals).state.tensors
    index = nets.index(small, bed.context.spec)
    kernels = [name for name in index if after[name].ndim == 4]
    assert kernels
    for name in kernels:
        sizes, parts = after[name].shape, index[name]
        rows = [torch.arange(size) if part is None else part for size, part in zip(sizes, parts, strict=True)]
        held = torch.zeros(sizes, dtype=torch.bool)
        held[torch.meshgrid(*rows, indexing="ij")] = True
        moved = torch.where(held, (10 * 1.0 + 30 * 2.0 + 20 * 6.0) / 60, 2.0)
        torch.testing.assert_close(after[name], state.tensors[name] + moved)


def test_clients_of_one_variant_are_sent_the_very_same_tensors() -> None:
    """So that they are laid down once for all of them, and averaged in one pass."""
    bed = Bed(ToyWidth(None), ["half", "half"])
    method = bed.method("heteroavg")
    state = method.setup()
    one, other = (method.send(state, Assignment(client=client, task=0)).tensors for client in bed.context.clients)
    assert all(one[name] is other[name] for name in one)
    state = method.merge(state, [trained(method, state, bed.context.clients[0], 1.0)]).state
    moved = method.send(state, Assignment(client=bed.context.clients[0], task=1)).tensors
    torch.testing.assert_close(moved["fc.weight"], one["fc.weight"] + 1)


def test_same_architecture_only() -> None:
    """One FedAvg per variant, weighted by samples; a variant of which nobody took part stays."""
    bed = Bed(ToyDepth(None), ["one", "one", "two", "three"], samples=[10, 30, 24, 24])
    method = bed.method("fedavg")
    state = method.setup()
    arrivals = [trained(method, state, c, by) for c, by in zip(bed.context.clients[:3], (1.0, 2.0, 6.0), strict=True)]
    after = method.merge(state, arrivals).state.tensors
    torch.testing.assert_close(after[f"one/{LAST}"], state.tensors[f"one/{LAST}"] + (10 * 1 + 30 * 2) / 40)
    torch.testing.assert_close(after[f"two/{LAST}"], state.tensors[f"two/{LAST}"] + 6.0)
    assert all(after[n] is t for n, t in state.tensors.items() if n.startswith("three/"))


def test_a_client_may_step_down_to_a_variant_that_nobody_had() -> None:
    bed = Bed(ToyDepth(None), ["two", "three"])
    for name in ("fedavg", "heteroavg"):
        method = bed.method(name)
        state = method.setup()
        smaller = Client(0, "one", 24)
        arrival = trained(method, state, smaller, 1.0)
        after = method.merge(state, [arrival]).state
        sent_next = method.send(after, Assignment(client=smaller, task=1)).tensors
        torch.testing.assert_close(sent_next[LAST], arrival.sent.tensors[LAST] + 1)


def test_one_architecture_makes_them_all_the_same() -> None:
    bed = Bed(ToyDepth(None), ["two"] * 3, samples=[16, 24, 40])
    sampled = [[0, 1, 2], [0, 2]]
    for counted in ("samples", "clients"):
        hetero = run(bed, bed.method("heteroavg", weighting=counted), 2, sampled=sampled)
        alike = run(bed, bed.method("fedavg", weighting=counted), 2, sampled=sampled)
        assert equal(hetero.state.tensors, alike.state.under("two/"))


def test_fedavg_is_the_weighted_mean_of_the_weights() -> None:
    bed = Bed(ToyDepth(None), ["one"] * 3, samples=[16, 24, 40])
    so_far = run(bed, bed.method("fedavg"))
    replies = [r.message.tensors for r in so_far.replies[0]]
    for name, now in so_far.state.under("one/").items():
        if now.is_floating_point():
            mean = sum(n * r[name].double() for n, r in zip((16, 24, 40), replies, strict=True)) / 80
            torch.testing.assert_close(now.double(), mean, rtol=1e-5, atol=1e-6)


def test_clients_really_train() -> None:
    """On a CPU, where state_dict() is no copy, every delta of a careless loop is 0."""
    bed = Bed(ToyDepth(None), ["one", "three"])
    so_far = run(bed, bed.method("heteroavg"))
    start = bed.method("heteroavg").setup()
    moved = {n: not torch.equal(t, start.tensors[n]) for n, t in so_far.state.tensors.items()}
    assert all(moved.values()), [n for n, yes in moved.items() if not yes]


@pytest.mark.parametrize("name", ["heteroavg", "fedavg", "heteroprox", "fedprox", "private"])
def test_it_learns_and_repeats(name: str) -> None:
    bed = Bed(ToyDropout(None), ["one", "two", "three"], samples=48)
    method = bed.method(name)
    first, second = run(bed, method, 6), run(bed, bed.method(name), 6)
    assert same(first.state, second.state)
    assert all(same(first.kept[n], second.kept[n]) for n in first.kept)
    assert accuracy(bed, method, first) > 0.7


def proximal_loss(start: dict[str, Tensor], net: torch.nn.Module, x: Tensor, y: Tensor, mu: float) -> Tensor:
    distance = sum((p - start[n]).square().sum() for n, p in net.named_parameters())
    return F.cross_entropy(net(x), y) + mu / 2 * distance


@pytest.mark.parametrize("name", ["heteroprox", "fedprox"])
def test_the_proximal_term_is_that_of_the_formula(name: str) -> None:
    """Three plain SGD steps on the written-out loss end at the same weights."""
    training = Training(batch=8, optimizer=SGD)
    bed = Bed(ToyDepth(None), ["two"], samples=24, training=training)
    method = bed.method(name, mu=0.7)
    client = bed.context.clients[0]
    message = method.send(method.setup(), Assignment(client=client, task=0))
    reply = method.client(bed.job(client, message))

    net = bed.family.build("two", SPEC).train()
    net.load_state_dict(message.tensors)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for x, y in bed.job(client, message).batches():
        optimizer.zero_grad()
        proximal_loss(message.tensors, net, x, y, 0.7).backward()
        optimizer.step()
    for n, t in net.state_dict().items():
        torch.testing.assert_close(reply.message.tensors[n], t)


@pytest.mark.parametrize(("with_term", "without"), [("heteroprox", "heteroavg"), ("fedprox", "fedavg")])
def test_no_proximal_term_is_no_difference(with_term: str, without: str) -> None:
    bed = Bed(ToyDropout(None), ["one", "three"])
    pulled, free = run(bed, bed.method(with_term, mu=0), 3), run(bed, bed.method(without), 3)
    assert same(pulled.state, free.state)
    assert not same(run(bed, bed.method(with_term), 3).state, free.state)


def test_a_strong_pull_keeps_clients_near() -> None:
    bed = Bed(ToyDepth(None), ["two"], training=Training(batch=8, epochs=4, optimizer=SGD))

    def moved(mu: float) -> float:
        so_far = run(bed, bed.method("heteroprox", mu=mu))
        start = bed.method("heteroprox").setup().tensors
        return sum(float((t - start[n]).square().sum()) for n, t in so_far.state.tensors.items() if "weight" in n)

    assert moved(10.0) < 0.5 * moved(0.0)


def test_weights_are_all_that_travels() -> None:
    """4 (P + buffers) bytes each way, and 8 for the counter of every batch norm."""
    spec = InputSpec((3, 32, 32), 10)
    bed = Bed(family("resnet-stage"), ["resnet10"], samples=4, spec=spec, training=Training(batch=2, max_steps=1))
    for name in ("heteroavg", "fedavg", "heteroprox"):
        so_far = run(bed, bed.method(name))
        net = bed.family.build("resnet10", spec)
        parameters = sum(p.numel() for p in net.parameters())
        floats = sum(b.numel() for b in net.buffers() if b.is_floating_point())
        norms = sum(isinstance(m, torch.nn.BatchNorm2d) for m in net.modules())
        assert parameters == 4_910_922
        wanted = 4 * (parameters + floats) + 8 * norms
        assert so_far.sent[0][0].nbytes() == so_far.replies[0][0].message.nbytes() == wanted


def test_private_sends_nothing_and_goes_on_from_its_own_model() -> None:
    bed = Bed(ToyDepth(None), ["one", "three"])
    so_far = run(bed, bed.method("private"), 2)
    assert all(b.nbytes() == 0 for sent in so_far.sent for b in sent)
    assert all(r.message.nbytes() == 0 for replies in so_far.replies for r in replies)
    first, second = (replies[0].keep.under("model/") for replies in so_far.replies)
    start = bed.context.initial("one")
    assert not equal(first, start)
    assert not equal(second, first)
    # by hand: the second task alone, from what the first one kept
    job = bed.job(bed.context.clients[0], Bundle(), so_far.replies[0][0].keep, 2)
    again = bed.method("private").client(job)
    assert equal(again.keep.under("model/"), second)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_private_may_keep_its_optimiser(optimizer: str) -> None:
    """Two tasks of 3 steps are then one of 6, if they see the same batches."""
    choice = ADAM if optimizer == "adam" else SGD
    bed = Bed(ToyDepth(None), ["one"], samples=8, training=Training(batch=8, epochs=3, optimizer=choice))
    method = bed.method("private", keep_optimizer=True)
    so_far = run(bed, method, 2)
    net = bed.family.build("one", SPEC).train()
    net.load_state_dict(bed.context.initial("one"))
    maker = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
    by_hand = maker(net.parameters(), lr=choice.lr, **({} if optimizer == "adam" else {"momentum": 0.9}))
    for task in (0, 1):
        for x, y in bed.job(bed.context.clients[0], Bundle(), None, task).batches():
            by_hand.zero_grad()
            F.cross_entropy(net(x), y).backward()
            by_hand.step()
    for n, t in net.state_dict().items():
        torch.testing.assert_close(so_far.kept[0].under("model/")[n], t)
    fresh = run(bed, bed.method("private"), 2).kept[0].under("model/")
    assert not torch.allclose(fresh["fc.weight"], net.state_dict()["fc.weight"])


@pytest.mark.parametrize("name", ["heteroavg", "heteroprox", "fedin", "scaffold", "fednova", "moon"])
def test_weights_of_strangers_are_not_averaged(name: str) -> None:
    bed = Bed(ToyStrangers(None), ["thin", "thick"])
    with pytest.raises(BadInput, match=r"toy-strangers, whose variants share no tensors.*thin, thick.*fedavg"):
        bed.method(name).check()
    bed.method("fedavg").check()
    Bed(ToyStrangers(None), ["thin", "thin"]).method("heteroavg").check()


def test_all_variants_start_as_parts_of_one_model() -> None:
    bed = Bed(ToyDepth(None), ["one", "two"])
    method = bed.method("heteroavg")
    whole = bed.context.initial("three")
    for client in bed.context.clients:
        sent = method.send(method.setup(), Assignment(client=client, task=0)).tensors
        assert all(torch.equal(t, whole[n]) for n, t in sent.items())


def test_every_method_can_be_merged_again_from_a_copy_of_its_state() -> None:
    """What a checkpoint keeps is enough: a method holds nothing in itself."""
    for name in ("heteroavg", "fedavg", "fedin", "scaffold", "fednova", "moon", "fedhe", "private"):
        bed = Bed(ToyDepth(None), ["one", "three"])
        so_far = run(bed, bed.method(name), 2)
        fresh = load_algorithm(name).Method(load_algorithm(name).Params(), bed.context)
        client = bed.context.clients[1]
        assert same(
            fresh.send(so_far.state, Assignment(client=client, task=9)),
            bed.method(name).send(so_far.state, Assignment(client=client, task=9)),
        )
