"""Runs a ServerApp in a thread beside the engine, and learns what it measures by itself."""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.server import server as legacy
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import Strategy

from fleetbed.emulator.randomness import derive
from fleetbed.flower import identity
from fleetbed.flower.app import DOWNLOAD, Config, needs_download
from fleetbed.flower.client import seed_all
from fleetbed.flower.grid import FleetGrid, Stopped
from fleetbed.flower.packing import figures
from fleetbed.profiles.errors import FleetbedError

ERROR_LOG = "error.log"  # the traceback of a ServerApp that failed
SERVER_LOG = "server.log"  # what it printed and logged
LEAVE_S = 10.0  # how long it may take to end after it was told to

Evaluated = Callable[[str, int, dict[str, float]], None]  # who measured, in which round, what


class ServerAppFailed(FleetbedError):
    """The ServerApp raised an error."""


@contextlib.contextmanager
def running(
    app: ServerApp, grid: FleetGrid, run_config: Config, seed: int, folder: Path, evaluated: Evaluated
) -> Iterator[None]:
    """Run the ServerApp meanwhile; its output goes to a file. At the end it is told to stop, if it has not ended."""
    context = Context(
        run_id=identity.RUN_ID,
        node_id=identity.SERVER_NODE,
        node_config={},
        state=RecordDict(),
        run_config=dict(run_config),
    )
    identity.set_for(identity.SERVER_NODE)
    seed_all(derive(seed, "flower server"))

    def run() -> None:
        try:
            app(grid=grid, context=context)
        except Stopped:
            grid.finish()
        except BaseException as error:  # noqa: BLE001 - raised again by the engine's thread
            grid.finish(_failed(error, folder))
        else:
            grid.finish()

    thread = threading.Thread(target=run, name="ServerApp", daemon=True)
    with _output_to(folder / SERVER_LOG), _hooks(grid, evaluated):
        thread.start()
        try:
            yield
        finally:
            grid.close()
            thread.join(LEAVE_S)


def _failed(error: BaseException, folder: Path) -> ServerAppFailed:
    path = folder / ERROR_LOG
    path.write_text("".join(traceback.format_exception(error)))
    frames = traceback.extract_tb(error.__traceback__)
    said = f"{type(error).__name__}: {error}".removesuffix(": ").splitlines()[0]
    return ServerAppFailed(
        f"the ServerApp failed at {frames[-1].filename}:{frames[-1].lineno}: {said}; its traceback is in {path}"
        + (f"; {DOWNLOAD}" if needs_download(said) else "")
    )


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Send what the ServerApp prints, and what Flower logs, to a file: the terminal shows the run."""
    logger = logging.getLogger("flwr")
    handlers = list(logger.handlers)
    with path.open("a", encoding="utf-8", buffering=1) as file, contextlib.redirect_stdout(file):
        logger.handlers[:] = [logging.StreamHandler(file)]
        try:
            yield
        finally:
            logger.handlers[:] = handlers


@contextlib.contextmanager
def _hooks(grid: FleetGrid, evaluated: Evaluated) -> Iterator[None]:
    """Learn what strategies of both interfaces measure on the server, and let legacy threads make one request.

    A legacy server asks each client in a thread of its own, and takes the results in the order of a set.
    """
    start, fit = Strategy.start, legacy.Server.fit
    originals = {name: getattr(legacy, name) for name in ("fit_clients", "evaluate_clients")}

    def watched_start(self: Strategy, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("evaluate_fn") is not None:
            measure = kwargs["evaluate_fn"]

            def watched(server_round: int, arrays: Any) -> Any:
                found = measure(server_round, arrays)
                evaluated("server", server_round, figures(dict(found or {})))
                return found

            kwargs["evaluate_fn"] = watched
        return start(self, *args, **kwargs)

    def watched_fit(self: legacy.Server, *args: Any, **kwargs: Any) -> Any:
        measure = self.strategy.evaluate

        def watched(server_round: int, *inner: Any, **named: Any) -> Any:
            found = measure(server_round, *inner, **named)
            if found is not None:
                evaluated("server", server_round, figures({"loss": found[0], **found[1]}))
            return found

        self.strategy.evaluate = watched  # type: ignore[method-assign]
        return fit(self, *args, **kwargs)

    def at_once(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(client_instructions: list[Any], max_workers: int | None, **kwargs: Any) -> Any:
            del max_workers  # a thread for each client: they only wait
            if not client_instructions:
                return [], []
            order = [proxy.cid for proxy, _ in client_instructions]
            with grid.together(len(order)):
                results, failures = original(client_instructions=client_instructions, max_workers=len(order), **kwargs)
            return sorted(results, key=lambda result: order.index(result[0].cid)), failures

        return call

    Strategy.start, legacy.Server.fit = watched_start, watched_fit  # type: ignore[method-assign]
    for name, original in originals.items():
        setattr(legacy, name, at_once(original))
    try:
        yield
    finally:
        Strategy.start, legacy.Server.fit = start, fit  # type: ignore[method-assign]
        for name, original in originals.items():
            setattr(legacy, name, original)
