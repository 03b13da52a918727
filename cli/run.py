"""`fleetbed run`: carry out an experiment, or go on with one."""

from __future__ import annotations

import shlex
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from fleetbed.cli.common import AsJson, ProfileFolders, complain, print_json
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.resolve import check_search, load_experiment


def run(
    experiment: Annotated[str | None, typer.Argument(help="A name or the path of a YAML file.")] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override any key, as in timing.source=modelled."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the runs go; it must not exist.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Go on with what is in this folder.")] = None,
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
    from rich.console import Console

    from fleetbed.cli.live import watch_for
    from fleetbed.emulator.study import resume_study, start_study

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill ends in order too
    watch = watch_for(Console(stderr=True))
    folder = resume or out or Path("runs") / f"{Path(experiment or '').stem}-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        if experiment is None:
            folders = resume_study(folder, watch)
        else:
            search = tuple(profiles or ())
            check_search(search)
            asked = load_experiment(experiment, search, sets or ())
            command = shlex.join(["fleetbed", *sys.argv[1:]])
            folders = start_study(asked, folder, search=search, command=command, watch=watch)
    except KeyboardInterrupt:
        complain(f"interrupted; go on with: fleetbed run --resume {folder}")
        raise
    if as_json:
        print_json({"folder": str(folder), "runs": [str(path) for path in folders]})
    else:
        print(folder)
