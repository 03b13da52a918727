"""`fleetbed run`: carry out an experiment, or continue one."""

from __future__ import annotations

import contextlib
import gc
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetbed.cli.common import AsJson, ProfileFolders, complain, print_json, print_table
from fleetbed.cli.interrupts import stop_cleanly
from fleetbed.cli.streams import never_failing
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Experiment, runs
from fleetbed.profiles.files import check_new
from fleetbed.profiles.fleet import sizes
from fleetbed.profiles.resolve import check_search, load_experiment, load_fleet

if TYPE_CHECKING:
    from fleetbed.emulator.engine.observer import Observer
    from fleetbed.emulator.run.study import Carrier

INTERRUPTED = 130  # the exit code
#: sources of time that other load on the host does not affect
UNDISTURBED = ("modelled", "replay")


def run(
    experiment: Annotated[str | None, typer.Argument(help="The name or YAML file of an experiment.")] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override any key, such as timing.source=modelled. With --resume, rounds=N adds rounds.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the runs; it must not exist yet.")] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Continue the study or run in this folder.")
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="RUN", help="With --resume: continue only this run.")] = None,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Runs at the same time; not with enforced timing.")] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only predict the device time, host time and disk space.")
    ] = False,
    profiles: ProfileFolders = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment: one run for each combination of algorithm, policy and seed.

    Ctrl-C stops cleanly; continue with --resume.
    """
    if (experiment is None) == (resume is None):
        raise BadInput(
            "fleetbed run needs either an experiment or --resume DIR; list them with: fleetbed profiles list experiment"
        )
    stop_cleanly()
    sys.stdout = never_failing(sys.stdout)  # results are in the run's folder, so a lost line must not end the run
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent may have ignored it, which hides how children end
    if resume is not None:
        _check_resume(out=out, profiles=profiles, dry_run=dry_run, sets=sets, only=only, jobs=jobs)
        folder, folders = _resume(resume, sets or (), only, jobs)
    else:
        assert experiment is not None
        if only is not None:
            raise BadInput("--only RUN needs --resume DIR; to run part of an experiment, use --set.")
        search = tuple(profiles or ())
        check_search(search)
        if out is not None:
            check_new(out, "--out")
        asked = prepared(load_experiment(experiment, search, sets or ()))
        _check_jobs(jobs, asked)
        if dry_run:
            if asked.flower is not None:
                raise BadInput("--dry-run cannot predict a Flower app: how long its code takes is known afterwards.")
            if out is not None and os.path.lexists(out):
                raise BadInput(f"--out {out}: the folder already exists; choose another one.")
            _forecast(asked, search, as_json)
            return
        default = Path("runs") / f"{Path(experiment).stem}-{datetime.now():%Y%m%d-%H%M%S}"
        folder, folders = start(asked, out or default, search, jobs, or_next=out is None)
    if as_json:
        from fleetbed.emulator.records.results import read_result

        results = {path.name: read_result(path) for path in folders}
        print_json({"folder": str(folder), "runs": [str(path) for path in folders], "results": results})
    else:
        print(folder)


def _check_resume(
    *,
    out: Path | None,
    profiles: list[Path] | None,
    dry_run: bool,
    sets: list[str] | None,
    only: str | None,
    jobs: int,
) -> None:
    """Refuse, rather than ignore, the options that have no effect on an existing study."""
    if out is not None:
        raise BadInput("--out cannot be used with --resume: a study continues in its own folder.")
    if profiles:
        raise BadInput("--profiles cannot be used with --resume: a study uses the profiles that it was started with.")
    if dry_run:
        raise BadInput(
            "--dry-run cannot be used with --resume: use fleetbed run EXPERIMENT --dry-run for the experiment instead."
        )
    if only is not None and jobs > 1:
        raise BadInput("--only RUN cannot be used with --jobs: it is a single run.")
    if only is not None and sets:
        raise BadInput("--set cannot be used with --only: all runs of a study have the same number of rounds.")


def start(
    asked: Experiment, folder: Path, search: Sequence[Path], jobs: int, *, or_next: bool
) -> tuple[Path, list[Path]]:
    """Carry out a new study; return its folder and the folders of its runs."""
    with _host_reserved(asked, search, jobs):
        observer = _imports()
        from fleetbed.emulator.run.study import new_study

        command = shlex.join(["fleetbed", *sys.argv[1:]])
        carrier = carrier_of(asked)
        with new_study(asked, folder, search=search, command=command, or_next=or_next, carrier=carrier) as taken:
            return taken, _carry_out(taken, None, jobs, observer)


def _resume(folder: Path, sets: Sequence[str], only: str | None, jobs: int) -> tuple[Path, list[Path]]:
    with _host_reserved(None, (), jobs):
        observer = _imports()
        from fleetbed.emulator.run.study import add_rounds, locate_study

        study, own = locate_study(folder)
        if own is not None and (sets or jobs > 1 or only not in (None, own)):
            raise BadInput(
                f"{folder} is a single run: use --set, --jobs and --only with the folder of its study, {study}."
            )
        if sets:
            add_rounds(study, sets)
        return folder, _carry_out(study, only or own, jobs, observer)


def _check_jobs(jobs: int, experiment: Experiment) -> None:
    source = experiment.timing.source
    if jobs > 1 and source not in UNDISTURBED:
        raise BadInput(
            f"--jobs {jobs}: a run with timing.source {source} needs the host to itself; "
            f"remove --jobs, or set timing.source to {' or '.join(UNDISTURBED)}."
        )


@contextlib.contextmanager
def _host_reserved(asked: Experiment | None, search: Sequence[Path], jobs: int) -> Iterator[None]:
    """Block measurements of this host meanwhile, unless other processes do the work and block them.

    Also start the zygote before this process imports torch, so that both import it at the same time; but only if the
    run will need one.
    """
    from fleetbed.emulator.machine import measuring_lock
    from fleetbed.emulator.machine.capacity import can_start_zygote, check_room
    from fleetbed.emulator.processes.early_start import started_ahead

    needs_zygote = jobs == 1
    if asked is not None:
        check_room(sum(sizes(load_fleet(asked.fleet, search, "fleet"))), asked.processes)
        needs_zygote &= asked.processes != "inline"
    else:  # the study to resume has not been read yet, so whether it needs one is not known; errors come later
        needs_zygote &= can_start_zygote()
    with contextlib.ExitStack() as stack:
        if jobs == 1:
            stack.enter_context(measuring_lock.in_use())
        if needs_zygote:
            stack.enter_context(started_ahead())
        yield


@contextlib.contextmanager
def _exit_on_interrupt() -> Iterator[None]:
    """Make an interrupt end the process at once, because torch aborts if one is raised during its import.

    Nothing has been written yet, and a zygote that was started early ends by itself.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _imports() -> Observer:
    """Import everything a run needs, as quickly as possible; return the observer that shows its progress."""
    gc.disable()  # imports leave no garbage, and searching for it takes a fifth of their time
    with _exit_on_interrupt():
        from rich.console import Console

        from fleetbed.cli.live import observer_for
        from fleetbed.emulator.run import study  # noqa: F401 (brings in all of the emulator)

    gc.freeze()
    gc.enable()
    return observer_for(Console(stderr=True))


