"""What a run has come to: the accuracy of its models, by series, with the round that it belongs to."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from fleetbed.emulator.method.series import TARGET_SERIES, TargetSeries, target_series

#: short enough for a line of progress
NAMES: dict[TargetSeries, str] = {
    "personal-own": "personal models on own data",
    "global": "global model",
    "personal-all": "personal models on all data",
}


class Result(Struct, frozen=True):
    """The accuracy after one round, as the mean over the models of a series, weighted by their test samples."""

    version: int
    round: int
    accuracy: dict[TargetSeries, float]

    def __str__(self) -> str:
        names = list(self.accuracy)
        if names == ["global"]:
            return f"accuracy {self.accuracy['global']:.1%} after round {self.round}"
        parts = ", ".join(f"{NAMES[name]} {self.accuracy[name]:.1%}" for name in names)
        return f"accuracy after round {self.round}: {parts}"


def result_of(rows: Iterable[Mapping[str, Any]]) -> Result | None:
    """The result that these evaluations of one version make; None if none of them was on any sample."""
    tested = [row for row in rows if row["samples"]]
    if not tested:
        return None
    sums: dict[TargetSeries, tuple[float, int]] = {}
    for row in tested:
        series = target_series(row["client"], bool(row["local"]))
        right, samples = sums.get(series, (0.0, 0))
        sums[series] = (right + row["accuracy"] * row["samples"], samples + row["samples"])
    accuracy = {series: sums[series][0] / sums[series][1] for series in TARGET_SERIES if series in sums}
    return Result(tested[0]["version"], tested[0]["round"], accuracy)


def read_result(folder: Path) -> Result | None:
    """The latest result in the records of a run."""
    # not read-only: such a connection would leave its log behind
    uri = f"file:{quote(str((folder / 'run.sqlite').absolute()))}?mode=rw"
    with closing(sqlite3.connect(uri, uri=True)) as db:
        db.row_factory = sqlite3.Row
        return result_of(
            db.execute(
                "SELECT version, round, client, local, samples, accuracy FROM evaluations "
                "WHERE version = (SELECT max(version) FROM evaluations)"
            ).fetchall()
        )
