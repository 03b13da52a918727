"""FedHeNN, both settings: CKA by its definition, who is sent what, and its reductions."""

from __future__ import annotations

import math

import pytest
import torch
from algorithm_harness import (
    SGD,
    Bed,
    ToyDepth,
    ToyDropout,
    ToyStrangers,
    accuracy,
    equal,
    run,
    same,
    server_flops,
    tensors_of,
)
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator.bases.alignment import Alignment, cka, gram, gram_of, representations
from fleetbed.emulator.method.algorithm import Arrival, Assignment
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.models.base import InputSpec
from fleetbed.models.work import Pass
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Training

SPEC = InputSpec((1, 4, 4), 3)
LINEAR = Alignment(rad=12)


def draws(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cka_by_definition(k: Tensor, other: Tensor) -> Tensor:
    """HSIC with the centring matrix written out."""
    size = len(k)
    h = torch.eye(size, dtype=k.dtype) - torch.ones(size, size, dtype=k.dtype) / size

    def hsic(a: Tensor, b: Tensor) -> Tensor:
        return torch.trace(a @ h @ b @ h) / (size - 1) ** 2

    return hsic(k, other) / (hsic(k, k) * hsic(other, other)).sqrt()


def linear_features(features: Tensor) -> Tensor:
    return gram(features, LINEAR)


# CKA


@pytest.mark.parametrize("seed", range(5))
def test_cka_is_its_definition(seed: int) -> None:
    a, b = draws(seed, 12, 5), draws(seed + 100, 12, 7)
    k, other = a @ a.T, b @ b.T
    torch.testing.assert_close(linear_features(a), k)
    value = cka(k, other)
    torch.testing.assert_close(value, cka_by_definition(k, other))
    assert 0 <= value <= 1
    torch.testing.assert_close(value, cka(other, k))
    torch.testing.assert_close(cka(k, k), torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize("seed", range(5))
def test_cka_does_not_see_rotation_scale_or_shift_but_other_linear_maps(seed: int) -> None:
    a, b = draws(seed, 30, 4), draws(seed + 100, 30, 6)
    value = cka(linear_features(a), linear_features(b))
    rotation = torch.linalg.qr(draws(seed + 200, 4, 4)).Q
    for changed in (a @ rotation, 3.7 * a, a + draws(seed + 300, 1, 4)):
        torch.testing.assert_close(cka(linear_features(changed), linear_features(b)), value, rtol=1e-5, atol=1e-5)
    stretched = a @ torch.diag(torch.tensor([1.0, 5.0, 0.1, 2.0], dtype=torch.float64))
    assert abs(cka(linear_features(stretched), linear_features(b)) - value) > 1e-3


def test_rbf_is_its_definition() -> None:
    a = draws(1, 9, 4)
    distances = torch.tensor([[float((p - q).norm()) for q in a] for p in a], dtype=torch.float64)
    pairs = sorted(float(distances[i, j]) for i in range(9) for j in range(9) if i != j)
    sigma = 0.5 * pairs[(len(pairs) - 1) // 2]
    wanted = torch.exp(-(distances**2) / (2 * sigma**2))
    torch.testing.assert_close(gram(a, Alignment(kernel="rbf", sigma=0.5)), wanted)


def test_rbf_becomes_linear_for_a_huge_sigma() -> None:
    a, b = draws(3, 20, 5), draws(4, 20, 5)
    linear = cka(linear_features(a), linear_features(b))
    wide, narrow = (cka(*(gram(x, Alignment(kernel="rbf", sigma=sigma)) for x in (a, b))) for sigma in (1000.0, 0.2))
    torch.testing.assert_close(wide, linear, rtol=1e-4, atol=1e-4)
    assert abs(narrow - linear) > 1e-2


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_nothing_becomes_nan(kernel: str) -> None:
    params = Alignment(kernel=kernel)
    for features in (torch.zeros(6, 3), torch.ones(6, 3), torch.randn(1, 3)):
        features.requires_grad_(True)
        value = cka(torch.eye(len(features)), gram(features, params))
        assert torch.isfinite(value)
        value.backward()
        assert features.grad.abs().max() < 1  # not a number would not be below it either


def test_the_alignment_reaches_the_features_and_not_the_head() -> None:
    net = ToyDepth(None).build("two", SPEC)
    a = net.features(torch.randn(8, *SPEC.shape))
    (1 - cka(torch.randn(8, 8), gram(a, LINEAR))).backward()
    for n, p in net.named_parameters():
        assert (p.grad is None) == n.startswith("fc")


# heterogeneous


def hetero(**params: object) -> tuple[Bed, object]:
    bed = Bed(ToyStrangers(None), ["thin", "thick", "thin"], public=40, training=Training(batch=8, optimizer=SGD))
    return bed, bed.method("fedhenn", **{"rad": 12, "eta": 0.5, **params})


def features_of(bed: Bed, variant: str, tensors: dict[str, Tensor], x: Tensor, *, running: bool = False) -> Tensor:
    """By the batch's own statistics: these nets have no dropout, so training mode differs in nothing else."""
    net = bed.family.build(variant, SPEC).train(not running)
    net.load_state_dict(tensors)
    with torch.no_grad():
        return net.features(x)


def test_what_travels() -> None:
    """Down nothing in round 0, then 4 (L CHW + L^2); up the weights."""
    bed, method = hetero()
    so_far = run(bed, method, 2)
    assert all(b.nbytes() == 0 for b in so_far.sent[0])
    for bundle in so_far.sent[1]:
        assert bundle.nbytes() == 4 * (12 * 16 + 12 * 12)
    for client, reply in zip(bed.context.clients, so_far.replies[0], strict=True):
        assert reply.message.nbytes() == Bundle(bed.context.initial(client.variant)).nbytes()


def test_the_mean_gram_is_over_the_clients_of_the_round() -> None:
    bed, method = hetero()
    so_far = run(bed, method, 2, sampled=[[0, 1, 2], [0, 1]])
    for merged, replies in zip(so_far.merged, so_far.replies, strict=True):
        grams = []
        for client, reply in zip(bed.context.clients, replies, strict=False):
            a = features_of(bed, client.variant, reply.message.tensors, merged.state.tensors["rad"])
            grams.append(a @ a.T)
        torch.testing.assert_close(merged.state.tensors["gram"], sum(grams) / len(grams))
    first, second = (m.state.tensors["rad"] for m in so_far.merged)
    assert not torch.equal(first, second)  # a new RAD in every round


def test_the_mean_gram_over_all_counts_the_absent_with_what_they_have() -> None:
    bed, method = hetero(kbar_over="all")
    so_far = run(bed, method, 2, sampled=[[0], [1]])
    latest = [so_far.replies[0][0].message.tensors, so_far.replies[1][0].message.tensors, bed.context.initial("thin")]
    rad = so_far.state.tensors["rad"]
    features = [features_of(bed, c.variant, t, rad) for c, t in zip(bed.context.clients, latest, strict=True)]
    torch.testing.assert_close(so_far.state.tensors["gram"], sum(a @ a.T for a in features) / 3)


def test_grams_may_be_normalised() -> None:
    bed, method = hetero(normalise_gram=True)
    so_far = run(bed, method, 1, sampled=[[1]])
    size = 12
    h = torch.eye(size) - 1 / size
    torch.testing.assert_close(float((h @ so_far.state.tensors["gram"] @ h).norm()), 1.0)


def test_the_rad_is_drawn_from_the_servers_pool() -> None:
    bed, method = hetero()
    rad = run(bed, method).state.tensors["rad"]
    pool = bed.data.x[-40:]
    for row in rad:
        assert (pool - row).abs().amax((1, 2, 3)).min() == 0


def test_eta_grows_with_the_root_of_the_round() -> None:
    bed, method = hetero()
    so_far = run(bed, method, 4)
    assert [sent[0].values.get("eta", 0.0) for sent in so_far.sent] == pytest.approx(
        [0.5 * math.sqrt(t) for t in range(4)]
    )
    _, constant = hetero(schedule="constant")
    assert [sent[0].values.get("eta", 0.0) for sent in run(bed, constant, 3).sent] == [0.0, 0.5, 0.5]


def aligned_by_hand(
    bed: Bed, variant: str, start: dict[str, Tensor], job: object, rad: Tensor, reference: Tensor, eta: float
) -> dict[str, Tensor]:
    net = bed.family.build(variant, SPEC).train()
    net.load_state_dict(start)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for x, y in job.batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        statistics = {n: b.clone() for n, b in net.named_buffers()}
        a = net.features(rad)
        (loss + eta * (1 - cka_by_definition(reference, a @ a.T))).backward()
        net.load_state_dict(statistics, strict=False)  # the RAD does not count in batch norm's running statistics
        optimizer.step()
    return dict(net.state_dict())


def test_the_loss_is_eq_6() -> None:
    bed, method = hetero(eta=2.0)
    so_far = run(bed, method)
    client = bed.context.clients[1]
    message = method.send(so_far.state, Assignment(client=client, task=5))
    reply = method.client(bed.job(client, message, so_far.kept[1], 5))
    wanted = aligned_by_hand(
        bed,
        "thick",
        so_far.kept[1].under("model/"),
        bed.job(client, message, None, 5),
        message.tensors["rad"],
        message.tensors["gram"],
        2.0,
    )
    for n, t in reply.keep.under("model/").items():
        torch.testing.assert_close(t, wanted[n], rtol=1e-3, atol=1e-5)
    assert not message.tensors["gram"].requires_grad


@pytest.mark.parametrize("family", [ToyStrangers, ToyDropout])
def test_eta_zero_is_private_bit_for_bit(family: type) -> None:
    variants = family(None).variants[:2]
    bed = Bed(family(None), variants, public=20)
    aligned, private = run(bed, bed.method("fedhenn", rad=10, eta=0), 3), run(bed, bed.method("private"), 3)
    assert all(same(aligned.kept[n], private.kept[n]) for n in (0, 1))
    assert all(b.nbytes() == 0 for sent in aligned.sent for b in sent)
    assert not same(run(bed, bed.method("fedhenn", rad=10, eta=1.0), 3).kept[0], private.kept[0])


def test_alignment_brings_representations_nearer() -> None:
    def similarity(eta: float) -> float:
        bed, method = hetero(eta=eta, rad=30)
        so_far = run(bed, method, 8)
        x = bed.data.x[-40:]
        k = [
            (a := features_of(bed, c.variant, so_far.kept[c.number].under("model/"), x).double()) @ a.T
            for c in bed.context.clients
        ]
        return float(
            (cka_by_definition(k[0], k[1]) + cka_by_definition(k[0], k[2]) + cka_by_definition(k[1], k[2])) / 3
        )

    assert similarity(3.0) > similarity(0.0) + 0.02


def test_a_diverged_client_is_left_out_of_the_mean() -> None:
    bed, method = hetero(statistics="running")  # the batch's would hide it
    state = method.setup()
    arrivals = []
    for client in bed.context.clients:
        tensors = dict(bed.context.initial(client.variant))
        if client.number == 1:
            tensors = {n: t * 1e30 if t.is_floating_point() else t for n, t in tensors.items()}
        arrivals.append(Arrival(assignment=Assignment(client=client), sent=Bundle(), message=Bundle(tensors)))
    merged = method.merge(state, arrivals)
    assert torch.isfinite(merged.state.tensors["gram"]).all()
    assert merged.metrics["grams_refused"] == 1
    a = features_of(bed, "thin", bed.context.initial("thin"), merged.state.tensors["rad"], running=True)
    torch.testing.assert_close(merged.state.tensors["gram"], a @ a.T)  # both others are the initial thin model
    none = method.merge(state, arrivals[1:2])
    assert none.metrics["grams_refused"] == 1
    assert (
        method.send(none.state, Assignment(client=bed.context.clients[0], task=1)).nbytes() == 0
    )  # a round without alignment


def test_grams_by_the_clients_are_those_of_the_server() -> None:
    """Two stages: the same mean gram and the same models, but no weights on the wire."""
    bed, server = hetero()
    _, clients = hetero(client_side_gram=True)
    assert clients.needs.stages == ("train", "gram")
    ours, theirs = run(bed, server, 1), run(bed, clients, 1)
    assert torch.equal(ours.state.tensors["rad"], theirs.state.tensors["rad"])
    torch.testing.assert_close(ours.state.tensors["gram"], theirs.state.tensors["gram"])
    train, grams = theirs.replies
    assert all(r.message.nbytes() == 0 for r in train)
    assert all(r.message.nbytes() == 4 * 12 * 12 for r in grams)
    assert all(b.nbytes() == 4 * 12 * 16 for b in theirs.sent[1])
    assert same(ours.kept[1], theirs.kept[1])  # the second stage leaves what was kept


def test_sub_sampling_and_once_an_epoch() -> None:
    bed, method = hetero(rad_batch=5, rad_every="epoch")
    state = run(bed, method).state
    client = bed.context.clients[0]
    work = method.work(state, Assignment(client=client))
    assert work.each_step == ()
    assert work.once == (Pass("train", "features", 5),)
    assert method.heaviest(method.setup(), client).each_step == (Pass("train", "features", 5),)
    assert run(bed, method, 2).state.tensors["gram"].shape == (12, 12)
    every = hetero()[1]
    assert every.work(state, Assignment(client=client)).each_step == (Pass("train", "features", 12),)
    assert every.work(every.setup(), Assignment(client=client)).each_step == ()


def test_once_an_epoch_aligns_the_first_step_of_each() -> None:
    """With one step an epoch both are the same, with two they are not."""
    for samples, alike in ((8, True), (16, False)):
        training = Training(batch=8, epochs=2, optimizer=SGD)
        bed = Bed(ToyDepth(None), ["one", "two"], samples=samples, public=20, training=training)
        step, epoch = (run(bed, bed.method("fedhenn", rad=10, eta=1.0, rad_every=e), 2) for e in ("step", "epoch"))
        assert same(step.kept[0], epoch.kept[0]) == alike


def test_the_server_pays_for_the_grams() -> None:
    bed, method = hetero()
    client = bed.context.clients[0]
    arrival = Arrival(assignment=Assignment(client=client), sent=Bundle(), message=Bundle(bed.context.initial("thin")))
    one, two = (server_flops(bed, method.server_work(method.setup(), [arrival] * n)) for n in (1, 2))
    forward = 2 * 12 * (16 * 6 + 6 * 4)  # RAD through both linear layers before the head
    assert one == pytest.approx(forward + 2 * 4 * 12**2)
    assert two == pytest.approx(2 * one)


def test_what_it_cannot_do_is_said() -> None:
    bed, _ = hetero()
    with pytest.raises(BadInput, match=r"params\.rad is 50, but the server's pool data\.public has 40 samples"):
        bed.method("fedhenn", rad=50).check()
    with pytest.raises(BadInput, match=r"data\.public has 0 samples"):
        Bed(ToyDepth(None), ["one"]).method("fedhenn").check()
    with pytest.raises(BadInput, match=r"params\.rad_batch is 20"):
        bed.method("fedhenn", rad=10, rad_batch=20).check()
    with pytest.raises(BadInput, match="kbar_over is all"):
        bed.method("fedhenn", rad=10, client_side_gram=True, kbar_over="all").check()
    assert "async" not in bed.method("fedhenn").needs.policies
    assert bed.method("fedhenn").needs.policies_why


@pytest.mark.parametrize("statistics", ["batch", "running"])
@pytest.mark.parametrize("rad", [12, 70, 200])
def test_a_model_is_at_no_distance_from_itself(statistics: str, rad: int) -> None:
    """Both grams are made in the same way: with dropout and batch norm too, whatever mode the model is in."""
    params = Alignment(rad=rad, statistics=statistics)
    net = ToyDropout(None).build("three", SPEC).train()
    for _ in range(3):
        net(torch.randn(8, *SPEC.shape))  # the running statistics are no longer those of a fresh model
    x = torch.randn(rad, *SPEC.shape)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    own = gram(representations(net, x, params), params)
    torch.testing.assert_close(cka(gram_of(net, x, params), own), torch.ones(()), rtol=0, atol=1e-5)
    assert net.training
    assert equal(before, dict(net.state_dict()))  # the RAD is not the client's data
    other = gram_of(net, x, Alignment(rad=rad, statistics="running" if statistics == "batch" else "batch"))
    assert cka(other, own) < 0.999  # it does matter which statistics


def test_with_a_part_of_the_rad_at_a_time_both_grams_are_of_as_many() -> None:
    params = Alignment(rad=30, rad_batch=10)
    net = ToyDepth(None).build("two", SPEC)
    x = torch.randn(30, *SPEC.shape)
    parts = torch.cat([representations(net, part, params) for part in x.split(10)])
    torch.testing.assert_close(gram_of(net, x, params), gram(parts, params).detach())


@pytest.mark.parametrize("name", ["fedhenn", "fedhenn_homo"])
def test_the_last_round_may_have_epochs_of_its_own(name: str) -> None:
    bed = Bed(ToyDepth(None), ["two"] * 2, samples=24, public=20, rounds=3)
    method = bed.method(name, rad=10, last_epochs=4)
    so_far = run(bed, method, 2)
    client = bed.context.clients[0]
    assert method.work(method.setup(), Assignment(client=client)).steps == 3
    assert method.work(so_far.state, Assignment(client=client)).steps == 12
    assert method.heaviest(method.setup(), client).steps == 12
    run(bed, method, 3)  # the bed holds it to what it declares


# homogeneous


def homo(**params: object) -> tuple[Bed, object]:
    bed = Bed(ToyDropout(None), ["two"] * 3, samples=[16, 24, 32], public=40)
    return bed, bed.method("fedhenn_homo", **{"rad": 12, "eta": 0.5, **params})


def test_homo_without_eta_is_fedavg_bit_for_bit() -> None:
    bed, method = homo(eta=0)
    aligned, plain = run(bed, method, 3), run(bed, bed.method("fedavg"), 3)
    weights = {n: t for n, t in aligned.state.tensors.items() if "/" not in n}
    assert equal(weights, plain.state.under("two/"))
    _, on = homo()
    assert not equal({n: t for n, t in run(bed, on, 3).state.tensors.items() if "/" not in n}, weights)


def test_homo_sends_the_rad_beside_the_weights() -> None:
    bed, method = homo()
    so_far = run(bed, method, 2)
    weights = so_far.sent[0][0].nbytes()
    assert weights == Bundle(bed.context.initial("two")).nbytes()
    assert so_far.sent[1][0].nbytes() == weights + 4 * 12 * 16
    assert so_far.replies[1][0].message.nbytes() == weights


def test_homo_aligns_with_the_received_model() -> None:
    """Eq. 5, by hand."""
    bed = Bed(ToyDepth(None), ["two"], public=40, training=Training(batch=8, optimizer=SGD))
    method = bed.method("fedhenn_homo", rad=12, eta=2.0)
    so_far = run(bed, method)
    client = bed.context.clients[0]
    message = method.send(so_far.state, Assignment(client=client, task=5))
    reply = method.client(bed.job(client, message, None, 5))
    rad = message.tensors["rad/x"]
    start = {n: t for n, t in message.tensors.items() if n != "rad/x"}
    a = features_of(bed, "two", start, rad)
    wanted = aligned_by_hand(bed, "two", start, bed.job(client, message, None, 5), rad, a @ a.T, 2.0)
    for n, t in reply.message.tensors.items():
        torch.testing.assert_close(t, wanted[n], rtol=1e-3, atol=1e-5)


def test_homo_evaluates_the_global_model_and_the_personal_ones() -> None:
    bed, method = homo()
    so_far = run(bed, method, 2)
    overall, *own = method.targets(so_far.state)
    assert (overall.name, overall.local, len(own)) == ("global", False, 3)
    assert all(t.local for t in own)
    assert bed.method("fedhenn").needs.reported == bed.method("fedhenn_homo").needs.reported == "personal-own"
    assert equal(tensors_of(bed, own[2], so_far), so_far.replies[1][2].message.tensors)
    assert equal(tensors_of(bed, overall, so_far), {n: t for n, t in so_far.state.tensors.items() if "/" not in n})


@pytest.mark.parametrize("weighting", ["samples", "clients"])
def test_homo_may_end_with_the_mean_over_all_clients(weighting: str) -> None:
    """The last line of Algorithm 1, by hand; training goes on from the mean over the round's clients."""
    bed, method = homo(final_average=True, weighting=weighting)
    sampled = [[0, 1], [2], [1]]
    so_far, plain = run(bed, method, 3, sampled=sampled), run(bed, homo(weighting=weighting)[1], 3, sampled=sampled)
    newest = [so_far.replies[0][0], so_far.replies[2][0], so_far.replies[1][0]]
    omegas = [16, 24, 32] if weighting == "samples" else [1, 1, 1]
    shown = method.targets(so_far.state)[0].tensors
    assert shown is not None
    for name, t in shown.items():
        parts = [reply.message.tensors[name] for reply in newest]
        if t.is_floating_point():
            mean = sum(o * part.double() for o, part in zip(omegas, parts, strict=True)) / sum(omegas)
            torch.testing.assert_close(t.double(), mean, rtol=1e-5, atol=1e-6)
    assert equal(*({n: t for n, t in r.state.tensors.items() if "/" not in n} for r in (so_far, plain)))


def test_homo_needs_one_variant() -> None:
    bed = Bed(ToyDepth(None), ["one", "two"], public=20)
    with pytest.raises(BadInput, match="one variant, but one, two are in use"):
        bed.method("fedhenn_homo", rad=10).check()


@pytest.mark.parametrize(
    ("name", "params"),
    [("fedhenn", {}), ("fedhenn", {"kernel": "rbf"}), ("fedhenn_homo", {}), ("fedhenn_homo", {"kernel": "rbf"})],
)
def test_it_learns_and_repeats(name: str, params: dict[str, object]) -> None:
    bed = Bed(ToyDepth(None), ["two", "two"], samples=48, public=20)
    method = bed.method(name, rad=16, eta=0.1, **params)
    first, second = run(bed, method, 4), run(bed, method, 4)
    assert same(first.state, second.state)
    assert accuracy(bed, method, first) > 0.6
