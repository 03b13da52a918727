"""Traces from files: when clients are available, and how fast their links are. Errors name the line.

Times are device seconds. A trace repeats from its start when it has ended, unless `availability.repeat` is false;
then it must be as long as the run may be (`device_time_limit_s`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from fleetbed.emulator.randomness import numpy_rng
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Experiment
from fleetbed.profiles.files import is_folder, list_folder, read_regular, show_path, user_path

#: a change that is this near counts as reached, otherwise rounding could put it off for ever
ROUNDING_S = 1e-6
#: traces that change faster, last longer or carry less than this would make a run endless
SHORTEST_S, MOST_S, LEAST_BIT_S, MOST_MBIT_S = 1e-3, 1e10, 1.0, 1e7
MAX_BYTES = 64 << 20


class Presence(Struct, frozen=True):
    """The stays of each client: (from, to) in order, none touching the next."""

    stays: tuple[tuple[tuple[float, float], ...], ...]
    end_s: float


class Bandwidth(Struct, frozen=True):
    """Rates that hold from each time to the next; the last line only marks the end of the trace."""

    times_s: tuple[float, ...]  # from 0 on
    rates_bit_s: tuple[float, ...]
    end_s: float

    @property
    def mean_bit_s(self) -> float:
        ends = (*self.times_s[1:], self.end_s)
        parts = zip(self.rates_bit_s, self.times_s, ends, strict=True)
        return sum(rate * (end - start) for rate, start, end in parts) / self.end_s

    def at(self, time_s: float) -> tuple[float, float]:
        """The rate at this moment, and how long it holds. The trace repeats."""
        inside = time_s % self.end_s
        if inside + ROUNDING_S >= self.end_s:
            inside = 0.0
        position = bisect_right(self.times_s, inside + ROUNDING_S) - 1
        until = self.times_s[position + 1] if position + 1 < len(self.times_s) else self.end_s
        return self.rates_bit_s[position], until - inside

    def seconds(self, start_s: float, bits: float, most_bit_s: float) -> float:
        """The seconds that so many bits take from this time on, at most at `most_bit_s`."""
        now_s = start_s
        while True:
            rate, lasts_s = self.at(now_s)
            rate = min(rate, most_bit_s)
            if bits <= rate * lasts_s:
                return now_s - start_s + (bits / rate if bits else 0.0)
            bits -= rate * lasts_s
            now_s += lasts_s


class LinkRates(Struct, frozen=True):
    """The bandwidth of every client: clients get the traces in turn, and each starts at its own position."""

    traces: tuple[Bandwidth, ...]
    offsets_s: tuple[float, ...]

    def at(self, client: int, time_s: float) -> tuple[float, float]:
        """The rate in bit/s of a client's link, and how long it holds."""
        return self._trace(client).at(time_s + self.offsets_s[client])

    def seconds(self, client: int, start_s: float, bits: float, most_bit_s: float) -> float:
        return self._trace(client).seconds(start_s + self.offsets_s[client], bits, most_bit_s)

    def mean_bit_s(self, client: int) -> float:
        return self._trace(client).mean_bit_s

    def spacing_s(self, client: int) -> float:
        """The average time for which a rate of this client's link holds."""
        trace = self._trace(client)
        return trace.end_s / len(trace.times_s)

    def _trace(self, client: int) -> Bandwidth:
        return self.traces[client % len(self.traces)]


def load_presence(experiment: Experiment, clients: int) -> Presence | None:
    choice = experiment.availability
    if choice.kind != "trace" or choice.trace is None:
        return None
    found = read_presence(user_path(choice.trace, "availability.trace"), clients)
    _check_length(experiment, "trace", choice.trace, found.end_s)
    return found


def load_rates(experiment: Experiment, clients: int, seed: int) -> LinkRates | None:
    choice = experiment.availability
    if choice.bandwidth is None:
        return None
    place = user_path(choice.bandwidth, "availability.bandwidth")
    files = [place]
    if is_folder(place, "availability.bandwidth"):
        files = [path for path in list_folder(place, "availability.bandwidth") if not path.is_dir()]
    if not files:
        raise BadInput(f"{place}: the folder of availability.bandwidth is empty; put trace files into it")
    traces = tuple(read_bandwidth(file) for file in files)
    for file, trace in zip(files, traces, strict=True):
        _check_length(experiment, "bandwidth", str(file), trace.end_s)
    offsets = (numpy_rng(seed, client, "bandwidth").random() for client in range(clients))
    return LinkRates(
        traces,
        tuple(
            float(part * traces[client % len(traces)].end_s) if choice.repeat else 0.0
            for client, part in enumerate(offsets)
        ),
    )


