"""The records of a run are whole after whatever interrupts a write."""

from __future__ import annotations

import functools
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetbed.emulator.records.records import Records
from fleetbed.emulator.records.tables import NoticeRow
from fleetbed.profiles.errors import FleetbedError


class Interrupted(sqlite3.Connection):
    """Ctrl-C comes right after the statement that begins with this word."""

    word: str | None = None

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        done = super().execute(sql, *parameters)
        if self.word is not None and sql.startswith(self.word):
            raise KeyboardInterrupt
        return done


def notice(text: str) -> list[NoticeRow]:
    return [NoticeRow(host_s=0.0, device_s=1.0, kind="k", text=text)]


@pytest.mark.parametrize(
    ("word", "act"),
    [
        ("BEGIN", lambda records: records.write(notice("second"))),
        ("INSERT", lambda records: records.write(notice("second"))),
        ("BEGIN", lambda records: records.rewind(0, 0, [], 0.0)),
        ("DELETE FROM notices", lambda records: records.rewind(0, 0, [], 0.0)),
    ],
    ids=["write-begun", "write", "rewind-begun", "rewind"],
)
def test_what_was_interrupted_is_taken_back_and_the_next_write_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, act: Callable[[Records], None]
) -> None:
    connect = functools.partial(sqlite3.connect, factory=Interrupted)
    monkeypatch.setattr("fleetbed.emulator.records.records.sqlite3.connect", connect)
    records = Records(tmp_path / "run.sqlite")
    records.write(notice("first"))
    monkeypatch.setattr(Interrupted, "word", word)
    with pytest.raises(KeyboardInterrupt):
        act(records)
    monkeypatch.setattr(Interrupted, "word", None)
    records.set_meta(status="interrupted")  # as the run does then
    assert records.meta("status") == "interrupted"
    assert records.rows("SELECT text FROM notices") == [("first",)]
    records.close()


def hold_lock(path: Path) -> sqlite3.Connection:
    """A reader that keeps others from writing."""
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    return other


@pytest.mark.slow
def test_a_reader_that_holds_the_file_for_a_while_is_waited_for(tmp_path: Path) -> None:
    records = Records(tmp_path / "run.sqlite")
    other = hold_lock(tmp_path / "run.sqlite")
    timer = threading.Timer(6.0, other.rollback)  # longer than SQLite waits if nobody tells it to
    timer.start()
    records.write(notice("late"))
    timer.join()
    assert records.rows("SELECT text FROM notices") == [("late",)]
    records.close()


def test_a_reader_that_never_lets_go_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetbed.emulator.records.records.BUSY_S", 0.2)
    records = Records(tmp_path / "run.sqlite")
    other = hold_lock(tmp_path / "run.sqlite")
    with pytest.raises(FleetbedError, match=r"run\.sqlite: another program has kept the records locked.*--resume"):
        records.write(notice("never"))
    other.close()
    records.close()


@pytest.mark.parametrize("name", ["run.sqlite", "run.sqlite-wal"])
@pytest.mark.parametrize("act", ["remove", "replace", "move"])
def test_records_that_are_no_longer_there_are_noticed_at_the_next_write(tmp_path: Path, name: str, act: str) -> None:
    records = Records(tmp_path / "run.sqlite")
    records.write(notice("first"))
    if act == "move":
        (tmp_path / name).rename(tmp_path / "elsewhere")
    else:
        (tmp_path / name).unlink()
    if act == "replace":
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(FleetbedError, match="removed or replaced while the run was writing them"):
        records.write(notice("second"))
    records.close()
