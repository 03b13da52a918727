"""Checks on which node a run is placed, by hand-made nodes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetbed import node_pool
from fleetbed.emulator.cluster.nodes import SAME, ClusterNode
from fleetbed.emulator.cluster.placed_run import sees
from fleetbed.node_pool import SERVER_BYTES, NodePool, PoolNode, RunNeed, need_of
from fleetbed.profiles.errors import HostCannot
from fleetbed.profiles.experiment import runs
from fleetbed.profiles.resolve import load_experiment

GIB = 2**30
SMALL = RunNeed(memory_bytes=GIB, alone=False)
ALONE = RunNeed(memory_bytes=GIB, alone=True)


def a_pool(**nodes: tuple[int, float, str]) -> NodePool:
    """A pool with nodes of so many cores, so many GiB of memory, and this CPU type."""
    pool = NodePool.__new__(NodePool)  # it asks a cluster otherwise
    pool.places = {
        name: PoolNode(ClusterNode(name, name, cpu, cores, int(gib * GIB), dict.fromkeys(SAME, "1")))
        for name, (cores, gib, cpu) in nodes.items()
    }
    return pool


def placed(pool: NodePool, *needs: RunNeed, processor: str | None = None) -> list[str | None]:
    """The nodes that these runs get, one after another."""
    found = []
    for need in needs:
        place = pool.choose(need, processor)
        found.append(None if place is None else place.node.id)
        if place is not None:
            place.take(need)
    return found


def test_a_node_gets_as_many_runs_as_it_has_cores_and_memory() -> None:
    pool = a_pool(cores=(3, 64, "A"), memory=(8, 2, "A"))
    names = placed(pool, *[SMALL] * 6)
    assert sorted(map(str, names)) == ["None", *["cores"] * 3, *["memory"] * 2]


def test_a_run_that_paces_itself_gets_a_node_to_itself() -> None:
    pool = a_pool(one=(2, 64, "A"), two=(2, 64, "A"))
    assert placed(pool, ALONE, SMALL, ALONE) == ["one", "two", None]
    pool.places["two"].give_back(SMALL)
    assert placed(pool, ALONE, SMALL) == ["two", None]


def test_a_head_without_cores_gets_no_run() -> None:
    assert placed(a_pool(head=(0, 64, "A")), SMALL, ALONE) == [None, None]


def test_a_run_continues_on_the_processor_on_which_it_was_begun() -> None:
    pool = a_pool(large=(8, 64, "A"), small=(1, 64, "B"))
    assert placed(pool, SMALL, SMALL, processor="B") == ["small", None]
    assert pool.has("B")
    assert not pool.has("C")


def test_a_node_that_may_be_lost_gets_no_run() -> None:
    pool = a_pool(one=(2, 64, "A"))
    pool.places["one"].doubtful = True
    assert placed(pool, SMALL) == [None]


def known(pool: NodePool, **others: float) -> dict[str, Any]:
    """What Ray knows of the nodes of the pool, and of others with so many cores."""
    cores = {name: float(place.node.cores) for name, place in pool.places.items()} | others
    return {name: {"NodeID": name, "Resources": {"CPU": number} if number else {}} for name, number in cores.items()}


def test_a_node_that_joins_is_asked_once_unless_it_has_no_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, asked = a_pool(one=(2, 64, "A")), []
    pool._known, pool._asked = {"one"}, {}
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setattr(pool, "_ask", asked.append)
    monkeypatch.setattr(node_pool, "alive", lambda: known(pool, head=0, two=2))
    for _ in range(2):
        pool._looked_s = -node_pool.LOOK_S - 1
        pool.refresh()
    assert asked == ["two"]


@pytest.mark.parametrize(("cores", "places"), [({"head": 0.0, "full": 1.0}, {"full"}), ({"head": 0.0}, {"head"})])
def test_a_node_that_starts_no_actor_describes_itself_in_another_way(
    cores: dict[str, float], places: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = a_pool()
    starting = SimpleNamespace(describe=SimpleNamespace(remote=lambda: "no answer"))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(wait=lambda asked, **_: ([], asked)))
    monkeypatch.setattr(pool, "_new_actor", lambda *_: starting)
    monkeypatch.setattr(node_pool, "alive", lambda: known(pool, **cores))
    described: list[set[str]] = []
    monkeypatch.setattr(node_pool, "nodes", lambda only: described.append(only) or [])
    assert pool._first_places(SMALL) == {}
    assert described == [{"head", *places}]


def test_runs_for_which_no_node_is_large_enough_are_refused() -> None:
    with pytest.raises(HostCannot, match=r"^a run of this study needs a node with 1 free core and 3\.0 GB of memory"):
        a_pool(one=(2, 2.5, "A")).check([SMALL, RunNeed(3 * GIB, alone=False)])


@pytest.mark.parametrize(
    ("source", "processes", "alone", "clients"),
    [("modelled", "inline", False, 0), ("modelled", "resident", False, 8), ("enforced", "on-demand", True, 0)],
)
def test_what_a_run_needs(source: str, processes: str, alone: bool, clients: int) -> None:
    experiment = load_experiment("demo", (), (f"timing.source={source}", f"processes={processes}"))
    need = need_of(runs(experiment)[0], ())
    assert need.alone is alone
    assert need.memory_bytes == SERVER_BYTES + clients * 12 * 2**20
    assert need.cores == 1


def test_the_study_folder_is_only_shared_with_nodes_that_read_its_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("right")
    assert sees(tmp_path / "token", "right")
    assert not sees(tmp_path / "token", "wrong")
    assert not sees(tmp_path / "missing", "right")
