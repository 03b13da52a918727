"""The `fleetbed` command: assembles the groups of commands and turns errors into exit codes.

Heavy modules (torch, matplotlib) are imported inside the commands that need them, so that `--help` is quick.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fleetbed.cli import (
    data,
    flower,
    host,
    init,
    methods,
    models,
    profiles,
    report,
    run,
    streams,
    track,
    validate,
    watch,
)
from fleetbed.cli.common import complain
from fleetbed.profiles.errors import BadInput, FleetbedError, HostCannot
from fleetbed.profiles.files import is_text, show_path

#: errors of a full or read-only disk, and of limits of the shell or the machine
LACKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
NO_MEMORY = ("failed to map segment", "cannot allocate memory", "Cannot allocate memory")
RUN = "Run"
DESCRIBE = "Describe"
HOST = "This host"
RESULTS = "Results"

#: the commands in the order of the help text; typer would list all groups last
ORDER = (
    *("run", "init", "flower"),
    *("profiles", "models", "data", "methods", "schema", "validate"),
    *("doctor", "calibrate", "verify"),
    *("watch", "track", "report", "compare", "plot", "export", "privacy"),
)


class _InOrder(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


app = typer.Typer(
    name="fleetbed",
    cls=_InOrder,
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
app.command("run", rich_help_panel=RUN)(run.run)
app.command("flower", rich_help_panel=RUN)(flower.flower)
app.command("init", rich_help_panel=RUN)(init.init)
app.command("schema", rich_help_panel=DESCRIBE)(profiles.schema)
app.command("methods", rich_help_panel=DESCRIBE)(methods.methods)
app.command("validate", rich_help_panel=DESCRIBE)(validate.validate)
profiles.app.command("measure")(host.measure)
_HOST_COMMANDS: tuple[Callable[..., None], ...] = (host.doctor, host.calibrate, host.verify)
_RESULT_COMMANDS: tuple[Callable[..., None], ...] = (
    report.report,
    report.plot,
    report.compare,
    watch.watch,
    track.track,
)
for command in _HOST_COMMANDS:
    app.command(rich_help_panel=HOST)(command)
for command in _RESULT_COMMANDS:
    app.command(rich_help_panel=RESULTS)(command)
app.command("export", rich_help_panel=RESULTS)(report.export_runs)


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
    """Run the command and exit. A FleetbedError becomes one line on stderr and its exit code, without a traceback."""
    try:
        _check_text(sys.argv[1:] if args is None else args)
        try:
            app(args=args, prog_name="fleetbed")
        finally:
            sys.stdout.flush()
    except FleetbedError as error:
        complain(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader is gone (`| head`), so nobody would see a message
        _drop_output()
        sys.exit(1)
    except (OSError, MemoryError, ImportError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            complain(f"{show_path(str(error.filename))}: {error.strerror}: give another path.")
            sys.exit(BadInput.exit_code)
        problem = _of_host(error)
        if problem is None:
            raise
        _drop_output()
        complain(f"this host cannot do it: {problem}")
        sys.exit(HostCannot.exit_code)


def _check_text(args: Sequence[str]) -> None:
    """Check that the arguments and the current folder are UTF-8 text, because both go into records."""
    for arg in args:
        if not is_text(arg):
            raise BadInput(f"the argument {show_path(arg)} is not UTF-8 text: rename that file or folder.")
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise BadInput("the current folder no longer exists: change to another one.") from None
    if not is_text(folder):
        raise BadInput(f"the path of the current folder, {show_path(folder)}, is not UTF-8 text: rename it.")


def _drop_output() -> None:
    """Discard pending standard output, which cannot be written, so that the interpreter does not try again at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _of_host(error: Exception) -> str | None:
    """Describe what this machine lacks; None if the error has another cause."""
    if isinstance(error, MemoryError):
        return "there is not enough memory"
    if isinstance(error, ImportError):  # a library that could not be mapped
        return str(error) if any(text in str(error) for text in NO_MEMORY) else None
    return str(error) if isinstance(error, OSError) and error.errno in LACKS else None


def program() -> None:
    """Run the command as a shell does, then exit without Python's cleanup.

    Freeing every object takes Python a quarter of a second once torch is imported; the kernel does it at once.
    """
    streams.open_closed()
    streams.show_all_characters()
    sys.stderr = streams.never_failing(sys.stderr)
    try:
        main()
    except SystemExit as end:
        for late in (signal.SIGINT, signal.SIGTERM):  # the command has finished: nothing may change its exit code now
            signal.signal(late, signal.SIG_IGN)
        if "torch" not in sys.modules or not isinstance(end.code, int | None):
            raise
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code or 0)


def standby() -> None:
    """Import what a run needs, and then be the command whose arguments come as a line of JSON.

    A node of a cluster starts this before it is known which run it gets; with a zygote if the argument is `zygote`.
    """
    import gc

    from fleetbed.emulator.processes.early_start import zygote_started_early

    gc.disable()  # imports leave no garbage, and searching for it takes a fifth of their time
    with zygote_started_early() if sys.argv[1:] == ["zygote"] else contextlib.nullcontext():
        from fleetbed.emulator.run import study  # noqa: F401 (brings in all of the emulator)

        gc.enable()
        if line := sys.stdin.readline():
            sys.argv[1:] = json.loads(line)
            program()


if __name__ == "__main__":
    program()
