"""`fleetbed flower`: run a Flower app on an emulated fleet."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fleetbed.cli.common import AsJson, ProfileFolders, complain, print_json
from fleetbed.cli.interrupts import stop_cleanly
from fleetbed.cli.streams import never_failing
from fleetbed.profiles.files import user_path
from fleetbed.profiles.resolve import make_experiment, search_folders
from fleetbed.profiles.yaml_text import parse
from fleetbed.running import StudyInterrupted, start_runs


def flower(
    app: Annotated[Path, typer.Argument(help="The folder of the app, as for `flwr run`.")],
    fleet: Annotated[str, typer.Option(metavar="FLEET", help="The name or YAML file of a fleet.")],
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a key of the app's run config, such as num-server-rounds=5, or of the experiment.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the run; it must not exist yet.")] = None,
    profiles: ProfileFolders = None,
    as_json: AsJson = False,
) -> None:
    """Run an unmodified Flower app, every call of its ClientApp in the limited process of its client."""
    from fleetbed.flower.app import check_flower, read_app

    check_flower()
    stop_cleanly()
    sys.stdout = never_failing(sys.stdout)
    search = search_folders(profiles)
    folder = user_path(app, "APP").absolute()
    run_config: dict[str, Any] = {}
    others = []
    known = read_app(folder, "APP").config
    for item in sets or ():
        key, equals, text = item.partition("=")
        if equals and key.strip() in known:
            run_config[key.strip()] = parse(text, f"--set {item}")
        else:
            others.append(item)
    tree = {"title": folder.name, "fleet": fleet, "flower": {"app": str(folder), "run_config": run_config}}
    asked = make_experiment(tree, others)
    command = shlex.join(["fleetbed", *sys.argv[1:]])
    try:
        taken, folders = start_runs(asked, folder.name, out, search=search, command=command)
    except StudyInterrupted:
        complain("interrupted; a ServerApp cannot be resumed, so start the run again")
        raise
    if as_json:
        print_json({"folder": str(taken), "runs": [str(path) for path in folders]})
    else:
        print(taken)
