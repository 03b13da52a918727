"""MOON against its loss."""

from __future__ import annotations

from math import exp, log, log1p

import pytest
import torch
from algorithm_harness import (
    ADAM,
    FAMILIES,
    SGD,
    Bed,
    Run,
    ToyDepth,
    ToyDropout,
    ToyNet,
    accuracy,
    advance,
    bed_on,
    equal,
    run,
    wire_sizes,
    without_class,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator.algorithms import moon
from fleetbed.emulator.algorithms.moon import contrast
from fleetbed.emulator.method.algorithm import ALL_POLICIES, Assignment, Client, Job
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.models.base import InputSpec, Net
from fleetbed.models.families.lookup import family
from fleetbed.models.work import Pass
from fleetbed.profiles.experiment import Optimizer, Training

OPTIMIZERS = {"momentum": SGD, "adam": ADAM}
both_optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
STRONG = {"mu": 5.0}


def own(bundle: Bundle | None) -> dict[str, Tensor]:
    assert bundle is not None
    return bundle.under("model/")


def by_hand(
    bed: Bed,
    message: Bundle,
    previous: dict[str, Tensor],
    *,
    task: int,
    client: Client | None = None,
    steps: int = 3,
    mu: float = 5.0,
    temperature: float = 0.5,
    statistics: str = "batch",
) -> dict[str, Tensor]:
    """The weights after steps on the written-out loss."""
    who = client or bed.context.clients[0]
    net, received, before = (bed.family.build(who.variant, bed.spec) for _ in range(3))
    for each, tensors in ((net, message.tensors), (received, message.tensors), (before, previous)):
        each.load_state_dict(tensors)
        each.train(each is net or statistics == "batch")
    choice = bed.training.optimizer
    optimizer = (
        torch.optim.Adam(net.parameters(), lr=choice.lr)
        if choice.name == "adam"
        else torch.optim.SGD(net.parameters(), lr=choice.lr, momentum=choice.momentum)
    )
    for _, (x, y) in zip(range(steps), bed.job(who, message, None, task).batches(), strict=False):
        z = net.features(x)
        with torch.no_grad():
            others = [received.features(x), before.features(x)]
        similar = torch.stack([F.cosine_similarity(z, other, dim=1) for other in others], 1) / temperature
        term = F.cross_entropy(similar, torch.zeros(len(x), dtype=torch.long))
        optimizer.zero_grad()
        (F.cross_entropy(net.classify(z), y) + mu * term).backward()
        optimizer.step()
    return dict(net.state_dict())


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


# the term


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(0.1, 2.0))
def test_the_term_is_the_cross_entropy_of_the_two_similarities(seed: int, temperature: float) -> None:
    z, z_g, z_p = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    similar = torch.stack([F.cosine_similarity(z, z_g), F.cosine_similarity(z, z_p)], 1) / temperature
    wanted = F.cross_entropy(similar, torch.zeros(5, dtype=torch.long))
    torch.testing.assert_close(contrast(z, z_g, z_p, temperature), wanted)


def test_the_bounds_of_the_term() -> None:
    z = torch.tensor([[3.0, 4.0]])
    least, most = float(contrast(z, z, -z, 0.5)), float(contrast(z, -z, z, 0.5))
    assert (least, most) == pytest.approx((log1p(exp(-4)), log1p(exp(4))))
    assert (round(least, 3), round(most, 3)) == (0.018, 4.018)


def test_where_both_models_agree_the_term_is_ln_2_and_pulls_nowhere() -> None:
    z, other = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1))
    z.requires_grad_()
    term = contrast(z, other, other, 0.5)
    assert float(term.detach()) == pytest.approx(log(2))
    (gradient,) = torch.autograd.grad(term, z)
    assert gradient.abs().max() < 1e-7  # rounding is left, so the term is not computed where the models agree


