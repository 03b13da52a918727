"""What the models of a run are judged by: accuracy where labels are classes, the mean absolute error of numbers."""

from __future__ import annotations

from msgspec import Struct

from fleetbed.emulator.method.series import MetricName


class Metric(Struct, frozen=True):
    """How a score is called and written. A higher accuracy is better, a lower error is."""

    name: MetricName
    title: str
    higher_is_better: bool

    @property
    def label(self) -> str:
        """Of an axis."""
        return f"{self.title} (%)" if self.name == "accuracy" else self.title

    @property
    def difference(self) -> str:
        """What differences are in."""
        return "percentage points" if self.name == "accuracy" else "the unit of the labels"

    def text(self, value: float) -> str:
        return f"{value:.1%}" if self.name == "accuracy" else f"{value:.4g}"


METRICS: dict[MetricName, Metric] = {
    "accuracy": Metric("accuracy", "accuracy", True),
    "mae": Metric("mae", "mean absolute error", False),
}
ACCURACY = METRICS["accuracy"]
