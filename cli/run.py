"""`fleetbed run`: carry out an experiment, or go on with one."""

from __future__ import annotations

import contextlib
import gc
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from fleetbed.cli.common import AsJson, ProfileFolders, complain, print_json, print_table
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Experiment, runs
from fleetbed.profiles.fleet import sizes
from fleetbed.profiles.resolve import check_search, load_experiment, load_fleet

#: the sources of time for which it does not matter what else the host does while clients train
UNDISTURBED = ("modelled", "calibrated", "replay")


def run(
    experiment: Annotated[str | None, typer.Argument(help="A name or the path of a YAML file.")] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override any key, as in timing.source=modelled."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the runs go; it must not exist.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Go on with what is in this folder.")] = None,
    only: Annotated[str | None, typer.Option(metavar="RUN", help="With --resume: only this run of the study.")] = None,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Runs at the same time, unless time is enforced.")] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it will take in device time, host time and disk, and stop.")
    ] = False,
    profiles: ProfileFolders = None,
    as_json: AsJson = False,
) -> None:
    """Carry out an experiment: every algorithm, policy and seed of it is one run.

    Ctrl-C ends in order; the same study can be gone on with later by --resume.
    """
    if (experiment is None) == (resume is None):
        raise BadInput(
            "fleetbed run takes either an experiment or --resume DIR, see: fleetbed profiles list experiment"
        )
    if only is not None and (resume is None or jobs > 1):
        raise BadInput("--only RUN goes with --resume DIR, and without --jobs.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill ends in order too
    search = tuple(profiles or ())
    check_search(search)
    asked = None if experiment is None else load_experiment(experiment, search, sets or ())
    if asked is not None and dry_run:
        _forecast(asked, search, as_json)
        return
    if asked is not None:
        _check_jobs(jobs, asked)
    folder = resume or out or Path("runs") / f"{Path(experiment or '').stem}-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        with _on_this_host(asked, search, jobs):
            folders = _carry_out(asked, folder, search, only, jobs)
    except KeyboardInterrupt:
        complain(f"interrupted; go on with: fleetbed run --resume {folder}")
        raise
    if as_json:
        print_json({"folder": str(folder), "runs": [str(path) for path in folders]})
    else:
        print(folder)


def _check_jobs(jobs: int, experiment: Experiment) -> None:
    source = experiment.timing.source
    if jobs > 1 and source not in UNDISTURBED:
        raise BadInput(
            f"--jobs {jobs}: runs with timing.source {source} need the host for themselves; "
            f"leave --jobs out, or set timing.source to {' or '.join(UNDISTURBED)}."
        )


@contextlib.contextmanager
def _on_this_host(asked: Experiment | None, search: Sequence[Path], jobs: int) -> Iterator[None]:
    """Keep those who measure it waiting, unless it is others who do the work.

    And start the zygote before this process imports torch, so that both do at the same time; never for nothing.
    """
    from fleetbed.emulator import quiet
    from fleetbed.emulator.ahead import started_ahead
    from fleetbed.emulator.room import check_room

    if asked is not None:
        check_room(sum(sizes(load_fleet(asked.fleet, search, "fleet"))), asked.processes)
    inline = asked is not None and asked.processes == "inline"
    with contextlib.ExitStack() as stack:
        if jobs == 1:
            stack.enter_context(quiet.in_use())
            if not inline:
                stack.enter_context(started_ahead())
        yield


def _carry_out(
    asked: Experiment | None, folder: Path, search: Sequence[Path], only: str | None, jobs: int
) -> list[Path]:
    gc.disable()  # imports leave no garbage, and looking for it takes a fifth of their time
    from rich.console import Console

    from fleetbed.cli.live import watch_for
    from fleetbed.cli.side_by_side import run_side_by_side
    from fleetbed.emulator.study import create_study, open_study, resume_study

    gc.freeze()
    gc.enable()
    watch = watch_for(Console(stderr=True))
    if asked is not None:
        create_study(asked, folder, search=search, command=shlex.join(["fleetbed", *sys.argv[1:]]))
    if jobs == 1:
        return resume_study(folder, watch, only)
    folder, study = open_study(folder)
    _check_jobs(jobs, study.experiment)
    names = [config.name for config in runs(study.experiment)]
    run_side_by_side(folder, names, jobs, watch.say)
    return [folder / name for name in names]


def _forecast(experiment: Experiment, search: Sequence[Path], as_json: bool) -> None:
    from rich.console import Console

    from fleetbed.cli.live import duration, watch_for
    from fleetbed.emulator.forecast import forecast

    watch = watch_for(Console(stderr=True))
    found = [forecast(config, search=search, watch=watch) for config in runs(experiment)]
    if as_json:
        print_json(found)
        return
    columns = ("run", "clients", "unfit", "tasks", "device time", "host time", "disk")
    rows = [
        (
            each.run,
            each.clients,
            each.unfit,
            each.tasks,
            duration(each.device_s),
            "unknown" if each.host_s is None else f"about {duration(each.host_s)}",
            f"{each.disk_bytes / 1e6:.0f} MB",
        )
        for each in found
    ]
    print_table("what it will take", columns, rows)
