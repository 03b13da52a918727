"""FedIN against its equations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from algorithm_harness import (
    SGD,
    SPEC,
    Bed,
    ToyDepth,
    ToyDropout,
    ToyWidth,
    accuracy,
    equal,
    run,
    same,
    tensors_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fleetbed.emulator.bases.features import noisy, projected
from fleetbed.emulator.method.algorithm import Assignment, Client
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.local_training import foreign_batch
from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.models.work import Pass
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Training

IN, OUT = "features/in", "features/out"
Update = Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]]
PLAIN = Training(batch=8, epochs=1, optimizer=SGD)


def features_of(bundle: Bundle) -> dict[str, Tensor]:
    return {n: t for n, t in bundle.tensors.items() if n in (IN, OUT)}


def weights_of(bundle: Bundle) -> dict[str, Tensor]:
    return {n: t for n, t in bundle.tensors.items() if n not in (IN, OUT)}


# what travels


def test_one_batch_of_features_travels_each_way() -> None:
    """At batch 16 on a ResNet at 32x32 exactly 16 (64*8*8 + 512) = 73,728 values more than HeteroAvg."""
    spec = InputSpec((3, 32, 32), 10)
    training = Training(batch=16, max_steps=1)
    bed = Bed(family("resnet-stage"), ["resnet10"], samples=16, spec=spec, training=training)
    plain, fedin = run(bed, bed.method("heteroavg"), 2), run(bed, bed.method("fedin"), 2)
    extra = 4 * 73_728
    weights = plain.sent[0][0].nbytes()
    assert [sent[0].nbytes() - weights for sent in fedin.sent] == [0, extra]
    assert [replies[0].message.nbytes() - weights for replies in fedin.replies] == [extra, extra]
    assert fedin.replies[0][0].message.tensors[IN].shape == (16, 64, 8, 8)
    assert fedin.replies[0][0].message.tensors[OUT].shape == (16, 512)


def test_pairs_stay_together_and_come_from_the_newest_batches() -> None:
    bed = Bed(ToyDepth(None), ["one", "two", "three"])
    method = bed.method("fedin")
    so_far = run(bed, method, 3, sampled=[[0, 1], [0, 2], [0, 1, 2]])
    newest = {0: so_far.replies[1][0], 1: so_far.replies[0][1], 2: so_far.replies[1][1]}
    pool = [
        (r.message.tensors[IN][i], r.message.tensors[OUT][i])
        for r in newest.values()
        for i in range(bed.training.batch)
    ]
    for sent in so_far.sent[2]:
        assert sent.tensors[IN].shape[0] == sent.tensors[OUT].shape[0] == bed.training.batch
        rows = [
            [k for k, (a, b) in enumerate(pool) if torch.equal(a, s_in) and torch.equal(b, s_out)]
            for s_in, s_out in zip(sent.tensors[IN], sent.tensors[OUT], strict=True)
        ]
        assert all(rows)
    assert not torch.equal(so_far.sent[2][0].tensors[IN], so_far.sent[2][1].tensors[IN])


@pytest.mark.parametrize("statistics", ["batch", "running"])
def test_features_are_those_of_the_trained_model_without_dropout(statistics: str) -> None:
    bed = Bed(ToyDropout(None), ["two"])
    so_far = run(bed, bed.method("fedin", statistics=statistics))
    reply = so_far.replies[0][0].message
    net = bed.family.build("two", SPEC).eval()
    net.load_state_dict(weights_of(reply))
    if statistics == "batch":
        for norm in (m for m in net.modules() if isinstance(m, torch.nn.BatchNorm1d)):
            norm.train()
    with torch.no_grad():
        torch.testing.assert_close(net.intermediate(reply.tensors[IN]), reply.tensors[OUT])
        everything = net.eval().extract(bed.data.x)
    if statistics == "running":
        for row in reply.tensors[IN]:
            assert (everything - row).abs().amax(1).min() < 1e-6  # it is one of the client's own samples
    assert not reply.tensors[OUT].requires_grad


def test_collecting_features_does_not_touch_the_running_statistics() -> None:
    bed = Bed(ToyDepth(None), ["two"])
    with_features, without = (
        run(bed, bed.method("fedin", **params)).replies[0][0].message for params in ({}, {"without_in": True})
    )
    assert all(torch.equal(t, with_features.tensors[name]) for name, t in without.tensors.items())


def test_a_client_with_few_samples_sends_a_full_batch() -> None:
    bed = Bed(ToyDepth(None), ["one"], samples=5)
    assert run(bed, bed.method("fedin")).replies[0][0].message.tensors[IN].shape[0] == 8


def test_the_number_of_pairs_can_be_set() -> None:
    bed = Bed(ToyDepth(None), ["one", "two"])
    so_far = run(bed, bed.method("fedin", batch=5), 2)
    assert {b.tensors[IN].shape[0] for b in so_far.sent[1]} == {5}


# the step


def by_hand(
    bed: Bed,
    client: Client,
    message: Bundle,
    update: Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """Local training where `update` makes w_in's gradients of G_local and G_IN; plain SGD with momentum."""
    net = bed.family.build(client.variant, SPEC).train()
    net.load_state_dict(weights_of(message))
    names = [n for n, _ in net.named_parameters()]
    inner = [n for n in names if n.startswith("blocks")]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for x, y in bed.job(client, message, task=1).batches():
        own = dict(net.named_parameters())
        g_local = dict(zip(names, torch.autograd.grad(F.cross_entropy(net(x), y), list(own.values())), strict=True))
        untracked = [m for m in net.modules() if isinstance(m, nn.BatchNorm1d)]
        before = [(m.running_mean.clone(), m.running_var.clone(), m.num_batches_tracked.clone()) for m in untracked]
        loss = ((net.intermediate(message.tensors[IN]) - message.tensors[OUT]) ** 2).mean()
        g_in = dict(zip(inner, torch.autograd.grad(loss, [own[n] for n in inner]), strict=True))
        for m, (mean, var, count) in zip(untracked, before, strict=True):
            m.running_mean, m.running_var, m.num_batches_tracked = mean, var, count
        gradients = {**g_local, **update({n: g_local[n] for n in inner}, g_in)}
        for n, p in own.items():
            p.grad = gradients[n]
        optimizer.step()
    return dict(net.state_dict())


