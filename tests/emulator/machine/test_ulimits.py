"""Limits of the shell that are too small are refused before anything starts; soft ones are raised."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from fleetbed.emulator.machine import host, ulimits
from fleetbed.profiles.errors import HostCannot

COMMAND = [sys.executable, "-m", "fleetbed.cli.main", "run", "demo", "--set", "processes=resident"]


def with_limit(limit: int, value: int, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    def lower() -> None:
        resource.setrlimit(limit, (value, value))

    return subprocess.run(command, cwd=cwd, preexec_fn=lower, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("limit", "value", "option"),
    [
        (ulimits.FILES, 12, "ulimit -n 140 or more, and the hard limit here is 12"),
        (ulimits.FILES, 100, "ulimit -n 140 or more, and the hard limit here is 100"),
        (ulimits.FILE_BYTES, 0, "ulimit -f"),
        (ulimits.FILE_BYTES, 1 << 20, "ulimit -f"),
        (ulimits.ADDRESS_BYTES, 400 << 20, "ulimit -v"),
        (ulimits.ADDRESS_BYTES, 4 << 30, "ulimit -v"),
    ],
)
def test_the_command_refuses_a_hard_limit_that_is_too_small(
    limit: int, value: int, option: str, tmp_path: Path
) -> None:
    if limit == ulimits.FILES:
        option = option.replace("140", str(ulimits.OWN_FILES + 8 + 2 * host.cores()))
    found = with_limit(limit, value, *COMMAND, cwd=tmp_path)
    assert found.returncode == 3
    assert found.stderr.count("\n") == 1
    assert option in found.stderr
    assert "or set processes to inline" in found.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_thousand_resident_clients_raise_the_usual_soft_limit(tmp_path: Path) -> None:
    code = (
        "import resource\nfrom fleetbed.emulator.machine import ulimits\n"
        "from fleetbed.profiles.errors import HostCannot\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))\n"
        "try: ulimits.check(1000, 'resident')\n"
        "except HostCannot: assert hard < 1200\n"
        "else: assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1100\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_whoever_is_not_root_is_told_how_many_threads_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 65534)
    monkeypatch.setattr(ulimits, "_threads_of_user", lambda: 10)
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (50, 50) if limit == ulimits.THREADS else (-1, -1))
    least = 10 + ulimits.OWN_THREADS + 3 * (500 + 2 * host.cores())
    with pytest.raises(HostCannot, match=f"500 resident clients needs ulimit -u {least} or more, .* here is 50"):
        ulimits.check(500, "resident")


def test_our_own_threads_are_counted() -> None:
    assert ulimits._threads_of_user() >= 1


def test_inline_runs_share_no_memory() -> None:
    assert {need.limit for need in ulimits.needs(1000, "inline")} == {ulimits.FILES, ulimits.ADDRESS_BYTES}
