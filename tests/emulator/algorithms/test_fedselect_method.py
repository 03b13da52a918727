"""FedSelect: clients choose the weights that are their own, train them in turn with the rest, and send the rest."""

from __future__ import annotations

import pytest
import torch
from algorithm_harness import (
    ADAM,
    SGD,
    Bed,
    Run,
    ToyDepth,
    ToyWidth,
    accuracy,
    advance,
    bed_on,
    equal,
    frozen,
    run,
    same,
    tensors_of,
    weights,
    wire_sizes,
)
from msgspec.structs import replace
from torch import Tensor

from fleetbed.emulator.algorithms.fedselect import Method
from fleetbed.emulator.bases.masks import MASK, MovingEntries, packed, share_of, unpacked
from fleetbed.emulator.method.algorithm import ALL_POLICIES, Arrival, Assignment, Client
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.local_training import cross_entropy_step, train
from fleetbed.profiles.experiment import Optimizer, Training

DECAYED = [replace(SGD, weight_decay=0.1), replace(ADAM, weight_decay=0.1)]
optimizers = pytest.mark.parametrize("optimizer", DECAYED, ids=["momentum and decay", "adam and decay"])


def select(bed: Bed, **params: object) -> Method:
    method = bed.method("fedselect", **params)
    assert isinstance(method, Method)
    return method


def masks_of(bundle: Bundle, bed: Bed, variant: str) -> dict[str, Tensor]:
    shapes = bed.context.initial(variant)
    return {name: unpacked(bits, shapes[name].shape) for name, bits in bundle.under(MASK).items()}


# masks


def test_masks_travel_as_bits() -> None:
    masks = {"a": torch.tensor([[True, False, True], [False, True, True]]), "b": torch.zeros(17, dtype=torch.bool)}
    bits = packed(masks)
    assert [bits[MASK + n].numel() for n in ("a", "b")] == [1, 3]
    assert all(torch.equal(unpacked(bits[MASK + n], mask.shape), mask) for n, mask in masks.items())
    assert share_of(masks) == 4 / 23


@optimizers
def test_entries_that_do_not_move_stay_bit_for_bit(optimizer: Optimizer) -> None:
    bed = Bed(ToyDepth(None), ["two"], training=Training(batch=8, optimizer=optimizer))
    client = bed.context.clients[0]
    job = bed.job(client, Bundle())
    net = job.model(bed.context.initial("two"))
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    moving = {"stem.1.weight": torch.rand(6, 16) < 0.5, "fc.weight": torch.zeros(3, 5, dtype=torch.bool)}
    train(job, net, cross_entropy_step(net), optimizer=MovingEntries(job, net, moving, others=True), epochs=3)
    for name, p in net.named_parameters():
        still = ~moving[name] if name in moving else torch.zeros_like(p, dtype=torch.bool)
        assert torch.equal(p[still], before[name][still]), name
        assert not torch.equal(p, before[name]) or bool(still.all()), name
    middle = {n: p.detach().clone() for n, p in net.named_parameters()}
    own = MovingEntries(job, net, moving, others=False)  # the other way round, with tensors that stand still
    train(job, net, cross_entropy_step(net), optimizer=own, epochs=3)
    for name, p in net.named_parameters():
        still = ~moving[name] if name in moving else torch.ones_like(p, dtype=torch.bool)
        assert torch.equal(p[still], middle[name][still]), name
    assert (net.stem[1].weight != middle["stem.1.weight"])[moving["stem.1.weight"]].all()


@optimizers
def test_an_optimiser_that_moves_everything_is_the_usual_one(optimizer: Optimizer) -> None:
    """Weight decay, which it adds by itself, included."""
    bed = Bed(ToyDepth(None), ["two"], training=Training(batch=8, optimizer=replace(optimizer, decay_biases=False)))
    nets = []
    for is_own in (True, False):
        job = bed.job(bed.context.clients[0], Bundle())
        net = job.model(bed.context.initial("two"))
        moving = {"fc.weight": torch.ones(3, 5, dtype=torch.bool)}
        chosen = MovingEntries(job, net, moving, others=True) if is_own else None
        train(job, net, cross_entropy_step(net), optimizer=chosen, epochs=2)
        nets.append(dict(net.named_parameters()))
    for name, p in nets[0].items():
        torch.testing.assert_close(p, nets[1][name], rtol=1e-4, atol=1e-6)


