"""However a run's folder is damaged, resuming gives the undisturbed result or one sentence."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from observers import Stopped
from same_runs import results
from small_runs import SMALL_NETS, TINIER

from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.run.study import resume_study, start_study
from fleetbed.profiles.errors import FleetbedError
from fleetbed.profiles.resolve import load_experiment

#: clients of this method keep a model of their own, so that all kinds of files are there
METHOD = ("algorithms=[{name: fedhe, params: {batch: 4}}]", *SMALL_NETS)
SETS = (*METHOD, "rounds=3", "participation.ratio=0.5", "processes=inline", "evaluation.every=3")
RUN = "fedhe-sync-1"
#: resumes a study after this was done to it; gives the sentence that it ended with, empty if the result is right
Attempt = Callable[[Callable[[Path], None]], str]
LIMIT_S = 60


class CopyAfter(Observer):
    """Copies the study as it is at this moment, as a kill would leave it, and stops."""

    def __init__(self, ticks: int, folder: Path, copy: Path) -> None:
        self._left, self._folder, self._copy = ticks, folder, copy

    def tick(self) -> None:
        self._left -= 1
        if self._left == 0:
            shutil.copytree(self._folder, self._copy)
            raise Stopped


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    def too_long(*_: object) -> None:
        raise AssertionError(f"not over after {seconds} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    experiment = load_experiment("demo", (), (*TINIER, *SETS))
    (folder,) = start_study(experiment, tmp_path_factory.mktemp("w") / "s", search=(), command="", observer=Observer())
    return results(folder)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that was stopped in its third round."""
    folder = tmp_path_factory.mktemp("v") / "s"
    killed = folder.with_name("killed")
    experiment = load_experiment("demo", (), (*TINIER, *SETS))
    with pytest.raises(Stopped):
        start_study(experiment, folder, search=(), command="", observer=CopyAfter(34, folder, killed))
    run = killed / RUN
    assert len(list((run / "state").glob("checkpoint-*"))) == 2
    assert list((run / "state").glob("client-*/task-*"))
    assert (run / "run.sqlite-wal").stat().st_size > 0
    # as a run in processes of its own, or one that has ended before, leaves it too
    (run / "workers.log").write_text("")
    (run / "models").mkdir()
    return killed


@pytest.fixture
def attempt(victim: Path, whole: dict[str, Any], tmp_path: Path) -> Attempt:
    """Damage a copy and resume it; gives the sentence that it ended with, or nothing if its result is right."""

    def resume(damage: Callable[[Path], None]) -> str:
        outside, folder = tmp_path / "outside", tmp_path / "s"
        for path in (outside, folder):
            shutil.rmtree(path, ignore_errors=True)
        outside.mkdir()
        (outside / "precious").write_text("precious")
        shutil.copytree(victim, folder)
        damage(folder)
        try:
            with within(LIMIT_S):
                (run,) = resume_study(folder, Observer())
        except FleetbedError as error:
            return str(error)
        finally:
            assert [path.name for path in outside.iterdir()] == ["precious"]
            assert (outside / "precious").read_text() == "precious"
        assert results(run) == whole
        return ""

    return resume


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def replace_by(kind: str, path: Path, draw: random.Random) -> None:
    """Put something else in the place of a file or folder."""
    content = b"" if path.is_dir() else path.read_bytes()
    remove(path)
    outside = path
    while outside.name != "s":
        outside = outside.parent
    outside = outside.parent / "outside"
    if kind == "folder":
        path.mkdir()
    elif kind == "full folder":
        path.mkdir()
        (path / "mine").write_text("mine")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "link":
        path.symlink_to(outside / "precious")
    elif kind == "link to folder":
        path.symlink_to(outside)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "garbage":
        path.write_bytes(draw.randbytes(5000))
    elif kind == "text":
        path.write_bytes(draw.choice([b"null", b"[]", b'"\xff"', b"[" * 100_000, b"{}", b'{"experiment": 1}']))
    elif kind == "half":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "cut":
        path.write_bytes(content[: draw.randrange(len(content) + 1)])
    elif kind == "flip":
        changed = bytearray(content)
        for _ in range(draw.choice([1, 1, 2, 20])):
            if changed:
                changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
    elif kind == "zeros":
        start = draw.randrange(len(content) + 1)
        length = min(draw.randrange(1, 5000), len(content) - start)
        path.write_bytes(content[:start] + bytes(length) + content[start + length :])
    else:
        assert kind == "missing"


KINDS = (
    *("missing", "folder", "full folder", "pipe", "loop", "link", "link to folder", "device", "empty", "garbage"),
    *("text", "half", "cut", "flip", "zeros"),
)
WITHIN = ("half", "cut", "flip", "zeros")
FILES = ("study.json", "study.lock", *(f"{RUN}/{name}" for name in (
    "run.sqlite", "run.sqlite-wal", "run.sqlite-shm", "partition.json", "setup.json", "clients.json", "workers.log",
    "models", "state",
    "state/checkpoint-newest", "state/checkpoint-oldest", "state/client", "state/client/task", ".",
)))  # fmt: skip
FOLDERS = tuple(f"{RUN}/{name}" for name in ("models", "state", "state/client", "."))


