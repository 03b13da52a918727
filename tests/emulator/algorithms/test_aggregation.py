"""`aggregation`, which every averaging method has: over all that hold a tensor, or over those of one variant."""

from __future__ import annotations

import pytest
from algorithm_harness import Bed, ToyDepth, equal, run

METHODS = ["heteroavg", "heteroprox", "scaffold", "fednova", "moon"]


@pytest.mark.parametrize("name", METHODS)
def test_with_one_variant_both_are_the_same(name: str) -> None:
    bed = Bed(ToyDepth(None), ["two"] * 3, samples=[16, 24, 40])
    layerwise = run(bed, bed.method(name), 3).state.tensors
    apart = run(bed, bed.method(name, aggregation="same-architecture"), 3).state

    def plain(place: str) -> str:
        return place.replace("two/", "")

    assert equal({plain(place): t for place, t in apart.tensors.items()}, layerwise)


@pytest.mark.parametrize("name", METHODS)
def test_variants_do_not_learn_from_each_other(name: str) -> None:
    """What the second group does changes nothing for the first, whose tasks have the same numbers in both runs."""
    both = Bed(ToyDepth(None), ["one", "one", "three", "three"])
    method = both.method(name, aggregation="same-architecture")
    together = run(both, method).state
    alone = run(both, method, sampled=[[0, 1]]).state
    assert equal(together.under("one/"), alone.under("one/"))
    assert not equal(together.under("three/"), alone.under("three/"))


def test_inclusivefl_among_equals_shares_nothing_but_the_momentum() -> None:
    bed = Bed(ToyDepth(None), ["one", "two", "three"])
    method = bed.method("inclusivefl", aggregation="same-architecture")
    assert all(name.startswith("own/") for name in method.setup().tensors)


def test_the_mean_over_equals_is_fedavg() -> None:
    bed = Bed(ToyDepth(None), ["one", "two", "two"], samples=[16, 24, 40])
    apart = run(bed, bed.method("heteroavg", aggregation="same-architecture", weighting="samples"), 2)
    assert equal(apart.state.tensors, run(bed, bed.method("fedavg"), 2).state.tensors)