def eq_12(g_local: dict[str, Tensor], g_in: dict[str, Tensor]) -> dict[str, Tensor]:
    z = {}
    for n in g_in:
        a, b = (
            torch.vdot(g_local[n].flatten(), g_local[n].flatten()),
            torch.vdot(g_local[n].flatten(), g_in[n].flatten()),
        )
        z[n] = g_in[n] if b >= 0 else g_in[n] - b / a * g_local[n]
    return z


@pytest.mark.parametrize(
    ("params", "update"),
    [
        ({"lambda": 1}, lambda local, inner: {n: inner[n] + 0.5 * local[n] for n in inner}),
        ({"lambda": 3}, lambda local, inner: {n: inner[n] + 1.5 * local[n] for n in inner}),
        ({"z": "projection"}, eq_12),
    ],
)
def test_w_in_steps_with_z_and_the_ends_with_the_local_gradient(params: dict[str, object], update: Update) -> None:
    bed = Bed(ToyDepth(None), ["two", "three"], training=PLAIN)
    method = bed.method("fedin", mu=0, **params)
    state = run(bed, method).state
    client = bed.context.clients[1]
    message = method.send(state, Assignment(client=client, task=1))
    assert IN in message.tensors
    reply = method.client(bed.job(client, message, task=1))
    wanted = by_hand(bed, client, message, update)
    for n, t in weights_of(reply.message).items():
        torch.testing.assert_close(t, wanted[n], rtol=1e-4, atol=1e-6, msg=lambda m, n=n: f"{n}: {m}")


def test_without_z_there_are_two_steps() -> None:
    """w/o Opt: all weights with G_local, then w_in with the G_IN of where that led."""
    one_step = Training(batch=24, epochs=1, optimizer=SGD)
    bed = Bed(ToyDepth(None), ["two"], training=one_step)
    method = bed.method("fedin", mu=0, z="none")
    client = bed.context.clients[0]
    message = method.send(run(bed, method).state, Assignment(client=client, task=1))
    reply = method.client(bed.job(client, message, task=1))
    net = bed.family.build("two", SPEC).train()
    net.load_state_dict(weights_of(message))
    (x, y), *rest = bed.job(client, message, task=1).batches()
    assert not rest
    velocity = {}
    for n, g in zip(
        dict(net.named_parameters()),
        torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters())),
        strict=True,
    ):
        velocity[n] = g
    with torch.no_grad():
        for n, p in net.named_parameters():
            p -= 0.05 * velocity[n]
    inner = {n: p for n, p in net.named_parameters() if n.startswith("blocks")}
    loss = ((net.intermediate(message.tensors[IN]) - message.tensors[OUT]) ** 2).mean()
    with torch.no_grad():
        for (n, p), g in zip(inner.items(), torch.autograd.grad(loss, list(inner.values())), strict=True):
            p -= 0.05 * (0.9 * velocity[n] + g)
    for n, p in net.named_parameters():
        torch.testing.assert_close(reply.message.tensors[n], p.detach(), rtol=1e-4, atol=1e-6)


