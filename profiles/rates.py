"""Training rates of every device by class of operation: its own, or derived from two published figures.

The rule for CPUs scales the rates that were fitted to published trainings of a Raspberry Pi 4 to another board. Matrix
products scale with the ratio of the two matrix-product rates (twice HPL). 1x1 and depthwise convolutions, memory-bound
work and calls of operators scale with the ratio of the memory bandwidths, or with that of the matrix products if it is
smaller, because a weak core cannot use all of its bandwidth. k x k convolutions spend half of their time on each, so
they scale with the harmonic mean of both. docs/device-time.md shows how accurate this is.

No published times of training on a GPU list the model, so the rates of a GPU are assumptions based on its own figures.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path

import msgspec

from fleetbed.profiles.types import Device, Provenance, Rates
from fleetbed.profiles.yaml_text import read_mapping

REFERENCE = "raspberry-pi-4b-8gb"
#: the part of the peak bandwidth that one core reaches when it copies: the median of the boards with both figures
COPIED_OF_PEAK = 0.28
#: ratios of a GPU: sustained to peak matrix product (Jetson AGX Orin, measured), depthwise to dense convolution
#: (MobileNetV2 against ResNet-18 there), reached to peak bandwidth; and microseconds to launch a kernel (assumed)
GPU_SUSTAINED, GPU_DEPTHWISE, GPU_MEMORY, GPU_CALL_US = 0.4, 0.01, 0.7, 50.0

#: figures of a device that derived rates depend on
RULE_FIGURES = (
    "cpu.fp32_gflops",
    "gpu.fp32_gflops_peak",
    "gpu.fp32_gflops_sustained",
    "memory.bandwidth_gb_s_measured",
    "memory.bandwidth_gb_s_peak",
)


def rates_of(device: Device) -> Rates:
    """Return the device's own rates, or those derived by the rule."""
    if device.rates is not None:
        return device.rates
    if device.trains_on == "gpu":
        return _gpu(device)
    reference = reference_device()
    assert reference.rates is not None  # its shipped file has them, as a test checks
    return scaled(reference.rates, reference, device)


def lacks_bandwidth(device: Device) -> bool:
    """Return whether there is nothing to derive rates from."""
    memory = device.memory
    return device.rates is None and memory.bandwidth_gb_s_measured is None and memory.bandwidth_gb_s_peak is None


def scaled(rates: Rates, known: Device, device: Device) -> Rates:
    """Scale the rates of the `known` device to another one; by one ratio if a bandwidth is not known."""
    matmul = device.rate_gflops / known.rate_gflops
    copied, known_copied = _bandwidth(device), _bandwidth(known)
    bandwidth = copied / known_copied if copied and known_copied else matmul
    slower, mean = min(matmul, bandwidth), 2 / (1 / matmul + 1 / bandwidth)
    return Rates(
        conv_1x1_gflops=_rounded(rates.conv_1x1_gflops * slower),
        conv_gflops=_rounded(rates.conv_gflops * mean),
        depthwise_gflops=_rounded(rates.depthwise_gflops * slower),
        matmul_gflops=_rounded(rates.matmul_gflops * matmul),
        memory_gb_s=_rounded(rates.memory_gb_s * slower),
        call_us=_rounded(rates.call_us / slower),
    )


def rates_provenance(device: Device) -> tuple[Provenance, ...]:
    """Return the provenance of the rates: that in the file, or the rule."""
    if device.rates is not None:
        return tuple(entry for entry in device.provenance if entry.figure.split(".")[0] == "rates")
    if device.trains_on == "gpu":
        note = "By rule from the GPU's matrix-product rate and peak bandwidth; not checked against any training."
        return (Provenance(figure="rates", kind="assumed", note=note),)
    note = f"By rule from cpu.fp32_gflops and the memory bandwidth, relative to {REFERENCE}."
    if device.memory.bandwidth_gb_s_measured is None:
        note += f" Bandwidth: {COPIED_OF_PEAK:g} of the peak."
    return (Provenance(figure="rates", kind="derived", source="docs/device-time.md", note=note),)


@cache
def reference_device() -> Device:
    """Return the board whose rates were fitted to published trainings."""
    path = Path(str(resources.files("fleetbed.profiles"))) / "devices" / f"{REFERENCE}.yaml"
    return msgspec.convert(read_mapping(path), Device)


def _gpu(device: Device) -> Rates:
    assert device.gpu is not None  # checked when it was loaded
    sustained = device.gpu.fp32_gflops_sustained
    rate = sustained if sustained is not None else device.rate_gflops * GPU_SUSTAINED
    memory = device.memory
    bandwidth = memory.bandwidth_gb_s_peak or memory.bandwidth_gb_s_measured
    assert bandwidth is not None  # checked when it was loaded
    return Rates(
        conv_1x1_gflops=_rounded(rate),
        conv_gflops=_rounded(rate),
        depthwise_gflops=_rounded(rate * GPU_DEPTHWISE),
        matmul_gflops=_rounded(rate),
        memory_gb_s=_rounded(bandwidth * GPU_MEMORY),
        call_us=GPU_CALL_US,
    )


def _bandwidth(device: Device) -> float | None:
    """Return the copy rate of one core in GB/s."""
    measured, peak = device.memory.bandwidth_gb_s_measured, device.memory.bandwidth_gb_s_peak
    if measured is None and peak is not None:
        return peak * COPIED_OF_PEAK
    return measured


def _rounded(value: float) -> float:
    """Round to four digits: more would pretend an accuracy that is not there."""
    return float(f"{value:.4g}")
