"""Formats numbers for people: three significant digits and a suitable unit, the same everywhere."""

from __future__ import annotations

from collections.abc import Callable

from fleetbed.emulator.records.metric import ACCURACY, Metric

MISSING = "–"
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ((2.0**50, "PiB"), (2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
_SPANS = ((2 * 86_400.0, 86_400.0, "d"), (2 * 3600.0, 3600.0, "h"), (120.0, 60.0, "min"))


def scale(largest: float, axis: str) -> tuple[float, str]:
    """Return the divisor of an axis and the resulting unit; `axis` is one of `curves.AXES`."""
    if axis == "time":
        below = (1e-3, "ms") if 0 < largest < 1 else (1.0, "s")
        return next(((size, unit) for least, size, unit in _SPANS if largest >= least), below)
    if axis == "rounds":
        return 1.0, ""
    if axis == "bytes":  # binary, as memory is stated everywhere, so that traffic can be set against it
        return next(((size, unit) for size, unit in _BINARY if largest >= size), (1.0, "B"))
    unit = {"joules": "J", "flops": "FLOP"}[axis]
    return next(((size, prefix + unit) for size, prefix in _PREFIXES if largest >= size), (1.0, unit))


def digits(value: float) -> str:
    """Format with three significant digits, never in scientific notation."""
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}".replace(",", " ")
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.995 else f"{value:.3g}"


def _quantity(axis: str) -> Callable[[float | None], str]:
    def text(value: float | None) -> str:
        if value is None:
            return MISSING
        size, unit = scale(abs(value), axis)
        return f"{digits(value / size)} {unit}".rstrip()

    return text


seconds = _quantity("time")
data_bytes = _quantity("bytes")
joules = _quantity("joules")
flops = _quantity("flops")


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.1f} %"


def score_text(value: float | None, metric: Metric) -> str:
    """Format an accuracy as a percentage, an error in the unit of the labels."""
    return percent(value) if metric is ACCURACY else MISSING if value is None else digits(value)


def target_text(target: float, metric: Metric = ACCURACY) -> str:
    return f"{100 * target:g} %" if metric is ACCURACY else f"{metric.title} {digits(target)}"


def of_field(name: str, value: object) -> str:
    """Format a value by the unit in the name of its field, such as `compute_s` or `peak_bytes`."""
    if value is None or not isinstance(value, (int, float)):
        return MISSING if value is None else str(value)
    for form, fits in (
        (seconds, name.endswith("_s")),
        (data_bytes, "bytes" in name),
        (flops, name == "flops"),
        (joules, name == "joules"),
        (percent, name == "accuracy"),
    ):
        if fits:
            return form(value)
    return digits(value)
