"""The `fleetbed` command: one group of commands per module, and what becomes of errors.

Heavy modules (torch, matplotlib) are imported inside the commands that need them, so that `--help` is quick.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from fleetbed.cli import data, host, models, profiles, report, run
from fleetbed.cli.common import complain
from fleetbed.profiles.errors import FleetbedError

DESCRIBE = "Describe"
HOST = "This host"
RESULTS = "Results"

app = typer.Typer(
    name="fleetbed",
    help="Emulate a fleet of unequal IoT devices on one machine and run federated learning on it.",
    epilog="Exit codes: 0 done, 1 the run failed, 2 bad input, 3 this host cannot do what was asked.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(profiles.app, name="profiles", rich_help_panel=DESCRIBE)
app.add_typer(data.app, name="data", rich_help_panel=DESCRIBE)
app.add_typer(models.app, name="models", rich_help_panel=DESCRIBE)
app.add_typer(report.privacy, name="privacy", rich_help_panel=RESULTS)
app.command("run")(run.run)
app.command("schema", rich_help_panel=DESCRIBE)(profiles.schema)
profiles.app.command("measure")(host.measure)
_HOST_COMMANDS: tuple[Callable[..., None], ...] = (host.doctor, host.calibrate, host.verify)
_RESULT_COMMANDS: tuple[Callable[..., None], ...] = (report.report, report.plot, report.compare, report.export)
for command in _HOST_COMMANDS:
    app.command(rich_help_panel=HOST)(command)
for command in _RESULT_COMMANDS:
    app.command(rich_help_panel=RESULTS)(command)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        print(f"fleetbed {metadata.version('fleetbed')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(args: Sequence[str] | None = None) -> None:
    """Run the command and exit. An error of ours is one line on stderr and its exit code, no traceback."""
    try:
        try:
            app(args=args, prog_name="fleetbed")
        finally:
            sys.stdout.flush()
    except FleetbedError as error:
        complain(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader went away (`| head`): nobody to tell, and the interpreter must not try to flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def program() -> None:
    """What a shell starts: the command, and an end that leaves it to the kernel to take the process apart.

    Python would do so object by object, which takes a quarter of a second with torch in it.
    """
    try:
        main()
    except SystemExit as end:
        if "torch" not in sys.modules or not isinstance(end.code, int | None):
            raise
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code or 0)


if __name__ == "__main__":
    program()
