"""`fleetbed track`, which also accompanies `fleetbed run --track`."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from fleetbed.cli.common import complain
from fleetbed.profiles.yaml_text import plain


def track(
    tracker: Annotated[str, typer.Argument(help="tensorboard, mlflow or wandb.")],
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs or studies.")],
    with_run: Annotated[bool, typer.Option("--until-input-ends", hidden=True)] = False,
) -> None:
    """Send runs to a tracker, as fleetbed run --track does while they go on; nothing is sent twice.

    It writes below DIR/trackers, unless MLFLOW_TRACKING_URI or WANDB_MODE names another place.
    """
    from fleetbed.analysis.tracking.sending import Sender
    from fleetbed.analysis.tracking.trackers import check_trackers

    check_trackers([tracker])
    senders = [Sender(tracker, folder, complain) for folder in folders]
    if with_run:
        os.nice(10)  # the run beside it comes first
        over = threading.Event()
        threading.Thread(target=_wait_for_input, args=(over,), daemon=True).start()
        senders[0].follow(over.is_set)
        return
    for sender in senders:
        sender.finish(going_on=True)
        print(plain(str(sender.place)))


def _wait_for_input(over: threading.Event) -> None:
    sys.stdin.read()
    over.set()
