"""`fleetbed flower`: run a Flower app on an emulated fleet."""

from __future__ import annotations

import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from fleetbed.cli.common import AsJson, ProfileFolders, print_json
from fleetbed.cli.interrupts import stop_cleanly
from fleetbed.cli.run import prepared, start
from fleetbed.cli.streams import never_failing
from fleetbed.profiles.files import check_new, user_path
from fleetbed.profiles.resolve import check_search, experiment_of
from fleetbed.profiles.yaml_text import parse


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
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    search = tuple(profiles or ())
    check_search(search)
    if out is not None:
        check_new(out, "--out")
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
    asked = prepared(experiment_of(tree, others, f"fleetbed flower {app}"))
    default = Path("runs") / f"{folder.name}-{datetime.now():%Y%m%d-%H%M%S}"
    taken, folders = start(asked, out or default, search, 1, or_next=out is None)
    if as_json:
        print_json({"folder": str(taken), "runs": [str(path) for path in folders]})
    else:
        print(taken)
