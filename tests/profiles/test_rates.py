"""Rates by class: a device's own, those derived by the rule, and the effect of a fleet's overrides."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fleetbed.profiles import BadInput, available, clients_of, load_device
from fleetbed.profiles.loading import decode
from fleetbed.profiles.rates import (
    COPIED_OF_PEAK,
    REFERENCE,
    rates_of,
    rates_provenance,
    reference_device,
    scaled,
)
from fleetbed.profiles.runtimes import RUNTIMES
from fleetbed.profiles.types import Device, Fleet, Rates

NAMES = Rates.__struct_fields__


@pytest.mark.parametrize("name", sorted(available("device")))
def test_every_shipped_device_has_rates_and_says_where_from(name: str) -> None:
    device = load_device(name)
    rates = rates_of(device)
    assert all(getattr(rates, field) > 0 for field in NAMES)
    entries = rates_provenance(device)
    assert entries
    expected = {REFERENCE: "fitted", "server": "assumed"}.get(
        name, "assumed" if device.trains_on == "gpu" else "derived"
    )
    assert entries[0].kind == expected
    assert all(entry.note for entry in entries)


def test_the_reference_scales_to_itself() -> None:
    reference = reference_device()
    assert reference.rates is not None
    assert scaled(reference.rates, reference, reference) == reference.rates
    assert rates_of(load_device("raspberry-pi-4b-2gb")) == reference.rates  # the same board


def test_the_rule_by_hand() -> None:
    """A Raspberry Pi 5: 2.99 times the matrix product, 1.78 times the bandwidth."""
    reference, device = rates_of(reference_device()), load_device("raspberry-pi-5-8gb")
    rates = rates_of(device)
    matmul, bandwidth = 70.3 / 23.5, 4.8 / 2.7
    assert rates.matmul_gflops == pytest.approx(reference.matmul_gflops * matmul, rel=1e-3)
    assert rates.conv_gflops == pytest.approx(reference.conv_gflops * 2 / (1 / matmul + 1 / bandwidth), rel=1e-3)
    for name in ("conv_1x1_gflops", "depthwise_gflops", "memory_gb_s"):
        assert getattr(rates, name) == pytest.approx(getattr(reference, name) * bandwidth, rel=1e-3)
    assert rates.call_us == pytest.approx(reference.call_us / bandwidth, rel=1e-3)


def test_a_weak_core_does_not_use_a_bandwidth_that_it_has() -> None:
    device = load_device("milk-v-duo-s-512mb")  # half the bandwidth, a seventeenth of the matrix product
    rates, reference = rates_of(device), rates_of(reference_device())
    assert rates.conv_1x1_gflops < rates.matmul_gflops
    assert rates.memory_gb_s == pytest.approx(reference.memory_gb_s * 1.4 / 23.5, rel=1e-3)


def test_a_peak_bandwidth_replaces_a_missing_measurement() -> None:
    device = load_device("phone-high")
    assert device.memory.bandwidth_gb_s_measured is None
    same = replace(device.memory, bandwidth_gb_s_measured=device.memory.bandwidth_gb_s_peak * COPIED_OF_PEAK)
    assert rates_of(device) == rates_of(replace(device, memory=same))
    assert "of the peak" in rates_provenance(device)[0].note


@given(st.floats(0.01, 1e4), st.floats(0.01, 1e3))
def test_a_faster_device_is_never_slower_in_any_class(gflops: float, bandwidth: float) -> None:
    plain = reference_device()

    def at(gflops: float, bandwidth: float) -> Rates:
        cpu = replace(plain.cpu, fp32_gflops=gflops)
        memory = replace(plain.memory, bandwidth_gb_s_measured=bandwidth)
        return rates_of(replace(plain, rates=None, cpu=cpu, memory=memory))

    slow = at(gflops, bandwidth)
    for fast in (at(2 * gflops, bandwidth), at(gflops, 2 * bandwidth)):
        assert all(getattr(fast, name) >= getattr(slow, name) for name in NAMES if name != "call_us")
        assert fast.call_us <= slow.call_us


def fleet(device: str, override: dict[str, int | float | str]) -> Fleet:
    return msgspec.convert({"title": "f", "members": [{"device": device, "count": 1, "override": override}]}, Fleet)


@pytest.mark.parametrize("device", ["raspberry-pi-4b-8gb", "raspberry-pi-5-8gb", "server"])
def test_rates_follow_the_overrides_of_a_fleet(device: str) -> None:
    plain = load_device(device)
    (client,) = clients_of(fleet(device, {"cpu.fp32_gflops": plain.cpu.fp32_gflops / 10}))
    rates, before = rates_of(client.device), rates_of(plain)
    assert rates.matmul_gflops == pytest.approx(before.matmul_gflops / 10, rel=1e-3)
    assert rates.memory_gb_s < before.memory_gb_s
    assert rates_provenance(client.device)[0].kind == "derived"


def test_rates_that_a_fleet_sets_itself_stay() -> None:
    override: dict[str, int | float | str] = {"rates.matmul_gflops": 3, "cpu.fp32_gflops": 1}
    (client,) = clients_of(fleet("raspberry-pi-4b-8gb", override))
    assert client.device.rates is not None
    assert client.device.rates.matmul_gflops == 3
    (other,) = clients_of(fleet("raspberry-pi-4b-8gb", {"memory.available_mib": 480}))
    assert other.device.rates == load_device("raspberry-pi-4b-8gb").rates


def test_the_runtime_takes_its_memory_unless_it_was_measured() -> None:
    plain = load_device("raspberry-pi-zero-2w")
    assert plain.cap_mib == 329 - 147
    (client,) = clients_of(fleet("raspberry-pi-zero-2w", {"runtime": "compiled"}))
    assert client.device.cap_mib == 329 - 2
    measured = replace(plain, memory=replace(plain.memory, runtime_mib=100))
    assert measured.cap_mib == 229
    with pytest.raises(BadInput, match=r"runtime pytorch-cuda takes 1024, but less than memory\.available_mib = 329"):
        clients_of(fleet("raspberry-pi-zero-2w", {"runtime": "pytorch-cuda"}))
    assert all(runtime.note for runtime in RUNTIMES.values())


def test_a_device_without_rates_or_bandwidth_is_refused_with_advice() -> None:
    tree = msgspec.to_builtins(load_device("raspberry-pi-5-8gb"))
    for key in ("bandwidth_gb_s_measured", "bandwidth_gb_s_peak"):
        del tree["memory"][key]
    tree["provenance"] = []
    with pytest.raises(BadInput, match=r"f\.yaml: there are no rates.*tinymembench.*`fleetbed profiles measure`"):
        decode(tree, Device, "f.yaml")
    tree["rates"] = msgspec.to_builtins(rates_of(reference_device()))
    assert rates_of(decode(tree, Device, "f.yaml")) == rates_of(reference_device())
