"""The table of a comparison for people: chosen columns, and a mean with its spread over seeds in every cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isnan
from statistics import mean, stdev

from fleetbed.analysis.tables.compare import TITLES, Comparison, MethodSummary, SeriesGroup
from fleetbed.analysis.tables.curves import Axis
from fleetbed.analysis.tables.intervals import difference_text, points, signed
from fleetbed.analysis.tables.units import MISSING, digits, percent, scale, target_text
from fleetbed.analysis.tables.writing import Table
from fleetbed.emulator.method.series import TITLES as SERIES_TITLES
from fleetbed.emulator.records.metric import ACCURACY, Metric
from fleetbed.profiles.errors import BadInput, nearest

Cell = Callable[[MethodSummary], str]
Columns = Callable[[SeriesGroup], list[tuple[str, Cell]]]  # titles and cells


def summary_tables(comparison: Comparison, names: Sequence[str] = ()) -> list[Table]:
    """Return one table for each target series shown, with the columns of these names, or all of them."""
    several = len(comparison.groups) > 1
    found = [
        replace(summary_table(group, names or DEFAULT), title=series_title(group) if several else "")
        for group in comparison.groups
    ]
    return [*found[:-1], replace(found[-1], notes=comparison.notes)]


def summary_table(group: SeriesGroup, names: Sequence[str]) -> Table:
    columns = [column for name in names for column in COLUMNS[name](group)]
    rows = tuple((one.series.label, *(cell(one) for _, cell in columns)) for one in group.summaries)
    return Table(("Method", *(title for title, _ in columns)), rows)


def column_names(text: str) -> list[str]:
    """Return the names in a list such as "final,time,speed-up"; refuse one that is not known."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in COLUMNS:
            raise nearest(name, COLUMNS, "column", "--columns")
    if not names:
        raise BadInput(f"--columns: name at least one column of {', '.join(COLUMNS)}.")
    return names


def series_title(group: SeriesGroup) -> str:
    return f"Series {group.shown}: {SERIES_TITLES[group.shown]}"


# the text of a cell


def mean_and_deviation(by_seed: Mapping[int, float], metric: Metric = ACCURACY) -> str:
    """Format mean and standard deviation over seeds; seeds that diverged are excluded, but their number is shown."""
    values = [value for value in by_seed.values() if not isnan(value)]
    lost = len(by_seed) - len(values)
    if not values:
        return "diverged" if lost else MISSING
    if metric is not ACCURACY:
        text = spread_text(values, "rounds")
    elif len(values) == 1:
        text = percent(values[0])
    else:
        text = f"{100 * mean(values):.1f} ± {100 * stdev(values):.1f} %"
    return f"{text} ({lost} of {len(by_seed)} seeds diverged)" if lost else text


def paired_text(summary: MethodSummary) -> str:
    if summary.difference is None:
        return MISSING
    return difference_text(summary.difference, points if summary.series.metric is ACCURACY else signed)


def spread_text(values: Sequence[float], axis: str, largest: float | None = None) -> str:
    """Format mean and standard deviation in the unit of their mean, or of the largest mean beside it."""
    if not values:
        return MISSING
    size, unit = scale(abs(mean(values)) if largest is None else largest, axis)
    text = digits(mean(values) / size)
    decimals = len(text.partition(".")[2])
    spread = f" ± {stdev(values) / size:.{decimals}f}" if len(values) > 1 else ""
    return f"{text}{spread} {unit}".rstrip()


def cost_text(summary: MethodSummary, group: SeriesGroup, target: float, axis: Axis) -> str:
    """Format the cost to reach a target, if all seeds reached it, in the same unit for all methods of the group."""
    to = summary.to_target[target, axis]
    if not to.by_seed:
        return MISSING
    if to.always:
        means = [mean(other.reached) for one in group.summaries if (other := one.to_target[target, axis]).always]
        return spread_text(to.reached, axis, max(means))
    if not to.reached:
        return "not reached"
    return f"reached by {len(to.reached)} of {len(to.by_seed)}"


def speed_up_text(summary: MethodSummary, base: MethodSummary, target: float, axis: Axis) -> str:
    """Format the ratio of the mean costs, and the deviation of the ratio over seeds."""
    gain, ratios = summary.speed_up(base, target, axis), summary.ratios(base, target, axis)
    if gain is None:
        return MISSING
    spread = f" ± {stdev(ratios):.2f}" if len(ratios) > 1 and summary is not base else ""
    return f"{gain:.2f}{spread}×"


def memory_text(summary: MethodSummary) -> str:
    """Format the peak memory of the device that came closest to its cap."""
    if (tight := summary.tightest) is None:
        return MISSING
    size, unit = scale(tight.cap_bytes, "bytes")
    return f"{digits(tight.peak_bytes / size)} of {digits(tight.cap_bytes / size)} {unit} ({tight.device})"


# the columns by name


def _one(title: str, cell: Cell) -> Columns:
    return lambda _: [(title, cell)]


def _per_target(title: str, text: Callable[[MethodSummary, SeriesGroup, float], str]) -> Columns:
    """Return one column for each target of the group."""

    def cell(group: SeriesGroup, target: float) -> Cell:
        return lambda one: text(one, group, target)

    return lambda group: [
        (f"{title} to {target_text(target, group.metric)}", cell(group, target)) for target in group.targets
    ]


def _score(title: str, of: Callable[[MethodSummary], Mapping[int, float]]) -> Columns:
    """Return a column of the accuracy, or of the error."""
    return lambda group: [(f"{title} {group.metric.title}", lambda one: mean_and_deviation(of(one), group.metric))]


def _cost(axis: Axis) -> Columns:
    return _per_target(TITLES[axis], lambda one, group, target: cost_text(one, group, target, axis))


def _speed_up(axis: Axis, title: str) -> Columns:
    return _per_target(title, lambda one, group, target: speed_up_text(one, group.base, target, axis))


COLUMNS: dict[str, Columns] = {
    "seeds": _one("Seeds", lambda one: str(len(one.series.runs))),
    "final": _score("Final", lambda one: one.final),
    "best": _score("Best", lambda one: one.best),
    "difference": lambda group: [(f"Difference to {group.base.series.label}", paired_text)],
    "time": _cost("time"),
    "rounds": _cost("rounds"),
    "bytes": _cost("bytes"),
    "energy": _cost("joules"),
    "flops": _cost("flops"),
    "speed-up": _speed_up("time", "Speed-up"),
    "bytes-saved": _speed_up("bytes", "Reduction of bytes"),
    "energy-saved": _speed_up("joules", "Reduction of energy"),
    "memory": _one("Peak memory", lambda one: spread_text(list(one.peak_bytes.values()), "bytes")),
    "tightest": _one("Memory of the tightest device", memory_text),
    "dropped": _one("Late or dropped work", lambda one: mean_and_deviation(one.dropped)),
    "degraded": _one("Degraded", lambda one: "yes" if one.degraded else "no"),
}
DEFAULT = (
    *("seeds", "final", "best", "difference", "time", "bytes", "energy", "flops", "speed-up"),
    *("memory", "dropped"),
)
#: what a person wants to know at the end of a study, in 80 columns
RESULT = ("final", "time", "tightest", "dropped", "degraded")
