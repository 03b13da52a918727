"""One run of the command after another, each with a fault that is drawn from its number, and what must hold after it.

The fault hits a process that the run started, or a file that it needs. The run ends by itself, or is resumed as a user
would do it, until it is done; then its results are those of a run that nobody disturbed, and nothing is left of it.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from same_runs import results
from small_runs import TINIER

DEADLINE_S = 180.0  # of one command, on a host that others use too
MOST_RESUMES = 3
PAUSE_S = 1.5  # how long a stopped broker stays so; longer than any tick of its clock
NAME = "heteroavg-sync-1"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
TARGETS = ("broker", "zygote", "client", "service", "everyone")
FILES = ("run folder", "records", "temporary folder", "full disk")


@dataclass(frozen=True)
class Fault:
    """What is done to whom, and when: as soon as the zygote has forked so often, or so many seconds after the start."""

    what: str  # one of SIGNALS or FILES
    target: str = ""
    forks: int | None = None
    after_s: float = 0.0
    mode: str = "resident"


@dataclass
class Life:
    """What became of a disturbed run."""

    fault: Fault
    hit: bool = False
    exits: list[int] = field(default_factory=list)
    said: str = ""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


def draw(number: int, run_s: float, kind: tuple[str, str] | None = None) -> Fault:
    """The fault of this run; most come at the moment of a fork, when the new process has not said hello yet.

    `kind` is what happens to whom; it is drawn unless given.
    """
    rng = random.Random(number)
    mode = rng.choice(("resident", "on-demand"))
    forks = rng.randint(1, 8) if rng.random() < 0.6 else None
    after_s = rng.uniform(0.2, run_s)
    if kind is not None:
        return Fault(*kind, forks, after_s, mode)
    if rng.random() < 0.25:
        return Fault(rng.choice(FILES), "", forks, after_s, mode)
    return Fault(rng.choice(list(SIGNALS)), rng.choice(TARGETS), forks, after_s, mode)


class Bed:
    """Folders of its own for everything that a command may touch, and an undisturbed run to compare with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary, self.home, self.cache, self.place = (folder / n for n in ("tmp", "home", "cache", "place"))
        for made in (self.temporary, self.home, self.cache, self.place):
            made.mkdir()
        self.environment = {
            **os.environ,
            "TMPDIR": str(self.temporary),
            "HOME": str(self.home),
            "XDG_CACHE_HOME": str(self.cache),
        }
        # the first one fills the cache
        self._command("run", "demo", *self._sets("inline"), "--out", str(folder / "first")).communicate()
        start_s = time.monotonic()
        self._command("run", "demo", *self._sets("resident"), "--out", str(folder / "whole")).communicate()
        self.run_s = time.monotonic() - start_s
        self.whole = results(folder / "whole" / NAME)
        self.cached = listing(self.cache)
        self.made_by_torch = listing(self.temporary)
        assert not any("fleetbed" in name for name in self.made_by_torch)

    def live(self, fault: Fault, number: int) -> Life:
        """Carry a run out under this fault, resume it until it is done, and look at what is left."""
        life, start_s = Life(fault), time.monotonic()
        place = self.place / f"run-{number}"
        place.mkdir()
        disk = fault.what == "full disk" and mount(place, "600k")
        out = place / "study"
        sessions = set()
        words = ["run", "demo", *self._sets(fault.mode), "--out", str(out)]
        for attempt in range(1 + MOST_RESUMES):
            process = self._command(*words)
            watched = Watched(process)
            if attempt == 0:
                life.hit = self._commit(fault, watched, out)
            try:
                _, said = process.communicate(timeout=DEADLINE_S)
            except subprocess.TimeoutExpired:
                life.problems.append(f"attempt {attempt} did not end within {DEADLINE_S:.0f} s")
                process.kill()
                _, said = process.communicate()
            watched.look()
            sessions |= watched.sessions
            life.exits.append(process.returncode)
            life.said += said
            if "Traceback" in said:
                life.problems.append("a traceback")
            if process.returncode == 0:
                break
            if process.returncode not in (1, 3, 130, -signal.SIGKILL, -signal.SIGTERM):
                life.problems.append(f"exit code {process.returncode}")
            if disk:
                mount(place, "remount,size=50m")
            words = ["run", "--resume", str(out)]
            if not (out / "study.json").exists():  # killed before there was anything to resume
                shutil.rmtree(out, ignore_errors=True)
                words = ["run", "demo", *self._sets(fault.mode), "--out", str(out)]
            elif fault.what == "records":  # what the sentence says
                shutil.rmtree(out / NAME, ignore_errors=True)
        self._judge(life, out, sessions)
        if disk:
            subprocess.run(["umount", "-l", str(place)], check=True)
        shutil.rmtree(place)
        life.seconds = time.monotonic() - start_s
        return life

    def _judge(self, life: Life, out: Path, sessions: set[int]) -> None:
        if life.exits[-1] != 0:
            life.problems.append("not done after all attempts")
        elif (found := results(out / NAME)) != self.whole:
            life.problems.append(f"other results: {[key for key in found if found[key] != self.whole[key]]}")
        if left := wait_until_empty(lambda: traces(sessions)):
            life.problems.append(f"left behind: {left}")
        if new := listing(self.temporary) - self.made_by_torch:
            life.problems.append(f"in the temporary folder: {sorted(new)}")
        for folder, allowed in ((self.home, set[str]()), (self.cache, self.cached)):
            if (now := listing(folder)) != allowed:
                life.problems.append(f"changed in {folder.name}: {sorted(now ^ allowed)}")
        if others := {p.name for p in out.iterdir()} - {NAME, "study.json", "study.lock"}:
            life.problems.append(f"in the study's folder: {sorted(others)}")

    def _commit(self, fault: Fault, watched: Watched, out: Path) -> bool:
        """Do it; False if the run was over before."""
        moment_s = time.monotonic() + fault.after_s
        while watched.is_running():
            watched.look()
            if fault.forks is None:
                if time.monotonic() >= moment_s:
                    break
            elif watched.forks >= fault.forks:
                break
            time.sleep(0.0005)
        if not watched.is_running():
            return False
        if fault.what == "full disk":
            return out.parent.is_mount()
        if fault.what == "temporary folder":
            shutil.rmtree(self.temporary)
            self.temporary.mkdir()
            return True
        if fault.what in FILES:
            victim = out / NAME if fault.what == "run folder" else out / NAME / "run.sqlite"
            while watched.is_running() and not victim.exists():
                time.sleep(0.001)
            shutil.rmtree(victim, ignore_errors=True)
            victim.unlink(missing_ok=True) if victim.is_file() else None
            return True
        while watched.is_running():  # there may be nobody yet to send it to
            if watched.signal(fault.target, SIGNALS[fault.what]):
                return True
            time.sleep(0.0005)
        return False

    def _sets(self, mode: str) -> list[str]:
        return [word for key in (*TINIER, "rounds=3", f"processes={mode}") for word in ("--set", key)]

    def _command(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "fleetbed.cli.main", *words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )


