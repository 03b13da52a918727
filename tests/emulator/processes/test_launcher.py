"""A zygote that is killed, told to end or stopped: the broker hears of it, and nothing of either is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fleetbed.emulator.processes import launcher
from fleetbed.emulator.processes.janitor import end_session
from fleetbed.emulator.processes.launcher import Launcher
from fleetbed.emulator.wire.messages import Configure, Trouble
from fleetbed.profiles.errors import FleetbedError

MANY = 1000  # orders: a socket takes a few hundred


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Launcher]:
    """A launcher whose zygote has made its cgroups."""
    found = Launcher("test", tmp_path / "workers.log")
    found.tell(Configure("nothing"))
    assert isinstance(until(found.hear), Trouble)  # by now it has opened the run
    yield found
    end_session(found.session)  # where a test has failed


def until(look: Callable[[], object], seconds: float = 60.0) -> object:
    end_s = time.monotonic() + seconds
    while (found := look()) is None and time.monotonic() < end_s:
        time.sleep(0.01)
    return found


def cgroups(made: Launcher) -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"**/fleetbed-????????-{made.session}-*"))


def is_stopped(made: Launcher) -> bool:
    return bool(psutil.Process(made.session).status() == psutil.STATUS_STOPPED)


def is_running(made: Launcher) -> bool:
    return psutil.pid_exists(made.session)


@pytest.mark.parametrize(
    ("by", "how"), [(signal.SIGKILL, "was ended by SIGKILL"), (signal.SIGTERM, "ended with exit status 0")]
)
def test_a_zygote_that_has_gone_is_a_sentence_and_its_cgroups_are_removed(
    made: Launcher, by: signal.Signals, how: str
) -> None:
    os.kill(made.session, by)
    with pytest.raises(FleetbedError, match=f"the process that forks the clients {how}, see .*workers.log; nothing"):
        until(made.hear)
    made.close()
    assert cgroups(made) == []
    assert not is_running(made)


def test_a_zygote_that_stays_stopped_ends_the_run_and_still_cleans_up(made: Launcher) -> None:
    os.kill(made.session, signal.SIGSTOP)
    until(lambda: is_stopped(made) or None)
    made.check(100.0)
    made.check(100.0 + launcher.STOPPED_S)
    with pytest.raises(FleetbedError, match="has been stopped by a signal for 10 s"):
        made.check(101.0 + launcher.STOPPED_S)
    made.close()
    assert cgroups(made) == []
    assert not is_running(made)


def test_a_zygote_that_is_continued_in_time_goes_on(made: Launcher) -> None:
    os.kill(made.session, signal.SIGSTOP)
    until(lambda: is_stopped(made) or None)
    made.check(100.0)
    os.kill(made.session, signal.SIGCONT)
    until(lambda: not is_stopped(made) or None)
    made.check(100.0 + 2 * launcher.STOPPED_S)
    made.close()


def test_a_zygote_that_does_not_answer_ends_the_run(made: Launcher) -> None:
    made.check(0.0)
    made.check(2 * launcher.SILENT_S)  # it owes nothing
    made.tell(Configure("nothing"))
    with pytest.raises(FleetbedError, match="has not answered for 1800 s"):
        made.check(4 * launcher.SILENT_S)
    made.close()


def test_orders_that_a_stopped_zygote_cannot_take_are_sent_later_and_nobody_blocks(made: Launcher) -> None:
    os.kill(made.session, signal.SIGSTOP)
    for _ in range(MANY):
        made.tell(Configure("nothing"))
    os.kill(made.session, signal.SIGCONT)
    for _ in range(MANY):
        made.flush()
        assert isinstance(until(made.hear), Trouble)
    made.close()


def test_the_processes_of_a_session_are_ended_even_stopped_ones() -> None:
    pids = []
    leader = os.fork()
    if leader == 0:
        os.setsid()
        for _ in range(3):
            if os.fork() == 0:
                time.sleep(60)
        time.sleep(60)
        os._exit(0)
    until(lambda: len(psutil.Process(leader).children()) == 3 or None)
    pids = [child.pid for child in psutil.Process(leader).children()]
    os.kill(pids[0], signal.SIGSTOP)
    end_session(leader)
    os.waitpid(leader, 0)
    for pid in pids:
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
