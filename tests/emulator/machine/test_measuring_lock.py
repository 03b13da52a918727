"""The lock on this host: runs share it, and who measures waits until they are over."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetbed.emulator.machine import measuring_lock

OTHER = """
import sys
from fleetbed.emulator.machine import measuring_lock
with measuring_lock.{within}:
    print("within", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path
    assert measuring_lock._held == []


def another(within: str) -> subprocess.Popen[str]:
    code = OTHER.format(within=within)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)


def is_alone(path: Path) -> bool:
    """Whether whoever holds the lock keeps out those who would share it."""
    with (path / "fleetbed" / "host.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_runs_share_the_host() -> None:
    said: list[str] = []
    with another("in_use(print)") as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "within\n"
        with measuring_lock.in_use(said.append):
            pass
        other.communicate()
    assert said == []


def test_who_measures_waits_for_others_and_says_so() -> None:
    said: list[str] = []
    with another("in_use(print)") as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "within\n"
        threading.Timer(0.3, other.communicate).start()
        with measuring_lock.alone(said.append):
            assert other.wait(10) == 0
    assert said == ["something has to be measured: waiting until no other run uses this host"]


def test_it_is_alone_within_a_run_of_its_own_and_shares_again_afterwards(cache: Path) -> None:
    said: list[str] = []
    with measuring_lock.in_use(said.append):
        assert not is_alone(cache)
        with measuring_lock.in_use(said.append), measuring_lock.alone(said.append):
            assert is_alone(cache)
        assert not is_alone(cache)
    assert said == []


def test_a_run_waits_while_somebody_measures_and_says_so() -> None:
    said: list[str] = []
    with another("alone(print)") as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "within\n"
        threading.Timer(0.3, other.communicate).start()
        with measuring_lock.in_use(said.append):
            assert other.wait(10) == 0
    assert said == ["waiting until another process has measured this host"]


def test_where_no_lock_can_be_kept_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    said: list[str] = []
    with measuring_lock.in_use(said.append), measuring_lock.alone(said.append):
        pass
    assert said == []
