"""Checks the keys of a device that depend on each other."""

from __future__ import annotations

from collections.abc import Iterator

from fleetbed.profiles.checks.provenance import check_provenance
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.rates import lacks_bandwidth
from fleetbed.profiles.types import Device


def check_device(device: Device, at: str) -> Iterator[BadInput]:
    """Check a device. Sentences start with `at`: the file, and the key path above the device."""
    memory, power = device.memory, device.power
    for lower, upper in (("available_mib", "visible_mib"), ("visible_mib", "installed_mib")):
        low, high = getattr(memory, lower), getattr(memory, upper)
        if low > high:
            yield BadInput(f"{at}memory.{lower} is {low:g}, but at most memory.{upper} = {high:g} is possible.")
    if device.runtime_mib >= memory.available_mib:
        whose = "memory.runtime_mib is" if memory.runtime_mib is not None else f"runtime {device.runtime} takes"
        yield BadInput(
            f"{at}{whose} {device.runtime_mib:g}, but less than memory.available_mib = "
            f"{memory.available_mib:g} is needed; otherwise no memory is left for training."
        )
    if power.idle_w is not None and power.load_w is not None and power.idle_w > power.load_w:
        yield BadInput(
            f"{at}power.idle_w is {power.idle_w:g}, but at most power.load_w = {power.load_w:g} is possible."
        )
    if device.trains_on == "gpu" and (
        device.gpu is None or not (device.gpu.fp32_gflops_sustained or device.gpu.fp32_gflops_peak)
    ):
        yield BadInput(
            f"{at}trains_on is gpu, but gpu.fp32_gflops_sustained and gpu.fp32_gflops_peak are both missing: "
            "add one of them, or set trains_on to cpu."
        )
    if lacks_bandwidth(device):
        yield BadInput(
            f"{at}there are no rates, and no memory.bandwidth_gb_s_measured to derive them from: add the copy rate of "
            "one core in GB/s (tinymembench's memcpy), or add rates, or run `fleetbed profiles measure` on the device."
        )
    yield from check_provenance(device, at)
