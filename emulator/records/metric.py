"""The score of a run's models: accuracy if labels are classes, the mean absolute error if they are numbers."""

from __future__ import annotations

from msgspec import Struct

from fleetbed.emulator.method.series import MetricName


class Metric(Struct, frozen=True):
    """The name and the format of a score. A higher accuracy is better, and a lower error."""

    name: MetricName
    title: str
    higher_is_better: bool

    @property
    def label(self) -> str:
        """The label of an axis."""
        return f"{self.title} (%)" if self.name == "accuracy" else self.title

    @property
    def difference(self) -> str:
        """The unit of differences."""
        return "percentage points" if self.name == "accuracy" else "the unit of the labels"

    def text(self, value: float) -> str:
        return f"{value:.1%}" if self.name == "accuracy" else f"{value:.4g}"


METRICS: dict[MetricName, Metric] = {
    "accuracy": Metric("accuracy", "accuracy", True),
    "mae": Metric("mae", "mean absolute error", False),
}
ACCURACY = METRICS["accuracy"]
