"""Connects to a Ray cluster, or starts one on this machine; ends what it started and nothing else.

Whoever reaches a Ray cluster may run any code on it. So a Ray that is started here listens on loopback only, asks for a
token that no other process knows, and has no dashboard. A cluster at an address is used as its owner set it up.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from fleetbed.emulator.cluster.guardian import guarded_folder
from fleetbed.emulator.machine import host
from fleetbed.profiles.errors import BadInput, HostCannot

OLDEST = (2, 55)
INSTALL = "pip install 'fleetbed[ray]'"
REACH_S = 5.0  # in which the head of a cluster must answer
STORE_BYTES = 256 * 2**20  # of shared memory for objects; what does not fit goes to disk
PREFIX = "fleetbed-ray-"  # of the folder of a Ray that was started here; the id of its process follows

_TOKEN = secrets.token_hex(32)  # Ray reads it once per process
#: the variables with which a Ray of our own starts; ray reads them when it is imported
_OWN_RAY = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # whatever the system: bind to 127.0.0.1, as Ray does on a laptop
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": _TOKEN,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # a run is paced, so it must not give way to others
}


def check_installed() -> str:
    """Return the version of Ray. Raises HostCannot if it is missing or too old."""
    try:
        found = metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise HostCannot(f"Ray is not installed: {INSTALL}") from None
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < OLDEST:
        raise HostCannot(f"Ray {found} is too old, {OLDEST[0]}.{OLDEST[1]} or newer is needed: {INSTALL}")
    return found


def check_reachable(address: str | None) -> None:
    """Raise HostCannot unless Ray is installed and the address answers: Ray itself would try for minutes."""
    check_installed()
    if address is not None:
        _check_address(address)


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect this process to the cluster at the address; without one, start Ray on this machine and end it again.

    A process that is connected already stays so, if it is to the same cluster. Raises HostCannot.
    """
    check_reachable(address)
    # nodes that are added to a cluster meanwhile must not take over the token of a Ray of our own
    is_own = address is None and not _is_connected()
    with _environment(_OWN_RAY if is_own else {}), contextlib.ExitStack() as stack:
        import ray

        if _is_connected():
            there = ray.get_runtime_context().gcs_address
            if address not in (None, "auto", there):
                raise HostCannot(
                    f"--address {address}: this process is connected to the Ray cluster at {there} already."
                )
            yield
            return
        folder = stack.enter_context(guarded_folder(PREFIX)) if address is None else None
        stack.callback(ray.shutdown)  # before what is left of it is ended
        if folder is not None:
            _start(folder)
        else:
            assert address is not None
            _join(address)
        yield


def _is_connected() -> bool:
    """Whether this process is connected to a cluster; does not import ray, which reads the variables when it is."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _start(folder: Path) -> None:
    import ray

    try:
        with _signals_kept():
            ray.init(
                address="local",
                num_cpus=host.cores(),
                include_dashboard=False,
                configure_logging=False,
                log_to_driver=False,
                object_store_memory=STORE_BYTES,
                _temp_dir=str(folder),
            )
    except Exception as error:
        raise HostCannot(f"Ray cannot be started on this machine: {first_sentence(error)}") from error


def _join(address: str) -> None:
    import ray

    try:
        with _signals_kept():
            ray.init(address=address, configure_logging=False, log_to_driver=False)
    except Exception as error:
        raise HostCannot(f"--address {address}: the Ray cluster cannot be used: {first_sentence(error)}") from error


def _check_address(address: str) -> None:
    if address == "auto":
        return
    name, colon, port = address.rpartition(":")
    if not colon or "/" in address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadInput(f"--address {address}: allowed are HOST:PORT of the head of a Ray cluster, and auto.")
    try:
        socket.create_connection((name.strip("[]"), int(port)), timeout=REACH_S).close()
    except OSError as error:
        raise HostCannot(
            f"--address {address}: no Ray cluster answers there ({error.strerror or error}); "
            "start one with: ray start --head"
        ) from error


def first_sentence(error: Exception) -> str:
    """The first sentence of an error, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[a-z)])\. ", text)[0][:300].rstrip(".") + "."


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set these variables meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep how signals are handled: Ray ends a process at SIGTERM, where a run stops cleanly."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, how in before.items():
            if how is not None:
                signal.signal(number, how)
