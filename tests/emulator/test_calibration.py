from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from fleetbed.emulator import calibration, host
from fleetbed.emulator.calibration import Calibration, HostRate, Store, load_or_measure, run_kernel, spread
from fleetbed.profiles.errors import BadInput, FleetbedError, HostCannot

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
    with pytest.raises(HostCannot, match=r"cannot be kept here \(File exists\); set XDG_CACHE_HOME"):
        Store(tmp_path / "file/calibration.json").save(made())


def test_a_busy_host_is_measured_again_and_the_quietest_counts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([1.5, 0.4, 0.8])
    monkeypatch.setattr(calibration, "measure_rate", lambda: msgspec.structs.replace(RATE, other_cores=next(loads)))
    assert load_or_measure(store).rate.other_cores == 0.4
    assert load_or_measure(store).rate.other_cores == 0.4  # kept: nothing is measured any more


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
