"""A zygote that is started early is taken once, and ended where nobody takes it."""

from __future__ import annotations

import psutil

from fleetbed.emulator.processes import early_start


def is_running(process: early_start.ZygoteProcess) -> bool:
    return psutil.pid_exists(process.session)


def test_one_that_nobody_took_is_ended_with_the_block() -> None:
    with early_start.zygote_started_early() as process:
        assert is_running(process)
    assert not is_running(process)
    assert process.control.fileno() == -1


def test_it_is_ended_although_an_error_comes_first() -> None:
    found = []
    try:
        with early_start.zygote_started_early() as process:
            found.append(process)
            raise ValueError
    except ValueError:
        pass
    assert [is_running(process) for process in found] == [False]


def test_it_is_taken_once() -> None:
    with early_start.zygote_started_early() as process:
        assert early_start.take() is process
        other = early_start.take()
        assert other is not process
    assert is_running(process), "who took it ends it"
    for each in (process, other):
        each.discard()


def test_one_that_was_told_nothing_leaves_when_its_socket_closes() -> None:
    process = early_start.ZygoteProcess()
    assert process.close(), "its exit status is 0"
