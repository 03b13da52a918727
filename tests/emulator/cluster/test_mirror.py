"""Checks the copy of a run's folder: what is in it, and that it can be resumed at every moment."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from fleetbed.emulator.cluster import mirror
from fleetbed.emulator.cluster.mirror import Inbox, Outbox, content_of, write_content


def write(folder: Path, **content: str) -> None:
    for name, text in content.items():
        path = folder / name.replace("__", "/").replace("_safetensors", ".safetensors")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def records(folder: Path) -> sqlite3.Connection:
    """Records that are open, and whose last line is in the log of SQLite only."""
    folder.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(folder / "run.sqlite", isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("CREATE TABLE lines (text)")
    db.execute("INSERT INTO lines VALUES ('first')")
    return db


def lines(folder: Path) -> list[str]:
    with closing(sqlite3.connect(folder / "run.sqlite")) as db:
        return [text for (text,) in db.execute("SELECT text FROM lines")]


def transfer(outbox: Outbox, inbox: Inbox) -> list[str]:
    names, gone = outbox.take()
    for name in names:
        inbox.put(name, outbox.read(name))
    inbox.finish(gone)
    return names


def test_a_copy_follows_the_folder(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "study" / "run"
    here.parent.mkdir()
    outbox, inbox = Outbox(there, tmp_path / "scratch"), Inbox(here)
    with closing(records(there)) as db:
        write(there, state__checkpoint_1="one", state__client_000__task_1="kept", partition="p", now="x")
        (there / ".half.12.part").write_text("not whole")
        (there / "now.json").write_text("{}")
        transfer(outbox, inbox)
        assert sorted(mirror.files(here)) == sorted(
            ["partition", "now", "run.sqlite", "state/checkpoint_1", "state/client_000/task_1"]
        )
        assert lines(here) == ["first"]

        db.execute("INSERT INTO lines VALUES ('second')")
        write(there, state__checkpoint_2="two")
        (there / "state" / "checkpoint_1").unlink()
        assert sorted(transfer(outbox, inbox)) == ["run.sqlite", "state/checkpoint_2"]
        assert lines(here) == ["first", "second"]
        assert not (here / "state" / "checkpoint_1").exists()
        assert transfer(outbox, inbox) == []
    assert [path.name for path in here.parent.iterdir()] == ["run"]


def test_checkpoints_come_last_and_records_after_all_else() -> None:
    names = ["state/checkpoint-00000002.safetensors", "run.sqlite", "models/a", "state/client-000/task-00000001"]
    assert sorted(names, key=mirror.order) == [names[2], names[3], names[1], names[0]]


@pytest.mark.parametrize("moment", range(3))
def test_records_are_never_older_than_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """The receiver is killed after so many files were put in place."""
    there, here = tmp_path / "there", tmp_path / "study" / "run"
    here.parent.mkdir()
    outbox = Outbox(there, tmp_path / "scratch")
    with closing(records(there)) as db:
        write(there, **{"state__checkpoint-1_safetensors": "1"})
        transfer(outbox, Inbox(here))
        db.execute("INSERT INTO lines VALUES ('second')")
        write(there, **{"state__checkpoint-2_safetensors": "2", "models__a": "a"})
        count = 0
        replace = mirror.os.replace

        def killed(*paths: Path) -> None:
            nonlocal count
            if count == moment:
                raise KeyboardInterrupt
            count += 1
            replace(*paths)

        monkeypatch.setattr(mirror.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            transfer(outbox, Inbox(here))
    newest = max(path.name for path in (here / "state").iterdir())
    assert (newest, lines(here)) in [
        ("checkpoint-1.safetensors", ["first"]),
        ("checkpoint-1.safetensors", ["first", "second"]),
    ]


def test_a_new_folder_appears_as_a_whole(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "run")
    inbox.put("models/a", b"a")
    assert not (tmp_path / "run").exists()
    inbox.close()
    assert list(tmp_path.iterdir()) == []


def test_content_has_all_records_and_makes_the_same_folder(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    with closing(records(there)):  # so the log still holds the lines
        write(there, state__a="1")
        content = content_of(there)
    write_content(here, content)
    assert lines(here) == ["first"]
    assert sorted(mirror.files(here)) == ["run.sqlite", "state/a"]
    assert content_of(tmp_path / "absent") == {}


@pytest.mark.parametrize("name", ["/etc/passwd", "../other/run.sqlite", "state/../../x"])
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a file of a run"):
        Inbox(tmp_path / "run").put(name, b"")
    with pytest.raises(ValueError, match="not the name of a file of a run"):
        write_content(tmp_path, {name: b""})


def test_a_folder_whose_files_are_replaced_meanwhile_is_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    write(there, state__one="1", state__two="2")
    link = mirror._link

    def replaced_meanwhile(path: Path, to: Path) -> None:
        if path.name == "one":
            path.unlink()
            write(there, state__three="3")
        link(path, to)

    monkeypatch.setattr(mirror, "_link", replaced_meanwhile)
    names, _ = Outbox(there, tmp_path / "scratch").take()
    assert names == ["state/three", "state/two"]
