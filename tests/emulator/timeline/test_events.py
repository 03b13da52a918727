"""The timeline against hand-computed examples."""

from __future__ import annotations

import msgspec
import pytest

from fleetbed.emulator.timeline.events import Event, Kind, Timeline
from fleetbed.emulator.timeline.network import Pipe, Transfer, transfer
from fleetbed.profiles.types import Link


def timeline(capacity_bit_s: float = 10.0) -> Timeline:
    return Timeline(Pipe(capacity_bit_s), Pipe(capacity_bit_s))


def drain(line: Timeline) -> list[tuple[float, Kind, int]]:
    found = []
    while (event := line.pop()) is not None:
        found.append((event.time_s, event.kind, event.task))
    return found


def test_events_come_in_device_time_whatever_order_they_were_added_in() -> None:
    line = timeline()
    for time_s, task in ((3.0, 1), (1.0, 2), (2.0, 3)):
        line.add(Event(time_s, Kind.COMPUTED, 0, task))
    assert [task for _, _, task in drain(line)] == [2, 3, 1]


def test_ties_are_broken_by_kind_client_and_task_never_by_arrival() -> None:
    events = [
        Event(1.0, Kind.COMPUTED, 5, 1),
        Event(1.0, Kind.COMPUTED, 2, 9),
        Event(1.0, Kind.UPLOADED, 7, 3),
        Event(1.0, Kind.COMPUTED, 2, 4),
    ]
    for order in (events, events[::-1]):
        line = timeline()
        for event in order:
            line.add(event)
        assert [task for _, _, task in drain(line)] == [3, 4, 9, 1]


def test_the_past_cannot_be_changed() -> None:
    line = timeline()
    line.add(Event(2.0, Kind.TIMER))
    line.pop()
    with pytest.raises(ValueError, match="after the timeline has reached 2"):
        line.add(Event(1.0, Kind.TIMER))


def test_one_transfer_is_limited_by_its_own_link_and_delayed() -> None:
    line = timeline(capacity_bit_s=100.0)
    line.send(Kind.DOWNLOADED, Transfer(0, 0, remaining_bits=50.0, limit_bit_s=10.0, delay_s=0.25))
    assert drain(line) == [(5.25, Kind.DOWNLOADED, 0)]


def test_the_server_link_is_shared_max_min_fairly() -> None:
    # capacity 10: the slow client takes its 2, the fast one the other 8; when the slow one is done (10/2 = 5 s) the
    # other has 100 - 8*5 = 60 left and the whole 10: it ends at 5 + 6 = 11 s
    line = timeline(capacity_bit_s=10.0)
    line.send(Kind.UPLOADED, Transfer(0, 0, remaining_bits=100.0, limit_bit_s=100.0, delay_s=0.0))
    line.send(Kind.UPLOADED, Transfer(1, 1, remaining_bits=10.0, limit_bit_s=2.0, delay_s=0.0))
    assert drain(line) == [(5.0, Kind.UPLOADED, 1), (11.0, Kind.UPLOADED, 0)]


def test_a_transfer_that_starts_later_takes_its_share_from_then_on() -> None:
    # alone for 4 s: 40 of 100 sent; then two share 10 equally: 60/5 = 12 s for the first, 60 bits of the second
    line = timeline(capacity_bit_s=10.0)
    line.send(Kind.DOWNLOADED, Transfer(0, 0, remaining_bits=100.0, limit_bit_s=50.0, delay_s=0.0))
    line.add(Event(4.0, Kind.TIMER))
    assert line.pop() == Event(4.0, Kind.TIMER)
    line.send(Kind.DOWNLOADED, Transfer(1, 1, remaining_bits=60.0, limit_bit_s=50.0, delay_s=0.0))
    assert drain(line) == [(16.0, Kind.DOWNLOADED, 0), (16.0, Kind.DOWNLOADED, 1)]


def test_directions_do_not_share() -> None:
    line = timeline(capacity_bit_s=10.0)
    line.send(Kind.DOWNLOADED, Transfer(0, 0, remaining_bits=10.0, limit_bit_s=10.0, delay_s=0.0))
    line.send(Kind.UPLOADED, Transfer(1, 1, remaining_bits=10.0, limit_bit_s=10.0, delay_s=0.0))
    assert [time_s for time_s, _, _ in drain(line)] == [1.0, 1.0]


