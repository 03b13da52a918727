"""On this host's own cgroups, whichever version they are: what is written holds, and nothing is left behind."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetbed.emulator.limits import LimitPlan, best_limits, clean_leftovers
from fleetbed.emulator.limits.cgroup import members, places
from fleetbed.emulator.limits.leftovers import leftovers

pytestmark = [
    pytest.mark.root,
    pytest.mark.usefixtures("writable_cgroups"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]
CAP = 32 * 2**20


def run_child(body: Callable[[], None]) -> int:
    """The exit status of a fork that runs `body`."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException:  # noqa: BLE001 - a fork must not return into the tests
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def folders_of(pid: int) -> list[Path]:
    return [path for place in places() for path in place.mount.rglob(f"fleetbed-*-{pid}-*.*")]


def test_limits_are_read_back_and_nothing_is_left_behind() -> None:
    limits = best_limits("t")
    group = limits.create(LimitPlan("client-001", CAP, 0.05))
    caps = {cap.knob: cap for cap in group.caps()}
    assert {cap.status for cap in caps.values()} == {"enforced"}
    assert caps["cpu"].got == pytest.approx(0.05)
    assert CAP <= caps["memory"].got <= 1.05 * CAP
    assert folders_of(os.getpid())
    group.remove()
    limits.close()
    assert folders_of(os.getpid()) == []


def test_a_child_that_takes_more_than_its_cap_is_killed_and_counted() -> None:
    limits = best_limits("t")
    try:
        group = limits.create(LimitPlan("client-001", CAP))

        def eat() -> None:
            group.join()
            bytearray(b"x" * 2 * CAP)

        assert run_child(eat) == signal.SIGKILL
        assert group.oom_kills() == 1
    finally:
        limits.close()


def test_a_kill_by_someone_else_is_no_oom() -> None:
    limits = best_limits("t")
    try:
        group = limits.create(LimitPlan("client-001", CAP))

        def killed() -> None:
            group.join()
            os.kill(os.getpid(), signal.SIGKILL)

        assert run_child(killed) == signal.SIGKILL
        assert group.oom_kills() == 0
    finally:
        limits.close()


def test_a_child_meters_itself_and_starts_its_peak_anew() -> None:
    limits = best_limits("t")
    try:
        group = limits.create(LimitPlan("client-001", CAP, 0.5))

        def meter() -> None:
            group.join()
            # not by malloc, which may keep what is given back
            eaten = mmap.mmap(-1, 8 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for _ in range(8):
                eaten.write(bytes(2**20))
            before = group.usage()
            eaten.close()
            possible = group.reset_peak()
            after = group.usage()
            low, high = 8 * 2**20, CAP
            ok = low <= before.peak_bytes <= high and before.anon_bytes >= low and before.cpu_s > 0
            ok = ok and after.anon_bytes < low and (not possible or after.peak_bytes < low)
            os._exit(0 if ok else 3)

        assert run_child(meter) == 0
    finally:
        limits.close()


def test_the_ceiling_holds_a_child_that_spins() -> None:
    limits = best_limits("t")
    try:
        group = limits.create(LimitPlan("client-001", cpu_cores=0.1))

        def spin() -> None:
            group.join()
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                pass
            os._exit(0 if group.usage().throttled_s > 0 else 3)

        assert run_child(spin) == 0
    finally:
        limits.close()


def test_remove_kills_who_is_still_in_it() -> None:
    limits = best_limits("t")
    try:
        group = limits.create(LimitPlan("client-001", CAP))
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            group.join()
            os.write(writer, b"in")
            time.sleep(60)
            os._exit(0)
        os.read(reader, 2)
        group.remove()
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        os.close(reader)
        os.close(writer)
    finally:
        limits.close()


OWNER = """
import os, time
from fleetbed.emulator.limits import LimitPlan, best_limits
group = best_limits("t").create(LimitPlan("client-001", 32 * 2**20))
if os.fork() == 0:
    group.join()
    os.write(1, b"made\\n")
    os.close(1)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


def test_the_folders_of_a_killed_owner_are_removed_with_their_members_and_those_of_a_live_one_stay() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    try:
        assert owner.stdout.readline() == b"made\n"
        ours = folders_of(owner.pid)
        orphans = {pid for folder in ours for pid in members(folder / "client-001")}
        assert len(orphans) == 1
        assert not set(ours) & set(leftovers())
    finally:
        owner.kill()
        owner.communicate()
    assert set(ours) <= set(leftovers())
    assert set(map(str, ours)) <= set(clean_leftovers())
    assert folders_of(owner.pid) == []
    assert all(_gone(pid) for pid in orphans)


def _gone(pid: int) -> bool:
    """No such process, or nothing of it but its entry."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