def _carry_out(folder: Path, only: str | None, jobs: int, observer: Observer) -> list[Path]:
    """Carry out the unfinished runs of a study; return the folders of all its runs."""
    from fleetbed.cli.side_by_side import run_side_by_side
    from fleetbed.emulator.run.study import conclude, open_study, resume_study

    try:
        experiment = open_study(folder).experiment
        if jobs == 1:
            return resume_study(folder, observer, only, carrier_of(experiment))
        _check_jobs(jobs, experiment)
        configs = runs(experiment)
        run_side_by_side(folder, [config.name for config in configs], jobs, observer.say)
        conclude(folder, configs, observer)
        return [folder / config.name for config in configs]
    except KeyboardInterrupt:
        complain(f"interrupted; continue with: fleetbed run --resume {folder}")
        raise


def carrier_of(experiment: Experiment) -> Carrier:
    """The module that carries out the runs of this experiment."""
    if experiment.flower is not None:
        from fleetbed.flower.app import check_flower

        check_flower()
        from fleetbed.flower import run as flower

        return flower
    from fleetbed.emulator.run import run as own

    return own


def prepared(experiment: Experiment) -> Experiment:
    """The experiment with what only its Flower app knows, if it has one."""
    if experiment.flower is None:
        return experiment
    from fleetbed.flower.app import with_rounds

    return with_rounds(experiment)


def _forecast(experiment: Experiment, search: Sequence[Path], as_json: bool) -> None:
    from rich.console import Console

    from fleetbed.cli.live import duration, observer_for
    from fleetbed.emulator.run.forecast import forecast, total

    observer = observer_for(Console(stderr=True))
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
            f"{each.disk_bytes / 1e6:.0f} MB",
        )
        for each in found
    ]
    if len(found) > 1:
        taken = (duration(together.device_s), f"about {duration(together.host_s)}")
        rows.append((f"all {len(found)} runs", "", "", together.tasks, *taken, f"{together.disk_bytes / 1e6:.0f} MB"))
    print_table("Forecast", columns, rows)
    for sentence in (sentence for each in found for sentence in each.warnings):
        complain(sentence)