def read_presence(path: Path, clients: int) -> Presence:
    """Lines of `client<TAB>start<TAB>stop`: a client's own lines in order of time."""
    stays: list[list[tuple[float, float]]] = [[] for _ in range(clients)]
    for where, (number, start, stop) in _lines(path, "client<TAB>start<TAB>stop", 3):
        if not number.is_integer() or not 0 <= number < clients:
            raise BadInput(f"{where}: there is no client {number:g}; the fleet has 0 to {clients - 1}")
        mine = stays[int(number)]
        if stop <= start:
            raise BadInput(f"{where}: it stops at {stop:g} s, but starts at {start:g} s; a stay must last")
        if stop - start < SHORTEST_S or (mine and 0 < start - mine[-1][1] < SHORTEST_S):
            raise BadInput(f"{where}: stays and absences must last at least {SHORTEST_S:g} s")
        if mine and start <= mine[-1][1]:
            raise BadInput(
                f"{where}: the trace goes back in time: it starts at {start:g} s, but client {number:g} was there "
                f"until {mine[-1][1]:g} s; order the lines of a client by time and join what touches"
            )
        mine.append((start, stop))
    never = [str(number) for number, mine in enumerate(stays) if not mine]
    if never:
        raise BadInput(f"{path}: no line for client {', '.join(never[:5])}; each of the {clients} needs one")
    return Presence(tuple(map(tuple, stays)), max(stop for mine in stays for _, stop in mine))


def read_bandwidth(path: Path) -> Bandwidth:
    """Lines of `seconds<TAB>Mbit/s`."""
    times: list[float] = []
    rates: list[float] = []
    for where, (time_s, rate) in _lines(path, "seconds<TAB>Mbit/s", 2):
        if times and time_s <= times[-1]:
            raise BadInput(f"{where}: the trace goes back in time, from {times[-1]:g} s to {time_s:g} s")
        if times and time_s - times[-1] < SHORTEST_S:
            raise BadInput(
                f"{where}: the rate changes {time_s - times[-1]:g} s after the line before; at least {SHORTEST_S:g} s "
                "must lie between two lines"
            )
        if rate > MOST_MBIT_S:
            raise BadInput(f"{where}: the rate is {rate:g} Mbit/s, but at most {MOST_MBIT_S:g} is allowed")
        times.append(time_s)
        rates.append(rate * 1e6)
    if len(times) < 2 or not any(rates[:-1]):
        raise BadInput(f"{path}: a bandwidth trace needs two lines or more, and a rate above 0 before its last line")
    found = Bandwidth(tuple(t - times[0] for t in times[:-1]), tuple(rates[:-1]), times[-1] - times[0])
    if found.mean_bit_s < LEAST_BIT_S:
        raise BadInput(
            f"{path}: the mean rate is {found.mean_bit_s / 1e6:g} Mbit/s, but at least {LEAST_BIT_S / 1e6:g} is "
            "needed, or a transfer would hardly ever end"
        )
    return found


def _lines(path: Path, form: str, count: int) -> Iterator[tuple[str, list[float]]]:
    try:
        text = read_regular(path, "a trace file", MAX_BYTES, "availability").decode()
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{show_path(path)}: the trace is not UTF-8 text (byte {error.start}): save it as UTF-8"
        ) from error
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        where = f"{path}:{number}"
        try:
            values = [float(word) for word in words]
        except ValueError as error:
            raise BadInput(f"{where}: {line[:60]!r} is not {form}") from error
        if len(values) != count or not all(0 <= value <= MOST_S for value in values):
            raise BadInput(f"{where}: {line[:60]!r} is not {form} with numbers from 0 to {MOST_S:g}")
        yield where, values


def _check_length(experiment: Experiment, key: str, path: str, end_s: float) -> None:
    if experiment.availability.repeat:
        return
    limit_s = experiment.device_time_limit_s
    if limit_s is None or end_s < limit_s:
        needed = "device_time_limit_s, which is not set" if limit_s is None else f"device_time_limit_s = {limit_s:g} s"
        raise BadInput(
            f"availability.{key}: {path} ends early, at {end_s:g} s, but without repeat it must last for {needed}; "
            "set availability.repeat to true, or a shorter limit"
        )
