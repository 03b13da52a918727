"""The runs of one experiment, in one folder that can be gone on with after any interruption."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from fleetbed.emulator import run
from fleetbed.emulator.layout import lay_out
from fleetbed.emulator.storage import write_atomically
from fleetbed.emulator.watch import Watch
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Experiment, RunConfig, runs

STUDY, LOCK = "study.json", "study.lock"


class Study(Struct, frozen=True):
    """What was asked for: complete, so that it can be gone on with from anywhere."""

    experiment: Experiment
    search: tuple[str, ...]
    command: str


def start_study(
    experiment: Experiment, folder: Path, *, search: Sequence[Path], command: str, watch: Watch
) -> list[Path]:
    """Carry out every run of the experiment; gives their folders."""
    create_study(experiment, folder, search=search, command=command)
    return resume_study(folder, watch)


def create_study(experiment: Experiment, folder: Path, *, search: Sequence[Path], command: str) -> None:
    """Make the folder of a study whose runs are yet to come. It is refused as a whole, if any of them is."""
    if folder.exists():
        raise BadInput(f"{folder}: the folder exists; choose another with --out, or go on with --resume {folder}")
    study = Study(experiment, tuple(str(path.absolute()) for path in search), command)
    for config in runs(experiment):
        lay_out(config, search)
    text = msgspec.json.encode(study)
    try:
        write_atomically(folder / STUDY, lambda part: part.write_bytes(text))
    except OSError as error:
        raise BadInput(
            f"{folder}: the folder cannot be written ({error.strerror}); choose another with --out"
        ) from error


def open_study(folder: Path) -> tuple[Path, Study]:
    """The study of this folder, or of the one that this run is in; and its folder."""
    if (folder / "run.sqlite").exists() and (folder.parent / STUDY).exists():
        folder = folder.parent
    try:
        return folder, msgspec.json.decode((folder / STUDY).read_bytes(), type=Study)
    except FileNotFoundError as error:
        raise BadInput(f"{folder}: not the folder of a study or a run, there is no {STUDY} in it") from error
    except msgspec.MsgspecError as error:
        raise BadInput(f"{folder / STUDY}: not what a study of this version looks like: {error}") from error


def resume_study(folder: Path, watch: Watch, only: str | None = None) -> list[Path]:
    """Go on with what is not done: unfinished runs from their checkpoints, the others from the start.

    With `only`, with this one of its runs, beside whom others may be at work.
    """
    folder, study = open_study(folder)
    configs = runs(study.experiment)
    if only is not None and only not in {config.name for config in configs}:
        names = ", ".join(config.name for config in configs)
        raise BadInput(f"--only {only}: {folder} has no such run, it has {names}")
    folders = []
    with _at_work(folder, only):
        for number, config in enumerate(configs, 1):
            if only in (None, config.name):
                watch.say(f"run {number} of {len(configs)}: {config.name}")
                folders.append(folder / config.name)
                _carry_out(study, folders[-1], config, watch)
    return folders


@contextlib.contextmanager
def _at_work(folder: Path, only: str | None) -> Iterator[None]:
    """On all runs, so that nobody else is at work here, or on one of them, beside those who are on others."""
    if only is None:
        with _lock(folder / LOCK, fcntl.LOCK_EX):
            yield
        return
    own = folder / f"{only}.lock"
    with _lock(folder / LOCK, fcntl.LOCK_SH), _lock(own, fcntl.LOCK_EX):
        try:
            yield
        finally:
            own.unlink()


@contextlib.contextmanager
def _lock(path: Path, kind: int) -> Iterator[None]:
    """Two processes at work on one run would spoil it; the kernel drops the lock of a killed one."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
            if os.fstat(lock.fileno()).st_nlink == 0:
                raise BlockingIOError("its owner removed the file after it was opened here: it keeps nobody out")
        except BlockingIOError as error:
            raise BadInput(f"{path.parent}: another process is at work here; wait for it, or end it first") from error
        yield


def _carry_out(study: Study, place: Path, config: RunConfig, watch: Watch) -> None:
    search = [Path(path) for path in study.search]
    if run.is_unborn(place):
        shutil.rmtree(place, ignore_errors=True)
        run.start(config, place, search=search, command=study.command, watch=watch)
    elif run.is_done(place):
        watch.say("done before")
    else:
        run.resume(config, place, search=search, watch=watch)
