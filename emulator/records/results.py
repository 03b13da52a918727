"""The result of a run: the accuracy (or error) of its models after a round, by series."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from msgspec import Struct, ValidationError

from fleetbed.emulator.method.series import TARGET_SERIES, MetricName, TargetSeries
from fleetbed.emulator.records.metric import METRICS
from fleetbed.emulator.records.reading import read_rows
from fleetbed.emulator.records.tables import EvaluationRow
from fleetbed.profiles.errors import FleetbedError

#: short enough for a line of progress
NAMES: dict[TargetSeries, str] = {
    "personal-own": "personal models on own data",
    "global": "global model",
    "personal-all": "personal models on all data",
}


class Result(Struct, frozen=True):
    """The scores after one round, as the mean over the models of a series, weighted by their test samples."""

    version: int
    round: int
    metric: MetricName
    scores: dict[TargetSeries, float]

    def __str__(self) -> str:
        names, what = list(self.scores), METRICS[self.metric]
        if names == ["global"]:
            return f"{what.title} {what.text(self.scores['global'])} after round {self.round}"
        parts = ", ".join(f"{NAMES[name]} {what.text(self.scores[name])}" for name in names)
        return f"{what.title} after round {self.round}: {parts}"


def result_of(rows: Iterable[EvaluationRow]) -> Result | None:
    """The result that the evaluations of one version make; None if none of them was on any sample."""
    tested = [row for row in rows if row.samples]
    if not tested:
        return None
    sums: dict[TargetSeries, tuple[float, int]] = {}
    for row in tested:
        right, samples = sums.get(row.series, (0.0, 0))
        sums[row.series] = (right + row.score * row.samples, samples + row.samples)
    scores = {series: sums[series][0] / sums[series][1] for series in TARGET_SERIES if series in sums}
    return Result(tested[0].version, tested[0].round, tested[0].metric, scores)


def read_result(folder: Path) -> Result | None:
    """The latest result in the records of a run."""
    path = folder / "run.sqlite"
    # not read-only: such a connection would leave its log behind
    with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=rw", uri=True)) as db:
        try:
            return result_of(read_rows(db, EvaluationRow, "version = (SELECT max(version) FROM evaluations)"))
        except ValidationError as error:
            raise FleetbedError(f"{path}: the records are damaged ({error}); move {folder} away") from error