@both_optimizers
@pytest.mark.parametrize("statistics", ["batch", "running"])
def test_the_local_step_is_that_of_the_formula(statistics: str, optimizer: Optimizer) -> None:
    bed = bed_on("depth", optimizer)
    so_far = run(bed, bed.method("moon", mu=5, temperature=0.3, statistics=statistics), 2)
    previous = own(so_far.replies[0][0].keep)
    wanted = by_hand(bed, so_far.sent[1][0], previous, task=3, temperature=0.3, statistics=statistics)
    assert_close(so_far.replies[1][0].message.tensors, wanted)
    other = {"batch": "running", "running": "batch"}[statistics]
    differs = by_hand(bed, so_far.sent[1][0], previous, task=3, temperature=0.3, statistics=other)
    assert not torch.allclose(wanted["stem.1.weight"], differs["stem.1.weight"], rtol=1e-4, atol=1e-5)


def test_it_pulls_from_the_previous_model_towards_the_received_one() -> None:
    bed = bed_on("depth")
    client = bed.context.clients[0]
    so_far = run(bed, bed.method("moon"))
    x, _ = bed.data.batch("train", bed.parts[0], None)

    def term_after(mu: float) -> float:
        method = bed.method("moon", mu=mu)
        message = method.send(so_far.state, Assignment(client=client))
        reply = method.client(bed.job(client, message, so_far.kept[0], 9))
        nets = [bed.family.build("one", bed.spec).train() for _ in range(3)]
        for net, tensors in zip(nets, (reply.message.tensors, message.tensors, own(so_far.kept[0])), strict=True):
            net.load_state_dict(tensors)
        with torch.no_grad():
            z, z_g, z_p = (net.features(x) for net in nets)
            return float(contrast(z, z_g, z_p, 0.5))

    assert term_after(5.0) < term_after(1.0) < term_after(0.0)


# reductions


@both_optimizers
@pytest.mark.parametrize("kind", FAMILIES)
def test_without_its_term_it_is_heteroavg(kind: str, optimizer: Optimizer) -> None:
    bed = bed_on(kind, optimizer)
    free, plain = bed.method("moon", mu=0), bed.method("heteroavg")
    so_far, other = run(bed, free, 3), run(bed, plain, 3)
    assert equal(so_far.state.tensors, other.state.tensors)
    assert so_far.kept == {}
    for client in bed.context.clients:
        task = Assignment(client=client)
        assert free.work(so_far.state, task) == free.heaviest(so_far.state, client) == plain.work(other.state, task)


@both_optimizers
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_first_round_is_heteroavg(kind: str, optimizer: Optimizer) -> None:
    bed = bed_on(kind, optimizer)
    so_far, other = run(bed, bed.method("moon"), 2), run(bed, bed.method("heteroavg"), 2)
    assert equal(so_far.merged[0].state.tensors, other.merged[0].state.tensors)
    assert not equal(so_far.state.tensors, other.state.tensors)


def test_dropout_draws_as_in_heteroavg() -> None:
    """The frozen models draw nothing: with a term of no weight to speak of, the masks are the same."""
    bed = Bed(ToyDropout(None), ["one", "two"])
    so_far, other = run(bed, bed.method("moon", mu=1e-12), 2), run(bed, bed.method("heteroavg"), 2)
    assert_close(so_far.state.tensors, other.state.tensors)


def test_a_client_that_is_alone_receives_its_own_model_and_has_no_term() -> None:
    bed = Bed(ToyDepth(None), ["two"])
    so_far, other = run(bed, bed.method("moon"), 3), run(bed, bed.method("heteroavg"), 3)
    assert equal(so_far.state.tensors, other.state.tensors)


# the previous model


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_client_keeps_the_model_that_it_trained(kind: str) -> None:
    bed = bed_on(kind)
    so_far = run(bed, bed.method("moon"), 2)
    for number, reply in enumerate(so_far.replies[1]):
        assert equal(own(so_far.kept[number]), reply.message.tensors)
        assert reply.keep.nbytes() == reply.message.nbytes()


