"""FedFomo: each client mixes its model out of those that lower the loss on data that it set aside."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_harness import (
    SGD,
    Bed,
    Run,
    ToyDepth,
    ToyStrangers,
    ToyWidth,
    accuracy,
    advance,
    bed_on,
    equal,
    run,
    same,
    tensors_of,
    wire_sizes,
)
from torch.nn import functional as F

from fleetbed.emulator.algorithms.fedfomo import (
    WEIGHTS,
    Method,
    leading,
    mixture,
    overlay,
    shares_of,
    validation_loss,
    weight_of,
)
from fleetbed.emulator.method.algorithm import ALL_POLICIES, Assignment, Client
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.schedule import held_out_of
from fleetbed.models.base import InputSpec, Tensors
from fleetbed.models.families.lookup import family, family_names
from fleetbed.models.work import Pass
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Training


def fomo(bed: Bed, **params: object) -> Method:
    method = bed.method("fedfomo", **params)
    assert isinstance(method, Method)
    return method


# the weights


def test_the_weights_of_the_example() -> None:
    """L(b) = 2; the candidates lose 1, 3 and 1.5 at distances 1, 1 and 2."""
    weights = [weight_of(2 - loss, distance) for loss, distance in ((1, 1), (3, 1), (1.5, 2))]
    assert weights == [1.0, -1.0, 0.25]
    assert shares_of(weights) == pytest.approx([0.8, 0.0, 0.2])


def test_a_model_at_no_distance_or_without_a_loss_has_no_weight() -> None:
    assert weight_of(1.0, 0.0) == weight_of(float("-inf"), 1.0) == weight_of(float("nan"), 1.0) == 0.0
    assert weight_of(1e30, 1e-30) == 0.0  # it would be infinite on the wire
    assert shares_of([-1.0, 0.0]) == [0.0, 0.0]


def test_a_mixture_is_over_those_that_hold_an_element() -> None:
    own = {"a": torch.tensor([0.0, 0.0]), "b": torch.tensor([5.0]), "n": torch.tensor(3)}
    parts = [
        {"a": torch.tensor([1.0])},
        {"a": torch.tensor([3.0, 3.0]), "b": torch.tensor([9.0]), "n": torch.tensor(8)},
    ]
    mixed = mixture(own, parts, [0.0, 3.0, 1.0])
    assert mixed["a"].tolist() == [1.5, 3.0]  # 3/4 of 1 and 1/4 of 3; the second element is held by the last alone
    assert mixed["b"].tolist() == [9.0]
    assert int(mixed["n"]) == 3
    unheld = mixture(own, parts[:1], [0.0, 2.0])
    assert unheld["a"].tolist() == [1.0, 0.0]
    assert unheld["b"].tolist() == [5.0]  # nobody with a weight holds it
    assert equal(mixture(own, parts, [-1.0, 0.0, -2.0]), own)


def test_an_overlay_has_the_parts_that_were_received_and_leaves_the_own_model_alone() -> None:
    own = {"a": torch.zeros(2, 2), "b": torch.ones(1)}
    laid = overlay(own, {"a": torch.ones(1, 2)})
    assert laid["a"].tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert laid["b"] is own["b"]
    assert not own["a"].any()


@pytest.mark.parametrize("name", [n for n in family_names() if family(n).shared])
def test_every_variant_holds_the_first_channels(name: str) -> None:
    """What `leading` relies on."""
    nets = family(name)
    shape = {"text": (6,), "values": (3, 64), "images": (3, 64, 64)}[nets.reads]
    spec = InputSpec(shape, 10, vocabulary=50 if nets.reads == "text" else 0)
    for rows in (rows for variant in nets.variants for rows in nets.index(variant, spec).values()):
        assert all(part is None or torch.equal(part, torch.arange(len(part))) for part in rows)


# a turn by hand


def test_a_turn_by_hand() -> None:
    bed = bed_on("depth", samples=60)
    method = fomo(bed, models=2, epsilon=0.0)
    so_far = run(bed, method, 1)
    client = bed.context.clients[1]
    kept, task = so_far.kept[1], Assignment(client=client, task=6, round=2)
    message = method.send(so_far.state, task)
    assert sorted(message.values["sent"]) == [0, 2]
    reply = method.client(bed.job(client, message, kept, task=6, round_=2))
    job = bed.job(client, message, kept, task=6, round_=2)
    job.hold_out(0.2)
    rows = list(job.held_out(99))
    assert len(rows) == 1
    x, y = rows[0]
    assert len(x) == held_out_of(60, 0.2) == 12

    def loss(tensors: Tensors) -> float:
        net = bed.family.build("two", bed.spec)
        net.load_state_dict(tensors)
        with torch.no_grad():
            return float(F.cross_entropy(net.eval()(x), y))

    own, before = kept.under("model/"), kept.under("before/")
    trainable = [n for n, _ in bed.family.build("two", bed.spec).named_parameters()]
    candidates = [own, *({**own, **message.under(f"{i}/")} for i in (0, 1))]
    weights = []
    for candidate in candidates:
        far = torch.cat([(candidate[n] - before[n]).flatten() for n in trainable]).norm()
        weights.append((loss(before) - loss(candidate)) / float(far))
    torch.testing.assert_close(reply.message.tensors[WEIGHTS], torch.tensor(weights[1:]), rtol=1e-3, atol=1e-5)
    assert reply.metrics["models_used"] == sum(w > 0 for w in weights[1:])
    clipped = [max(0.0, w) for w in weights]
    assert sum(w > 0 for w in weights) >= 2
    start = reply.keep.under("before/")
    for name in trainable:
        holders = [(w, c[name]) for w, c in zip(clipped, candidates, strict=True)]
        if name not in message.under("0/") or name not in message.under("1/"):
            present = [True, *(name in message.under(f"{i}/") for i in (0, 1))]
            holders = [h for h, is_held in zip(holders, present, strict=True) if is_held]
        total = sum(w for w, _ in holders)
        wanted = sum(w * t for w, t in holders) / total if total else own[name]
        torch.testing.assert_close(start[name], wanted, rtol=1e-4, atol=1e-6)
    assert equal(reply.keep.under("model/"), {n: t for n, t in reply.message.tensors.items() if n != WEIGHTS})


def test_where_no_weight_is_positive_the_client_goes_on_with_its_own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = bed_on("depth")
    method = fomo(bed)
    so_far = run(bed, method)
    client = bed.context.clients[0]
    message = method.send(so_far.state, Assignment(client=client, task=3))
    losses = iter((1.0, 2.0, 2.0, 2.0))
    monkeypatch.setattr("fleetbed.emulator.algorithms.fedfomo.validation_loss", lambda *_: next(losses))
    reply = method.client(bed.job(client, message, so_far.kept[0], task=3))
    assert equal(reply.keep.under("before/"), so_far.kept[0].under("model/"))
    assert reply.metrics["models_used"] == 0
    assert (reply.message.tensors[WEIGHTS] < 0).all()  # unclipped: the server learns what did not help


def test_the_norm_is_that_of_all_trainable_tensors() -> None:
    bed = Bed(ToyDepth(None), ["one"])
    job = bed.job(bed.context.clients[0], Bundle())
    a = bed.context.initial("one")
    names = [n for n, _ in bed.family.build("one", bed.spec).named_parameters()]
    b = {n: t + 2.0 if n in names else t for n, t in a.items()}
    count = sum(a[n].numel() for n in names)
    assert fomo(bed).distance(job, a, b) == pytest.approx(2 * count**0.5, rel=1e-5)
    assert fomo(bed, norm="l1").distance(job, a, b) == pytest.approx(2 * count, rel=1e-5)


# the part that is set aside


def test_the_same_samples_are_set_aside_in_every_task_and_never_trained_on() -> None:
    bed = Bed(ToyDepth(None), ["one"], samples=23)
    client = bed.context.clients[0]
    parts = []
    for task in (0, 7):
        job = bed.job(client, Bundle(), task=task)
        whole = job.class_counts()
        job.hold_out(0.25)
        aside = torch.cat([x for x, _ in job.held_out(4)])
        parts.append(aside)
        assert len(aside) == held_out_of(23, 0.25) == 6
        seen = {tuple(x.flatten().tolist()) for batch, _ in job.batches(epochs=2) for x in batch}
        seen |= {tuple(x.flatten().tolist()) for batch, _ in job.ordered(4) for x in batch}
        assert len(seen) == 17
        assert not seen & {tuple(x.flatten().tolist()) for x in aside}
        assert int(job.class_counts().sum()) == 17 < int(whole.sum())
    assert torch.equal(*parts)
    assert [held_out_of(n, 0.2) for n in (1, 2, 3, 10, 12)] == [0, 1, 1, 2, 2]


def test_a_client_of_one_sample_weighs_nothing() -> None:
    bed = Bed(ToyDepth(None), ["one", "two"], samples=[1, 24])
    so_far = run(bed, fomo(bed), 2)  # the harness compares the steps with the declared ones
    assert so_far.replies[1][0].message.tensors[WEIGHTS].tolist() == [0.0]
    job = bed.job(bed.context.clients[0], Bundle())
    job.hold_out(0.2)
    assert validation_loss(job, bed.context.initial("one")) is None
    assert fomo(bed).work(so_far.state, Assignment(client=bed.context.clients[0])).once == ()


def test_without_models_it_is_private_on_the_rest_of_the_data() -> None:
    bed = bed_on("depth", samples=30)
    so_far = run(bed, fomo(bed, models=0), 3)
    alone = bed_on("depth", samples=30)
    for number, client in enumerate(bed.context.clients):
        job = bed.job(client, Bundle())
        job.hold_out(0.2)
        alone.parts[number] = np.asarray(job._indices)
    clients = tuple(replace(c, samples=24) for c in bed.context.clients)
    alone.context = replace(alone.context, clients=clients)
    private = run(alone, alone.method("private"), 3)
    for number in range(3):
        assert equal(so_far.kept[number].under("model/"), private.kept[number].under("model/"))
    assert all(not sent.tensors for round_ in so_far.sent for sent in round_)


# the server


def test_the_first_round_is_private_and_sends_nothing() -> None:
    bed = bed_on("depth")
    method = fomo(bed)
    so_far = run(bed, method)
    assert all(not sent.tensors for sent in so_far.sent[0])
    work = method.work(method.setup(), Assignment(client=bed.context.clients[0]))
    assert (work.bytes_down, work.once, work.held_models) == (0, (), 2)


def test_the_server_sends_what_was_most_use_and_sometimes_something_else() -> None:
    bed = Bed(ToyDepth(None), ["one"] * 6)
    method = fomo(bed, models=2, epsilon=0.0)
    so_far = run(bed, method)
    preference = torch.zeros(6, 6)
    preference[0] = torch.tensor([9.0, 0.5, -1.0, 3.0, 0.1, -2.0])
    state = Bundle({**so_far.state.tensors, "preference": preference}, so_far.state.values)
    tasks = [Assignment(client=bed.context.clients[0], task=t) for t in range(60)]
    assert {tuple(method.chosen(state, task)) for task in tasks} == {(3, 1)}
    curious = fomo(bed, models=2, epsilon=0.3)
    picks = [curious.chosen(state, task) for task in tasks]
    assert all(len(set(p)) == 2 and 0 not in p for p in picks)
    odd = sum(p != [3, 1] for p in picks)
    assert 10 < odd < 50
    later = [curious.chosen(state, replace(task, round=8)) for task in tasks]  # 0.3 - 7 * 0.05 < 0
    assert later == [[3, 1]] * 60
    nothing_known = Bundle({**state.tensors, "preference": torch.zeros(6, 6)}, state.values)
    assert {n for task in tasks for n in method.chosen(nothing_known, task)} == {1, 2, 3, 4, 5}  # ties are drawn


def test_the_store_holds_the_newest_uploads() -> None:
    bed = Bed(ToyDepth(None), ["one"] * 4)
    method = fomo(bed, store=2)
    so_far = run(bed, method, 3, sampled=[[0, 1], [2], [1]])
    assert so_far.state.values["stored"] == [2, 1]
    assert {n.split("/")[0] for n in so_far.state.tensors if "/" in n} == {"1", "2"}
    assert {n for n in so_far.state.values if "/" in n} == {"variant/1", "variant/2"}
    newest = {n: t for n, t in so_far.replies[2][0].message.tensors.items() if n != WEIGHTS}
    assert equal(so_far.state.under("1/"), newest)
    half = bed.method("fedfomo")
    half.context = replace(half.context, ratio=0.5)
    assert len(run(bed, half, 1).state.values["stored"]) == 2  # as many as take part in a round


def test_weights_add_up_in_the_preferences() -> None:
    bed = bed_on("depth")
    so_far = run(bed, fomo(bed), 4)
    wanted = torch.zeros(3, 3)
    for sents, replies in zip(so_far.sent, so_far.replies, strict=True):
        for number, (sent, reply) in enumerate(zip(sents, replies, strict=True)):
            for other, weight in zip(sent.values["sent"], reply.message.tensors[WEIGHTS], strict=True):
                wanted[number, other] += weight
    assert wanted.any()
    torch.testing.assert_close(so_far.state.tensors["preference"], wanted)
    assert not so_far.state.tensors["preference"].diagonal().any()


def test_a_mixing_weight_changes_nothing() -> None:
    bed = bed_on("depth")
    assert same(run(bed, fomo(bed), 3, weight=0.3).state, run(bed, fomo(bed), 3).state)


# what a client is sent of another variant


@pytest.mark.parametrize(("nets", "variants"), [(ToyDepth, ["one", "three"]), (ToyWidth, ["half", "full"])])
def test_a_client_gets_what_its_variant_has_of_another_model(nets: type[ToyDepth], variants: list[str]) -> None:
    bed = Bed(nets(None), variants)
    so_far = run(bed, fomo(bed), 2)
    uploads = [reply.message.tensors for reply in so_far.replies[0]]
    for number, other in ((0, 1), (1, 0)):
        part, shapes = so_far.sent[1][number].under("0/"), bed.context.initial(variants[number])
        assert part.keys() == uploads[other].keys() & shapes.keys()
        for name, tensor in part.items():
            region = leading(uploads[other][name].shape, shapes[name].shape)
            assert torch.equal(tensor, uploads[other][name][region])


def test_variants_that_share_nothing_are_mixed_among_equals() -> None:
    bed = Bed(ToyStrangers(None), ["thin", "thick", "thin"])
    so_far = run(bed, fomo(bed), 2)
    assert [sent.values["sent"] for sent in so_far.sent[1]] == [[2], [], [0]]


# cost


def test_bytes_and_work() -> None:
    bed = Bed(ToyDepth(None), ["two"] * 4, samples=30)
    method = fomo(bed, models=2)
    so_far = run(bed, method, 2)
    parameters, buffers, counters = wire_sizes(bed, "two")
    size = 4 * (parameters + buffers) + 8 * counters
    for sent, reply in zip(so_far.sent[1], so_far.replies[1], strict=True):
        assert (sent.nbytes(), reply.message.nbytes()) == (2 * size, size + 4 * 2)
        assert reply.keep.nbytes() == 2 * size
    client = bed.context.clients[0]
    work = method.work(so_far.state, Assignment(client=client))
    assert (work.bytes_down, work.bytes_up) == (2 * size, size + 8)
    assert (work.steps, work.batch, work.held_models, work.held_values) == (3, 8, 5, 0)
    assert work.once == (Pass("forward", "all", 4 * 6),)  # b, the own model and two others, 6 samples each
    assert method.heaviest(method.setup(), client) == work
    assert fomo(bed, models=9).heaviest(method.setup(), client).held_models == 3 + 3  # there are no more others
    unchosen = Method(method.params, replace(bed.context, clients=bed.context.clients[:1]))  # one for each variant
    assert unchosen.heaviest(unchosen.setup(), client) == work


def test_the_declared_passes_are_those_that_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed(ToyDepth(None), ["two", "two", "one"], samples=30)
    method = fomo(bed)
    so_far = run(bed, method)
    client = bed.context.clients[0]
    message = method.send(so_far.state, Assignment(client=client, task=3))
    seen: list[tuple[bool, int]] = []
    net = type(bed.family.build("two", bed.spec))
    extract = net.extract

    def counted(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.append((self.training, len(x)))
        return extract(self, x)

    monkeypatch.setattr(net, "extract", counted)
    method.client(bed.job(client, message, so_far.kept[0], task=3))
    (weighing,) = method.work(so_far.state, Assignment(client=client, task=3)).once
    assert sum(n for training, n in seen if not training) == weighing.samples
    assert sum(n for training, n in seen if training) == 24


# over time


def test_a_first_turn_in_a_later_round_weighs_against_the_initial_model() -> None:
    bed = bed_on("depth")
    so_far = run(bed, fomo(bed), 2, sampled=[[1, 2], [0]])
    reply = so_far.replies[1][0]
    assert len(so_far.sent[1][0].values["sent"]) == 2
    if (reply.message.tensors[WEIGHTS] <= 0).all():
        assert equal(reply.keep.under("before/"), bed.context.initial("one"))
    else:
        assert not equal(reply.keep.under("before/"), bed.context.initial("one"))


def test_a_client_that_was_away_has_its_own_model_and_never_taking_part_the_initial_one() -> None:
    bed = bed_on("depth")
    method = fomo(bed)
    so_far = run(bed, method, 3, sampled=[[0, 1], [1], [1]])
    targets = {t.client: t for t in method.targets(so_far.state) if t.local}
    assert equal(tensors_of(bed, targets[0], so_far), so_far.replies[0][0].keep.under("model/"))
    assert equal(tensors_of(bed, targets[2], so_far), bed.context.initial("three"))


def test_a_client_that_steps_down_begins_anew_and_its_old_upload_still_serves() -> None:
    bed = Bed(ToyDepth(None), ["three", "three"])
    method = fomo(bed)
    so_far = run(bed, method, 2)
    smaller = Client(0, "one", 24)
    assert method.step_down(so_far.kept.pop(0), smaller) is None
    clients = [smaller, bed.context.clients[1]]
    method.reassign(clients)
    advance(bed, method, so_far, clients, round_=3)
    assert so_far.sent[2][1].under("0/").keys() == bed.context.initial("three").keys()  # its last large one
    advance(bed, method, so_far, clients, round_=4)
    assert so_far.sent[3][1].under("0/").keys() == bed.context.initial("one").keys()


def test_a_run_goes_on_from_its_state_and_what_clients_keep() -> None:
    bed = bed_on("depth")
    whole, so_far = run(bed, fomo(bed), 3), run(bed, fomo(bed), 2)
    resumed = Run(Bundle(dict(so_far.state.tensors), dict(so_far.state.values)), kept=so_far.kept, task=so_far.task)
    advance(bed, fomo(bed), resumed, bed.context.clients, round_=3)
    assert same(resumed.state, whole.state)
    assert all(same(resumed.kept[n], whole.kept[n]) for n in range(3))


def test_partial_work_is_kept_as_it_is() -> None:
    bed = bed_on("depth")
    method = fomo(bed)
    so_far = run(bed, method)
    client = bed.context.clients[0]
    message = method.send(so_far.state, Assignment(client=client, task=3))
    job = bed.job(client, message, so_far.kept[0], 3, most_steps=1)
    reply = method.client(job)
    assert job.steps == 1
    assert not equal(reply.keep.under("model/"), reply.keep.under("before/"))


def test_policies_and_the_series_of_the_paper() -> None:
    bed = bed_on("depth")
    method = fomo(bed)
    assert (method.needs.policies, method.needs.reported) == (ALL_POLICIES, "personal-own")
    assert {(t.client, t.local) for t in method.targets(method.setup())} == {
        (c, o) for c in range(3) for o in (True, False)
    }
    with pytest.raises(BadInput, match="fedfomo"):
        bed.method("inco", base="fedfomo").check()


def test_models_of_clients_that_are_alike_are_of_use() -> None:
    """Clients 0 and 1 call the classes by other names than 2 and 3: they come to prefer each other."""
    training = Training(batch=8, epochs=2, optimizer=SGD)
    bed = Bed(ToyDepth(None), ["two"] * 4, samples=40, training=training)
    for number in (2, 3):
        rows = bed.parts[number]
        bed.data.y[rows] = (bed.data.y[rows] + 1) % 3
    so_far = run(bed, fomo(bed, epsilon=0.0), 6)
    gained = so_far.state.tensors["preference"]
    assert gained[0, 1] > max(gained[0, 2], gained[0, 3])
    assert gained[3, 2] > max(gained[3, 0], gained[3, 1])


def test_it_learns() -> None:
    bed = Bed(ToyDepth(None), ["one", "three"], samples=60)
    method = fomo(bed)
    assert accuracy(bed, method, run(bed, method, 6)) > 0.6
