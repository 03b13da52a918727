"""Damaged run folders: every command ends with one sentence and exit code 2, or a result that lists what is missing."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from handmade import write_models
from synthetic_runs import write_run
from test_report_commands import run_command

from fleetbed.analysis.page.page import page
from fleetbed.analysis.page.report import clients_csv, report_json
from fleetbed.analysis.tables import by_round
from fleetbed.analysis.tables.compare import compare_runs, records
from fleetbed.analysis.tables.export import export
from fleetbed.analysis.tables.runs import open_runs
from fleetbed.analysis.tables.summary_table import summary_tables
from fleetbed.profiles.errors import BadInput

TABLES = ("meta", "clients", "caps", "rounds", "tasks", "evaluations", "metrics", "notices")
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("report",),
    ("report", "--json"),
    ("report", "--client", "0"),
    ("compare",),
    ("compare", "--show", "rounds", "--format", "csv"),
    ("compare", "--show", "costs", "--format", "latex"),
    ("export",),
    ("export", "--format", "chrome-trace"),
    ("plot", "time"),
    ("plot", "partition"),
    ("plot", "updates"),
    ("privacy", "reconstruct"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run with its final models."""
    folder = write_run(tmp_path_factory.mktemp("whole"), "inco", clients=4, rounds=2)
    write_models(folder, ("resnet10", "resnet14"))
    return folder


@pytest.fixture
def damaged(whole: Path, tmp_path: Path) -> Iterator[Path]:
    yield Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


def analyse(folder: Path, out: Path) -> str:
    """All that is derived from records, but the figures: the sentence that refused it, or nothing."""
    try:
        runs = open_runs([folder])
        found = compare_runs(runs, None, [])
        page(found)
        for table in (*summary_tables(found), *by_round.accuracy_tables(found), by_round.cost_table(found)):
            table.markdown()
        msgspec.json.encode([records(found), by_round.accuracy_records(found), report_json(runs, None, [], None)])
        clients_csv(runs)
        export(runs, "csv", out)
        export(runs, "chrome-trace", out)
    except BadInput as error:
        return str(error)
    return ""