def place(folder: Path, name: str, draw: random.Random) -> Path:
    state = folder / RUN / "state"
    checkpoints = sorted(state.glob("checkpoint-*"))
    special = {
        "checkpoint-newest": checkpoints[-1],
        "checkpoint-oldest": checkpoints[0],
        "client": draw.choice(sorted(state.glob("client-*"))),
        "task": draw.choice(sorted(state.glob("client-*/task-*"))),
    }
    return special.get(name.rsplit("/", 1)[1] if "/" in name else "", folder / name).absolute()


def spoil(attempt: Attempt, name: str, kind: str, seed: int) -> str:
    draw = random.Random(seed)

    def damage(folder: Path) -> None:
        path = place(folder, name, draw)
        if path.name == "run.sqlite" and draw.random() < 0.7:  # as a run that was not killed leaves it: without a log
            with contextlib.closing(sqlite3.connect(path)) as db:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        if not path.exists():
            path.write_bytes(b"x")
        replace_by("missing" if path.is_dir() and kind in WITHIN else kind, path, draw)

    sentence = attempt(damage)
    print(f"{name}, {kind}, {seed}: {sentence or 'the same result'}")
    assert "\n" not in sentence
    return sentence


def test_an_undamaged_folder_gives_the_same_result(attempt: Attempt) -> None:
    assert attempt(lambda _: None) == ""


@pytest.mark.parametrize("seed", range(12))
def test_some_damage(attempt: Attempt, seed: int) -> None:
    """One of each kind that reads or writes elsewhere, or waits for ever, and some at random."""
    draw = random.Random(seed)
    spoil(attempt, draw.choice(FILES), KINDS[seed], seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_anything_in_the_place_of_anything(attempt: Attempt, name: str) -> None:
    for seed, kind in enumerate(KINDS):
        if name not in FOLDERS or kind not in WITHIN:
            spoil(attempt, name, kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_random_changes_within_files(attempt: Attempt, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(15):
        name = draw.choice([*(f"{RUN}/run.sqlite",) * 6, f"{RUN}/run.sqlite-wal", *FILES])
        spoil(attempt, name, draw.choice(WITHIN), draw.randrange(10**9))


@pytest.mark.parametrize("kind", ["half", "folder", "pipe", "loop", "device"])
def test_the_older_checkpoint_is_fallen_back_on(attempt: Attempt, kind: str) -> None:
    assert spoil(attempt, f"{RUN}/state/checkpoint-newest", kind, 1) == ""


@pytest.mark.parametrize("table", ["tasks", "rounds", "evaluations", "clients"])
def test_records_that_were_changed_are_noticed(attempt: Attempt, table: str) -> None:
    changes = {
        "tasks": "UPDATE tasks SET loss = loss + 1 WHERE task = 2",
        "rounds": "UPDATE rounds SET merged = merged + 1 WHERE version = 1",
        "evaluations": "DELETE FROM evaluations WHERE version = 0",
        "clients": "UPDATE clients SET samples = samples + 1 WHERE client = 3",
    }
    sentence = attempt(lambda folder: _execute(folder, changes[table]))
    assert "the records are not those that it was written with" in sentence


def test_a_checkpoint_of_another_run_is_not_taken(attempt: Attempt, tmp_path: Path) -> None:
    experiment = load_experiment("demo", (), (*TINIER, *SETS, "seeds=[2]"))
    (other,) = start_study(experiment, tmp_path / "other", search=(), command="", observer=Observer())
    foreign = sorted((other / "state").glob("checkpoint-*"))

    def swap(folder: Path) -> None:
        shutil.copy(foreign[0], folder / RUN / "state")

    def swap_and_leave_no_other(folder: Path) -> None:
        oldest, newest = sorted((folder / RUN / "state").glob("checkpoint-*"))
        assert newest.name == foreign[0].name
        oldest.unlink()
        swap(folder)

    assert attempt(swap) == ""
    assert "it belongs to another run" in attempt(swap_and_leave_no_other)


@pytest.mark.slow
def test_locked_records_are_a_sentence(attempt: Attempt) -> None:
    held = []

    def lock(folder: Path) -> None:
        db = sqlite3.connect(folder / RUN / "run.sqlite", isolation_level=None)
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        db.execute("BEGIN EXCLUSIVE")
        held.append(db)

    assert "locked by another program" in attempt(lock)
    held[0].close()


def _execute(folder: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(folder / RUN / "run.sqlite")) as db, db:
        assert db.execute(statement).rowcount > 0
