"""The series in which accuracy is reported: whose models are tested, and on which data.

A method may evaluate in several of them. Figures of different series answer different questions, so they are never
averaged together or compared with each other.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

MetricName = Literal["accuracy", "mae"]  # what is measured: of classes, of numbers
TargetSeries = Literal["personal-own", "global", "personal-all"]
#: In the order of preference where a method does not say which one its paper reports.
TARGET_SERIES: tuple[TargetSeries, ...] = get_args(TargetSeries)
TITLES: dict[TargetSeries, str] = {
    "personal-own": "personal models, each on its client's own test data",
    "global": "global models on the whole test set",
    "personal-all": "personal models on the whole test set",
}


def target_series(client: int | None, local: bool) -> TargetSeries:
    """The series of a target: `client` owns the model (None: a global one), `local` means on its own test data."""
    if client is None:
        return "global"
    return "personal-own" if local else "personal-all"


def default_series(found: Collection[TargetSeries], reported: TargetSeries | None) -> TargetSeries:
    """The series that the method's paper reports or, where the method does not say, the most specific one found."""
    if reported is not None:
        return reported
    return next((series for series in TARGET_SERIES if series in found), "global")