def test_a_forgotten_task_frees_its_share() -> None:
    line = timeline(capacity_bit_s=10.0)
    line.send(Kind.UPLOADED, Transfer(0, 0, remaining_bits=100.0, limit_bit_s=10.0, delay_s=0.0))
    line.send(Kind.UPLOADED, Transfer(1, 1, remaining_bits=50.0, limit_bit_s=10.0, delay_s=0.0))
    line.add(Event(2.0, Kind.TIMER))
    line.pop()
    line.forget(0)
    assert drain(line) == [(6.0, Kind.UPLOADED, 1)]  # 10 sent by 2 s, the other 40 at full rate


def test_a_transfer_goes_on_at_the_rate_that_its_link_has_now() -> None:
    # 20 bits by 2 s, none until 5 s, the other 30 at 6 bit/s
    line = timeline(capacity_bit_s=100.0)
    line.send(Kind.UPLOADED, Transfer(0, 0, remaining_bits=50.0, limit_bit_s=10.0, delay_s=0.5))
    line.add(Event(2.0, Kind.RATE, 0, 0))
    line.add(Event(5.0, Kind.RATE, 0, 0))
    assert line.pop() == Event(2.0, Kind.RATE, 0, 0)
    assert line.limit(0, 0.0)
    assert line.pop() == Event(5.0, Kind.RATE, 0, 0)
    assert line.limit(0, 6.0)
    assert line.pop() == Event(10.5, Kind.UPLOADED, 0, 0)
    assert not line.limit(0, 6.0)


def test_a_timeline_survives_json_in_the_middle() -> None:
    line = timeline()
    line.send(Kind.DOWNLOADED, Transfer(0, 0, remaining_bits=33.0, limit_bit_s=7.0, delay_s=0.1))
    line.send(Kind.DOWNLOADED, Transfer(1, 1, remaining_bits=41.0, limit_bit_s=9.0, delay_s=0.2))
    line.add(Event(1.0, Kind.TIMER))
    line.pop()
    copy = msgspec.json.decode(msgspec.json.encode(line), type=Timeline)
    assert drain(copy) == drain(line)


LINK = Link(title="", down_mbit_s=8.0, up_mbit_s=4.0, rtt_ms=100.0, jitter_ms=0.0, loss=0.0)
SERVER = Link(title="", down_mbit_s=1000.0, up_mbit_s=1000.0, rtt_ms=20.0)


def test_a_transfer_has_its_direction_and_half_of_both_round_trips() -> None:
    down = transfer(LINK, up=False, size_bytes=1000, server=SERVER, seed=1, client=2, task=3)
    up = transfer(LINK, up=True, size_bytes=1000, server=SERVER, seed=1, client=2, task=3)
    assert (down.remaining_bits, down.limit_bit_s, down.delay_s) == (8000.0, 8e6, pytest.approx(0.06))
    assert up.limit_bit_s == 4e6


def test_losses_are_sent_again_and_stall_by_the_logarithm() -> None:
    lossy = msgspec.structs.replace(LINK, loss=1.0)
    found = transfer(lossy, up=True, size_bytes=3 * 1460, server=SERVER, seed=1, client=2, task=3)
    assert found.remaining_bits == 2 * 8 * 3 * 1460
    assert found.delay_s == pytest.approx(0.06 + 0.12 * 2)  # three lost: log2(1 + 3) round trips


def test_jitter_is_drawn_per_client_task_and_direction_and_repeats() -> None:
    jittery = msgspec.structs.replace(LINK, jitter_ms=30.0)

    def delay(client: int, task: int, up: bool) -> float:
        return transfer(jittery, up=up, size_bytes=1000, server=SERVER, seed=1, client=client, task=task).delay_s

    keys = [(2, 3, True), (2, 3, False), (2, 4, True), (3, 3, True)]
    assert len({delay(*key) for key in keys}) == 4
    assert delay(*keys[0]) == delay(*keys[0])
