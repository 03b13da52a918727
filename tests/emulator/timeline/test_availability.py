"""When clients come and leave, against hand-computed days and laps."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from fleetbed.emulator.timeline.availability import AnyAvailability, Charging, OnOff, Traced, make_availability
from fleetbed.emulator.timeline.events import Event, Kind
from fleetbed.emulator.timeline.traces import Presence
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Availability
from fleetbed.profiles.resolve import clients_of, load_fleet


def follow(model: AnyAvailability, clients: list[int], until_s: float) -> list[tuple[float, str, int]]:
    """All changes up to a time, as the timeline would carry them out."""
    events, seen = sorted(model.begin(clients)), []
    while events and events[0].time_s <= until_s:
        event = events.pop(0)
        events = sorted([*events, *model.changed(event)])
        seen.append((event.time_s, event.kind.name, event.client))
    return seen


def traced(*stays: tuple[tuple[float, float], ...], end_s: float, repeat: bool = True) -> Traced:
    return Traced(trace=Presence(stays, end_s), repeat=repeat)


def test_a_trace_is_followed_and_starts_over() -> None:
    model = traced(((1.0, 2.0), (4.0, 5.0)), end_s=10.0)
    assert follow(model, [0], 13.0) == [
        (1.0, "CAME", 0),
        (2.0, "LEFT", 0),
        (4.0, "CAME", 0),
        (5.0, "LEFT", 0),
        (11.0, "CAME", 0),
        (12.0, "LEFT", 0),
    ]
    assert model.away == [0]


def test_who_is_there_at_0_is_there_at_once() -> None:
    model = traced(((0.0, 2.0),), ((1.0, 3.0),), end_s=3.0)
    model.begin([0, 1])
    assert model.away == [1]


def test_who_is_there_at_the_end_and_at_the_start_stays_on_from_lap_to_lap() -> None:
    model = traced(((0.0, 2.0), (8.0, 10.0)), end_s=10.0)
    assert follow(model, [0], 19.0) == [(2.0, "LEFT", 0), (8.0, "CAME", 0), (12.0, "LEFT", 0), (18.0, "CAME", 0)]
    assert follow(traced(((0.0, 10.0),), end_s=10.0), [0], 1e9) == []


def test_a_trace_that_does_not_repeat_ends() -> None:
    model = traced(((0.0, 2.0), (8.0, 10.0)), end_s=10.0, repeat=False)
    assert follow(model, [0], 1e9) == [(2.0, "LEFT", 0), (8.0, "CAME", 0), (10.0, "LEFT", 0)]


def test_on_and_off_alternate_with_the_means_asked_for_and_repeat() -> None:
    def model() -> OnOff:
        return OnOff(seed=1, mean_on_s=30.0, mean_off_s=10.0)

    clients = list(range(400))
    first = model()
    first.begin(clients)
    assert 0.19 < len(first.away) / 400 < 0.31  # a quarter of the time
    seen = follow(model(), clients, 1000.0)
    assert seen == follow(model(), clients, 1000.0)
    assert follow(model(), clients[::-1], 1000.0) == seen
    on_s = off_s = 0.0
    stays = 0
    for client in clients:
        mine = [(time_s, kind) for time_s, kind, who in seen if who == client]
        for (start_s, kind), (stop_s, following) in pairwise(mine):
            assert kind != following
            if kind == "CAME":
                on_s, stays = on_s + stop_s - start_s, stays + 1
            else:
                off_s += stop_s - start_s
    assert on_s / stays == pytest.approx(30.0, rel=0.05)
    assert off_s / stays == pytest.approx(10.0, rel=0.05)


def charging(level_wh: float, *, plugged: bool) -> Charging:
    """Client 0 with a battery of 10 Wh that gains 4 W for a quarter of a day of 8 h; training takes 2 W."""
    settings = Availability(kind="charging", battery_wh=10.0, charge_w=4.0, day_s=28_800.0, plugged=0.25, low=0.2)
    return Charging(
        seed=1,
        settings=settings,
        load_w={0: 2.0},
        plugged=[0] if plugged else [],
        level_wh={0: level_wh},
        known_s={0: 0.0},
    )


def test_a_battery_charges_while_it_is_plugged_in_and_not_beyond_its_size() -> None:
    model = charging(3.0, plugged=True)
    model.worked(0, now_s=3600.0, seconds=0.0)
    assert model.level_wh[0] == pytest.approx(7.0)
    model.worked(0, now_s=7200.0, seconds=0.0)
    assert model.level_wh[0] == 10.0


def test_training_drains_it_and_a_low_one_keeps_the_client_away_until_it_is_plugged_in() -> None:
    model = charging(5.0, plugged=False)
    model.worked(0, now_s=3600.0, seconds=3600.0)
    assert (model.level_wh[0], model.away) == (3.0, [])
    model.worked(0, now_s=7200.0, seconds=3600.0)
    assert (model.level_wh[0], model.away) == (1.0, [0])
    assert model.changed(Event(9000.0, Kind.CAME, 0)) == [Event(9000.0 + 7200.0, Kind.LEFT, 0)]
    assert model.away == []
    # two hours at 4 W: it is at 9 Wh when it is unplugged, and stays
    assert model.changed(Event(16_200.0, Kind.LEFT, 0)) == [Event(16_200.0 + 21_600.0, Kind.CAME, 0)]
    assert (model.level_wh[0], model.away) == (pytest.approx(9.0), [])


def test_a_client_leaves_in_the_middle_of_a_task_that_drains_its_battery() -> None:
    # 5 Wh are 3 Wh above the limit of 2 Wh: an hour and a half at 2 W
    assert charging(5.0, plugged=False).starts(0, 7, 100.0, 5000.0) == []
    model = charging(5.0, plugged=False)
    (event,) = model.starts(0, 7, 100.0, 6000.0)
    assert event == Event(100.0 + 5400.0, Kind.LEFT, 0, 7)
    assert model.changed(event) == []
    assert model.away == [0]
    model.worked(0, event.time_s, 5400.0)  # as the engine tells it of a task that it stops
    assert model.level_wh[0] == pytest.approx(2.0)
    # an hour on the charger: 4 Wh above the limit, and not above an empty battery
    model.changed(Event(9000.0, Kind.CAME, 0))
    model.worked(0, 9000.0 + 3600.0, 0.0)
    assert model.level_wh[0] == pytest.approx(6.0)


def test_plugged_in_it_goes_on() -> None:
    assert charging(2.5, plugged=True).starts(0, 7, 100.0, 1e6) == []
    model = charging(5.0, plugged=False)
    (event,) = model.starts(0, 7, 0.0, 6000.0)
    model.changed(Event(1000.0, Kind.CAME, 0))
    assert model.changed(event) == []
    assert model.away == []


def test_days_begin_at_a_time_of_their_own_for_each_client() -> None:
    settings = Availability(kind="charging", day_s=100.0, plugged=0.3)
    model = Charging(seed=1, settings=settings, load_w={})
    clients = list(range(300))
    events = model.begin(clients)
    assert 60 < len(model.plugged) < 120
    assert {event.kind for event in events if event.client in model.plugged} == {Kind.LEFT}
    assert max(event.time_s for event in events if event.kind is Kind.LEFT) <= 30.0
    assert 60.0 < max(event.time_s for event in events if event.kind is Kind.CAME) <= 70.0


def test_charging_needs_watts() -> None:
    specs = clients_of(load_fleet("demo", (), "fleet"), (), "demo")
    silent = msgspec.structs.replace(
        specs[0], device=msgspec.structs.replace(specs[0].device, power=type(specs[0].device.power)())
    )
    with pytest.raises(BadInput, match=r"raspberry-pi-zero-2w \(client 000\) has no power.load_w"):
        make_availability(Availability(kind="charging"), [silent], None, 1)


@pytest.mark.parametrize(
    "model",
    [OnOff(seed=1, mean_on_s=1.0, mean_off_s=1.0), traced(((1.0, 2.0),), end_s=3.0), charging(3.0, plugged=True)],
)
def test_it_survives_json(model: AnyAvailability) -> None:
    model.begin([0])
    assert msgspec.json.decode(msgspec.json.encode(model), type=AnyAvailability) == model