def test_simplified_is_the_gradient_of_the_sum() -> None:
    """One backward of L_IN + (lambda/2) L_local gives w_in what the two gave."""
    torch.manual_seed(0)
    net = ToyDepth(None).build("three", SPEC).eval()
    x, y = torch.randn(8, *SPEC.shape), torch.randint(0, 3, (8,))
    s_in, s_out = torch.randn(8, 6), torch.randn(8, 5)
    inner = [p for n, p in net.named_parameters() if n.startswith("blocks")]
    local = torch.autograd.grad(F.cross_entropy(net(x), y), inner)
    loss_in = F.mse_loss(net.intermediate(s_in), s_out)
    g_in = torch.autograd.grad(loss_in, inner)
    together = torch.autograd.grad(F.mse_loss(net.intermediate(s_in), s_out) + 0.35 * F.cross_entropy(net(x), y), inner)
    for z, a, b in zip(together, g_in, local, strict=True):
        torch.testing.assert_close(z, a + 0.7 / 2 * b, rtol=1e-4, atol=1e-7)


def test_the_in_loss_does_not_reach_the_ends() -> None:
    net = ToyDepth(None).build("two", SPEC)
    loss = F.mse_loss(net.intermediate(torch.randn(4, 6)), torch.randn(4, 5))
    loss.backward()
    for n, p in net.named_parameters():
        assert (p.grad is not None) == (net.section(n) == "intermediate")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 30))
def test_projection_keeps_to_its_constraint(seed: int, size: int) -> None:
    """Eq. 9: never against G_local; where it would be, orthogonal to it; else G_IN itself."""
    rng = torch.Generator().manual_seed(seed)
    g_in, g_local = (torch.randn(size, generator=rng, dtype=torch.float64) for _ in range(2))
    z = projected(g_in, g_local)
    if torch.dot(g_in, g_local) >= 0:
        assert torch.equal(z, g_in)
    else:
        assert abs(torch.dot(z, g_local)) < 1e-12 * (1 + g_in.norm() * g_local.norm())
        # nothing nearer to G_IN fulfils it: what was taken off is along G_local alone
        cosine = torch.dot(g_in - z, g_local) / ((g_in - z).norm() * g_local.norm())
        torch.testing.assert_close(abs(cosine), torch.tensor(1.0, dtype=torch.float64))


def test_simplified_does_not_promise_the_constraint() -> None:
    g_local, g_in = torch.tensor([1.0, 0.0]), torch.tensor([-3.0, 1.0])
    assert torch.dot(g_in + 0.5 * g_local, g_local) < 0


def test_foreign_features_do_not_count_in_the_running_statistics() -> None:
    net = ToyDepth(None).build("three", SPEC).train()
    before = {n: b.clone() for n, b in net.named_buffers()}
    s = torch.randn(8, 6) * 10 + 5
    with foreign_batch(net):
        foreign = net.intermediate(s)
    assert equal(dict(net.named_buffers()), before)
    torch.testing.assert_close(foreign, net.intermediate(s))  # the batch's own statistics, as in training
    assert not equal(dict(net.named_buffers()), before)


# reductions


def test_the_first_round_without_prox_is_heteroavg() -> None:
    bed = Bed(ToyDropout(None), ["one", "two", "three"])
    fedin = run(bed, bed.method("fedin", mu=0))
    plain = run(bed, bed.method("heteroavg"))
    assert equal({n: t for n, t in fedin.state.tensors.items() if "/" not in n}, plain.state.tensors)


def test_without_in_it_is_heteroprox() -> None:
    bed = Bed(ToyDropout(None), ["one", "two", "three"])
    fedin = run(bed, bed.method("fedin", without_in=True), 3)
    prox = run(bed, bed.method("heteroprox"), 3)
    assert same(fedin.state, prox.state)
    assert all(not features_of(b) for sent in fedin.sent for b in sent)


def test_features_do_make_a_difference() -> None:
    bed = Bed(ToyDepth(None), ["one", "two", "three"])
    fedin, prox = run(bed, bed.method("fedin"), 2), run(bed, bed.method("heteroprox"), 2)
    assert not torch.equal(fedin.state.tensors["blocks.0.0.weight"], prox.state.tensors["blocks.0.0.weight"])


