"""FedPer: the representation is averaged layer-wise, the head never leaves its client."""

from __future__ import annotations

import pytest
import torch
from algorithm_harness import Bed, ToyDepth, ToyDropout, ToyWidth, accuracy, advance, equal, run, same, tensors_of

from fleetbed.emulator.bases.averaging import ALL_SECTIONS
from fleetbed.emulator.method.algorithm import ALL_POLICIES, Assignment, Client

HEAD = {"fc.weight", "fc.bias"}


def depths(samples: int | list[int] = 24) -> Bed:
    return Bed(ToyDepth(None), ["one", "two", "three"], samples=samples)


def test_bytes_are_those_of_the_representation() -> None:
    bed = depths()
    method = bed.method("fedper")
    so_far = run(bed, method, 2)
    for client, sent, reply in zip(bed.context.clients, so_far.sent[1], so_far.replies[1], strict=True):
        net = bed.family.build(client.variant, bed.spec)
        head = 4 * sum(p.numel() for p in net.fc.parameters())
        whole = sum(t.numel() * t.element_size() for t in net.state_dict().values())
        assert sent.nbytes() == reply.message.nbytes() == whole - head
        work = method.work(so_far.state, Assignment(client=client))
        assert (work.bytes_down, work.bytes_up, work.held_models) == (whole - head, whole - head, 1)
        assert not HEAD & (sent.tensors.keys() | reply.message.tensors.keys())
    assert not HEAD & so_far.state.tensors.keys()


def test_with_all_sections_it_would_be_heteroavg() -> None:
    bed = Bed(ToyDropout(None), ["one", "two", "three"])
    method = bed.method("fedper")
    method.sections = ALL_SECTIONS
    assert same(run(bed, method, 3).state, run(bed, bed.method("heteroavg"), 3).state)
    assert not run(bed, method).kept


def test_of_one_client_it_is_heteroavg() -> None:
    """The head that it kept is then the one that the server would have sent back."""
    bed = Bed(ToyDropout(None), ["two"])
    so_far, wanted = run(bed, bed.method("fedper"), 3), run(bed, bed.method("heteroavg"), 3).state.tensors
    assert equal({**so_far.state.tensors, **so_far.kept[0].under("model/")}, wanted)


def test_the_representation_is_the_mean_and_heads_differ() -> None:
    bed = Bed(ToyDepth(None), ["two", "two"], samples=[8, 24])
    so_far = run(bed, bed.method("fedper"))
    first, second = (reply.message.tensors["stem.1.weight"] for reply in so_far.replies[0])
    torch.testing.assert_close(so_far.state.tensors["stem.1.weight"], (first + second) / 2)
    by_samples = run(bed, bed.method("fedper", weighting="samples")).state.tensors["stem.1.weight"]
    torch.testing.assert_close(by_samples, (first + 3 * second) / 4)
    heads = [so_far.kept[n].under("model/") for n in (0, 1)]
    assert heads[0].keys() == HEAD
    assert not torch.equal(heads[0]["fc.weight"], heads[1]["fc.weight"])


def test_a_client_begins_with_the_initial_head_and_goes_on_with_its_own() -> None:
    """Also one that was away for long, whatever the others did meanwhile."""
    bed = depths()
    method = bed.method("fedper")
    so_far = run(bed, method, 4, sampled=[[0], [1], [1], [1]])
    assert 2 not in so_far.kept
    own = {t.client: t for t in method.targets(so_far.state) if t.local}
    never = tensors_of(bed, own[2], so_far)
    assert torch.equal(never["fc.weight"], bed.context.initial("three")["fc.weight"])
    assert torch.equal(never["stem.1.weight"], so_far.state.tensors["stem.1.weight"])
    away = so_far.kept[0]
    advance(bed, method, so_far, [bed.context.clients[0]], round_=5)
    again = method.client(bed.job(bed.context.clients[0], so_far.sent[-1][0], away, so_far.task - 1, round_=5))
    assert same(again.keep, so_far.kept[0])  # what it trained from is what it had kept
    assert not same(away, so_far.kept[0])


def test_it_is_shown_as_in_the_paper_and_offered_on_the_whole_test_set() -> None:
    bed = depths()
    method = bed.method("fedper")
    assert method.needs.reported == "personal-own"
    targets = method.targets(method.setup())
    assert [(t.client, t.local) for t in targets] == [(n, local) for local in (True, False) for n in range(3)]
    assert len({t.name for t in targets}) == 6


def test_a_client_that_steps_down_keeps_a_head_that_fits() -> None:
    bed = depths()
    method = bed.method("fedper")
    so_far = run(bed, method, 2)
    smaller = Client(2, "one", 24)
    kept = method.step_down(so_far.kept[2], smaller)
    assert kept is not None
    assert equal(kept.under("model/"), so_far.kept[2].under("model/"))
    so_far.kept[2] = kept
    method.reassign([*bed.context.clients[:2], smaller])
    advance(bed, method, so_far, [*bed.context.clients[:2], smaller], round_=3)
    assert not same(so_far.kept[2], kept)
    widths = Bed(ToyWidth(None), ["half", "full"])
    wide = run(widths, widths.method("fedper"))
    assert widths.method("fedper").step_down(wide.kept[1], Client(1, "half", 24)) is None


def test_a_stale_result_counts_by_the_weight_of_its_policy() -> None:
    bed = Bed(ToyDepth(None), ["two"])
    method = bed.method("fedper")
    before = method.setup().tensors["stem.1.weight"]
    full, half = (run(bed, method, weight=weight).state.tensors["stem.1.weight"] for weight in (1.0, 0.5))
    torch.testing.assert_close(half - before, (full - before) / 2, rtol=1e-3, atol=1e-6)
    assert method.needs.policies == ALL_POLICIES


@pytest.mark.parametrize("family", [ToyDepth, ToyWidth])
def test_it_learns_and_repeats(family: type) -> None:
    variants = family(None).variants[-2:]
    bed = Bed(family(None), variants, samples=60)
    method = bed.method("fedper")
    so_far = run(bed, method, 8)
    assert same(so_far.state, run(bed, method, 8).state)
    assert accuracy(bed, method, so_far) > accuracy(bed, method, run(bed, method, 1)) + 0.1
