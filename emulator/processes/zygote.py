"""The zygote: imports torch once, forks every worker warm and inside its limits, and cleans up after all of them.

It is exec'd with one compute thread and opens no ZeroMQ context, so what it forks is sound and costs megabytes. It
watches the broker through a socket pair: when that closes, whatever killed the broker, it kills its workers, waits for
them, and removes their cgroups. SIGTERM has the same effect.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TypeVar

import msgspec
import setproctitle

from fleetbed.emulator.limits import Group, Limits, best_limits
from fleetbed.emulator.machine.parent import signal_when_parent_ends
from fleetbed.emulator.processes.forking import fork, keep_what_steps_free, ready_to_fork, warm
from fleetbed.emulator.processes.runner import Runner, open_runner
from fleetbed.emulator.processes.worker import serve
from fleetbed.emulator.wire.messages import (
    Configure,
    Enrol,
    Enrolment,
    Exited,
    Forked,
    FromZygote,
    Kill,
    Open,
    Ready,
    Setup,
    Spawn,
    Trouble,
    to_zygote,
)

PF_EXITING = 0x4  # of the kernel's task flags
MAX_CONTROL_BYTES = 1 << 16
T = TypeVar("T")


class Zygote:
    def __init__(self, control: socket.socket, shared: int) -> None:
        self._control = control
        self._shared = shared
        self._address = ""
        self._limits: Limits | None = None
        self._runner: Runner | None = None
        self._children: dict[int, tuple[str, Group]] = {}
        self._ordered: set[int] = set()
        self._stopped: set[int] = set()

    def run(self) -> None:
        """Serve the broker until it closes its end."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is self._control:
                    message = self._control.recv(MAX_CONTROL_BYTES)
                    if not message:
                        return
                    self._obey(message)
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
                    self._reap()

    def close(self) -> None:
        """Kill the workers, wait for them, and remove their limits, so that nothing outlives the run."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)
        if self._limits is not None:
            self._limits.close()

    def _obey(self, message: bytes) -> None:
        order = to_zygote.decode(message)
        if isinstance(order, Open):
            self._open(order)
        elif isinstance(order, Configure):
            self._prepare(lambda: open_runner(_read(order.setup, Setup)))
        elif isinstance(order, Enrol):
            if (runner := self._runner) is not None:  # else the broker has been told why
                self._prepare(lambda: runner.enrol(_read(order.enrolment, Enrolment)))
        elif isinstance(order, Spawn):
            self._spawn(order)
        elif isinstance(order, Kill):
            self._kill(order.worker)

    def _open(self, order: Open) -> None:
        try:
            with open(order.log, "ab") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
        except OSError as error:
            self._say(Trouble(None, str(error)))
        self._address = order.address
        self._limits = best_limits(order.run)

    def _prepare(self, make: Callable[[], Runner]) -> None:
        """Make the task runner that forks inherit, and warm it up."""
        try:
            self._runner = make()
            # in the zygote's own cgroup, or the first client would be charged for the pages that all share
            warm(self._runner.warm_up)
            if self._runner.enrolled:  # else it is not known yet which models clients train
                keep_what_steps_free()
        except Exception as error:  # noqa: BLE001 - reported to the broker, which ends the run with it
            self._say(Trouble(None, f"{type(error).__name__}: {error}"))
            return
        ready_to_fork()
        gc.enable()  # it was off during the imports
        self._say(Ready())

    def _kill(self, worker: str) -> None:
        for pid, (name, _) in self._children.items():
            # a process that is dying by itself, and is not reaped yet, must not look like one that was killed
            if name == worker and not _is_ending(pid):
                self._ordered.add(pid)
                os.kill(pid, signal.SIGKILL)

    def _spawn(self, order: Spawn) -> None:
        assert self._limits is not None  # the broker opens and configures before it spawns
        if (runner := self._runner) is None:
            return  # it could not be configured, which the broker has been told
        try:
            group = self._limits.create(order.plan)
        except OSError as error:
            self._say(Trouble(order.worker, f"its limits could not be set: {error}"))
            return
        try:
            pid = fork(lambda: self._child(runner, order, group))
        except OSError as error:
            group.remove()
            self._say(Trouble(order.worker, f"its process could not be forked: {error.strerror}"))
            return
        self._children[pid] = (order.worker, group)
        self._say(Forked(order.worker))

    def _child(self, runner: Runner, order: Spawn, group: Group) -> None:
        """Run a worker's process: drop what belongs to the zygote, join the limits, then serve."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._control.close()
        setproctitle.setproctitle(order.title)
        group.join()
        serve(runner, order.identity, self._address, self._shared, group, one_task=order.one_task)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return
            if os.WIFSTOPPED(status):  # for an unknown time, so another process is to do its work
                self._stopped.add(pid)
                os.kill(pid, signal.SIGKILL)
                continue
            worker, group = self._children.pop(pid)
            oom = group.oom_kills() > 0
            group.remove()
            exited = Exited(
                worker,
                os.waitstatus_to_exitcode(status),
                oom,
                ordered=pid in self._ordered,
                stopped=pid in self._stopped,
            )
            self._ordered.discard(pid)
            self._stopped.discard(pid)
            self._say(exited)

    def _say(self, message: FromZygote) -> None:
        # the broker may be gone; then the closed socket ends the loop in run()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._control.send(msgspec.msgpack.encode(message))


def _read(path: str, kind: type[T]) -> T:
    return msgspec.json.decode(Path(path).read_bytes(), type=kind)


def _is_ending(pid: int) -> bool:
    """Whether a child is exiting or has exited; its sockets close before it can be waited for."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    flags = int(stat[stat.rindex(")") + 2 :].split()[6])
    return bool(flags & PF_EXITING)


def _end(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the broker's to handle; the workers inherit this
    signal.signal(signal.SIGTERM, _end)
    signal_when_parent_ends(signal.SIGCONT)  # so that it can clean up even if it is stopped at that time
    setproctitle.setproctitle("fleetbed: zygote")
    zygote = Zygote(socket.socket(fileno=int(sys.argv[1])), shared=int(sys.argv[2]))
    try:
        with contextlib.suppress(SystemExit):
            zygote.run()
    finally:
        zygote.close()
    os._exit(0)  # destroying torch object by object would take longer than all of the above
