"""Checks how fleetbed connects to Ray: what it refuses with one sentence, and that it leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import pytest
from msgspec.structs import replace
from ray_cluster import needs_ray

from fleetbed.emulator.cluster import connection, guardian
from fleetbed.emulator.cluster.connection import check_installed, connected
from fleetbed.emulator.cluster.nodes import SAME, ClusterNode, check_large_enough, check_nodes
from fleetbed.profiles.errors import BadInput, HostCannot


def a_node(**changes: object) -> ClusterNode:
    versions = dict.fromkeys(SAME, "1.0")
    return replace(
        ClusterNode("0a", "one (127.0.0.1)", "A CPU", cores=4, memory_bytes=8 * 2**30, versions=versions), **changes
    )


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        try:
            return versions[name]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(metadata, "version", version)


def test_without_ray_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    with pytest.raises(HostCannot, match=r"^Ray is not installed: pip install 'fleetbed\[ray\]'$"):
        check_installed()


def test_an_old_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, ray="2.9.3")
    with pytest.raises(HostCannot, match=r"^Ray 2\.9\.3 is too old, 2\.55 or newer is needed"):
        check_installed()


def test_an_address_where_nothing_listens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, ray="2.60.0")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(HostCannot, match=rf"^--address 127\.0\.0\.1:{port}: no Ray cluster answers there \("):
        connected(f"127.0.0.1:{port}").__enter__()


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "localhost", "localhost:", "localhost:99999", ":x"])
def test_an_address_that_is_none_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, ray="2.60.0")
    with pytest.raises(BadInput, match="allowed are HOST:PORT"):
        connected(address).__enter__()


def test_nodes_with_the_same_versions_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, **dict.fromkeys(SAME, "1.0"))
    check_nodes([a_node(), a_node()], "auto")


@pytest.mark.parametrize("name", SAME)
def test_a_node_with_another_version_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, **dict.fromkeys(SAME, "1.0"))
    other = a_node(versions={**dict.fromkeys(SAME, "1.0"), name: "0.9"})
    with pytest.raises(
        HostCannot, match=rf"^--address auto: on node one \(127\.0\.0\.1\) {name} has version 0\.9, but"
    ):
        check_nodes([a_node(), other], "auto")


def test_a_node_without_fleetbed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, **dict.fromkeys(SAME, "1.0"))
    with pytest.raises(HostCannot, match="fleetbed is not installed, but here it is"):
        check_nodes([a_node(versions={**dict.fromkeys(SAME, "1.0"), "fleetbed": None})], None)


def test_no_node_is_refused() -> None:
    with pytest.raises(HostCannot, match="no node of the Ray cluster answers"):
        check_nodes([], None)


def test_a_node_must_have_both_the_cores_and_the_memory() -> None:
    found = [a_node(cores=1), a_node(memory_bytes=2**30)]
    check_large_enough(found, cores=1, memory_bytes=8 * 2**30, what="a run")
    with pytest.raises(
        HostCannot, match=r"^a run needs a node with 2 free cores and 4\.0 GB of memory, but .*1\.0 GB\.$"
    ):
        check_large_enough(found, cores=2, memory_bytes=4 * 2**30, what="a run")


def test_the_folder_of_a_killed_process_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen(["true"]) as ended:
        pass
    left, ours = (tmp_path / f"{connection.PREFIX}{pid}-x" for pid in (ended.pid, os.getpid()))
    left.mkdir()
    ours.mkdir()
    with guardian.guarded_folder(connection.PREFIX) as folder:
        assert folder.parent == tmp_path
        assert not left.exists()
        assert ours.exists()
    assert not folder.exists()


STARTED = """
import os, signal, sys
from pathlib import Path
signal.signal(signal.SIGTERM, handler := lambda number, frame: None)
from fleetbed.emulator.cluster.connection import connected
from fleetbed.emulator.cluster.nodes import check_nodes, nodes
for _ in range(2):  # a second time in the same process works as well
    with connected(None):
        check_nodes(found := nodes(), None)
        import psutil
        of_ray = psutil.Process().children(recursive=True)
        addresses = {each.laddr.ip for one in [psutil.Process(), *of_ray] for each in one.net_connections("tcp")
                     if each.status == psutil.CONN_LISTEN}
        assert {address.removeprefix("::ffff:") for address in addresses} == {"127.0.0.1"}, addresses
        assert signal.getsignal(signal.SIGTERM) is handler
        assert "RAY_AUTH_TOKEN" in os.environ
    assert "RAY_AUTH_TOKEN" not in os.environ
    _, alive = psutil.wait_procs(of_ray, timeout=10)
    assert not alive, alive
print(len(found), found[0].cores, found[0].cpu_model)
"""


@needs_ray
@pytest.mark.slow
def test_a_ray_of_our_own_listens_on_loopback_and_leaves_nothing(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="fb-", dir="/tmp"))  # the path of a socket must be short
    environment = {**os.environ, "TMPDIR": str(folder), "HOME": str(tmp_path)}
    before = set(os.listdir("/dev/shm"))
    try:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", STARTED], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        from fleetbed.emulator.machine import host

        assert done.stdout.split(maxsplit=2) == ["1", str(host.cores()), host.cpu_model() + "\n"]
        assert done.stderr == ""
        assert list(folder.iterdir()) == []
        assert not (tmp_path / ".ray").exists()
        assert set(os.listdir("/dev/shm")) <= before
    finally:
        shutil.rmtree(folder)


KILLED = """
import time
from fleetbed.emulator.cluster.connection import connected
with connected(None):
    import psutil
    print(*(each.pid for each in psutil.Process().children(recursive=True)), flush=True)
    time.sleep(600)
"""


@needs_ray
@pytest.mark.slow
def test_ray_ends_with_a_killed_process() -> None:
    import psutil

    folder = Path(tempfile.mkdtemp(prefix="fb-", dir="/tmp"))
    environment = {**os.environ, "TMPDIR": str(folder)}
    try:
        with subprocess.Popen(
            [sys.executable, "-c", KILLED], env=environment, stdout=subprocess.PIPE, text=True
        ) as driver:
            assert driver.stdout is not None
            below = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]  # with the guardian
            driver.send_signal(signal.SIGKILL)
        assert len(below) >= 3
        _, alive = psutil.wait_procs(below, timeout=60)
        assert alive == []
        assert list(folder.iterdir()) == []
    finally:
        shutil.rmtree(folder)


def test_a_process_that_does_not_end_by_itself_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guardian, "CLEAN_S", 0.2)
    (tmp_path / "log").touch()
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    with (tmp_path / "log").open() as log:
        users = [
            subprocess.Popen([sys.executable, "-c", code], stdin=stdin, stdout=subprocess.PIPE)
            for code, stdin in (
                (stubborn, log),
                ("import time; print(flush=True); time.sleep(600)", log),
                (stubborn, None),
            )
        ]
    for each in users:
        assert each.stdout is not None
        each.stdout.readline()
    guardian.end_users(tmp_path, spared=set())
    assert [each.wait(60) for each in users[:2]] == [-signal.SIGKILL, -signal.SIGTERM]
    assert users[2].poll() is None, "it holds no file of the folder open"
    users[2].kill()
    for each in users:
        each.communicate()