class Watched:
    """The processes of a command, as far as they have been seen."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._broker = process
        self.sessions: set[int] = set()  # of zygotes
        self._children: set[int] = set()

    @property
    def forks(self) -> int:
        return len(self._children)

    def is_running(self) -> bool:
        return self._broker.poll() is None

    def look(self) -> None:
        for pid in _children(self._broker.pid):
            if _session(pid) == pid:
                self.sessions.add(pid)
        for zygote in self.sessions:
            self._children.update(_children(zygote))

    def signal(self, target: str, by: signal.Signals) -> bool:
        """Send a signal to one of these processes, the youngest if there are several; False if there is none."""
        self.look()
        workers = sorted({pid for zygote in self.sessions for pid in _children(zygote)})
        services = [pid for pid in workers if "service" in _title(pid)]
        chosen = {
            "broker": [self._broker.pid],
            "zygote": sorted(self.sessions),
            "client": [pid for pid in workers if pid not in services][-1:],
            "service": services[-1:],
            "everyone": [self._broker.pid, *sorted(self.sessions), *workers],
        }[target]
        for pid in chosen:
            try:
                os.kill(pid, by)
            except ProcessLookupError:
                continue
        if by is signal.SIGSTOP and self._broker.pid in chosen:  # nobody but its user can continue it
            time.sleep(PAUSE_S)
            os.kill(self._broker.pid, signal.SIGCONT)
        if by is signal.SIGKILL and target == "everyone":
            for pid in chosen[1:]:  # what was forked meanwhile has died with the zygote
                wait_until_empty(lambda pid=pid: [str(pid)] if psutil.pid_exists(pid) else [])  # type: ignore[misc]
        return bool(chosen)


def traces(sessions: set[int]) -> list[str]:
    """The processes of these sessions, and cgroups that are named after their leaders."""
    alive = [f"process {pid} {_title(pid)}" for pid in psutil.pids() if _session(pid) in sessions and not _is_dead(pid)]
    cgroups = [
        str(path) for session in sessions for path in Path("/sys/fs/cgroup").glob(f"**/fleetbed-????????-{session}-*")
    ]
    return alive + cgroups


def wait_until_empty(look: Callable[[], list[str]], seconds: float = 10.0) -> list[str]:
    """What is still there after so long: a killed broker's zygote cleans up after its end."""
    end_s = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < end_s:
        time.sleep(0.05)
    return found


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def mount(place: Path, options: str) -> bool:
    options = options if "size" in options else f"size={options}"
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(place)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _is_dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
