"""Hosts to stand in for the real one: a /proc in a temporary folder, and a kernel that keeps cgroup v2's rules."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from pathlib import Path

import pytest

from fleetbed.emulator.limits import best_limits, cgroup

V2_FILES = {
    "cgroup.procs": "",
    "cgroup.subtree_control": "",
    "cpu.max": "max 100000",
    "cpu.weight": "100",
    "cpu.stat": "usage_usec 2500000\nthrottled_usec 1500000\n",
    "memory.max": "max",
    "memory.swap.max": "max",
    "memory.peak": "7340032",
    "memory.current": "5242880",
    "memory.stat": "anon 4194304\nfile 1048576\n",
    "memory.events": "oom 3\noom_kill 2\n",
}
V1_FILES = {
    "cgroup.procs": "",
    "cpu.cfs_quota_us": "-1",
    "cpu.shares": "1024",
    "cpu.cfs_period_us": "100000",
    "cpu.stat": "nr_throttled 4\nthrottled_time 250000000\n",
    "memory.limit_in_bytes": "9223372036854771712",
    "memory.max_usage_in_bytes": "0",
    "memory.stat": "rss 4096\nhierarchical_memory_limit 9223372036854771712\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
}


class FakeKernel:
    """Folders and files as the kernel would make them, and its answers to what is written into them."""

    def __init__(self, files: dict[str, str], controllers: str) -> None:
        self.files = dict(files)
        self.controllers = controllers
        self.refuses: set[str] = set()  # names of files whose value is not kept

    def make(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        for name, content in {**self.files, "cgroup.controllers": self.controllers}.items():
            (folder / name).write_text(content)

    def drop(self, folder: Path) -> None:
        if (folder / "cgroup.procs").read_text().split():
            raise OSError(errno.EBUSY, "Device or resource busy")
        shutil.rmtree(folder)

    def write(self, path: Path, value: str | int) -> None:
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        if path.name in self.refuses:
            return
        text = str(value)
        if path.name == "cgroup.subtree_control":
            self._enable(path, text)
        elif path.name == "cgroup.procs":
            self._move(path, text if text != "0" else str(os.getpid()))
        elif path.name in ("memory.max", "memory.limit_in_bytes"):
            path.write_text(str(int(text) // mmap.PAGESIZE * mmap.PAGESIZE))
        else:
            path.write_text(text)

    def _enable(self, path: Path, text: str) -> None:
        enabled = set(path.read_text().split())
        for word in text.split():
            if word[0] == "-":
                enabled.discard(word[1:])
            elif (path.parent / "cgroup.procs").read_text().split():
                raise OSError(errno.EBUSY, "Device or resource busy")
            else:
                enabled.add(word[1:])
        path.write_text(" ".join(sorted(enabled)))

    def _move(self, path: Path, pid: str) -> None:
        if (path.parent / "cgroup.subtree_control").exists() and cgroup.read_words(
            path.parent / "cgroup.subtree_control"
        ):
            raise OSError(errno.EBUSY, "Device or resource busy")
        mount = next(parent for parent in path.parents if parent.name.startswith("mount"))
        for procs in mount.rglob("cgroup.procs"):
            procs.write_text("".join(f"{p}\n" for p in procs.read_text().split() if p != pid))
        with path.open("a") as file:
            file.write(f"{pid}\n")


def make_proc(folder: Path, groups: str, mounts: str) -> Path:
    """A /proc that tells of these groups and mounts, and otherwise what the real one does."""
    pid = os.getpid()
    for part in (f"{pid}", "self/ns", "sys/kernel/random"):
        (folder / part).mkdir(parents=True)
    (folder / f"{pid}/stat").write_text(Path(f"/proc/{pid}/stat").read_text())
    (folder / "self/ns/pid").symlink_to("pid:[4026531836]")
    (folder / "sys/kernel/random/boot_id").write_text("11111111-2222-3333-4444-555555555555\n")
    (folder / "self/cgroup").write_text(groups)
    (folder / "self/mountinfo").write_text(mounts)
    return folder


class FakeHost:
    def __init__(self, proc: Path, own: Path, kernel: FakeKernel) -> None:
        self.proc, self.own, self.kernel = proc, own, kernel


def _install(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("make", "drop", "write"):
        monkeypatch.setattr(cgroup, name, getattr(kernel, name))


@pytest.fixture
def v2_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    """A scope that was delegated to us, with only this process in it."""
    kernel = FakeKernel(V2_FILES, "cpu memory pids")
    _install(kernel, monkeypatch)
    mount = tmp_path / "mount"
    kernel.make(mount)
    kernel.make(mount / "user.slice")
    own = mount / "user.slice/run-1.scope"
    kernel.make(own)
    (own / "cgroup.procs").write_text(f"{os.getpid()}\n")
    (own / "memory.max").write_text(str(2**30))
    mounts = f"30 23 0:26 / {mount} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
    return FakeHost(make_proc(tmp_path / "proc", "0::/user.slice/run-1.scope\n", mounts), own, kernel)


@pytest.fixture
def v1_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    """Two trees in which we stand at different places; memory is seen through a container's mount of a subtree."""
    kernel = FakeKernel(V1_FILES, "")
    _install(kernel, monkeypatch)
    cpu, memory = tmp_path / "mount-cpu", tmp_path / "mount-memory"
    kernel.make(cpu)
    kernel.make(memory)
    kernel.make(memory / "job")
    mounts = (
        f"31 23 0:28 / {cpu} rw - cgroup cgroup rw,cpu,cpuacct\n"
        f"32 23 0:29 /docker/abc {memory} rw - cgroup cgroup rw,memory\n"
    )
    groups = "2:memory:/docker/abc/job\n1:cpu,cpuacct:/\n0::/\n"
    return FakeHost(make_proc(tmp_path / "proc", groups, mounts), memory / "job", kernel)


@pytest.fixture
def bare_proc(tmp_path: Path) -> Path:
    """A host without any cgroup mounted."""
    return make_proc(tmp_path / "proc", "0::/\n", "23 1 8:1 / / rw - ext4 /dev/sda1 rw\n")


@pytest.fixture
def writable_cgroups() -> None:
    """Real ones: skips where this host, or this user, has none for memory and CPU."""
    limits = best_limits("probe")
    limits.close()
    if not (limits.has_ceiling and "cgroup" in limits.memory_backend):
        pytest.skip(f"no writable cgroups here: {limits.backend}")
