"""The fallback, in forked children: a limit on data cannot be taken back."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fleetbed.emulator.limits import Group, LimitPlan, best_limits
from fleetbed.emulator.limits.rlimit import read_status

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
CAP = 24 * 2**20
PIECE = 64 * 1024


def in_child(group: Group, body: Callable[[], object]) -> dict[str, object]:
    """What `body` gives in a fork that has joined its group."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            group.join()
            os.write(writer, msgspec.json.encode(body()))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read()
    assert os.waitpid(pid, 0)[1] == 0
    found: dict[str, object] = msgspec.json.decode(text)
    return found


@pytest.fixture
def group(bare_proc: Path) -> Group:
    return best_limits("t", bare_proc).create(LimitPlan("client-001", CAP, 0.5))


def test_it_says_what_it_is(group: Group) -> None:
    caps = {cap["knob"]: cap for cap in in_child(group, group.caps)}  # type: ignore[index]
    assert caps["memory"]["backend"] == "RLIMIT_DATA"
    assert caps["memory"]["asked"] == CAP
    assert CAP <= caps["memory"]["got"] <= 1.05 * CAP
    assert caps["memory"]["note"].startswith("approximate: ")
    assert caps["memory"]["note"].endswith("this host mounts no cgroup with this controller")
    assert (caps["cpu"]["backend"], caps["cpu"]["got"]) == ("pacing", None)


def test_allocation_fails_at_the_cap_and_not_below(group: Group) -> None:
    """What Python's own heap grows by meanwhile counts too, so all is counted that the process has more."""
    before = read_status()["VmData"]

    def eat() -> dict[str, int]:
        held = []
        try:
            while True:
                held.append(mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        except (MemoryError, OSError):
            eaten = len(held) * PIECE
        held.clear()  # or there is no room to look
        return {"bytes": read_status()["VmData"] - before + eaten}

    got = in_child(group, eat)["bytes"]
    assert CAP <= got <= 1.05 * CAP  # type: ignore[operator]


def test_the_peak_is_what_the_child_added_and_can_start_anew(group: Group) -> None:
    def meter() -> dict[str, int]:
        with mmap.mmap(-1, 8 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as eaten:
            eaten.write(b"x" * len(eaten))
            before = group.usage()
        group.reset_peak()
        after = group.usage()
        return {
            "peak": before.peak_bytes,
            "anon": before.anon_bytes,
            "after": after.peak_bytes,
            "kills": group.oom_kills(),
        }

    found = in_child(group, meter)
    assert 8 * 2**20 <= found["peak"] <= CAP  # type: ignore[operator]
    assert 8 * 2**20 <= found["anon"] <= CAP  # type: ignore[operator]
    assert found["after"] < 8 * 2**20  # type: ignore[operator]
    assert found["kills"] == 0


def test_without_a_plan_there_is_no_cap_but_there_are_meters(bare_proc: Path) -> None:
    group = best_limits("t", bare_proc).create(LimitPlan("client-001"))
    found = in_child(group, lambda: {"caps": group.caps(), "usage": group.usage()})
    assert found["caps"] == []
    assert found["usage"]["throttled_s"] == 0.0  # type: ignore[index]
