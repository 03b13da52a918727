"""Checks, without Ray, how the caps of a client that ran on several nodes are labelled, and what is sent twice."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from fleetbed.emulator.limits.plan import Cap
from fleetbed.emulator.remote import fleet, pool
from fleetbed.emulator.remote.parcels import MOST_REMEMBERED, STORE_FROM_BYTES, Parcels

ENFORCED = Cap("memory", "enforced", "cgroup v2", 100.0, 100.0, "bytes")
FALLBACK = Cap("memory", "enforced", "RLIMIT_DATA", 100.0, 100.0, "bytes", "no cgroup is writable")
NONE = Cap("memory", "unavailable", "nothing", 100.0, None, "bytes", "no limit")


def test_a_cap_that_is_the_same_on_all_nodes_has_its_own_label() -> None:
    assert fleet._merged(fleet._merged((), (ENFORCED,)), (ENFORCED,)) == (ENFORCED,)


def test_a_cap_that_differs_is_labelled_with_all_that_it_was() -> None:
    both = fleet._merged((ENFORCED,), (FALLBACK,))
    (cap,) = both
    assert cap.backend == "cgroup v2 or RLIMIT_DATA"
    assert cap.note == "cgroup v2 on some nodes, RLIMIT_DATA on others; no cgroup is writable"
    assert fleet._merged(both, (ENFORCED,)) == both
    assert fleet._merged(both, (FALLBACK,)) == both


@pytest.mark.parametrize("caps", [(ENFORCED, NONE), (NONE, ENFORCED)])
def test_a_cap_that_some_node_lacks_is_not_enforced(caps: tuple[Cap, Cap]) -> None:
    (cap,) = fleet._merged((caps[0],), (caps[1],))
    assert cap.status == "unavailable"
    assert cap.got is None


def test_large_content_is_put_into_the_store_once(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[bytes] = []
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(put=lambda content: put.append(content) or len(put)))
    parcels = Parcels()
    small, models = b"a" * (STORE_FROM_BYTES - 1), [bytes([n]) * STORE_FROM_BYTES for n in range(MOST_REMEMBERED)]
    assert parcels.of(small) is small
    assert [parcels.of(model) for _ in range(2) for model in models] == 2 * list(range(1, MOST_REMEMBERED + 1))
    assert put == models


def test_a_node_gets_one_order_for_each_core_and_as_many_ahead() -> None:
    member = pool.FleetNode(SimpleNamespace(cores=3), None, orders={1: None})  # type: ignore[arg-type,dict-item]
    assert (member.room(ahead=False), member.room(ahead=True)) == (2, 5)
