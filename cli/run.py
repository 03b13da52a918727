"""`fleetbed run`: carry out an experiment, or continue one."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fleetbed.analysis.tracking.trackers import check_trackers
from fleetbed.beside import tracked
from fleetbed.cli.common import AsJson, ProfileFolders, complain, print_json, print_table
from fleetbed.cli.interrupts import stop_cleanly
from fleetbed.cli.streams import never_failing
from fleetbed.cli.watch import watched
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Experiment, runs
from fleetbed.profiles.files import check_new
from fleetbed.profiles.resolve import load_experiment, search_folders
from fleetbed.profiles.yaml_text import plain
from fleetbed.running import StudyInterrupted, check_jobs, resume_runs, start_runs


def run(
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="The name of an experiment, as fleetbed profiles list experiment shows them, or a YAML file."
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override any key, such as timing.source=modelled. With --resume, rounds=N adds rounds.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the runs, which must not exist yet; default: a new one in runs/."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Continue the study or run in this folder.")
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="RUN", help="With --resume: continue only this run.")] = None,
    jobs: Annotated[
        int, typer.Option(min=1, metavar="N", help="Carry out N runs at the same time; not with enforced timing.")
    ] = 1,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="ray", help="Carry out the runs on the nodes of a Ray cluster, as many at a time as they carry."
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The Ray cluster for --on ray and processes: ray, or auto; without it Ray is started here.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only predict the device time, host time and disk space.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Also show the runs in a browser while they go on, as fleetbed watch does.")
    ] = False,
    track: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRACKER",
            help="Also send the runs to tensorboard, mlflow or wandb while they go on, as fleetbed track does; "
            "may be repeated.",
        ),
    ] = None,
    profiles: ProfileFolders = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment: one run for each combination of algorithm, policy and seed.

    Ctrl-C stops cleanly, and --resume continues. When it is done, fleetbed report shows the results.
    """
    if (experiment is None) == (resume is None):
        raise BadInput(
            "fleetbed run needs either an experiment or --resume DIR; list them with: fleetbed profiles list experiment"
        )
    stop_cleanly()
    check_trackers(track or ())
    beside = partial(_accompanied, watch=watch, trackers=track or ())
    sys.stdout = never_failing(sys.stdout)  # results are in the run's folder, so a lost line must not end the run
    try:
        if resume is not None:
            _check_resume(out=out, profiles=profiles, dry_run=dry_run)
            folder, folders = resume_runs(
                resume, sets=sets or (), only=only, jobs=jobs, on=on, address=address, beside=beside
            )
        else:
            assert experiment is not None
            if only is not None:
                raise BadInput("--only RUN needs --resume DIR; to run part of an experiment, use --set.")
            search = search_folders(profiles, experiment)
            asked = load_experiment(experiment, search, sets or ())
            if dry_run:
                if address is not None:
                    raise BadInput("--address cannot be used with --dry-run: a forecast needs no cluster.")
                if asked.flower is not None:
                    raise BadInput("--dry-run cannot predict a Flower app: how long its code takes is not known.")
                _check_start(asked, out, jobs)
                _forecast(asked, search, as_json)
                return
            command = shlex.join(["fleetbed", *sys.argv[1:]])
            folder, folders = start_runs(
                asked, experiment, out, search=search, command=command, jobs=jobs, on=on, address=address, beside=beside
            )
    except StudyInterrupted as stop:
        complain(f"interrupted; continue with: fleetbed run {'--on ray ' if on else ''}--resume {stop.folder}")
        raise
    if as_json:
        from fleetbed.emulator.records.results import read_result

        results = {path.name: read_result(path) for path in folders}
        print_json({"folder": str(folder), "runs": [str(path) for path in folders], "results": results})
        return
    if only is None:  # with --jobs, each run of the study is a command with --only
        print(plain(f"see the results with: fleetbed report {folder}"), file=sys.stderr)
    print(folder)


@contextlib.contextmanager
def _accompanied(folder: Path, watch: bool, trackers: Sequence[str]) -> Iterator[None]:
    """Show the runs in this folder while they go on, and send them to trackers, as far as that was asked for."""
    with watched(folder) if watch else contextlib.nullcontext(), tracked(folder, trackers):
        yield


def _check_resume(*, out: Path | None, profiles: list[Path] | None, dry_run: bool) -> None:
    """Refuse, rather than ignore, the options that have no effect on an existing study."""
    if out is not None:
        raise BadInput("--out cannot be used with --resume: a study continues in its own folder.")
    if profiles:
        raise BadInput("--profiles cannot be used with --resume: a study uses the profiles that it was started with.")
    if dry_run:
        raise BadInput(
            "--dry-run cannot be used with --resume: use fleetbed run EXPERIMENT --dry-run for the experiment instead."
        )


def _check_start(asked: Experiment, out: Path | None, jobs: int) -> None:
    """Refuse a forecast of what would be refused."""
    check_jobs(jobs, asked)
    if out is not None:
        check_new(out, "--out")
        if os.path.lexists(out):
            raise BadInput(f"--out {out}: the folder already exists; choose another one.")


def _forecast(experiment: Experiment, search: Sequence[Path], as_json: bool) -> None:
    from fleetbed.analysis.tables.units import data_bytes
    from fleetbed.emulator.run.forecast import forecast, total
    from fleetbed.live import duration, make_observer

    observer = make_observer()
    found = [forecast(config, search=search, observer=observer) for config in runs(experiment)]
    together = total(found)
    if as_json:
        print_json({"runs": found, "total": together})
        return
    columns = ("run", "clients", "unfit", "tasks", "device time", "host time", "disk")
    rows: list[tuple[object, ...]] = [
        (
            each.run,
            each.clients,
            each.unfit,
            each.tasks,
            duration(each.device_s),
            f"about {duration(each.host_s)}",
            data_bytes(each.disk_bytes),
        )
        for each in found
    ]
    if len(found) > 1:
        taken = (duration(together.device_s), f"about {duration(together.host_s)}")
        rows.append((f"all {len(found)} runs", "", "", together.tasks, *taken, data_bytes(together.disk_bytes)))
    print_table("Forecast", columns, rows)
    for sentence in (sentence for each in found for sentence in each.warnings):
        complain(sentence)
