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
from fleetbed.cli.streams import unfailing
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Experiment, runs
from fleetbed.profiles.files import check_new
from fleetbed.profiles.fleet import sizes
from fleetbed.profiles.resolve import check_search, load_experiment, load_fleet

if TYPE_CHECKING:
    from fleetbed.emulator.engine.observer import Observer

INTERRUPTED = 130  # the exit code
#: the sources of time for which it does not matter what else the host does while clients train
UNDISTURBED = ("modelled", "replay")


def run(
    experiment: Annotated[str | None, typer.Argument(help="A name or the path of a YAML file.")] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override any key, as in timing.source=modelled. With --resume: rounds=N adds rounds.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the runs go; it must not exist.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Continue the study or run in it.")] = None,
    only: Annotated[str | None, typer.Option(metavar="RUN", help="With --resume: only this run of the study.")] = None,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Runs at the same time, unless time is enforced.")] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it will take in device time, host time and disk, and stop.")
    ] = False,
    profiles: ProfileFolders = None,
    as_json: AsJson = False,
) -> None:
    """Carry out an experiment: every algorithm, policy and seed of it is one run.

    Ctrl-C stops cleanly; continue with --resume.
    """
    if (experiment is None) == (resume is None):
        raise BadInput(
            "fleetbed run takes either an experiment or --resume DIR, see: fleetbed profiles list experiment"
        )
    stop_cleanly()
    sys.stdout = unfailing(sys.stdout)  # a run has its folder; what it prints is nobody's result
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where a parent ignored it, nobody would hear how a job ended
    if resume is not None:
        _check_resume(out=out, profiles=profiles, dry_run=dry_run, sets=sets, only=only, jobs=jobs)
        folder, folders = _resume(resume, sets or (), only, jobs)
    else:
        assert experiment is not None
        if only is not None:
            raise BadInput("--only RUN goes with --resume DIR; to carry out a part of an experiment, use --set.")
        search = tuple(profiles or ())
        check_search(search)
        if out is not None:
            check_new(out, "--out")
        asked = load_experiment(experiment, search, sets or ())
        _check_jobs(jobs, asked)
        if dry_run:
            if out is not None and os.path.lexists(out):
                raise BadInput(f"--out {out}: the folder exists; choose another.")
            _forecast(asked, search, as_json)
            return
        default = Path("runs") / f"{Path(experiment).stem}-{datetime.now():%Y%m%d-%H%M%S}"
        folder, folders = _start(asked, out or default, search, jobs, or_next=out is None)
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
    """Refuse, rather than ignore, the options that a study which is there already cannot heed."""
    if out is not None:
        raise BadInput("--out does not go with --resume: a study continues in its own folder.")
    if profiles:
        raise BadInput("--profiles does not go with --resume: a study keeps the profiles that it was started with.")
    if dry_run:
        raise BadInput(
            "--dry-run does not go with --resume: forecast the experiment, by fleetbed run EXPERIMENT --dry-run."
        )
    if only is not None and jobs > 1:
        raise BadInput("--only RUN does not go with --jobs: it is one run.")
    if only is not None and sets:
        raise BadInput("--set does not go with --only: the number of rounds is that of all runs of the study.")


def _start(
    asked: Experiment, folder: Path, search: Sequence[Path], jobs: int, *, or_next: bool
) -> tuple[Path, list[Path]]:
    """Carry out a new study; gives its folder and those of its runs."""
    with _on_this_host(asked, search, jobs):
        watch = _imports()
        from fleetbed.emulator.run.study import new_study

        command = shlex.join(["fleetbed", *sys.argv[1:]])
        with new_study(asked, folder, search=search, command=command, or_next=or_next) as taken:
            return taken, _carry_out(taken, None, jobs, watch)


def _resume(folder: Path, sets: Sequence[str], only: str | None, jobs: int) -> tuple[Path, list[Path]]:
    with _on_this_host(None, (), jobs):
        watch = _imports()
        from fleetbed.emulator.run.study import add_rounds, locate

        study, own = locate(folder)
        if own is not None and (sets or jobs > 1 or only not in (None, own)):
            raise BadInput(f"{folder} is one run: --set, --jobs and --only go with the folder of its study, {study}.")
        if sets:
            add_rounds(study, sets)
        return folder, _carry_out(study, only or own, jobs, watch)


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
    from fleetbed.emulator.machine import measuring_lock
    from fleetbed.emulator.machine.capacity import can_start_zygote, check_room
    from fleetbed.emulator.processes.early_start import started_ahead

    needs_zygote = jobs == 1
    if asked is not None:
        check_room(sum(sizes(load_fleet(asked.fleet, search, "fleet"))), asked.processes)
        needs_zygote &= asked.processes != "inline"
    else:  # nobody has looked yet at what is resumed, and whether it needs one; what it lacks is said later
        needs_zygote &= can_start_zygote()
    with contextlib.ExitStack() as stack:
        if jobs == 1:
            stack.enter_context(measuring_lock.in_use())
        if needs_zygote:
            stack.enter_context(started_ahead())
        yield


@contextlib.contextmanager
def _leaving_at_once() -> Iterator[None]:
    """Within this an interrupt ends the process on the spot: torch aborts if one is raised while it is imported.

    Nothing has been made yet, and a zygote that was started ahead ends by itself.
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
    """Import what a run needs, as quickly as possible; gives what shows its progress."""
    gc.disable()  # imports leave no garbage, and looking for it takes a fifth of their time
    with _leaving_at_once():
        from rich.console import Console

        from fleetbed.cli.live import observer_for
        from fleetbed.emulator.run import study  # noqa: F401 (brings in all of the emulator)

    gc.freeze()
    gc.enable()
    return observer_for(Console(stderr=True))


def _carry_out(folder: Path, only: str | None, jobs: int, watch: Observer) -> list[Path]:
    """Carry out what is not done in a study; gives the folders of its runs."""
    from fleetbed.cli.side_by_side import run_side_by_side
    from fleetbed.emulator.run.study import conclude, open_study, resume_study

    try:
        if jobs == 1:
            return resume_study(folder, watch, only)
        experiment = open_study(folder).experiment
        _check_jobs(jobs, experiment)
        configs = runs(experiment)
        run_side_by_side(folder, [config.name for config in configs], jobs, watch.say)
        conclude(folder, configs, watch)
        return [folder / config.name for config in configs]
    except KeyboardInterrupt:
        complain(f"interrupted; continue with: fleetbed run --resume {folder}")
        raise


def _forecast(experiment: Experiment, search: Sequence[Path], as_json: bool) -> None:
    from rich.console import Console

    from fleetbed.cli.live import duration, observer_for
    from fleetbed.emulator.run.forecast import forecast, total

    watch = observer_for(Console(stderr=True))
    found = [forecast(config, search=search, watch=watch) for config in runs(experiment)]
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
    print_table("what it will take", columns, rows)
    for sentence in (sentence for each in found for sentence in each.warnings):
        complain(sentence)
