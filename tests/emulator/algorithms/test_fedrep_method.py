"""FedRep: first the head on a frozen representation, then the representation under a frozen head."""

from __future__ import annotations

import pytest
import torch
from algorithm_harness import ADAM, Bed, ToyDepth, ToyDropout, accuracy, advance, equal, run, same, tensors_of
from msgspec.structs import replace
from torch.nn import functional as F

from fleetbed.emulator.algorithms.fedrep import head_step, train_only
from fleetbed.emulator.method.algorithm import ALL_POLICIES, Algorithm, Assignment, Client, Reply
from fleetbed.emulator.method.local_training import cross_entropy_step, train
from fleetbed.emulator.method.optimizers import make_optimizer
from fleetbed.models.base import InputSpec, Net, Tensors
from fleetbed.models.work import Pass
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Optimizer, Training

DECAYED = Optimizer(lr=0.05, momentum=0.9, weight_decay=0.1)
OPTIMIZERS = [DECAYED, replace(ADAM, weight_decay=0.1)]
HEAD = {"fc.weight", "fc.bias"}


def bed_of(*variants: str, optimizer: Optimizer = DECAYED, samples: int = 24) -> Bed:
    training = Training(batch=8, epochs=4, max_steps=1, optimizer=optimizer)
    return Bed(ToyDropout(None), variants, samples=samples, training=training)


def turn(bed: Bed, method: Algorithm, most_steps: int | None = None) -> tuple[Reply, int]:
    """The first task of the first client, and how many steps it made."""
    client = bed.context.clients[0]
    job = bed.job(client, method.send(method.setup(), Assignment(client=client)), most_steps=most_steps)
    torch.manual_seed(job.seed("model"))
    return method.client(job), job.steps


def halves(net: Net) -> tuple[Tensors, Tensors]:
    """Copies of the head and of the representation with its buffers."""
    tensors = {name: t.clone() for name, t in net.state_dict().items()}
    return {n: t for n, t in tensors.items() if n in HEAD}, {n: t for n, t in tensors.items() if n not in HEAD}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["momentum and decay", "adam"])
def test_what_is_frozen_stays_bit_for_bit(optimizer: Optimizer) -> None:
    bed = bed_of("two", optimizer=optimizer)
    client = bed.context.clients[0]
    net = bed.job(client, bed.method("fedrep").setup()).model(bed.context.initial("two"))
    for round_ in range(2):  # the second time there are gradients left of the first
        head, representation = halves(net)
        train_only(net, head=True)
        train(bed.job(client, bed.method("fedrep").setup()), net, head_step(net), epochs=3, phase="head")
        fitted, untouched = halves(net)
        assert equal(untouched, representation), round_
        assert not torch.equal(fitted["fc.weight"], head["fc.weight"])
        train_only(net, head=False)
        train(bed.job(client, bed.method("fedrep").setup()), net, cross_entropy_step(net), epochs=1)
        after, moved = halves(net)
        assert equal(after, fitted), round_
        assert all(not torch.equal(moved[name], representation[name]) for name in moved)


def test_one_optimiser_for_both_phases_would_move_the_frozen_head() -> None:
    """Why there is one for each: momentum and decay go on where gradients are zero."""
    net = bed_of("two").family.build("two", InputSpec((1, 4, 4), 3))
    both = make_optimizer(DECAYED, net)
    x, y = torch.randn(8, 1, 4, 4), torch.arange(8) % 3
    for _ in range(2):
        F.cross_entropy(net(x), y).backward()
        both.step()
        net.fc.weight.grad.zero_()
        before = net.fc.weight.detach().clone()
        both.step()
        assert not torch.equal(net.fc.weight, before)


def test_both_phases_by_hand() -> None:
    """Against torch's own optimiser and the job's batches."""
    bed = Bed(ToyDepth(None), ["two"], training=Training(batch=8, optimizer=DECAYED))
    method = bed.method("fedrep", head_epochs=2, rep_epochs=1)
    reply, steps = turn(bed, method)
    assert steps == 9
    net = bed.family.build("two", bed.spec).train()
    net.load_state_dict(bed.context.initial("two"))
    job = bed.job(bed.context.clients[0], method.setup())
    sgd = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
    head = torch.optim.SGD(net.fc.parameters(), **sgd)
    buffers = {name: b.clone() for name, b in net.named_buffers()}
    for x, y in job.batches(epochs=2, phase="head"):
        head.zero_grad()
        F.cross_entropy(net(x), y).backward()
        head.step()
    net.load_state_dict(buffers, strict=False)  # the head phase leaves running statistics alone
    below = torch.optim.SGD([p for n, p in net.named_parameters() if n not in HEAD], **sgd)
    for x, y in job.batches(epochs=1):
        below.zero_grad()
        F.cross_entropy(net(x), y).backward()
        below.step()
    found = {**reply.message.tensors, **reply.keep.under("model/")}
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


def test_the_phases_see_different_orders() -> None:
    bed = bed_of("two")
    job = bed.job(bed.context.clients[0], bed.method("fedrep").setup())
    orders = [[y.tolist() for _, y in job.batches(epochs=1, phase=phase)] for phase in ("head", "")]
    assert orders[0] != orders[1]


def test_without_epochs_for_it_the_representation_never_changes() -> None:
    bed = bed_of("one", "three")
    method = bed.method("fedrep", rep_epochs=0, head_epochs=2)
    so_far = run(bed, method, 3)
    assert same(so_far.state, method.setup())
    assert not torch.equal(so_far.kept[0].tensors["model/fc.weight"], bed.context.initial("one")["fc.weight"])


