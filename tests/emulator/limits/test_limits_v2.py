"""cgroup v2 on a stand-in for the kernel that keeps its rules; no controllers of a real one were at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from fleetbed.emulator.limits import LimitPlan, best_limits, clean_leftovers
from fleetbed.emulator.limits.plan import with_headroom

PLAN = LimitPlan("client-007", memory_bytes=100_000_000, cpu_cores=0.25)


def test_limits_are_written_and_read_back(v2_host: Any) -> None:
    limits = best_limits("r", v2_host.proc)
    cpu, memory = limits.create(PLAN).caps()
    assert (cpu.status, cpu.got, cpu.backend) == ("enforced", 0.25, "pacing under a cgroup v2 quota")
    assert (memory.status, memory.got, memory.note) == ("enforced", with_headroom(100_000_000), "")
    (leaf,) = v2_host.own.glob("fleetbed-*/client-007")
    assert (leaf / "cpu.max").read_text() == "25000 100000"
    assert (leaf / "cpu.weight").read_text() == "25"
    assert (leaf / "memory.swap.max").read_text() == "0"


def test_processes_make_way_for_the_groups_and_come_back(v2_host: Any) -> None:
    limits = best_limits("r", v2_host.proc)
    assert (v2_host.own / "cgroup.procs").read_text() == ""
    assert (v2_host.own / "fleetbed-host/cgroup.procs").read_text().split() == [str(os.getpid())]
    assert (v2_host.own / "cgroup.subtree_control").read_text() == "cpu memory"
    limits.close()
    assert (v2_host.own / "cgroup.procs").read_text().split() == [str(os.getpid())]
    assert (v2_host.own / "cgroup.subtree_control").read_text() == ""
    assert [path for path in v2_host.own.iterdir() if path.is_dir()] == []


def test_what_a_killed_run_left_is_undone_as_if_it_had_ended(v2_host: Any) -> None:
    best_limits("r", v2_host.proc).create(PLAN)
    (v2_host.proc / f"{os.getpid()}/stat").unlink()  # as if we had died
    (cleaned,) = clean_leftovers(v2_host.proc)
    assert cleaned.startswith(str(v2_host.own / "fleetbed-"))
    assert (v2_host.own / "cgroup.procs").read_text().split() == [str(os.getpid())]
    assert (v2_host.own / "cgroup.subtree_control").read_text() == ""
    assert [path for path in v2_host.own.iterdir() if path.is_dir()] == []


def test_the_host_leaf_stays_while_another_run_needs_it(v2_host: Any) -> None:
    limits = best_limits("r", v2_host.proc)
    other = v2_host.own / "fleetbed-00000000-1-1.other"
    v2_host.kernel.make(other)
    limits.close()
    assert (v2_host.own / "fleetbed-host").is_dir()


def test_a_second_run_nests_beside_the_first_not_below_it(v2_host: Any) -> None:
    first = best_limits("one", v2_host.proc)
    (v2_host.proc / "self/cgroup").write_text("0::/user.slice/run-1.scope/fleetbed-host\n")
    second = best_limits("two", v2_host.proc)
    assert len(list(v2_host.own.glob("fleetbed-*-*"))) == 2
    first.close()
    second.close()


def test_strangers_in_our_group_are_not_moved(v2_host: Any) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    try:
        (v2_host.own / "cgroup.procs").write_text(f"{os.getpid()}\n{stranger.pid}\n999999999\n")
        limits = best_limits("r", v2_host.proc)
        cpu, memory = limits.create(PLAN).caps()
    finally:
        stranger.communicate()
    assert (cpu.backend, memory.backend) == ("pacing", "RLIMIT_DATA")
    assert "holds other processes too ([999999999])" in memory.note
    assert not list(v2_host.own.glob("fleetbed-*"))


def test_a_value_that_was_not_kept_is_no_cap(v2_host: Any) -> None:
    v2_host.kernel.refuses |= {"cpu.max", "memory.max"}
    caps = best_limits("r", v2_host.proc).create(PLAN).caps()
    assert [cap.status for cap in caps] == ["unavailable", "unavailable"]


def test_an_outer_limit_is_told(v2_host: Any) -> None:
    plan = LimitPlan("client-007", memory_bytes=2**31)
    (memory,) = best_limits("r", v2_host.proc).create(plan).caps()
    assert memory.note == f"an outer group allows only {2**30} bytes"


def test_meters(v2_host: Any) -> None:
    group = best_limits("r", v2_host.proc).create(PLAN)
    usage = group.usage()
    assert (usage.peak_bytes, usage.anon_bytes, usage.throttled_s) == (7340032, 4194304, 1.5)
    assert group.oom_kills() == 2


def test_the_peak_is_reset_through_a_file_that_is_kept_open(v2_host: Any) -> None:
    group = best_limits("r", v2_host.proc).create(PLAN)
    (leaf,) = v2_host.own.glob("fleetbed-*/client-007")
    assert group.reset_peak()
    assert (leaf / "memory.peak").read_text().startswith("reset")
    (leaf / "memory.peak").write_text("42\n")  # what the kernel would then answer on that file
    assert group.usage().peak_bytes == 42


def test_an_old_kernel_keeps_its_peak_or_has_none(v2_host: Any) -> None:
    group = best_limits("r", v2_host.proc).create(PLAN)
    (leaf,) = v2_host.own.glob("fleetbed-*/client-007")
    (leaf / "memory.peak").unlink()
    assert not group.reset_peak()
    assert group.usage().peak_bytes == 5242880


def test_joining_enters_the_group(v2_host: Any) -> None:
    group = best_limits("r", v2_host.proc).create(PLAN)
    group.join()
    (leaf,) = v2_host.own.glob("fleetbed-*/client-007")
    assert (leaf / "cgroup.procs").read_text().split() == [str(os.getpid())]
