"""Runs in Weights & Biases: offline below the study, to be sent with `wandb sync`, unless WANDB_MODE says otherwise."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any

from fleetbed.analysis.tables.runs import Run
from fleetbed.analysis.tracking.points import TrackedPoint, part, settings

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when it is imported: errors of ours are not theirs

import wandb

PROJECT = "fleetbed"


class WandbRun:
    """A run in the group of its study. Every row has its round and device time, either of which can be the x axis."""

    def __init__(self, run: Run, folder: Path, known: str | None) -> None:
        self.id = known or token_hex(4)
        folder.mkdir(parents=True, exist_ok=True)
        mode: Any = os.environ.get("WANDB_MODE") or "offline"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            group=run.config.experiment.title[:100],
            name=run.folder.name,
            id=self.id,
            resume="allow",
            dir=str(folder),
            mode=mode,
            config=settings(run),
            reinit="create_new",  # runs of a study may go side by side
            # of the host that emulates, nothing is of interest; the rest of what it would collect is not asked for
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
            ),
        )
        self._run.define_metric("time/device_s")
        self._run.define_metric("*", step_metric="time/device_s")

    def send(self, points: Sequence[TrackedPoint], before: int) -> None:
        for number, point in enumerate(points, before):
            row = {"round": point.round, **point.values, "time/device_s": point.device_s}
            self._run.log(row, step=number)  # counted here, because one that is continued offline counts from 0

    def end(self, status: str | None, report: Path | None) -> None:
        if report is not None:
            artifact = wandb.Artifact(part(f"report-{self.id}"), type="report")
            artifact.add_file(str(report), name="report.html")
            self._run.log_artifact(artifact)
        if status is not None:
            self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status in ("done", None) else 1)
