"""Copies the folder of a run from the node that works in it, while it does, to the folder of the study.

At every moment the copy can be resumed, whatever ends: records may be newer than a checkpoint, which the run then
rewinds, but never older. So the files of clients are put in place first, then the records, then the checkpoints. A
folder that did not exist appears as a whole.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

DATABASE = "run.sqlite"
#: what is not copied: SQLite's own files, whose content a copy of the records includes, and what is sent apart
LEFT_OUT = ("run.sqlite-wal", "run.sqlite-shm", "now.json", "now.json.part")
TRIES = 100  # to list a folder in which files come and go


class Outbox:
    """The files of a run that have changed since they were last taken."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self._folder, self._scratch = folder, scratch  # on one file system
        self._sent: dict[str, tuple[int, ...]] = {}

    def take(self) -> tuple[list[str], list[str]]:
        """Freeze the state of the folder; return the names that have changed, in order, and those that are gone.

        The content of each is then in the scratch folder, until it is read or the next state is taken.
        """
        shutil.rmtree(self._scratch, ignore_errors=True)
        marks = self._linked()
        changed = [name for name, mark in marks.items() if self._sent.get(name) != mark]
        gone = [name for name in self._sent if name not in marks]
        self._sent = marks
        return sorted(changed, key=order), gone

    def read(self, name: str) -> bytes:
        """Return the content of a file as it was when it was taken, and forget it."""
        path = self._scratch / name
        content = path.read_bytes()
        path.unlink()
        return content

    def _linked(self) -> dict[str, tuple[int, ...]]:
        """Link all files into the scratch folder: a run replaces its files, and never changes one, except for logs."""
        for _ in range(TRIES):
            try:
                found = {name: _mark(self._folder / name) for name in files(self._folder)}
                for name in found:
                    if name != DATABASE:
                        _link(self._folder / name, self._scratch / name)
                break
            except FileNotFoundError:  # a newer checkpoint has taken the place of an old one: so list them again
                shutil.rmtree(self._scratch, ignore_errors=True)
        else:
            raise OSError(f"{self._folder}: its files change faster than they can be listed")
        if DATABASE in found:  # after the checkpoints, because records may be newer than those
            wal = self._folder / f"{DATABASE}-wal"
            found[DATABASE] += _mark(wal) if wal.exists() else ()
            if found[DATABASE] != self._sent.get(DATABASE):
                copy_database(self._folder / DATABASE, self._scratch / DATABASE)
        return found


class Inbox:
    """Receives the files of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._coming = folder.parent / ".coming" / folder.name  # so deep that nobody takes it for a run
        shutil.rmtree(self._coming, ignore_errors=True)

    def put(self, name: str, content: bytes) -> None:
        path = self._coming / _checked(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def finish(self, gone: Sequence[str]) -> None:
        """Make the folder what was received."""
        if not self._folder.exists():
            if self._coming.exists():
                self._coming.rename(self._folder)
        else:
            for name in sorted(files(self._coming), key=order):
                if name == DATABASE:  # nothing is in the log of the old records: see `content_of`
                    for end in ("-wal", "-shm"):
                        (self._folder / f"{DATABASE}{end}").unlink(missing_ok=True)
                (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(self._coming / name, self._folder / name)
            for name in gone:
                (self._folder / _checked(name)).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Remove what was not finished."""
        shutil.rmtree(self._coming, ignore_errors=True)
        with contextlib.suppress(OSError):  # other runs are coming, or none ever came
            self._coming.parent.rmdir()


def content_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a run in which nobody works, to begin with on a node; nothing if there is none."""
    if (path := folder / DATABASE).exists():
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # so that the records are in one file
    return {name: (folder / name).read_bytes() for name in files(folder)}


def write_content(folder: Path, content: Mapping[str, bytes]) -> None:
    for name, data in content.items():
        path = folder / _checked(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def files(folder: Path) -> Iterator[str]:
    """The names of all files below the folder that are copied."""
    for above, _, names in os.walk(folder):
        for name in names:
            if name not in LEFT_OUT and not name.endswith(".part"):
                yield (Path(above) / name).relative_to(folder).as_posix()


def order(name: str) -> tuple[int, str]:
    """Sort files in the order in which they are put in place."""
    is_checkpoint = name.startswith("state/checkpoint-")
    return (2 if is_checkpoint else int(name == DATABASE), name)


def copy_database(path: Path, to: Path) -> None:
    """Copy the records of a run that may be writing to them, at one moment."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as source, contextlib.closing(sqlite3.connect(to)) as target:
        source.backup(target)


def _mark(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def _link(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    os.link(path, to)


def _checked(name: str) -> str:
    """Refuse a name that leads out of the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name!r} is not the name of a file of a run")
    return name
