"""The runs of one experiment, one after the other, in one folder that can be gone on with after any interruption."""

from __future__ import annotations

import contextlib
import fcntl
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
    if folder.exists():
        raise BadInput(f"{folder}: the folder exists; choose another with --out, or go on with --resume {folder}")
    study = Study(experiment, tuple(str(path.absolute()) for path in search), command)
    configs = runs(experiment)
    for config in configs:
        lay_out(config, search)  # a study is refused as a whole, before its first run
    text = msgspec.json.encode(study)
    try:
        write_atomically(folder / STUDY, lambda part: part.write_bytes(text))
    except OSError as error:
        raise BadInput(
            f"{folder}: the folder cannot be written ({error.strerror}); choose another with --out"
        ) from error
    with _alone(folder):
        return _carry_out(study, folder, configs, watch)


def resume_study(folder: Path, watch: Watch) -> list[Path]:
    """Go on with what is not done: unfinished runs from their checkpoints, the others from the start."""
    if (folder / "run.sqlite").exists() and (folder.parent / STUDY).exists():
        folder = folder.parent
    try:
        study = msgspec.json.decode((folder / STUDY).read_bytes(), type=Study)
    except FileNotFoundError as error:
        raise BadInput(f"{folder}: not the folder of a study or a run, there is no {STUDY} in it") from error
    except msgspec.MsgspecError as error:
        raise BadInput(f"{folder / STUDY}: not what a study of this version looks like: {error}") from error
    with _alone(folder):
        return _carry_out(study, folder, runs(study.experiment), watch)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two processes at work in one folder would spoil it; the kernel drops the lock of a killed one."""
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadInput(f"{folder}: another process is at work here; wait for it, or end it first") from error
        yield


def _carry_out(study: Study, folder: Path, configs: list[RunConfig], watch: Watch) -> list[Path]:
    search = [Path(path) for path in study.search]
    folders = []
    for number, config in enumerate(configs, 1):
        place = folder / config.name
        watch.say(f"run {number} of {len(configs)}: {config.name}")
        if run.is_unborn(place):
            shutil.rmtree(place, ignore_errors=True)
            run.start(config, place, search=search, command=study.command, watch=watch)
        elif run.is_done(place):
            watch.say("done before")
        else:
            run.resume(config, place, search=search, watch=watch)
        folders.append(place)
    return folders
