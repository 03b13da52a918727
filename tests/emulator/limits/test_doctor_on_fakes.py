"""What the doctor says on hosts without cgroups, with v1 and with v2, and which command it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleetbed.emulator.checks.doctor import Knob, enabling_command, examine
from fleetbed.emulator.limits.cgroup import Place
from fleetbed.emulator.limits.gpu import Card
from fleetbed.emulator.machine.calibration import Store


class NoCard:
    def card(self, index: int) -> Card | None:
        return None

    def mps_running(self) -> bool:
        return False


class CardWithoutMps(NoCard):
    def card(self, index: int) -> Card | None:
        return Card(80, 16 * 2**30)


def knobs(proc: Path, tmp_path: Path, driver: Any = None) -> dict[str, Knob]:
    report = examine(proc, driver or NoCard(), Store(tmp_path / "calibration.json"))
    assert report.calibration is None
    assert report.cores >= 1
    return {knob.knob: knob for knob in report.knobs}


def test_without_cgroups(bare_proc: Path, tmp_path: Path) -> None:
    found = knobs(bare_proc, tmp_path)
    assert (found["cpu"].status, found["cpu"].backend) == ("enforced", "pacing")
    assert (found["memory"].status, found["memory"].backend) == ("enforced", "RLIMIT_DATA")
    assert found["memory"].note.startswith("approximate")
    assert found["memory"].enable.startswith("in a container")
    assert found["link"].status == "modelled"


def test_with_v1(v1_host: Any, tmp_path: Path) -> None:
    found = knobs(v1_host.proc, tmp_path)
    assert found["cpu"].backend == "pacing under a cgroup v1 quota"
    assert found["memory"].backend == "cgroup v1"
    assert found["cpu"].enable == found["memory"].enable == ""
    assert not list(v1_host.own.glob("fleetbed-*"))


def test_with_v2(v2_host: Any, tmp_path: Path) -> None:
    found = knobs(v2_host.proc, tmp_path)
    assert found["cpu"].backend == "pacing under a cgroup v2 quota"
    assert found["memory"].backend == "cgroup v2"
    assert not list(v2_host.own.glob("fleetbed-*"))


def test_a_card_needs_a_daemon_to_be_shared(bare_proc: Path, tmp_path: Path) -> None:
    found = knobs(bare_proc, tmp_path, CardWithoutMps())
    assert (found["gpu-compute"].status, found["gpu-compute"].enable) == ("unavailable", "nvidia-cuda-mps-control -d")
    assert found["gpu-memory"].backend == "torch fraction"


def test_without_a_card_a_gpu_is_emulated(bare_proc: Path, tmp_path: Path) -> None:
    found = knobs(bare_proc, tmp_path)
    assert found["gpu-compute"].status == found["gpu-memory"].status == "modelled"
    assert found["gpu-compute"].note.startswith("gpu emulated on cpu")


V2 = Place(2, frozenset({"cpu", "memory"}), Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/user.slice"))
V1 = Place(1, frozenset({"memory"}), Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/memory/job"))
V2_BARE = Place(2, frozenset(), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup/unified"))


@pytest.mark.parametrize(("uid", "option"), [(0, ""), (1000, " --user")])
def test_systemd_gives_a_scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, option: str) -> None:
    monkeypatch.setattr("os.geteuid", lambda: uid)
    assert enabling_command([V2], tmp_path) == f"systemd-run{option} --scope -p Delegate=yes fleetbed ..."


def test_without_systemd_a_folder_is_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    command = enabling_command([V2_BARE, V1], tmp_path / "no systemd")
    assert command == (
        "sudo sh -c 'for g; do mkdir -p $g && chown -R ada $g && echo '$$' > $g/cgroup.procs; done' "
        "sh /sys/fs/cgroup/memory/job/of-ada"
    )


def test_v2_without_systemd_is_handed_over_below_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    command = enabling_command([V2], tmp_path / "no systemd")
    assert command.startswith("sudo sh -c 'echo +cpu +memory > /sys/fs/cgroup/cgroup.subtree_control; for g; do ")
    assert command.endswith(" sh /sys/fs/cgroup/of-ada")
