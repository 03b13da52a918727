"""LG-FedAvg: the head is averaged, the representation never leaves its client."""

from __future__ import annotations

import pytest
import torch
from algorithm_harness import Bed, ToyDepth, ToyDropout, accuracy, advance, begin_anew, equal, run, same, tensors_of

from fleetbed.emulator.method.algorithm import ALL_POLICIES, Assignment, Client
from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.profiles.errors import BadInput

HEAD = {"fc.weight", "fc.bias"}


def test_bytes_are_those_of_the_head() -> None:
    """5 features and a bias for each of 3 classes."""
    bed = Bed(ToyDepth(None), ["one", "three"])
    method = bed.method("lgfedavg")
    so_far = run(bed, method, 2)
    for client, sent, reply in zip(bed.context.clients, so_far.sent[1], so_far.replies[1], strict=True):
        assert sent.nbytes() == reply.message.nbytes() == 4 * 3 * (5 + 1)
        work = method.work(so_far.state, Assignment(client=client))
        assert (work.bytes_down, work.bytes_up, work.held_models) == (72, 72, 1)
    assert so_far.state.tensors.keys() == HEAD
    assert not HEAD & so_far.kept[0].under("model/").keys()


def test_of_one_client_it_is_heteroavg() -> None:
    bed = Bed(ToyDropout(None), ["two"])
    so_far, wanted = run(bed, bed.method("lgfedavg"), 3), run(bed, bed.method("heteroavg"), 3).state.tensors
    assert equal({**so_far.kept[0].under("model/"), **so_far.state.tensors}, wanted)


def test_the_head_is_the_mean_over_unequal_models() -> None:
    bed = Bed(ToyDepth(None), ["one", "three"])
    so_far = run(bed, bed.method("lgfedavg"))
    first, second = (reply.message.tensors["fc.weight"] for reply in so_far.replies[0])
    torch.testing.assert_close(so_far.state.tensors["fc.weight"], (first + second) / 2)


def test_representations_stay_apart_with_their_statistics() -> None:
    bed = Bed(ToyDepth(None), ["two", "two", "two"])
    method = bed.method("lgfedavg")
    so_far = run(bed, method, 3, sampled=[[0, 1], [1], [1]])
    own = [so_far.kept[n].under("model/") for n in (0, 1)]
    for name in ("stem.1.weight", "stem.2.running_mean"):
        assert not torch.equal(own[0][name], own[1][name])
    assert (int(own[0]["stem.2.num_batches_tracked"]), int(own[1]["stem.2.num_batches_tracked"])) == (3, 9)
    targets = {t.client: t for t in method.targets(so_far.state) if t.local}
    away, never = (tensors_of(bed, targets[n], so_far) for n in (0, 2))
    assert equal(away, {**own[0], **so_far.state.tensors})  # its representation of the first round, today's head
    assert equal(never, {**bed.context.initial("two"), **so_far.state.tensors})


def test_a_client_that_steps_down_begins_with_the_initial_representation() -> None:
    bed = Bed(ToyDepth(None), ["one", "three"])
    method = bed.method("lgfedavg")
    so_far = run(bed, method, 2)
    clients = begin_anew(bed, method, so_far, Client(1, "one", 24))
    advance(bed, method, so_far, clients, round_=3)
    start = {**bed.context.initial("one"), **so_far.sent[-1][1].tensors}
    assert torch.equal(start["stem.1.weight"], bed.context.initial("one")["stem.1.weight"])
    assert so_far.kept[1].under("model/").keys() == bed.context.initial("one").keys() - HEAD


def test_every_policy_and_the_series_of_the_paper() -> None:
    needs = Bed(ToyDepth(None), ["one"]).method("lgfedavg").needs
    assert (needs.policies, needs.reported, needs.initial_on_client) == (ALL_POLICIES, "personal-own", True)


def test_inco_has_nothing_to_cross() -> None:
    spec = InputSpec((1, 32, 32), 3)
    bed = Bed(family("resnet-stage", {"base_width": 4}), ["resnet18", "resnet26"], spec=spec)
    with pytest.raises(BadInput, match=r"base of inco is lgfedavg.* would change nothing: choose another base"):
        bed.method("inco", base="lgfedavg").check()


def test_it_learns_and_repeats() -> None:
    bed = Bed(ToyDepth(None), ["one", "three"], samples=60)
    method = bed.method("lgfedavg")
    so_far = run(bed, method, 6)
    assert same(so_far.state, run(bed, method, 6).state)
    assert accuracy(bed, method, so_far) > accuracy(bed, method, run(bed, method, 1)) + 0.1