@both_optimizers
def test_a_first_turn_in_a_later_round_contrasts_with_the_initial_model(optimizer: Optimizer) -> None:
    bed = bed_on("depth", optimizer)
    so_far = run(bed, bed.method("moon", **STRONG), 2, sampled=[[1, 2], [0]])
    wanted = by_hand(bed, so_far.sent[1][0], bed.context.initial("one"), task=2)
    assert_close(so_far.replies[1][0].message.tensors, wanted)
    assert bed.method("moon").needs.initial_on_client
    assert not bed.method("moon", mu=0).needs.initial_on_client


def test_a_client_that_was_away_for_long_contrasts_with_its_last_model() -> None:
    bed = bed_on("depth")
    so_far = run(bed, bed.method("moon", **STRONG), 4, sampled=[[0, 1], [1, 2], [1, 2], [0]])
    wanted = by_hand(bed, so_far.sent[3][0], own(so_far.replies[0][0].keep), task=6)
    assert_close(so_far.replies[3][0].message.tensors, wanted)


def test_partial_work_is_kept_as_it_is() -> None:
    bed = bed_on("depth")
    method = bed.method("moon", **STRONG)
    so_far = run(bed, method)
    client = bed.context.clients[0]
    message = method.send(so_far.state, Assignment(client=client))
    job = bed.job(client, message, so_far.kept[0], 9, most_steps=1)
    reply = method.client(job)
    assert job.steps == 1
    assert_close(reply.message.tensors, by_hand(bed, message, own(so_far.kept[0]), task=9, steps=1))
    assert equal(own(reply.keep), reply.message.tensors)


def test_a_client_that_steps_down_contrasts_with_the_initial_model_of_its_new_variant() -> None:
    bed = Bed(ToyDepth(None), ["three", "two"])
    method = bed.method("moon", **STRONG)
    so_far = run(bed, method, 2)
    clients = [Client(0, "one", 24), bed.context.clients[1]]
    method.reassign(clients)
    assert method.step_down(so_far.kept.pop(0), clients[0]) is None
    advance(bed, method, so_far, clients, round_=3)
    wanted = by_hand(bed, so_far.sent[2][0], bed.context.initial("one"), task=4, client=clients[0])
    assert_close(so_far.replies[2][0].message.tensors, wanted)
    assert own(so_far.kept[0]).keys() == wanted.keys()


# the frozen models


