"""Trace files: read by hand-made examples, refused by line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleetbed.emulator.timeline.traces import load_presence, load_rates, read_bandwidth, read_presence
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import AlgorithmChoice, Availability, Experiment


def experiment(limit_s: float | None = None, **availability: Any) -> Experiment:
    return Experiment(
        title="",
        fleet="",
        algorithms=(AlgorithmChoice(name="x"),),
        availability=Availability(**availability),
        device_time_limit_s=limit_s,
    )


def file(folder: Path, text: str) -> Path:
    path = folder / "trace.tsv"
    path.write_text(text)
    return path


def test_a_bandwidth_holds_until_the_next_line_and_starts_over_after_the_last(tmp_path: Path) -> None:
    trace = read_bandwidth(file(tmp_path, "# a bus\n2.0\t4\n3.0\t0.5\n5.0\t9\n"))
    assert trace.at(0.0) == (4e6, 1.0)
    assert trace.at(1.0) == (0.5e6, 2.0)
    assert trace.at(2.5) == (0.5e6, 0.5)
    assert trace.at(3.0) == (4e6, 1.0)  # the last line only says when it ends


def test_a_transfer_takes_as_long_as_the_lines_that_it_crosses_allow(tmp_path: Path) -> None:
    trace = read_bandwidth(file(tmp_path, "0\t4\n1\t0\n3\t1\n5\t9\n"))  # 4 Mbit, a gap of 2 s, 2 Mbit in 2 s
    fast = 1e9
    assert trace.seconds(0.0, 2e6, fast) == 0.5
    assert trace.seconds(0.0, 5e6, fast) == 1 + 2 + 1
    assert trace.seconds(0.5, 3e6, fast) == 0.5 + 2 + 1
    assert trace.seconds(0.0, 6e6 + 4e6, fast) == 5 + 1  # it starts over
    assert trace.seconds(0.0, 2e6, 2e6) == 1  # the other end allows no more
    assert trace.seconds(1.0, 0.0, fast) == 0


def test_every_change_is_reached_in_as_many_steps_as_there_are_lines(tmp_path: Path) -> None:
    trace = read_bandwidth(file(tmp_path, "0\t1\n0.549999952316\t2\n0.879999876022\t3\n1.7\t1\n"))
    now_s = 12345.678
    for _ in range(3 * 1000):
        _, lasts_s = trace.at(now_s)
        assert now_s + lasts_s > now_s
        now_s += lasts_s
    assert now_s == pytest.approx(12345.678 + 1000 * 1.7, abs=1.0)


def test_clients_take_the_files_of_a_folder_in_turn_each_from_a_place_of_its_own(tmp_path: Path) -> None:
    for name, rate in (("a", 1), ("b", 2)):
        (tmp_path / name).write_text(f"0\t{rate}\n100\t{rate}\n")
    rates = load_rates(experiment(bandwidth=str(tmp_path)), clients=4, seed=1)
    assert rates is not None
    assert [rates.at(client, 5.0)[0] for client in range(4)] == [1e6, 2e6, 1e6, 2e6]
    assert len({rates.at(client, 5.0)[1] for client in range(4)}) == 4
    assert load_rates(experiment(bandwidth=str(tmp_path)), clients=4, seed=1) == rates
    assert load_rates(experiment(), clients=4, seed=1) is None


def test_stays_are_read_per_client(tmp_path: Path) -> None:
    found = read_presence(file(tmp_path, "1\t0\t5\n0\t2\t3\n0\t4\t9\n"), clients=2)
    assert found.stays == (((2.0, 3.0), (4.0, 9.0)), ((0.0, 5.0),))
    assert found.end_s == 9.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0\t5\n1\t4\n1\t3\n2\t3", r"tsv:3: the trace goes back in time, from 1 s to 1 s"),
        ("0\t5\nx\t4", r"tsv:2: 'x\\t4' is not seconds<TAB>Mbit/s"),
        ("0\t5\n1\t-4", r"tsv:2: .*numbers from 0 to"),
        ("0\t5\n1", r"tsv:2: .*is not seconds<TAB>Mbit/s"),
        ("0\t5\n1\tinf", r"tsv:2: .*from 0 to"),
        ("0\t5", "two lines or more"),
        ("0\t0\n1\t5", "a rate above 0"),
        ("", "two lines or more"),
    ],
)
def test_a_bad_bandwidth_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        read_bandwidth(file(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0\t5\t6\n0\t4\t7\n", r"tsv:2: the trace goes back in time: it starts at 4 s.*until 6 s"),
        ("0\t5\t5\n", r"tsv:1: it stops at 5 s, but starts at 5 s"),
        ("7\t5\t6\n", r"tsv:1: there is no client 7; the fleet has 0 to 1"),
        ("0.5\t5\t6\n", r"tsv:1: there is no client 0.5"),
        ("0\t5\t6\n", r"no line for client 1; each of the 2 needs one"),
    ],
)
def test_bad_stays_are_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        read_presence(file(tmp_path, text), clients=2)


def test_what_is_no_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"does not exist|is a folder"):
        read_bandwidth(tmp_path / "none")
    with pytest.raises(BadInput, match=r"does not exist|is a folder"):
        read_bandwidth(file(tmp_path, "").with_name("..").resolve())
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="is empty"):
        load_rates(experiment(bandwidth=str(tmp_path / "empty")), 1, 1)


def test_a_trace_that_does_not_repeat_must_last_for_the_run(tmp_path: Path) -> None:
    stays = str(file(tmp_path, "0\t0\t50\n"))
    asked = {"kind": "trace", "trace": stays, "repeat": False}
    with pytest.raises(BadInput, match=r"ends early, at 50 s.*device_time_limit_s = 60 s"):
        load_presence(experiment(60.0, **asked), 1)
    with pytest.raises(BadInput, match=r"ends early, at 50 s.*device_time_limit_s, which is not set"):
        load_presence(experiment(None, **asked), 1)
    assert load_presence(experiment(50.0, **asked), 1) is not None
    (tmp_path / "rate").write_text("0\t1\n20\t1\n")
    with pytest.raises(BadInput, match=r"availability\.bandwidth: .*rate ends early, at 20 s"):
        load_rates(experiment(60.0, bandwidth=str(tmp_path / "rate"), repeat=False), 1, 1)