def test_same_architecture_aggregation_is_weighted_by_samples() -> None:
    bed = Bed(ToyDepth(None), ["one", "one", "three"], samples=[16, 40, 24])
    fedin = run(bed, bed.method("fedin", aggregation="same-architecture", mu=0))
    alike = run(bed, bed.method("fedavg"))
    assert equal({n: t for n, t in fedin.state.tensors.items() if not n.startswith("store/")}, alike.state.tensors)


# the first version


def test_v1_sends_the_ends_only_and_keeps_the_rest() -> None:
    bed = Bed(ToyDepth(None), ["one", "three"], samples=[16, 40])
    method = bed.method("fedin", version="v1")
    so_far = run(bed, method, 2)
    for bundle in [*so_far.sent[0], *(r.message for r in so_far.replies[0])]:
        assert {n.split(".")[0] for n in weights_of(bundle)} == {"stem", "fc"}
    replies = [r.message.tensors for r in so_far.replies[1]]
    mean = (replies[0]["fc.weight"] + replies[1]["fc.weight"]) / 2  # unweighted
    torch.testing.assert_close(so_far.state.tensors["fc.weight"], mean)
    assert {n for n in so_far.state.tensors if "/" not in n} == set(weights_of(so_far.sent[0][0]))
    # the second task began with its own w_in, and with the ends that came
    again = method.client(bed.job(bed.context.clients[1], so_far.sent[1][1], so_far.replies[0][1].keep, 3))
    assert same(again.keep, so_far.replies[1][1].keep)
    fresh = method.client(bed.job(bed.context.clients[1], so_far.sent[1][1], None, 3))
    assert not same(fresh.keep, so_far.replies[1][1].keep)


def test_v1_evaluates_each_client_with_the_shared_ends() -> None:
    bed = Bed(ToyDepth(None), ["one", "three"])
    method = bed.method("fedin", version="v1")
    so_far = run(bed, method, 1, sampled=[[1]])
    never, taken = method.targets(so_far.state)
    for target in (never, taken):
        tensors = tensors_of(bed, target, so_far)
        assert tensors.keys() == bed.context.initial(target.variant).keys()
        assert torch.equal(tensors["fc.weight"], so_far.state.tensors["fc.weight"])
    own = so_far.kept[1].under("model/")["blocks.2.0.weight"]
    assert torch.equal(tensors_of(bed, taken, so_far)["blocks.2.0.weight"], own)


def test_without_aggregation_features_travel_and_no_weights() -> None:
    bed = Bed(ToyDepth(None), ["one", "three"], samples=[16, 40])
    so_far = run(bed, bed.method("fedin", version="v1", without_aggregation=True), 2)
    assert [set(bundle.tensors) for bundle in so_far.sent[0]] == [set(), set()]
    assert all(set(bundle.tensors) == {IN, OUT} for bundle in so_far.sent[1])
    assert all(set(reply.message.tensors) == {IN, OUT} for replies in so_far.replies for reply in replies)
    assert {name.split("/")[0] for name in so_far.state.tensors} == {"store"}


def test_without_aggregation_and_without_in_each_client_trains_alone() -> None:
    bed = Bed(ToyDepth(None), ["one", "three"], samples=[16, 40])
    alone = {"version": "v1", "without_aggregation": True, "without_in": True}
    fedin, private = run(bed, bed.method("fedin", **alone), 3), run(bed, bed.method("private"), 3)
    assert all(equal(fedin.kept[n].under("model/"), private.kept[n].under("model/")) for n in (0, 1))
    with_in = run(bed, bed.method("fedin", version="v1", without_aggregation=True), 3)
    assert not equal(with_in.kept[0].under("model/"), private.kept[0].under("model/"))


def test_without_aggregation_there_is_no_kind_of_aggregation() -> None:
    bed = Bed(ToyDepth(None), ["one"])
    with pytest.raises(BadInput, match=r"both params\.without_aggregation and params\.aggregation ends"):
        bed.method("fedin", without_aggregation=True, aggregation="ends").check()


def test_the_versions_differ_as_the_papers_say() -> None:
    bed = Bed(ToyDepth(None), ["one"])
    tmlr, v1 = bed.method("fedin"), bed.method("fedin", version="v1")
    assert (tmlr.aggregation, tmlr.lambda_, tmlr.mu / 2) == ("layerwise", 1, 0.05)
    assert (v1.aggregation, v1.lambda_, v1.mu) == ("ends", 2, 0)
    mixed = bed.method("fedin", version="v1", **{"lambda": 0, "mu": 0.2, "aggregation": "layerwise"})
    assert (mixed.aggregation, mixed.lambda_, mixed.mu) == ("layerwise", 0, 0.2)


