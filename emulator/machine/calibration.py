"""The speed of this host, measured once and stored in the user's cache per host and torch version.

The host's rate is that of an FP32 matrix product on one core: alone, and with all cores busy. The reference
times of training steps are added as runs need them. Values that were measured while other programs used the host
serve this process only: they are not stored, and a warning says so.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import statistics
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import msgspec
from msgspec import Struct

from fleetbed.emulator.machine import host, interpreter
from fleetbed.profiles.errors import BadInput, FleetbedError, HostCannot
from fleetbed.profiles.folders import cache_folder

MEASURE_S = 3.0
RETRIES = 2
STEADY_SPREAD = 0.1  # repetitions with a larger spread were disturbed
RATE = "rate"  # the key of a disturbed rate; disturbed reference times have their own keys
ANSWER_S = 300.0  # how long a measuring process may be silent
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class HostRate(Struct, frozen=True):
    """Medians over samples; a spread is the 10th to 90th percentile as a part of the median."""

    alone_gflops: float
    busy_gflops: float  # of each core, with all cores busy
    cores: int
    alone_spread: float
    busy_spread: float
    other_cores: float  # that other programs kept busy during the measurement

    @property
    def busy_to_alone(self) -> float:
        return min(1.0, self.busy_gflops / self.alone_gflops)

    @property
    def problem(self) -> str | None:
        """What disturbed the measurement and made the rates too low; None: nothing."""
        return disturbance(max(self.alone_spread, self.busy_spread), self.other_cores)


class Calibration(Struct, frozen=True):
    fingerprint: str
    measured: str
    rate: HostRate
    steps: dict[str, float] = {}  # seconds of one pass, hot and alone, by a key that describes the pass
    disturbed: dict[str, str] = {}  # by key: what was measured while others used the host, and how that showed

    @property
    def id(self) -> str:
        """A hash of the content: calibrations with the same id give the same durations."""
        return hashlib.blake2b(msgspec.json.encode(self, order="sorted"), digest_size=8).hexdigest()

    @property
    def warning(self) -> str | None:
        """A warning for the user of this calibration; None if it is sound."""
        if not self.disturbed:
            return None
        steps = len(self.disturbed.keys() - {RATE})
        what = ["the rate"] * (RATE in self.disturbed) + [f"reference times: {steps}"] * (steps > 0)
        return (
            f"other programs used this host during the measurement ({next(iter(self.disturbed.values()))}), which "
            f"distorted {', '.join(what)}; tasks may be late or paced too slowly, and the result is not stored: "
            "repeat the run when the host is idle"
        )


def disturbance(spread: float, other_cores: float) -> str | None:
    """Return how a measurement shows that other programs used the host; None if it does not."""
    if other_cores > host.MOST_OTHER_CORES:
        return f"others kept {other_cores:.1f} cores busy"
    if spread > STEADY_SPREAD:
        return f"repetitions were {spread:.0%} apart"
    return None


def host_fingerprint() -> str:
    """Identifies the host and torch version that a calibration is valid for."""
    return f"{host.cpu_model()}, {host.cores()} cores, torch {version('torch')}"


#: calibrations measured while others used the host, by file and fingerprint; only this process uses them
_passing: dict[tuple[Path, str], Calibration] = {}


class Store:
    """The file of calibrations, one per fingerprint. Several runs may write to it at once."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_folder() / "calibration.json"

    def load(self, fingerprint: str | None = None) -> Calibration | None:
        """The stored calibration if it was undisturbed, otherwise the one that this process has measured, if any."""
        fingerprint = fingerprint or host_fingerprint()
        kept = self._read().get(fingerprint)
        if kept is not None and kept.rate.problem is None:
            return kept
        return _passing.get((self.path, fingerprint))

    def save(self, calibration: Calibration) -> None:
        """Store a calibration; a disturbed one for this process only."""
        if calibration.disturbed:
            _passing[self.path, calibration.fingerprint] = calibration
            return
        with self._locked():
            self._write({**self._read(), calibration.fingerprint: calibration})

    def add_steps(
        self, calibration: Calibration, steps: Mapping[str, float], disturbed: Mapping[str, str] | None = None
    ) -> Calibration:
        """Store more reference times; returns the calibration with all that are known, the disturbed ones too.

        Times that are stored already stay, so that all runs see the same.
        """
        disturbed = disturbed or {}
        before = _passing.get((self.path, calibration.fingerprint), calibration)
        known = {**before.steps, **calibration.steps, **steps}
        doubtful = {**before.disturbed, **calibration.disturbed, **disturbed}
        if RATE not in calibration.disturbed:
            with self._locked():
                stored = self._read()
                now = stored.get(calibration.fingerprint, calibration)
                sound = {key: seconds for key, seconds in steps.items() if key not in disturbed} | now.steps
                kept = msgspec.structs.replace(now, steps=sound, disturbed={})
                self._write({**stored, calibration.fingerprint: kept})
            known |= sound
            doubtful = {key: why for key, why in doubtful.items() if key not in sound}
        merged = msgspec.structs.replace(calibration, steps=known, disturbed=doubtful)
        if doubtful:
            _passing[self.path, calibration.fingerprint] = merged
        return merged

    def _read(self) -> dict[str, Calibration]:
        if not self.path.exists():
            return {}
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=dict[str, Calibration])
        except msgspec.DecodeError as error:
            raise BadInput(
                f"{self.path}: not a calibration file ({error}); remove it and run: fleetbed calibrate"
            ) from error

    def _write(self, calibrations: dict[str, Calibration]) -> None:
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(calibrations)))
        temporary.replace(self.path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = self.path.with_suffix(".lock").open("w")
        except OSError as error:
            raise HostCannot(
                f"{self.path}: the calibration cannot be stored here ({error.strerror}); "
                "set XDG_CACHE_HOME to a folder that you can write"
            ) from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def load_or_measure(store: Store | None = None, force: bool = False) -> Calibration:
    """The stored calibration of this host, or a new one without steps, which takes about ten seconds.

    If others use the host it is measured again; if they still do, the quietest of three serves this process only.
    """
    store = store or Store()
    if not force and (stored := store.load()) is not None:
        return stored
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    rates = [measure_rate()]
    while rates[-1].problem is not None and len(rates) <= RETRIES:
        rates.append(measure_rate())
    rate = min(rates, key=lambda rate: (rate.problem is not None, rate.other_cores))
    disturbed = {} if rate.problem is None else {RATE: rate.problem}
    calibration = Calibration(host_fingerprint(), now, rate, disturbed=disturbed)
    store.save(calibration)
    return calibration


def measure_rate(seconds: float = MEASURE_S) -> HostRate:
    cores = host.cores()
    meter = host.LoadMeter()
    alone = run_kernel("matmul", seconds=seconds)
    busy = run_kernel("matmul", processes=cores, seconds=seconds)
    return HostRate(
        alone_gflops=statistics.median(alone),
        busy_gflops=statistics.median(busy),
        cores=cores,
        alone_spread=spread(alone),
        busy_spread=spread(busy),
        other_cores=meter.other_cores(),
    )


def run_kernel(name: str, *, processes: int = 1, threads: int = 1, seconds: float = MEASURE_S) -> list[float]:
    """Samples of a kernel from so many new processes that start to measure at the same time."""
    command = interpreter.module_command("fleetbed.emulator.machine.matmul", name, threads, seconds)
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads))}
    pipe = subprocess.PIPE
    running = [
        # in separate sessions, so that Ctrl-C reaches us, and we end them
        subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        for _ in range(processes)
    ]
    samples: list[float] = []
    try:
        for process in running:
            _line(process)
        for process in running:
            _go(process)
        for process in running:
            samples += msgspec.json.decode(_line(process), type=list[float])
    finally:
        for process in running:
            process.kill()
            process.communicate()
    return samples


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None  # asked for in Popen
    ready, _, _ = select.select([process.stdout], [], [], ANSWER_S)
    if not ready:
        raise FleetbedError(f"the process that measures this host has not answered for {ANSWER_S:.0f} s")
    line = process.stdout.readline()
    if not line:
        raise FleetbedError("the process that measures this host ended early; see its output above")
    return line


def _go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None  # asked for in Popen
    process.stdin.write("\n")
    process.stdin.flush()


def spread(samples: list[float]) -> float:
    deciles = statistics.quantiles(samples, n=10)
    return (deciles[-1] - deciles[0]) / statistics.median(samples)
