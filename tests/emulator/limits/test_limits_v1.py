"""On a stand-in for the kernel: what is written, where, and what is said when the kernel keeps something else."""

from __future__ import annotations

from typing import Any

import pytest

from fleetbed.emulator.limits import LimitPlan, best_limits
from fleetbed.emulator.limits.cgroup import places
from fleetbed.emulator.limits.plan import with_headroom

PLAN = LimitPlan("client-007", memory_bytes=100_000_000, cpu_cores=0.25)


def test_each_controller_has_its_own_place(v1_host: Any) -> None:
    found = {name: place for place in places(v1_host.proc) for name in place.controllers}
    assert found["memory"].own == v1_host.own
    assert found["cpu"].own == found["cpu"].mount


def test_limits_are_written_and_read_back(v1_host: Any) -> None:
    limits = best_limits("r", v1_host.proc)
    caps = {cap.knob: cap for cap in limits.create(PLAN).caps()}
    assert caps["memory"].status == caps["cpu"].status == "enforced"
    assert caps["memory"].got == with_headroom(100_000_000)
    assert caps["memory"].note == "swap is not accounted by this kernel: a client may swap beyond its cap"
    assert caps["cpu"].got == 0.25
    (leaf,) = v1_host.own.glob("fleetbed-*/client-007")
    assert int((leaf / "memory.limit_in_bytes").read_text()) == with_headroom(100_000_000)
    (leaf,) = next(place for place in places(v1_host.proc) if "cpu" in place.controllers).own.glob(
        "fleetbed-*/client-007"
    )
    assert (leaf / "cpu.shares").read_text() == "256"
    limits.close()
    assert not list(v1_host.own.glob("fleetbed-*"))


def test_swap_is_limited_with_the_memory(v1_host: Any) -> None:
    v1_host.kernel.files["memory.memsw.limit_in_bytes"] = "9223372036854771712"
    group = best_limits("r", v1_host.proc).create(PLAN)
    (leaf,) = v1_host.own.glob("fleetbed-*/client-007")
    assert (leaf / "memory.memsw.limit_in_bytes").read_text() == str(with_headroom(100_000_000))
    assert group.caps()[1].note == ""


def test_an_outer_quota_that_is_lower_becomes_ours(v1_host: Any) -> None:
    mount = next(place.mount for place in places(v1_host.proc) if "cpu" in place.controllers)
    (mount / "cpu.cfs_quota_us").write_text("20000")
    cpu = best_limits("r", v1_host.proc).create(PLAN).caps()[0]
    assert (cpu.asked, cpu.got) == (0.25, 0.2)
    assert cpu.note == "an outer group allows only 0.2 cores"


def test_an_outer_memory_limit_is_told(v1_host: Any) -> None:
    v1_host.kernel.files["memory.stat"] = "rss 0\nhierarchical_memory_limit 50000000\n"
    memory = best_limits("r", v1_host.proc).create(PLAN).caps()[1]
    assert memory.note == "an outer group allows only 50000000 bytes"


@pytest.mark.parametrize(("file", "knob"), [("memory.limit_in_bytes", "memory"), ("cpu.cfs_quota_us", "cpu")])
def test_a_value_that_was_not_kept_is_no_cap(v1_host: Any, file: str, knob: str) -> None:
    v1_host.kernel.refuses.add(file)
    caps = {cap.knob: cap for cap in best_limits("r", v1_host.proc).create(PLAN).caps()}
    assert caps[knob].status == "unavailable"


def test_one_tree_that_cannot_be_written_leaves_the_other_in_use(v1_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make = v1_host.kernel.make

    def only_memory(folder: Any) -> None:
        if "mount-cpu" in str(folder):
            raise PermissionError(13, "Permission denied")
        make(folder)

    monkeypatch.setattr("fleetbed.emulator.limits.cgroup.make", only_memory)
    limits = best_limits("r", v1_host.proc)
    cpu, memory = limits.create(PLAN).caps()
    assert memory.backend == "cgroup v1"
    assert cpu.backend == "pacing"
    assert "Permission denied" in cpu.note
    assert not limits.has_ceiling


def test_meters(v1_host: Any) -> None:
    group = best_limits("r", v1_host.proc).create(PLAN)
    (leaf,) = v1_host.own.glob("fleetbed-*/client-007")
    (leaf / "memory.max_usage_in_bytes").write_text("123456")
    (leaf / "memory.oom_control").write_text("oom_kill_disable 0\noom_kill 3\n")
    usage = group.usage()
    assert (usage.peak_bytes, usage.anon_bytes, usage.throttled_s) == (123456, 4096, 0.25)
    assert group.oom_kills() == 3
    assert group.reset_peak()
    assert (leaf / "memory.max_usage_in_bytes").read_text() == "0"
