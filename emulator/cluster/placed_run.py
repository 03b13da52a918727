"""A run on a node of the cluster: an actor starts its command there, and reports what it prints and writes.

The command is started before it is known which run it is for, because its imports take longer than all the rest. The
actor also says what its node is: a process that Ray starts only for that would cost as much as this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fleetbed.emulator.cluster.guardian import guarded
from fleetbed.emulator.cluster.mirror import DATABASE, Outbox, write_content
from fleetbed.emulator.cluster.nodes import SAME, description
from fleetbed.emulator.machine import interpreter
from fleetbed.emulator.machine.parent import die_with

STUDY, NOW = "study.json", "now.json"
REPORT_S = 1.0  # after which a node reports even if there is nothing new
COPY_S = 2.0  # between two copies of the folder,
SHARE = 20  # or as many times as long as the last copy took, if that is longer
MOST_BYTES = 32 << 20  # of files in one report, unless a single one is larger
WATCH_S = 0.5  # between two looks whether the node is still one of the cluster
PREFIX = "fleetbed-run-"
#: Ray sets these in its workers, and a run must not notice: the number of threads may change the last bits of a result
OF_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV")


class Report(NamedTuple):
    """What is new of a run on a node."""

    lines: list[str]
    files: list[tuple[str, bytes]]
    gone: list[str] | None  # with the last files of a copy: those that do not exist any more
    now: bytes | None  # what the run is doing, if that has changed
    status: int | None  # the exit code, with the last report


class PlacedRun:
    """The actor. It works in the study's folder if the node sees that, otherwise in a copy of the run's folder."""

    def __init__(self, forks: bool, start_in: str, environment: Mapping[str, str]) -> None:
        """`forks`: whether the clients of the run are processes of their own."""
        self._arguments = ("zygote",) if forks else ()
        self._start_in = start_in if os.path.isdir(start_in) else tempfile.gettempdir()
        self._environment = {key: value for key, value in os.environ.items() if key not in OF_RAY} | dict(environment)
        self._stack = contextlib.ExitStack()
        self._folder, self._study = Path(), ""
        self._outbox: Outbox | None = None
        self._news = threading.Condition()
        self._is_prepared = False
        self._lines: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._status: int | None = None
        self._stopped = False
        self._to_send: deque[str] = deque()
        self._gone: list[str] | None = None  # the names that are sent with the last files of a copy
        self._is_final = False  # whether the copy was begun after the run had ended
        self._now_mark = 0
        self._copied_s, self._pause_s = time.monotonic(), COPY_S
        threading.Thread(target=_end_with_node, args=(os.getppid(),), daemon=True).start()

    def describe(self) -> dict[str, Any]:
        """What this node is."""
        return description()(list(SAME))

    def sees(self, path: Path, token: str) -> bool:
        """Whether this node finds the token there, and may write beside it."""
        return sees(path, token)

    def prepare(self) -> None:
        """Start the command, unless it was started before."""
        with self._news:
            if not self._is_prepared:
                self._is_prepared = True
                # the kernel watches the thread that starts a process, so it must live as long as that
                threading.Thread(target=self._carry_out, daemon=True).start()

    def begin(self, name: str, study: Path, content: Mapping[str, bytes] | None) -> None:
        """Carry out this run; `content` are files by their path in the study. None: work in the study's folder."""
        self._study = str(study)
        if content is not None:
            scratch = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
            self._stack.enter_context(guarded(scratch))
            study = scratch / study.name
            write_content(study, content)
            self._outbox = Outbox(study / name, scratch / "copy")
        self._folder = study / name
        self.prepare()
        with self._news:
            self._news.wait_for(lambda: self._process is not None or self._status is not None)
            if self._process is not None and self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # it has ended, which will be reported
                    self._process.stdin.write(f"{json.dumps(['run', '--resume', str(study), '--only', name])}\n")
                    self._process.stdin.close()

    def report(self) -> Report:
        """Wait for news, for a limited time, and return them."""
        with self._news:
            if not self._to_send:
                self._news.wait_for(lambda: self._lines or self._status is not None, REPORT_S)
            lines, self._lines = self._lines, []
            status = self._status
        files, gone = self._files(final=status is not None)
        if self._outbox is not None and not (self._is_final and gone is not None):
            status = None  # there is more to send
        return Report(lines, files, gone, self._what_now(), status)

    def stop(self) -> None:
        """Ask the run to stop cleanly."""
        with self._news:
            self._stopped = True
            if self._process is not None and self._status is None:
                self._process.terminate()

    def close(self) -> None:
        """Remove what is left on the node."""
        self._stack.close()

    def _carry_out(self) -> None:
        this = os.getpid()

        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks Ctrl-C
            die_with(this, signal.SIGTERM)  # a clean stop

        with subprocess.Popen(
            interpreter.module_command("fleetbed.cli.main", *self._arguments, function="standby"),
            cwd=self._start_in,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=prepare,
        ) as process:
            with self._news:
                self._process = process
                self._news.notify()
                if self._stopped:
                    process.terminate()
            assert process.stderr is not None  # asked for above
            for line in process.stderr:
                with self._news:
                    self._lines.append(line.rstrip().replace(str(self._folder.parent), self._study))
                    self._news.notify()
        with self._news:
            self._status = process.returncode
            self._news.notify()

    def _files(self, final: bool) -> tuple[list[tuple[str, bytes]], list[str] | None]:
        """Return the next files to send; and, with the last ones of a copy, the names of those that are gone."""
        if self._outbox is None:
            return [], None
        if self._gone is None:  # the last copy has been sent
            if not final and time.monotonic() - self._copied_s < self._pause_s:
                return [], None
            self._is_final = final
            if not (self._folder / DATABASE).exists():  # not begun, or refused
                return [], []
            self._copied_s = time.monotonic()
            names, self._gone = self._outbox.take()
            self._to_send.extend(names)
        found: list[tuple[str, bytes]] = []
        size = 0
        while self._to_send and size < MOST_BYTES:
            name = self._to_send.popleft()
            found.append((name, self._outbox.read(name)))
            size += len(found[-1][1])
        if self._to_send:
            return found, None
        gone, self._gone = self._gone, None
        self._pause_s = max(COPY_S, SHARE * (time.monotonic() - self._copied_s))
        return found, gone

    def _what_now(self) -> bytes | None:
        if self._outbox is None:
            return None
        with contextlib.suppress(OSError):  # none yet, or it is just being replaced
            path = self._folder / NOW
            if (mark := path.stat().st_mtime_ns) != self._now_mark:
                self._now_mark = mark
                return path.read_bytes()
        return None


def sees(path: Path, token: str) -> bool:
    """Whether this node finds the token there, and may write beside it."""
    try:
        return path.read_text() == token and os.access(path.parent, os.W_OK)
    except OSError:
        return False


def _end_with_node(raylet: int) -> None:
    """End this process when its node has left the cluster: Ray lets it work on, although nobody awaits its results."""
    while os.getppid() == raylet:
        time.sleep(WATCH_S)
    os._exit(1)
