"""`fleetbed watch`, and the page beside `fleetbed run --watch`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetbed.cli.common import complain
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


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Serve the page of a study from a process of its own, so that it does not disturb the run; end it with the run."""
    from fleetbed.emulator.machine.interpreter import module_command

    command = module_command("fleetbed.cli.main", "watch", folder, "--until-input-ends", function="program")
    # in a session of its own, so that Ctrl-C stops the run first; it ends when this process does, however that ends
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=2 * LAST_LOOK_S)
        except subprocess.TimeoutExpired:
            process.kill()
            complain("the live page did not end in time and was stopped")