@both_optimizers
@pytest.mark.parametrize("statistics", ["batch", "running"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_nothing_reaches_the_frozen_models(
    kind: str, statistics: str, optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Net] = []
    real = moon.frozen

    def noted(job: Job, tensors: dict[str, Tensor]) -> Net:
        made.append(real(job, tensors))
        return made[-1]

    bed = bed_on(kind, optimizer)
    method = bed.method("moon", statistics=statistics)
    so_far = run(bed, method)
    kept = {name: t.clone() for name, t in own(so_far.kept[0]).items()}
    monkeypatch.setattr(moon, "frozen", noted)
    client = bed.context.clients[0]
    message = method.send(so_far.state, Assignment(client=client))
    sent = {name: t.clone() for name, t in message.tensors.items()}
    reply = method.client(bed.job(client, message, so_far.kept[0], 9))
    assert len(made) == 2
    for net, before in zip(made, (sent, kept), strict=True):
        assert all(p.grad is None and not p.requires_grad for p in net.parameters())
        assert equal(dict(net.state_dict()), before)
        assert not net.training
    assert equal(message.tensors, sent)
    assert equal(own(so_far.kept[0]), kept)
    counts = [int(t - sent[n]) for n, t in reply.message.tensors.items() if n.endswith("num_batches_tracked")]
    assert set(counts) == {3}  # each of the client's own batches counts once


def test_the_received_tensors_are_not_copied() -> None:
    bed = bed_on("depth")
    method = bed.method("moon")
    so_far = run(bed, method)
    message = method.send(so_far.state, Assignment(client=bed.context.clients[0]))
    net = moon.frozen(bed.job(bed.context.clients[0], message), message.tensors)
    assert all(p.data_ptr() == message.tensors[n].data_ptr() for n, p in net.named_parameters())


# what it costs


def test_bytes_are_those_of_the_weights() -> None:
    bed = Bed(
        family("resnet-stage"),
        ["resnet10"],
        samples=4,
        spec=InputSpec((3, 32, 32), 10),
        training=Training(batch=2, max_steps=1),
    )
    so_far = run(bed, bed.method("moon"))
    parameters, buffers, counters = wire_sizes(bed, "resnet10")
    wanted = 4 * (parameters + buffers) + 8 * counters
    reply = so_far.replies[0][0]
    assert so_far.sent[0][0].nbytes() == reply.message.nbytes() == reply.keep.nbytes() == wanted
    work = bed.method("moon").work(so_far.state, Assignment(client=bed.context.clients[0]))
    assert (work.bytes_down, work.bytes_up) == (wanted, wanted)
    assert work.held_values == 2 * 2 * 512


def test_two_more_forward_passes_a_step_once_there_is_a_term(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed(ToyDepth(None), ["one", "two"])
    method, plain = bed.method("moon"), bed.method("heteroavg")
    passes: list[int] = []
    forward = ToyNet.extract

    def counted(self: ToyNet, x: Tensor) -> Tensor:
        passes.append(len(x))
        return forward(self, x)

    client = bed.context.clients[0]
    task = Assignment(client=client)
    first = method.setup()
    so_far = run(bed, method)
    assert method.work(first, task) == plain.work(plain.setup(), task)
    later = method.work(so_far.state, task)
    assert later == method.heaviest(first, client)
    assert (later.held_models, later.held_values, later.parameter_passes) == (2, 2 * 8 * 5, 0)
    assert later.each_step == (Pass("forward", "features", 8), Pass("forward", "features", 8))
    monkeypatch.setattr(ToyNet, "extract", counted)
    message = method.send(so_far.state, task)
    method.client(bed.job(client, message, so_far.kept[0], 9))
    assert passes == [8] * 3 * (1 + len(later.each_step))
    assert method.foresee(first, []).values == so_far.state.values  # forecasts go on with the heavier work


def test_policies() -> None:
    needs = Bed(ToyDepth(None), ["one"]).method("moon").needs
    assert needs.policies == ALL_POLICIES
    assert needs.shared_tensors


# training


@both_optimizers
def test_a_client_that_lacks_a_class(optimizer: Optimizer) -> None:
    choice = replace_lr(optimizer)
    bed = without_class(bed_on("depth", choice), 0, 2)
    so_far = run(bed, bed.method("moon"), 6)  # the harness checks that everything stays finite
    previous = own(so_far.replies[4][0].keep)
    wanted = by_hand(bed, so_far.sent[5][0], previous, task=15, mu=1.0)
    for name in ("fc.weight", "stem.1.weight"):
        torch.testing.assert_close(so_far.replies[5][0].message.tensors[name], wanted[name], rtol=1e-3, atol=1e-4)
    assert accuracy(bed, bed.method("moon"), so_far) > 0.6


def replace_lr(optimizer: Optimizer) -> Optimizer:
    """Adam of a learning rate that gets somewhere in a few steps."""
    return Optimizer(name="adam", lr=0.02) if optimizer.name == "adam" else optimizer


def test_a_run_goes_on_from_its_state_and_what_clients_keep() -> None:
    bed = bed_on("depth")
    whole = run(bed, bed.method("moon"), 3)
    so_far = run(bed, bed.method("moon"), 2)
    resumed = Run(Bundle(dict(so_far.state.tensors), dict(so_far.state.values)), kept=so_far.kept, task=so_far.task)
    advance(bed, bed.method("moon"), resumed, bed.context.clients, round_=3)
    assert equal(resumed.state.tensors, whole.state.tensors)
