"""`fleetbed watch`, and the page beside `fleetbed run --watch`."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetbed.beside import beside
from fleetbed.profiles.yaml_text import plain

if TYPE_CHECKING:
    from fleetbed.analysis.page.serving import LiveServer

#: how long a page that is open may take to fetch the end of a run, before its server ends with the run
LAST_LOOK_S = 5.0


def watch(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs or studies.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 chooses a free one.")] = 0,
    with_run: Annotated[bool, typer.Option("--until-input-ends", hidden=True)] = False,
) -> None:
    """Show runs in a browser while they go on, on the report's page, which is updated all the time. Ctrl-C ends it.

    The page is served on this host only (127.0.0.1), and only at the address that is printed.
    """
    from fleetbed.analysis.page.serving import LiveServer
    from fleetbed.analysis.page.watching import Watched

    if with_run:
        os.nice(10)  # the run beside it comes first
    with LiveServer(Watched(folders), port) as server:
        print(plain(f"watch: {server.url}"), file=sys.stderr if with_run else sys.stdout, flush=True)
        if with_run:
            threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def _end_with_input(server: LiveServer) -> None:
    sys.stdin.read()
    time.sleep(LAST_LOOK_S)
    server.shutdown()


def watched(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Serve the page of a study from a process of its own; end it with the run."""
    return beside("watch", folder, wait_s=2 * LAST_LOOK_S)
