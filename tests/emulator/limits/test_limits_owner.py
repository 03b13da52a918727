from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fleetbed.emulator.limits.owner import folder_name, is_leftover


def test_a_live_owner_has_no_leftovers() -> None:
    name = folder_name("demo-sync-1")
    assert name.startswith("fleetbed-")
    assert f"-{os.getpid()}-" in name
    assert not is_leftover(name)


def test_a_dead_owner_has() -> None:
    program = "from fleetbed.emulator.limits.owner import folder_name; print(folder_name('r'))"
    name = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert is_leftover(name)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_an_unreaped_corpse_is_dead() -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, folder_name("r").encode())
        os._exit(0)
    name = os.read(reader, 200).decode()
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        assert is_leftover(name)
    finally:
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)


def test_a_pid_that_was_given_to_another_process_is_no_owner() -> None:
    prefix, start = folder_name("r").removesuffix(".r").rsplit("-", 1)
    assert is_leftover(f"{prefix}-{int(start) - 1}.r")


def test_what_others_made_is_not_ours_to_judge() -> None:
    boot, pid, start = folder_name("r").removesuffix(".r").split("-")[1:]
    other_boot = f"{(int(boot, 16) + 1) % 2**32:08x}"
    for name in (f"fleetbed-{other_boot}-{pid}-1.r", "fleetbed-host", "user.slice", f"fleetbed-{boot}-{pid}-{start}"):
        assert not is_leftover(name)


def test_a_run_name_cannot_leave_its_folder() -> None:
    assert "/" not in folder_name("../../etc")
