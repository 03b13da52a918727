"""Methods are compared on equal terms: they start alike, and what one averaging method can be told, all can."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from algorithm_harness import Bed, ToyDepth, ToyWidth, equal, run, tensors_of

from fleetbed.models.base import Family, gather

AVERAGING = ("heteroavg", "heteroprox", "fedavg", "fedprox", "fedin", "scaffold", "fednova", "moon", "inclusivefl")
STARTS = (*AVERAGING, "private", "fedhe", "fedhenn", "fd")
PERSONAL = ("fedper", "fedrep", "lgfedavg", "fedproto", "fedfomo", "fedselect", "feddpa")


@pytest.mark.parametrize("name", STARTS + PERSONAL)
@pytest.mark.parametrize(
    ("family", "variants"),
    [(ToyDepth, ["one", "two", "three"]), (ToyDepth, ["one", "two"]), (ToyWidth, ["half", "full"])],
)
def test_all_methods_start_alike(name: str, family: type[Family], variants: list[str]) -> None:
    """Where tensors are shared each variant is a part of the largest one's draw, in every method."""
    if name in ("fedin", "fedproto", "inclusivefl") and family is ToyWidth:
        pytest.skip("its features, or blocks, differ")
    bed = Bed(family(None), variants, public=20)
    method = bed.method(name, **({"rad": 10} if name == "fedhenn" else {}))
    torch.manual_seed(bed.seed)
    whole = bed.family.build(bed.family.variants[-1], bed.spec).state_dict()
    before = run(bed, method, 0)
    for target in method.targets(before.state):
        cut = gather(whole, bed.family.index(target.variant, bed.spec))
        assert equal(tensors_of(bed, target, before), cut)
    so_far = run(bed, method, 1)
    for client, sent in zip(bed.context.clients, so_far.sent[0], strict=True):
        cut = gather(whole, bed.family.index(client.variant, bed.spec))
        assert all(torch.equal(t, cut[n]) for n, t in sent.tensors.items() if "/" not in n)


def test_a_narrow_variant_that_is_alone_is_drawn_for_itself() -> None:
    bed = Bed(ToyWidth(None), ["half"])
    torch.manual_seed(bed.seed)
    own = dict(bed.family.build("half", bed.spec).state_dict())
    assert equal(replace(bed.context, alone=True).initial("half"), own)
    assert not equal(bed.context.initial("half"), own)
    drawn = bed.context.with_initial()
    assert drawn.drawn is not None
    assert equal(drawn.initial("half"), bed.context.initial("half"))


@pytest.mark.parametrize("name", [*AVERAGING, "fedhenn_homo", "fedper", "fedrep", "lgfedavg", "fedselect", "feddpa"])
def test_every_averaging_method_can_scale_its_mean_delta(name: str) -> None:
    bed = Bed(ToyDepth(None), ["two", "two"], public=20)
    params = {"rad": 10} if name == "fedhenn_homo" else {}
    first = bed.method(name, **params).setup().tensors
    plain = run(bed, bed.method(name, **params)).state.tensors
    scaled = run(bed, bed.method(name, delta_scale=0.25, **params)).state.tensors
    for n, start in first.items():
        if n.startswith("variate/"):
            assert torch.equal(scaled[n], plain[n])  # of the weights alone
        elif start.is_floating_point():
            torch.testing.assert_close(scaled[n] - start, 0.25 * (plain[n] - start), rtol=1e-3, atol=1e-6)
        else:
            assert torch.equal(scaled[n], plain[n])


@pytest.mark.parametrize(("weighting", "shares"), [(None, (1, 3)), ("samples", (1, 3)), ("clients", (1, 1))])
def test_fedin_in_one_architecture_counts_clients_as_it_is_told(weighting: str | None, shares: tuple[int, int]) -> None:
    bed = Bed(ToyDepth(None), ["two", "two"], samples=[8, 24])
    so_far = run(bed, bed.method("fedin", aggregation="same-architecture", weighting=weighting))
    a, b = (reply.message.tensors["fc.weight"].double() for reply in so_far.replies[0])
    mean = (shares[0] * a + shares[1] * b) / sum(shares)
    torch.testing.assert_close(so_far.state.tensors["two/fc.weight"].double(), mean, rtol=1e-5, atol=1e-7)
