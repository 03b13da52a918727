"""Runs that would be far too slow or large are refused before they start; long runs are forecast quickly."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fleetbed.emulator.engine.layout import lay_out
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.run.forecast import MOST_TASKS, forecast
from fleetbed.emulator.timeline.traces import read_bandwidth, read_presence
from fleetbed.profiles import BadInput, HostCannot, load_experiment, runs
from fleetbed.profiles.experiment import RunConfig

FLEET = "title: x\nmembers: [{device: jetson-nano, count: 8, link: lora_sf12}]\n"


def config(*sets: str) -> RunConfig:
    plain = ("timing.source=modelled", "processes=inline", "algorithms=[{name: fedavg}]", "data.train_limit=400")
    small = ("data.test_limit=100", "data.partition={kind: iid}", "budgets={}", "evaluation={}")
    return runs(load_experiment("demo", sets=[*plain, *small, *sets]))[0]


def test_links_that_change_all_the_time(tmp_path: Path) -> None:
    trace = tmp_path / "trace.tsv"
    trace.write_text("0\t0.001\n0.001\t0.002\n0.002\t0")
    with pytest.raises(BadInput, match=r"availability.bandwidth: the links would change about \S+ times in a round"):
        forecast(config(f"availability.bandwidth={trace}"), search=(), observer=Observer())
    trace.write_text("0\t10\n1\t20\n2\t0")
    assert forecast(config(f"availability.bandwidth={trace}"), search=(), observer=Observer()).tasks == 80


@pytest.mark.parametrize(
    ("choice", "key"),
    [("{kind: on-off, mean_on_s: 1, mean_off_s: 1}", "mean_on_s"), ("{kind: charging, day_s: 1}", "day_s")],
)
def test_clients_that_come_and_go_all_the_time(tmp_path: Path, choice: str, key: str) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(FLEET)
    asked = (f"fleet={fleet}", f"availability={choice}", "model.options.base_width=64", "model.variants=[resnet26]")
    with pytest.raises(BadInput, match=rf"availability.{key}: clients would come and go about \S+ times in a round"):
        forecast(config(*asked), search=(), observer=Observer())


@pytest.mark.slow
def test_a_long_run_is_forecast_by_its_first_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    most = MOST_TASKS // 25  # with all of them it takes ten seconds
    monkeypatch.setattr("fleetbed.emulator.run.forecast.MOST_TASKS", most)
    begun_s = time.process_time()
    long = forecast(config("rounds=100000"), search=(), observer=Observer())
    assert time.process_time() - begun_s < 30 / 25 + 4  # and what comes before the first task
    short = forecast(config(f"rounds={most // 8}"), search=(), observer=Observer())
    assert (short.tasks, long.tasks) == (most, 800_000)
    assert long.device_s == pytest.approx(short.device_s * 100_000 / (most // 8))


@pytest.mark.parametrize(
    "sets",
    [
        ("model.options.base_width=4096",),
        ("model={family: fedhenn-cnn, options: {hidden: [65536, 65536], filters: [65536, 1, 1]}}",),
        ("model={family: vit-layer, options: {width: 65536, heads: 1, patch: 28}}",),
    ],
)
def test_models_that_do_not_fit_into_memory(sets: tuple[str, ...]) -> None:
    with pytest.raises(HostCannot, match="of memory are free"):
        lay_out(config(*sets), ())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0\t5\n1e-9\t5", "at least 0.001 s must lie between two lines"),
        ("0\t1e300\n1\t5", "numbers from 0 to"),
        ("0\t1e8\n1\t5", "at most 1e\\+07 is allowed"),
        ("0\t1e-300\n1\t5", "the mean rate is 1e-300 Mbit/s, but at least 1e-06 is needed"),
        ("0\t1\n0.001\t0\n1e9\t5", "the mean rate is"),
        ("0\t5\n1e11\t5", "numbers from 0 to"),
        ("0\tnan\n1\t5", "numbers from 0 to"),
        ("nan\t1\n1\t5", "numbers from 0 to"),
    ],
)
def test_traces_without_sense(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.tsv"
    path.write_text(text)
    with pytest.raises(BadInput, match=says):
        read_bandwidth(path)


@pytest.mark.parametrize("text", ["0\t0\t1e-9", "0\t0\t1\n0\t1.000000001\t5", "0\t0\tinf", "0\tnan\t3", "nan\t0\t1"])
def test_stays_without_sense(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.tsv"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"must last at least|numbers from 0 to|there is no client"):
        read_presence(path, 1)
