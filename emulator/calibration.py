"""How fast this host is, measured once and kept in the user's cache per host and torch version.

The host's rate is that of an FP32 matrix product on one core: alone, and with all cores busy. Beside it stand
the reference times of training steps, which the engine measures as it needs them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import msgspec
from msgspec import Struct

from fleetbed.emulator import host
from fleetbed.profiles.errors import BadInput, FleetbedError, HostCannot
from fleetbed.profiles.folders import cache_folder

MEASURE_S = 3.0
RETRIES = 2
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class HostRate(Struct, frozen=True):
    """Medians over samples; a spread is the 10th to 90th percentile as a part of the median."""

    alone_gflops: float
    busy_gflops: float  # of each core, with all cores busy
    cores: int
    alone_spread: float
    busy_spread: float
    other_cores: float  # what others kept busy while this was measured

    @property
    def busy_to_alone(self) -> float:
        return min(1.0, self.busy_gflops / self.alone_gflops)

    @property
    def quiet(self) -> bool:
        """Whether the host was left alone while this was measured; else the rates are too low."""
        return self.other_cores <= host.QUIET_CORES


class Calibration(Struct, frozen=True):
    fingerprint: str
    measured: str
    rate: HostRate
    steps: dict[str, float] = {}  # seconds of one training step, hot and alone, by what the step is

    @property
    def id(self) -> str:
        """A hash of the content: the same id gives the same durations."""
        return hashlib.blake2b(msgspec.json.encode(self, order="sorted"), digest_size=8).hexdigest()


def host_fingerprint() -> str:
    """What a calibration holds for."""
    return f"{host.cpu_model()}, {host.cores()} cores, torch {version('torch')}"


class Store:
    """The file of calibrations, one per fingerprint. Several runs may write to it at once."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_folder() / "calibration.json"

    def load(self, fingerprint: str | None = None) -> Calibration | None:
        return self._read().get(fingerprint or host_fingerprint())

    def save(self, calibration: Calibration) -> None:
        with self._locked():
            self._write({**self._read(), calibration.fingerprint: calibration})

    def add_steps(self, calibration: Calibration, steps: Mapping[str, float]) -> Calibration:
        """Keep more reference times. What is there already stays, so that all runs see the same."""
        with self._locked():
            stored = self._read()
            now = stored.get(calibration.fingerprint, calibration)
            merged = msgspec.structs.replace(now, steps={**steps, **now.steps})
            self._write({**stored, calibration.fingerprint: merged})
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
                f"{self.path}: the calibration cannot be kept here ({error.strerror}); "
                "set XDG_CACHE_HOME to a folder that you can write"
            ) from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def load_or_measure(store: Store | None = None, force: bool = False) -> Calibration:
    """The stored calibration of this host, or a new one without steps, which takes about ten seconds.

    On a busy host it is measured again, and the quietest of three is kept.
    """
    store = store or Store()
    if not force and (stored := store.load()) is not None:
        return stored
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    rate = measure_rate()
    for _ in range(RETRIES):
        if rate.quiet:
            break
        rate = min(rate, measure_rate(), key=lambda rate: rate.other_cores)
    calibration = Calibration(host_fingerprint(), now, rate)
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
    """Samples of a kernel, from so many fresh processes that start to measure together."""
    command = [sys.executable, "-m", "fleetbed.emulator.kernel", name, str(threads), str(seconds)]
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads))}
    pipe = subprocess.PIPE
    running = [
        # in sessions of their own: Ctrl-C is for us, and we end them
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
    line = process.stdout.readline()
    if not line:
        raise FleetbedError("the process that measures this host ended early; what it said stands above")
    return line


def _go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None  # asked for in Popen
    process.stdin.write("\n")
    process.stdin.flush()


def spread(samples: list[float]) -> float:
    deciles = statistics.quantiles(samples, n=10)
    return (deciles[-1] - deciles[0]) / statistics.median(samples)
