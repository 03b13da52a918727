"""Availability: when clients come and leave, as events of the timeline.

Each model holds which clients are away and what their next changes depend on; all of it is plain data, so a checkpoint
holds it. Its methods are called for what happens on the timeline and return the events that follow.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from fleetbed.emulator.randomness import numpy_rng
from fleetbed.emulator.timeline import traces
from fleetbed.emulator.timeline.events import Event, Kind
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Availability
from fleetbed.profiles.types import ClientSpec

HOUR_S = 3600.0


class Always(Struct, tag="always"):
    """All clients are always available. The other models override parts of it."""

    away: list[int] = []

    def begin(self, clients: Iterable[int]) -> list[Event]:
        """Return the first change of every client; called once, at time 0."""
        del clients
        return []

    def changed(self, event: Event) -> list[Event]:
        """Handle that a client came or left, by an event of this model; returns the events that follow."""
        raise AssertionError(f"{event} of a client that is always available")

    def starts(self, client: int, task: int, now_s: float, seconds: float) -> list[Event]:
        """Handle that a task begins to compute and is planned to take so long; returns the events that follow."""
        del client, task, now_s, seconds
        return []

    def worked(self, client: int, now_s: float, seconds: float) -> None:
        """Note that a task has computed for so long, until now."""

    def _here(self, client: int) -> None:
        if client in self.away:
            self.away.remove(client)

    def _gone(self, client: int) -> None:
        if client not in self.away:
            self.away.append(client)


class OnOff(Always, tag="on-off", kw_only=True):
    """Stays and absences of exponential length, drawn per client and count."""

    seed: int
    mean_on_s: float
    mean_off_s: float
    changes: dict[int, int] = {}

    def begin(self, clients: Iterable[int]) -> list[Event]:
        return [self._first(client) for client in clients]

    def changed(self, event: Event) -> list[Event]:
        client = event.client
        self.changes[client] += 1
        if event.kind is Kind.CAME:
            self._here(client)
        else:
            self._gone(client)
        return [self._next(client, event.time_s)]

    def _first(self, client: int) -> Event:
        self.changes[client] = 0
        part_on = self.mean_on_s / (self.mean_on_s + self.mean_off_s)
        if numpy_rng(self.seed, client, "there at first").random() >= part_on:
            self._gone(client)
        return self._next(client, 0.0)

    def _next(self, client: int, now_s: float) -> Event:
        away = client in self.away
        mean_s = self.mean_off_s if away else self.mean_on_s
        lasts_s = float(numpy_rng(self.seed, client, "stay", self.changes[client]).exponential(mean_s))
        return Event(now_s + lasts_s, Kind.CAME if away else Kind.LEFT, client)


class Traced(Always, tag="trace", kw_only=True):
    """Stays and absences from a trace file, repeated if asked for."""

    trace: traces.Presence
    repeat: bool
    changes: dict[int, int] = {}

    def begin(self, clients: Iterable[int]) -> list[Event]:
        events = []
        for client in clients:
            self.changes[client] = 0
            self._gone(client)
            if self.trace.stays[client][0][0] == 0.0:
                self.changes[client] = 1
                self._here(client)
            events += self._next(client)
        return events

    def changed(self, event: Event) -> list[Event]:
        self.changes[event.client] += 1
        if event.kind is Kind.CAME:
            self._here(event.client)
        else:
            self._gone(event.client)
        return self._next(event.client)

    def _next(self, client: int) -> list[Event]:
        """Its changes count up through the trace: even ones are arrivals, odd ones departures."""
        times = [moment for stay in self.trace.stays[client] for moment in stay]
        through = (
            self.repeat and times[0] == 0.0 and times[-1] == self.trace.end_s
        )  # it is available across repetitions
        if through and len(times) == 2:
            return []
        lap, position = divmod(self.changes[client], len(times))
        if through and position == len(times) - 1:
            self.changes[client] += 2
            lap, position = lap + 1, 1
        if lap and not self.repeat:
            return []
        kind = Kind.LEFT if position % 2 else Kind.CAME
        return [Event(lap * self.trace.end_s + times[position], kind, client)]


class Charging(Always, tag="charging", kw_only=True):
    """A battery per client: it charges for a part of each day, training drains it, and a low one keeps the client away.

    A client is plugged in for `plugged` of each day, from its own time of day on. It is available while it is plugged
    in, or while its battery holds more than `low` of its capacity. Nothing but training drains the battery.
    """

    seed: int
    settings: Availability
    load_w: dict[int, float]
    plugged: list[int] = []
    level_wh: dict[int, float] = {}
    known_s: dict[int, float] = {}  # the time at which the level was known

    def begin(self, clients: Iterable[int]) -> list[Event]:
        return [self._first(client) for client in clients]

    def changed(self, event: Event) -> list[Event]:
        client, now_s = event.client, event.time_s
        if event.task >= 0:  # drained by this task, unless it was plugged in meanwhile
            if client not in self.plugged:  # `worked` accounts for what the task used
                self._gone(client)
            return []
        self._charge(client, now_s)
        if event.kind is Kind.CAME:
            self.plugged.append(client)
            self._here(client)
            return [Event(now_s + self._plugged_s, Kind.LEFT, client)]
        self.plugged.remove(client)
        self._check_low(client)
        return [Event(now_s + self.settings.day_s - self._plugged_s, Kind.CAME, client)]

    def starts(self, client: int, task: int, now_s: float, seconds: float) -> list[Event]:
        self._charge(client, now_s)
        lasts_s = (self.level_wh[client] - self._low_wh) / self.load_w[client] * HOUR_S
        if client in self.plugged or lasts_s >= seconds:
            return []
        return [Event(now_s + max(0.0, lasts_s), Kind.LEFT, client, task)]

    def worked(self, client: int, now_s: float, seconds: float) -> None:
        self._charge(client, now_s)
        self.level_wh[client] = max(0.0, self.level_wh[client] - self.load_w[client] * seconds / HOUR_S)
        self._check_low(client)

    @property
    def _low_wh(self) -> float:
        return self.settings.low * self.settings.battery_wh

    @property
    def _plugged_s(self) -> float:
        return self.settings.plugged * self.settings.day_s

    def _first(self, client: int) -> Event:
        rng = numpy_rng(self.seed, client, "battery")
        self.level_wh[client] = float(rng.uniform(self._low_wh, self.settings.battery_wh))
        self.known_s[client] = 0.0
        # its position in its own day, of charging and not charging, at time 0
        into_s = float(rng.uniform(0.0, self.settings.day_s))
        if into_s < self._plugged_s:
            self.plugged.append(client)
            return Event(self._plugged_s - into_s, Kind.LEFT, client)
        return Event(self.settings.day_s - into_s, Kind.CAME, client)

    def _charge(self, client: int, now_s: float) -> None:
        if client in self.plugged:
            gained = self.settings.charge_w * (now_s - self.known_s[client]) / HOUR_S
            self.level_wh[client] = min(self.settings.battery_wh, self.level_wh[client] + gained)
        self.known_s[client] = now_s

    def _check_low(self, client: int) -> None:
        if client not in self.plugged and self.level_wh[client] <= self._low_wh:
            self._gone(client)


AnyAvailability = Always | OnOff | Traced | Charging


def make_availability(
    choice: Availability, specs: Iterable[ClientSpec], trace: traces.Presence | None, seed: int
) -> AnyAvailability:
    if choice.kind == "on-off":
        return OnOff(seed=seed, mean_on_s=choice.mean_on_s, mean_off_s=choice.mean_off_s)
    if choice.kind == "charging":
        return Charging(seed=seed, settings=choice, load_w={spec.number: _load_w(spec) for spec in specs})
    if trace is not None:
        return Traced(trace=trace, repeat=choice.repeat)
    return Always()


def _load_w(spec: ClientSpec) -> float:
    if spec.device.power.load_w is None:
        raise BadInput(
            f"availability.kind: charging drains a battery by the device's watts, but {spec.kind} (client {spec.name}) "
            "has no power.load_w; add the figure, or choose another kind"
        )
    return spec.device.power.load_w
