"""Checks which files of clients a node has: the newest of each client, and those in use."""

from __future__ import annotations

from pathlib import Path

from fleetbed.emulator.remote.kept_files import KeptFiles

OLD, NEW = "state/client-003/task-00000001.safetensors", "state/client-003/task-00000007.safetensors"


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def write(folder: Path, name: str) -> None:
    """As a client's process does."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(name.encode())


def test_a_file_that_is_not_here_is_reported(tmp_path: Path) -> None:
    with KeptFiles(tmp_path).in_use(OLD, b"") as is_here:
        assert not is_here


def test_a_task_that_needs_no_file_can_always_begin(tmp_path: Path) -> None:
    with KeptFiles(tmp_path).in_use(None, b"") as is_here:
        assert is_here


def test_what_was_sent_stays_for_later_tasks(tmp_path: Path) -> None:
    kept = KeptFiles(tmp_path)
    for content in (b"sent", b""):
        with kept.in_use(OLD, content) as is_here:
            assert is_here
            assert (tmp_path / OLD).read_bytes() == b"sent"


def test_what_a_task_writes_replaces_what_it_read(tmp_path: Path) -> None:
    kept = KeptFiles(tmp_path)
    with kept.in_use(OLD, b"sent"):
        write(tmp_path, NEW)
        assert kept.read_new(NEW) == NEW.encode()
        assert files(tmp_path) == [OLD, NEW], "its own task may still read it"
    assert files(tmp_path) == [NEW]


def test_a_file_stays_while_another_task_uses_it(tmp_path: Path) -> None:
    kept = KeptFiles(tmp_path)
    with kept.in_use(OLD, b"sent"):
        with kept.in_use(OLD, b""):
            write(tmp_path, NEW)
            kept.read_new(NEW)
        assert files(tmp_path) == [OLD, NEW]
    assert files(tmp_path) == [NEW]


def test_the_files_of_clients_do_not_replace_each_other(tmp_path: Path) -> None:
    kept, other = KeptFiles(tmp_path), OLD.replace("003", "004")
    with kept.in_use(OLD, b"one"), kept.in_use(other, b"two"):
        pass
    assert files(tmp_path) == [OLD, other]


def test_an_older_version_that_is_sent_again_becomes_the_one_that_stays(tmp_path: Path) -> None:
    kept = KeptFiles(tmp_path)
    write(tmp_path, NEW)
    kept.read_new(NEW)
    with kept.in_use(OLD, b"sent again"):
        pass
    assert files(tmp_path) == [OLD]