# reductions


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("kind", ["depth", "width", "resnet"])
def test_without_a_rate_it_is_heteroavg(kind: str, optimizer: Optimizer) -> None:
    bed = bed_on(kind, optimizer)
    longer = bed_on(kind, optimizer)
    longer.context = type(longer.context)(**{**vars(longer.context), "training": replace(longer.training, epochs=2)})
    so_far = run(bed, select(bed, rate=0, every=1, alternations=2), 3)
    plain = run(longer, longer.method("heteroavg"), 3)
    trainable = {n for n, _ in bed.family.build(bed.family.variants[-1], bed.spec).named_parameters()}
    assert weights(so_far.state).keys() == trainable
    assert equal(weights(so_far.state), {n: t for n, t in plain.state.tensors.items() if n in trainable})


def test_it_is_heteroavg_until_the_first_selection() -> None:
    bed = bed_on("depth")
    so_far, never = run(bed, select(bed, every=3), 2), run(bed, select(bed, rate=0), 2)
    assert same(so_far.state, never.state)


def test_with_everything_its_own_only_biases_are_shared() -> None:
    bed = bed_on("depth")
    method = select(bed, rate=1, limit=1, every=1)
    so_far = run(bed, method, 4)
    after_first = run(bed, method, 1).state
    for name, tensor in weights(so_far.state).items():
        assert torch.equal(tensor, after_first.tensors[name]) is ("weight" in name), name
    kept = so_far.kept[2].under("model/")
    assert not torch.equal(kept["fc.weight"], so_far.state.tensors["fc.weight"])


# the selection


def test_the_entries_that_moved_furthest_are_selected() -> None:
    bed = Bed(ToyDepth(None), ["one"])
    method = select(bed, rate=0.5)
    mask = torch.tensor([[True, False, False], [False, False, False]])
    now, then = torch.tensor([[9.0, 1.0, -5.0], [0.0, 3.0, 0.5]]), torch.zeros(2, 3)
    # of five common entries round(2.5) = 2: -5 and 3
    assert method.selected(mask, now, then).tolist() == [[True, False, True], [False, True, False]]
    assert select(bed, rate=0.5, limit=0.1).selected(mask, now, then) is mask


def test_masks_grow_by_the_rate_and_stop_at_the_limit() -> None:
    bed = Bed(ToyDepth(None), ["two"], samples=16)
    method = select(bed, every=1, rate=0.25, limit=0.8)
    so_far = Run(method.setup())
    shares, before = [], {}
    for round_ in range(1, 9):
        advance(bed, method, so_far, bed.context.clients, round_=round_)
        masks = masks_of(so_far.kept[0], bed, "two")
        assert set(masks) == {n for n, _ in bed.family.build("two", bed.spec).named_parameters() if "weight" in n}
        assert all((masks[n] | old).equal(masks[n]) for n, old in before.items()), "a mask shrank"
        shares.append(float(masks["stem.1.weight"].float().mean()))
        before = masks
        assert so_far.replies[-1][0].metrics["own_share"] == pytest.approx(share_of(masks))
    assert shares == pytest.approx([0.25, 0.44, 0.58, 0.68, 0.76, 0.82, 0.82, 0.82], abs=0.015)  # of 96 entries


def test_a_client_selects_in_every_third_of_its_own_turns() -> None:
    bed = Bed(ToyDepth(None), ["two", "two"])
    method = select(bed, every=3)
    so_far = run(bed, method, 5, sampled=[[0, 1], [0], [1], [0], [1]])
    chosen = [[bool(masks_of(r.message, bed, "two")["fc.weight"].any()) for r in replies] for replies in so_far.replies]
    assert chosen == [[False, False], [False], [False], [True], [True]]
    # measured from where the client first began, as nothing was selected before
    begun, ended = so_far.sent[0][0].tensors["fc.weight"], so_far.replies[3][0].message.tensors["fc.weight"]
    mask = masks_of(so_far.kept[0], bed, "two")["fc.weight"]
    moved = (ended - begun).abs()
    assert moved[mask].min() >= moved[~mask].max()
    assert equal(
        so_far.kept[0].under("snapshot/"),
        {n: so_far.kept[0].under("model/")[n] for n in masks_of(so_far.kept[0], bed, "two")},
    )


# a turn with masks


