from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from fleetbed.emulator.machine import calibration, host
from fleetbed.emulator.machine.calibration import Calibration, HostRate, Store, load_or_measure, run_kernel, spread
from fleetbed.emulator.processes.executor import Order, Outcome
from fleetbed.emulator.run.references import Reference, References
from fleetbed.emulator.wire.messages import Measured
from fleetbed.models.base import InputSpec
from fleetbed.profiles.errors import BadInput, FleetbedError, HostCannot
from fleetbed.profiles.experiment import Model, Optimizer

RATE = HostRate(180.0, 120.0, 2, 0.01, 0.02, other_cores=0.0)


def made(**changes: object) -> Calibration:
    return msgspec.structs.replace(Calibration("this host", "2026-01-01T00:00:00+00:00", RATE), **changes)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "deep/calibration.json")


def test_what_was_saved_is_loaded_for_the_same_host_only(store: Store) -> None:
    assert store.load("this host") is None
    store.save(made())
    store.save(made(fingerprint="another host"))
    assert store.load("this host") == made()
    assert store.load("a third host") is None


def test_the_id_follows_the_content() -> None:
    assert made().id == made().id
    assert len({made().id, made(steps={"a": 1.0}).id, made(rate=msgspec.structs.replace(RATE, cores=4)).id}) == 3


def test_reference_times_are_added_and_never_replaced(store: Store) -> None:
    store.save(made())
    store.add_steps(made(), {"a": 1.0})
    merged = store.add_steps(made(), {"a": 2.0, "b": 3.0})
    assert merged.steps == {"a": 1.0, "b": 3.0}
    assert store.load("this host") == merged


def test_writers_at_the_same_time_lose_nothing(store: Store) -> None:
    store.save(made())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: store.add_steps(made(), {f"step {i}": float(i)}), range(40)))
    stored = store.load("this host")
    assert stored is not None
    assert len(stored.steps) == 40


@pytest.mark.parametrize("content", [b"", b"{", b'{"this host": {"rate": 3}}', b"\x00\xff"])
def test_a_broken_file_is_named(store: Store, content: bytes) -> None:
    store.path.parent.mkdir()
    store.path.write_bytes(content)
    with pytest.raises(BadInput, match=r"calibration\.json: not a calibration file .* fleetbed calibrate"):
        store.load()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostCannot, match=r"cannot be stored here \(File exists\); set XDG_CACHE_HOME"):
        Store(tmp_path / "file/calibration.json").save(made())


DISTURBED = {
    "others": {"other_cores": 0.8},
    "alone": {"alone_spread": 0.34},
    "busy": {"busy_spread": 0.11},
}


def measured(monkeypatch: pytest.MonkeyPatch, *changes: dict[str, float]) -> list[HostRate]:
    """Have the host be measured with these changes, one after the other; gives what was measured as it goes on."""
    rates = iter([msgspec.structs.replace(RATE, **change) for change in changes])
    done: list[HostRate] = []

    def measure_rate() -> HostRate:
        done.append(next(rates))
        return done[-1]

    monkeypatch.setattr(calibration, "measure_rate", measure_rate)
    return done


@pytest.mark.parametrize("change", DISTURBED.values(), ids=DISTURBED)
def test_what_was_disturbed_is_measured_again_and_what_was_not_is_kept(
    store: Store, monkeypatch: pytest.MonkeyPatch, change: dict[str, float]
) -> None:
    done = measured(monkeypatch, change, {"alone_gflops": 170.0})
    found = load_or_measure(store)
    assert (found.rate.alone_gflops, found.disturbed, found.warning) == (170.0, {}, None)
    assert len(done) == 2
    assert Store(store.path).load() == found == load_or_measure(store)
    assert store.path.exists()


@pytest.mark.parametrize("change", DISTURBED.values(), ids=DISTURBED)
def test_what_is_disturbed_every_time_serves_this_process_says_so_and_is_not_kept(
    store: Store, monkeypatch: pytest.MonkeyPatch, change: dict[str, float]
) -> None:
    done = measured(monkeypatch, {"other_cores": 1.5}, change, {"other_cores": 1.8}, {})
    found = load_or_measure(store)
    assert found.rate == msgspec.structs.replace(RATE, **change)  # the quietest
    assert found.disturbed.keys() == {calibration.RATE}
    assert found.warning is not None
    assert "which distorted the rate;" in found.warning
    assert load_or_measure(store) == found  # so that the runs of a study share it
    assert len(done) == 3
    more = store.add_steps(found, {"a": 1.0}, {"a": "repetitions were 20% apart"})
    assert more.steps == store.add_steps(found, {}).steps == {"a": 1.0}
    assert more.warning is not None
    assert "the rate, reference times: 1;" in more.warning
    assert not store.path.exists()
    monkeypatch.setattr(calibration, "_passing", {})  # another process
    assert load_or_measure(store).rate == RATE


