"""Runs in MLflow: in a store of files below the study, or in the one that MLFLOW_TRACKING_URI names.

The step is the round. Times count device seconds from the start of the run, so the axis "relative time" is device time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from fleetbed.analysis.tables.runs import Run
from fleetbed.analysis.tracking.points import TrackedPoint, settings, started_s

# Read when MLflow is imported. Its own retries would keep the end of a run waiting; we try again ourselves.
for _name, _value in {
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}.items():
    os.environ.setdefault(_name, _value)

from mlflow.entities import Metric, Param, RunTag  # noqa: E402
from mlflow.tracking import MlflowClient  # noqa: E402

AT_ONCE = {"metrics": 1000, "params": 100}  # limits of its interface
LONGEST = 500  # characters of a parameter in every version
STATUS = {"done": "FINISHED", "interrupted": "KILLED", "killed": "KILLED"}


class MlflowRun:
    """A run in the experiment that has the study's title."""

    def __init__(self, run: Run, folder: Path, known: str | None) -> None:
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or folder.resolve().as_uri())
        self._start_ms = round(1000 * started_s(run))
        if known is None:
            name = run.config.experiment.title
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self._client.create_experiment(name)
            made = self._client.create_run(experiment, start_time=self._start_ms, run_name=run.folder.name)
            self.id = made.info.run_id
            params = [Param(key, value[:LONGEST]) for key, value in settings(run).items()]
            for some in _split(params, AT_ONCE["params"]):
                self._client.log_batch(self.id, params=some)
        else:
            self.id = known
            self._client.update_run(self.id, "RUNNING")

    def send(self, points: Sequence[TrackedPoint], before: int) -> None:
        metrics = [
            Metric(name, value, self._start_ms + round(1000 * point.device_s), point.round)
            for point in points
            for name, value in point.values.items()
        ]
        for some in _split(metrics, AT_ONCE["metrics"]):
            self._client.log_batch(self.id, metrics=some)

    def end(self, status: str | None, report: Path | None) -> None:
        if report is not None:
            self._client.log_artifact(self.id, str(report))
        if status is not None:
            self._client.log_batch(self.id, tags=[RunTag("status", status)])
            self._client.set_terminated(self.id, STATUS.get(status, "FAILED"))


def _split(items: Sequence[Any], most: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while some := list(islice(rest, most)):
        yield some
