"""The records of a run are whole after whatever interrupts a write."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetbed.emulator.records import Records


def test_a_run_from_before_tasks_had_a_dilation_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    Records(path).close()
    with sqlite3.connect(path) as db:
        db.execute("ALTER TABLE tasks DROP COLUMN dilation")
    records = Records(path)
    assert records.rows("SELECT dilation FROM tasks") == []
    records.close()
    Records(path).close()


class Interrupted(sqlite3.Connection):
    """Ctrl-C comes right after the statement that begins with this word."""

    word: str | None = None

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        done = super().execute(sql, *parameters)
        if self.word is not None and sql.startswith(self.word):
            raise KeyboardInterrupt
        return done


def notice(text: str) -> dict[str, Any]:
    return {"notices": [{"host_s": 0.0, "device_s": 1.0, "kind": "k", "text": text}]}


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
    monkeypatch.setattr("fleetbed.emulator.records.sqlite3.connect", connect)
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