@pytest.mark.parametrize("optimizer", DECAYED, ids=["momentum and decay", "adam and decay"])
def test_both_sides_move_in_turn(optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed(ToyDepth(None), ["two"], training=Training(batch=8, optimizer=optimizer))
    method = select(bed, every=1, alternations=2)
    so_far = run(bed, method)
    masks, client = masks_of(so_far.kept[0], bed, "two"), bed.context.clients[0]
    moved: list[tuple[bool, bool]] = []
    step = MovingEntries.step

    def watched(self: MovingEntries) -> None:
        before = [p.detach().clone() for p, _, _ in self._parts]
        step(self)
        own = common = False
        for name, (p, _, _), old in zip(names, self._parts, before, strict=True):
            changed = p != old
            mask = masks.get(name, torch.zeros_like(changed))
            own, common = own or bool(changed[mask].any()), common or bool(changed[~mask].any())
        moved.append((own, common))

    names = [n for n, _ in bed.family.build("two", bed.spec).named_parameters()]
    monkeypatch.setattr(MovingEntries, "step", watched)
    method.client(bed.job(client, method.send(so_far.state, Assignment(client=client)), so_far.kept[0], task=1))
    assert moved == [*[(True, False)] * 3, *[(False, True)] * 3] * 2


def test_a_client_begins_with_its_own_where_the_mask_says_so() -> None:
    bed = bed_on("depth")
    method = select(bed, every=1)
    so_far = run(bed, method, 2)
    client = bed.context.clients[0]
    message = method.send(so_far.state, Assignment(client=client))
    job = bed.job(client, message, so_far.kept[0], 6, most_steps=0)
    reply = method.client(job)
    masks, kept = masks_of(so_far.kept[0], bed, "one"), so_far.kept[0].under("model/")
    for name, tensor in weights(reply.message).items():
        mask = masks.get(name, torch.zeros_like(tensor, dtype=torch.bool))
        assert torch.equal(tensor, torch.where(mask, kept[name], message.tensors[name]))
    assert equal(
        {n: t for n, t in reply.keep.under("model/").items() if n not in message.tensors},
        {n: t for n, t in kept.items() if n not in message.tensors},
    )  # statistics are its own


# the mean


def test_an_entry_is_averaged_over_those_that_share_it() -> None:
    bed = Bed(ToyDepth(None), ["one", "one"])
    method = select(bed)
    state = method.setup()

    def arrival(number: int, by: float, own: list[int]) -> Arrival:
        task = Assignment(client=bed.context.clients[number])
        sent = method.send(state, task)
        shapes = {n: sent.tensors[n].shape for n in method.may_be_own("one")}
        masks = {n: torch.zeros(s, dtype=torch.bool) for n, s in shapes.items()}
        masks["fc.weight"].view(-1)[own] = True
        moved = {n: t + by for n, t in sent.tensors.items()}
        return Arrival(assignment=task, sent=sent, message=Bundle({**moved, **packed(masks)}))

    arrivals = [arrival(0, 1.0, [0, 1]), arrival(1, 3.0, [1, 2])]
    change = method.merge(state, arrivals).state.tensors["fc.weight"] - state.tensors["fc.weight"]
    torch.testing.assert_close(change.view(-1)[:4], torch.tensor([3.0, 0.0, 1.0, 2.0]))
    merged = method.merge(state, arrivals).state.tensors
    assert torch.equal(merged["fc.weight"].view(-1)[1], state.tensors["fc.weight"].view(-1)[1])  # nobody shares it
    torch.testing.assert_close(merged["fc.bias"] - state.tensors["fc.bias"], torch.full((3,), 2.0))
    for name, tensor in weights(method.merge(state, arrivals[::-1]).state).items():
        torch.testing.assert_close(tensor, merged[name])
    halved = [Arrival(assignment=a.assignment, sent=a.sent, message=a.message, weight=0.5) for a in arrivals]
    change = method.merge(state, halved).state.tensors["fc.weight"] - state.tensors["fc.weight"]
    torch.testing.assert_close(change.view(-1)[:4], torch.tensor([1.5, 0.0, 0.5, 1.0]))


def test_masks_on_a_width_family_are_of_the_part_that_a_client_holds() -> None:
    bed = Bed(ToyWidth(None), ["half", "full"])
    so_far = run(bed, select(bed, every=1), 3)
    assert so_far.replies[2][0].message.tensors[MASK + "stem.1.weight"].numel() == 6  # 3 x 16 bits


# cost


@pytest.mark.parametrize("optimizer", [SGD, ADAM, Optimizer(lr=0.05)], ids=["momentum", "adam", "sgd"])
def test_bytes_and_work(optimizer: Optimizer) -> None:
    bed = Bed(
        ToyDepth(None), ["two"], samples=30, training=Training(batch=8, epochs=2, max_steps=1, optimizer=optimizer)
    )
    method = select(bed, every=2)
    so_far = run(bed, method, 4)
    parameters, _, _ = wire_sizes(bed, "two")
    tensors = bed.family.build("two", bed.spec).named_parameters()
    bits = sum(-(-p.numel() // 8) for n, p in tensors if "weight" in n)
    for sent, reply in zip(so_far.sent[3], so_far.replies[3], strict=True):
        assert (sent.nbytes(), reply.message.nbytes()) == (4 * parameters, 4 * parameters + bits)
        assert abs(bits - parameters / 8) < 10
    client = bed.context.clients[0]
    first = method.work(method.setup(), Assignment(client=client))
    later = method.work(so_far.state, Assignment(client=client))
    assert (
        (first.bytes_down, first.bytes_up)
        == (later.bytes_down, later.bytes_up)
        == (4 * parameters, 4 * parameters + bits)
    )
    second_optimizer = {"adam": 2}.get(optimizer.name, int(bool(optimizer.momentum)))
    assert (first.steps, first.held_models, first.parameter_passes) == (6, 3, 0)
    assert (later.steps, later.held_models, later.parameter_passes) == (12, 3 + second_optimizer, 1)
    assert method.heaviest(method.setup(), client) == later
    assert select(bed, rate=0).heaviest(method.setup(), client).steps == 6
    foreseen = method.setup()
    arrival = Arrival(assignment=Assignment(client=client), sent=Bundle(), message=Bundle())
    for _ in range(2):
        foreseen = method.foresee(foreseen, [arrival])
    assert method.work(foreseen, Assignment(client=client)) == later  # forecasts go on with both sides


# over time


def test_an_own_entry_outlasts_a_long_absence_and_a_client_that_never_came_has_the_initial_model() -> None:
    bed = bed_on("depth")
    method = select(bed, every=1, rate=1, limit=1)
    so_far = run(bed, method, 5, sampled=[[0, 1], [1], [1], [1], [0]])
    targets = {t.client: t for t in method.targets(so_far.state) if t.local}
    assert equal(tensors_of(bed, targets[2], so_far), bed.context.initial("three"))
    assert equal(tensors_of(bed, targets[0], so_far), so_far.kept[0].under("model/"))
    job = bed.job(bed.context.clients[0], so_far.sent[4][0], frozen(so_far.replies[0][0].keep), 5, most_steps=0)
    start = method.client(job).message.tensors
    assert torch.equal(start["fc.weight"], so_far.replies[0][0].message.tensors["fc.weight"])
    assert torch.equal(start["fc.bias"], so_far.sent[4][0].tensors["fc.bias"])


def test_a_client_that_steps_down_begins_anew() -> None:
    bed = Bed(ToyDepth(None), ["three", "two"])
    method = select(bed, every=1)
    so_far = run(bed, method, 2)
    clients = [Client(0, "one", 24), bed.context.clients[1]]
    assert method.step_down(so_far.kept.pop(0), clients[0]) is None
    method.reassign(clients)
    tasks = [method.work(so_far.state, Assignment(client=c)).steps for c in clients]
    assert tasks == [3, 6]
    advance(bed, method, so_far, clients, round_=3)
    assert so_far.kept[0].values["turns"] == 1
    advance(bed, method, so_far, clients, round_=4)  # and goes on with masks of its own


def test_a_run_goes_on_from_its_state_and_what_clients_keep() -> None:
    bed = bed_on("depth")
    whole, so_far = run(bed, select(bed, every=2), 5), run(bed, select(bed, every=2), 3)
    resumed = Run(Bundle(dict(so_far.state.tensors), dict(so_far.state.values)), kept=so_far.kept, task=so_far.task)
    for round_ in (4, 5):
        advance(bed, select(bed, every=2), resumed, bed.context.clients, round_=round_)
    assert same(resumed.state, whole.state)
    assert all(same(resumed.kept[n], whole.kept[n]) for n in range(3))


def test_policies_and_the_series_of_the_paper() -> None:
    method = select(bed_on("depth"))
    assert (method.needs.policies, method.needs.reported) == (ALL_POLICIES, "personal-own")
    assert method.needs.initial_on_client


def test_it_learns() -> None:
    bed = Bed(ToyDepth(None), ["one", "three"], samples=60)
    method = select(bed, every=2)
    assert accuracy(bed, method, run(bed, method, 6)) > 0.6