def command(args: tuple[str, ...], folder: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence with which the command refused the folder, or nothing."""
    place = {"report": ("--out", out / "r.html"), "compare": ()}.get(args[0], ("--out", out))
    short = ("--steps", "1", "--images", "1") if args[0] == "privacy" else ()
    code = run_command(*args, folder, *place, *short)
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert code in (0, 2), args
    assert code == 0 or err.count("\n") == 1, err
    return err if code else ""


def edit(folder: Path, *statements: str) -> None:
    db = sqlite3.connect(folder / "run.sqlite")
    db.execute("PRAGMA synchronous=OFF")  # hundreds of times: nothing here needs to survive a power cut
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()


def loosened(table: str) -> tuple[str, ...]:
    """Makes a table that takes anything: no types, keys or constraints."""
    return (
        f"CREATE TABLE loose AS SELECT * FROM {table}",
        f"DROP TABLE {table}",
        f"ALTER TABLE loose RENAME TO {table}",
    )


def test_a_whole_run_passes(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyse(whole, tmp_path) == ""
    for args in COMMANDS:
        assert command(args, whole, tmp_path, capsys) == "", args


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _as_link(path: Path, to: str) -> None:
    path.unlink()
    path.symlink_to(to)


def _cut(path: Path, keep: float) -> None:
    os.truncate(path, int(path.stat().st_size * keep))


REPLACED: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_bytes(b"this is not a database\n" * 400),
    "zeros": lambda path: path.write_bytes(bytes(20_000)),
    "random": lambda path: path.write_bytes(random.Random(1).randbytes(20_000)),
    "head of sqlite alone": lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(84)),
    "cut to a half": lambda path: _cut(path, 0.5),
    "cut in its first page": lambda path: _cut(path, 0.01),
    "a folder": _as_folder,
    "a FIFO": _as_fifo,
    "a dangling link": lambda path: _as_link(path, "nowhere"),
    "a link to itself": lambda path: _as_link(path, path.name),
    "a link to /dev/zero": lambda path: _as_link(path, "/dev/zero"),
    "removed": Path.unlink,
}


@pytest.mark.parametrize("how", REPLACED)
def test_a_database_replaced_by_something_else(
    how: str, damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    REPLACED[how](damaged / "run.sqlite")
    for args in COMMANDS:
        assert "run.sqlite" in command(args, damaged, tmp_path / "out", capsys), (how, args)


def test_a_study_with_one_damaged_run_names_it(
    whole: Path, damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (damaged / "run.sqlite").write_bytes(b"")
    shutil.copytree(whole, tmp_path / "sound")
    said = command(("compare",), tmp_path, tmp_path / "out", capsys)
    assert str(damaged / "run.sqlite") in said


@pytest.mark.slow
def test_a_locked_database_is_reported_as_locked(damaged: Path, tmp_path: Path) -> None:
    holder = sqlite3.connect(damaged / "run.sqlite", isolation_level=None)
    holder.execute("PRAGMA locking_mode=EXCLUSIVE")
    holder.execute("PRAGMA journal_mode=WAL")
    holder.execute("BEGIN EXCLUSIVE")
    holder.execute("DELETE FROM rounds")
    try:
        began_s = time.monotonic()
        assert "another program has locked it" in analyse(damaged, tmp_path)
        assert time.monotonic() - began_s < 20
    finally:
        holder.close()


@pytest.mark.parametrize("log", ["-wal", "-journal", "-shm"])
@pytest.mark.parametrize("how", ["empty", "random", "a folder"])
def test_garbage_in_place_of_a_log(log: str, how: str, damaged: Path, tmp_path: Path) -> None:
    path = damaged / f"run.sqlite{log}"
    path.touch()
    REPLACED[how](path)
    analyse(damaged, tmp_path)


@pytest.mark.parametrize("table", TABLES)
def test_a_table_that_is_missing_empty_or_another(table: str, damaged: Path, tmp_path: Path, whole: Path) -> None:
    edit(damaged, f"DELETE FROM {table}")
    analyse(damaged, tmp_path)
    edit(damaged, f"DROP TABLE {table}")
    assert f"no such table: {table}" in analyse(damaged, tmp_path)
    edit(damaged, f"CREATE TABLE {table} (something TEXT)")
    assert "run.sqlite" in analyse(damaged, tmp_path)


ODD_VALUES = ("NULL", "'text'", "''", "x'00ff'", "-1", "9223372036854775807", "9e999", "-9e999", "1e300", "0.5")


def columns_of(folder: Path, table: str) -> list[str]:
    db = sqlite3.connect(folder / "run.sqlite")
    found = [name for _, name, *_ in db.execute(f"PRAGMA table_info({table})")]
    db.close()
    return found


@pytest.mark.parametrize("table", [pytest.param(t, marks=[pytest.mark.slow] * (t == "tasks")) for t in TABLES[1:]])
def test_any_odd_value_in_any_column(table: str, whole: Path, tmp_path: Path) -> None:
    """In one row and in all of them."""
    columns = columns_of(whole, table)
    run = Path(shutil.copytree(whole, tmp_path / "run", ignore=shutil.ignore_patterns("models")))
    edit(run, "INSERT INTO notices VALUES (1.0, 2.0, 'oom', 'client 000')", *loosened(table))
    kept = (run / "run.sqlite").read_bytes()
    for column in columns:
        for value in ODD_VALUES:
            for rows in ("", f" WHERE rowid = (SELECT max(rowid) FROM {table})"):
                (run / "run.sqlite").write_bytes(kept)
                edit(run, f"UPDATE {table} SET {column} = {value}{rows}")
                said = analyse(run, tmp_path / "out")
                assert "\n" not in said
                # what may be NULL is read; a value of another type never is
                assert value != "x'00ff'" or f"table {table} row " in said, (column, value)


ODD_JSON = (
    "null",
    "0",
    "-1",
    "true",
    '"x"',
    "[]",
    "{}",
    "[1]",
    '{"a": 1}',
    '[{"knob": 1}]',
    '{"cpu": []}',
    "1e999",
    "{",
    "",
)


def test_any_odd_value_of_any_meta_key(whole: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run", ignore=shutil.ignore_patterns("models")))
    db = sqlite3.connect(run / "run.sqlite")
    keys = [key for (key,) in db.execute("SELECT key FROM meta")]
    db.close()
    kept = (run / "run.sqlite").read_bytes()
    for key in (*keys, "series", "host_can", "error"):
        for value in ODD_JSON:
            (run / "run.sqlite").write_bytes(kept)
            edit(run, f"INSERT OR REPLACE INTO meta VALUES ('{key}', '{value}')")
            analyse(run, tmp_path / "out")
        edit(run, f"UPDATE meta SET value = '{'[' * 5000}' WHERE key = '{key}'")
        assert "table meta" in analyse(run, tmp_path / "out")


def _flips(whole: Path, tmp_path: Path, count: int, seed: int) -> dict[str, int]:
    """Bytes flipped, zeroed or cut off at random: how many were refused, and how many read."""
    chance = random.Random(seed)
    sound = (whole / "run.sqlite").read_bytes()
    run = tmp_path / "run"
    run.mkdir()
    outcomes = {"refused": 0, "read": 0}
    for _ in range(count):
        content = bytearray(sound)
        how = chance.choice(("flip", "flip", "flips", "zeros", "cut", "swap"))
        for _ in range(chance.randint(2, 200) if how == "flips" else 1):
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        start, length = chance.randrange(len(content)), chance.randint(1, 5000)
        if how == "zeros":
            content[start : start + length] = bytes(len(content[start : start + length]))
        elif how == "cut":
            del content[start:]
        elif how == "swap":  # two pages
            one, other = (chance.randrange(len(content) // 4096) * 4096 for _ in range(2))
            content[one : one + 4096], content[other : other + 4096] = (
                content[other : other + 4096],
                content[one : one + 4096],
            )
        (run / "run.sqlite").write_bytes(content)
        outcomes["refused" if analyse(run, tmp_path / "out") else "read"] += 1
    return outcomes


def test_bytes_that_were_flipped_or_lost(whole: Path, tmp_path: Path) -> None:
    assert _flips(whole, tmp_path, 150, seed=1)["refused"] > 30


@pytest.mark.slow
def test_many_bytes_that_were_flipped_or_lost(whole: Path, tmp_path: Path) -> None:
    assert _flips(whole, tmp_path, 3000, seed=2)["refused"] > 600


@pytest.mark.parametrize("name", ["models", "models/resnet10.safetensors"])
@pytest.mark.parametrize("how", [h for h in REPLACED if h not in ("removed",)])
def test_models_replaced_by_something_else(
    name: str, how: str, damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = damaged / name
    if path.is_dir():
        shutil.rmtree(path)
        path.touch()
    else:
        path.with_name("resnet14.safetensors").unlink()
    REPLACED[how](path)
    for args in (("plot", "updates"), ("plot", "cka"), ("privacy", "reconstruct")):
        assert "models" in command(args, damaged, tmp_path / "out", capsys), args
    assert command(("compare",), damaged, tmp_path, capsys) == ""


def test_a_model_of_another_run_or_one_that_diverged(
    damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    path = damaged / "models" / "resnet10.safetensors"
    tensors = load_file(path)
    first = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    for changed, about, says in (
        ({**tensors, first: tensors[first] * torch.nan}, '{"variant": "resnet10"}', "the model diverged"),
        ({first: tensors[first]}, '{"variant": "resnet10"}', "not an intact model of this run"),
        ({**tensors, first: torch.zeros(3)}, '{"variant": "resnet10"}', "not an intact model of this run"),
        (tensors, '{"variant": "other"}', "its variant other is not one of"),
        (tensors, '{"variant": 5}', "not an intact model of this run"),
        (tensors, "[", "not an intact model of this run"),
        (tensors, None, "not an intact model of this run"),
    ):
        save_file(changed, path, metadata=None if about is None else {"values": about})
        assert says in command(("plot", "updates"), damaged, tmp_path, capsys)


@pytest.mark.parametrize("name", ["study.json", "partition.json", "workers.log", "state"])
def test_other_files_of_the_folder_do_not_matter(
    name: str, damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = damaged / name
    for make in (lambda: path.write_bytes(b"\0garbage"), lambda: _as_folder(path)):
        make()
        assert command(("compare",), damaged, tmp_path, capsys) == ""


def test_a_place_that_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    for place in ("file", "loop", "fifo", "missing", "x" * 300, "file/below"):
        for args in COMMANDS:
            assert command(args, tmp_path / place, tmp_path / "out", capsys), (place, args)
