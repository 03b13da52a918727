"""What a fork inherits and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fleetbed.emulator.processes import forking


def status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_ends_with_its_work(capfd: pytest.CaptureFixture[str]) -> None:
    assert status_of(forking.fork(lambda: None)) == 0
    assert status_of(forking.fork(lambda: 1 // 0)) == 1  # type: ignore[arg-type,return-value]
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_fork_ends_with_its_parent(tmp_path: Path) -> None:
    """A parent that is killed leaves nobody behind, wherever its fork was."""
    code = f"""
import os, time
from pathlib import Path
from fleetbed.emulator.processes.forking import fork
pid = fork(lambda: time.sleep(600))
Path({str(tmp_path / "pid")!r}).write_text(str(pid))
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    stat = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    deadline = time.monotonic() + 10
    while stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < deadline, "it outlived its parent"
        time.sleep(0.01)


def test_where_torch_could_use_a_gpu_the_warm_up_is_a_fork_s(monkeypatch: pytest.MonkeyPatch) -> None:
    here: list[int] = []
    forking.warm(lambda: here.append(1))
    assert here == [1]
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    forking.warm(lambda: here.append(2))
    assert here == [1]
    with pytest.raises(RuntimeError, match="exit code 1"):
        forking.warm(lambda: here.append(1 // 0))