def test_without_epochs_for_it_the_head_never_changes() -> None:
    bed = bed_of("one", "three")
    so_far = run(bed, bed.method("fedrep", head_epochs=0), 2)
    assert torch.equal(so_far.kept[1].tensors["model/fc.weight"], bed.context.initial("three")["fc.weight"])
    with pytest.raises(BadInput, match="both 0"):
        bed.method("fedrep", head_epochs=0, rep_epochs=0).check()


def test_no_byte_of_a_head_travels() -> None:
    bed = bed_of("one", "three")
    method, plain = bed.method("fedrep", head_epochs=2), bed.method("heteroavg")
    so_far = run(bed, method, 2)
    for client, sent, reply in zip(bed.context.clients, so_far.sent[1], so_far.replies[1], strict=True):
        assert not HEAD & (sent.tensors.keys() | reply.message.tensors.keys())
        whole = plain.send(plain.setup(), Assignment(client=client)).nbytes()
        work = method.work(so_far.state, Assignment(client=client))
        assert sent.nbytes() == reply.message.nbytes() == work.bytes_down == work.bytes_up == whole - 4 * 3 * (5 + 1)
    assert so_far.kept[0].tensors.keys() == {"model/fc.weight", "model/fc.bias"}


def test_the_declared_work_is_two_phases() -> None:
    bed = bed_of("two", samples=27)  # 3 batches of 8; max_steps is for training by `training.epochs`
    method = bed.method("fedrep")
    work = method.work(method.setup(), Assignment(client=bed.context.clients[0]))
    (head,) = work.earlier
    assert (head.steps, head.batch, head.trains, head.each_step) == (
        30,
        8,
        "classifier",
        (Pass("forward", "features", 8),),
    )
    assert (work.steps, work.batch, work.trains, work.each_step, work.once) == (3, 8, "all", (), ())
    assert (work.held_models, work.held_values, work.parameter_passes) == (1, 0, 0)


def test_steps_take_the_place_of_the_epochs_of_each_phase() -> None:
    bed = bed_of("two", samples=27)
    method = bed.method("fedrep", steps=2)
    work = method.work(method.setup(), Assignment(client=bed.context.clients[0]))
    assert ([phase.steps for phase in work.earlier], work.steps) == ([2], 2)
    assert turn(bed, method)[1] == 4
    assert turn(bed, bed.method("fedrep", head_epochs=0, steps=2))[1] == 2


@pytest.mark.parametrize(("most", "head", "below"), [(4, True, False), (6, True, False), (8, True, True)])
def test_partial_work_ends_in_either_phase(most: int, head: bool, below: bool) -> None:
    """6 steps for the head, then 3."""
    bed = bed_of("two")
    method = bed.method("fedrep", head_epochs=2)
    reply, steps = turn(bed, method, most)
    assert steps == most
    initial = bed.context.initial("two")
    assert torch.equal(reply.keep.tensors["model/fc.weight"], initial["fc.weight"]) is not head
    changed = [n for n, t in reply.message.tensors.items() if not torch.equal(t, initial[n])]
    assert bool(changed) is below
    assert "loss" in reply.metrics
    client = bed.context.clients[0]
    cut = method.work(method.setup(), Assignment(client=client)).cut(most)
    assert (cut.earlier[0].steps, cut.steps) == (min(6, most), max(0, most - 6))


def test_a_client_begins_with_the_initial_head_and_one_that_was_away_has_its_own() -> None:
    bed = bed_of("one", "two", "three")
    method = bed.method("fedrep", head_epochs=2)
    so_far = run(bed, method, 4, sampled=[[0], [1], [1], [1]])
    targets = {t.client: t for t in method.targets(so_far.state) if t.local}
    never = tensors_of(bed, targets[2], so_far)
    assert torch.equal(never["fc.weight"], bed.context.initial("three")["fc.weight"])
    away = tensors_of(bed, targets[0], so_far)
    assert equal({n: away[n] for n in HEAD}, so_far.replies[0][0].keep.under("model/"))
    assert torch.equal(away["stem.1.weight"], so_far.state.tensors["stem.1.weight"])
    assert not torch.equal(away["stem.1.weight"], so_far.replies[0][0].message.tensors["stem.1.weight"])


def test_a_client_that_steps_down_goes_on_with_its_head() -> None:
    bed = bed_of("one", "three")
    method = bed.method("fedrep", head_epochs=0)
    so_far = run(bed, bed.method("fedrep", head_epochs=2), 2)
    smaller = Client(1, "two", 24)
    kept = method.step_down(so_far.kept[1], smaller)
    assert kept is not None
    so_far.kept[1] = kept
    method.reassign([bed.context.clients[0], smaller])
    advance(bed, method, so_far, [bed.context.clients[0], smaller], round_=3)
    assert same(so_far.kept[1], kept)  # no epochs for the head: it is what it was


def test_every_policy_and_the_series_of_the_paper() -> None:
    method = bed_of("two").method("fedrep")
    assert (method.needs.policies, method.needs.reported) == (ALL_POLICIES, "personal-own")
    assert {(t.client, t.local) for t in method.targets(method.setup())} == {(0, True), (0, False)}


def test_it_learns_and_repeats() -> None:
    bed = Bed(ToyDepth(None), ["one", "three"], samples=60)
    method = bed.method("fedrep", head_epochs=2)
    so_far = run(bed, method, 5)
    assert same(so_far.state, run(bed, method, 5).state)
    assert accuracy(bed, method, so_far) > 0.6