# noise


def test_noise_has_the_width_asked_for() -> None:
    s = torch.randn(400, 600, generator=torch.Generator().manual_seed(1)) * 3 + 2
    added = noisy(s, 0.8, torch.Generator().manual_seed(2)) - s
    assert abs(float((added / s.std()).std()) - 0.8) < 0.02 * 0.8
    assert abs(float(added.mean())) < 0.02


def test_noise_on_the_upload_leaves_training_alone() -> None:
    bed = Bed(ToyDepth(None), ["two"])
    clean, upload, forward = (
        run(bed, bed.method("fedin", **params)).replies[0][0].message
        for params in ({}, {"noise": 0.8}, {"noise": 0.8, "noise_where": "upload+forward"})
    )
    assert equal(weights_of(clean), weights_of(upload))
    assert not torch.equal(clean.tensors[IN], upload.tensors[IN])
    assert not torch.equal(clean.tensors[OUT], upload.tensors[OUT])
    assert not equal(weights_of(clean), weights_of(forward))


def test_noise_in_the_forward_pass_is_at_both_cuts() -> None:
    """One step by hand, with the job's own noise."""
    bed = Bed(ToyDepth(None), ["two"], training=Training(batch=24, optimizer=SGD))
    method = bed.method("fedin", mu=0, noise=0.8, noise_where="upload+forward")
    client = bed.context.clients[0]
    message = method.send(method.setup(), Assignment(client=client, task=0))
    reply = method.client(bed.job(client, message))
    net = bed.family.build("two", SPEC).train()
    net.load_state_dict(message.tensors)
    (x, y), *_ = bed.job(client, message).batches()
    rng = bed.job(client, message).generator("noise")
    s_in = net.extract(x)
    s_in = s_in + 0.8 * s_in.detach().std() * torch.randn(s_in.shape, generator=rng)
    s_out = net.intermediate(s_in)
    s_out = s_out + 0.8 * s_out.detach().std() * torch.randn(s_out.shape, generator=rng)
    F.cross_entropy(net.classify(s_out), y).backward()
    for n, p in net.named_parameters():
        torch.testing.assert_close(reply.message.tensors[n], (p - 0.05 * p.grad).detach(), rtol=1e-4, atol=1e-6)


# the rest


def test_the_work_declared_grows_with_the_features() -> None:
    bed = Bed(ToyDepth(None), ["two"])
    method = bed.method("fedin")
    client = bed.context.clients[0]
    cold, warm = method.setup(), run(bed, method).state
    assert method.work(cold, Assignment(client=client)).each_step == ()
    assert method.work(cold, Assignment(client=client)).once == (Pass("forward", "features", 8),)
    assert method.work(warm, Assignment(client=client)).each_step == (Pass("train", "intermediate", 8),)
    assert method.work(warm, Assignment(client=client)).held_values == 8 * (6 + 5)
    assert method.work(warm, Assignment(client=client)).parameter_passes == 2
    assert method.heaviest(cold, client) == method.work(warm, Assignment(client=client))


def test_cuts_must_have_one_shape() -> None:
    bed = Bed(ToyWidth(None), ["half", "full"])
    with pytest.raises(BadInput, match=r"toy-width.*half has \(3,\) and \(2,\) there, full has \(6,\) and \(4,\)"):
        bed.method("fedin").check()
    Bed(ToyWidth(None), ["half", "half"]).method("fedin").check()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"version": "v1"},
        {"aggregation": "same-architecture"},
        {"z": "projection"},
        {"z": "none"},
        {"noise": 0.8, "noise_where": "upload+forward"},
    ],
)
def test_it_learns_and_repeats(params: dict[str, object]) -> None:
    bed = Bed(ToyDepth(None), ["one", "two", "three"], samples=48, training=Training(batch=8, epochs=2, optimizer=SGD))
    method = bed.method("fedin", **params)
    learnt = run(bed, method, 4)
    if params.get("z") != "projection":  # which never shows labels to w_in while the gradients agree
        assert accuracy(bed, method, learnt) > 0.5  # a third is chance
    dropout = Bed(ToyDropout(None), ["one", "three"])
    first, second = (run(dropout, dropout.method("fedin", **params), 2) for _ in range(2))
    assert same(first.state, second.state)