def test_a_disturbed_calibration_that_was_kept_before_is_measured_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(made(fingerprint=calibration.host_fingerprint(), rate=msgspec.structs.replace(RATE, busy_spread=0.5)))
    measured(monkeypatch, {"alone_gflops": 170.0})
    assert load_or_measure(store).rate.alone_gflops == 170.0


def test_a_disturbed_reference_time_is_not_kept_and_the_sound_ones_are(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(made())
    first = store.add_steps(made(), {"a": 1.0})
    both = store.add_steps(first, {"b": 2.0, "c": 3.0}, {"c": "others kept 0.9 cores busy"})
    assert both.steps == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert both.disturbed == {"c": "others kept 0.9 cores busy"}
    assert store.load("this host") == made(steps={"a": 1.0, "b": 2.0})
    assert store.add_steps(made(), {}) == both  # the next run of this process
    again = store.add_steps(both, {"a": 9.0}, {"a": "others kept 0.9 cores busy"})
    assert (again.steps["a"], "a" in again.disturbed) == (1.0, False)  # what is kept stands
    monkeypatch.setattr(calibration, "_passing", {})
    sound = store.add_steps(made(), {"c": 2.5})
    assert (sound.steps["c"], sound.disturbed) == (2.5, {})


class Passes:
    """An executor whose measurements the test makes up."""

    def __init__(self, *answers: Measured) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.answers = list(answers)

    def submit(self, order: Order) -> None: ...

    def wait(self, task: int) -> Outcome:
        return Outcome(kind="ok", answer=self.answers.pop(0))

    def cancel(self, task: int) -> None: ...

    def close(self) -> None: ...


def a_pass(seconds: float, spread: float = 0.01, other_cores: float = 0.0) -> Measured:
    return Measured(task=0, seconds=seconds, spread=spread, other_cores=other_cores)


@pytest.mark.usefixtures("own_cache")  # a real run on this host would hold its lock
@pytest.mark.parametrize(
    ("answers", "seconds", "kept"),
    [
        ([a_pass(1.0)], 1.0, True),
        ([a_pass(2.0, spread=0.3), a_pass(1.0)], 1.0, True),
        ([a_pass(2.0, other_cores=0.5), a_pass(2.0, spread=0.2), a_pass(1.0)], 1.0, True),
        ([a_pass(2.0, spread=0.3), a_pass(1.5, spread=0.2), a_pass(1.7, other_cores=1.0)], 1.5, False),
    ],
)
def test_a_pass_is_measured_again_until_nobody_disturbs_it(
    store: Store, answers: list[Measured], seconds: float, kept: bool
) -> None:
    store.save(made())
    executor = Passes(*answers)
    references = References(made(), store, executor, Model(), InputSpec((1, 8, 8), 2), Optimizer(), print)
    asked = Reference("resnet10", "train", "all", 16)
    assert references.seconds(asked) == references.seconds(asked) == seconds
    assert executor.answers == []
    stored = store.load("this host")
    assert stored is not None
    assert (seconds in stored.steps.values()) == kept
    assert (references.calibration.warning is None) == kept


def test_a_quiet_host_is_measured_once_and_again_by_force(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([RATE, msgspec.structs.replace(RATE, alone_gflops=99.0)])
    monkeypatch.setattr(calibration, "measure_rate", lambda: next(rates))
    first = load_or_measure(store)
    store.add_steps(first, {"a": 1.0})
    assert load_or_measure(store).rate == RATE
    again = load_or_measure(store, force=True)
    assert again.rate.alone_gflops == 99.0
    assert store.load() == again
    assert again.steps == {}


def test_spread_by_hand() -> None:
    # deciles of 1..19 by the exclusive method are 2, 4, ..., 18; the median is 10
    assert spread([float(i) for i in range(1, 20)]) == pytest.approx(1.6)


def test_the_kernel_measures_in_its_own_processes() -> None:
    samples = run_kernel("matmul", processes=2, seconds=0.05)
    assert len(samples) >= 2
    assert min(samples) > 0


def test_a_kernel_that_fails_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FleetbedError, match="ended early"):
        run_kernel("no such kernel")
    assert "KeyError" in capfd.readouterr().err


def test_the_fingerprint_names_cpu_cores_and_torch() -> None:
    text = calibration.host_fingerprint()
    assert host.cpu_model() in text
    assert f"{host.cores()} cores, torch 2." in text


def test_our_own_work_is_not_load_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = {"monotonic": iter([10.0, 14.0]), "_busy_s": iter([500.0, 507.0]), "_own_s": iter([3.0, 4.0])}
    monkeypatch.setattr(host.time, "monotonic", lambda: next(readings["monotonic"]))
    monkeypatch.setattr(host, "_busy_s", lambda: next(readings["_busy_s"]))
    monkeypatch.setattr(host, "_own_s", lambda: next(readings["_own_s"]))
    assert host.LoadMeter().other_cores() == pytest.approx((7 - 1) / 4)


def test_a_measuring_process_that_stays_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "ANSWER_S", 0.05)
    with pytest.raises(FleetbedError, match="the process that measures this host has not answered"):
        run_kernel("matmul", seconds=0.1)
