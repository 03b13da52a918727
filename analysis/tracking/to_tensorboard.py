"""Runs as TensorBoard's event files: the step is the round, and "relative" time is device time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shutil import copyfile

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from fleetbed.analysis.tables.runs import Run
from fleetbed.analysis.tables.writing import Table
from fleetbed.analysis.tracking.points import TrackedPoint, settings, started_s


class TensorBoardRun:
    """A folder of event files. Each process that continues the run adds a file, which TensorBoard reads as one."""

    def __init__(self, run: Run, folder: Path, known: str | None) -> None:
        self.id = known or run.folder.name
        self._folder = folder / self.id
        self._started_s = started_s(run)
        self._writer = EventFileWriter(str(self._folder))
        if known is None:
            table = Table(("key", "value"), tuple(settings(run).items()))
            self._add(0, 0.0, _text("configuration", table.markdown()))
            self._writer.flush()

    def send(self, points: Sequence[TrackedPoint], before: int) -> None:
        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._add(point.round, point.device_s, *values)
        self._writer.flush()

    def end(self, status: str | None, report: Path | None) -> None:
        if status is not None:
            self._add(0, 0.0, _text("status", status))
        if report is not None:
            copyfile(report, self._folder / "report.html")
        self._writer.close()

    def _add(self, step: int, device_s: float, *values: Summary.Value) -> None:
        self._writer.add_event(Event(wall_time=self._started_s + device_s, step=step, summary=Summary(value=values)))


def _text(tag: str, markdown: str) -> Summary.Value:
    kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag=tag, metadata=kind, tensor=make_tensor_proto(np.array([markdown.encode()], dtype=object)))
