"""The runs of one experiment in one folder, which can be resumed after any interruption."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from fleetbed.emulator.engine.layout import lay_out
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.records.results import read_result
from fleetbed.emulator.resume import run_folder
from fleetbed.emulator.resume.identity import differences
from fleetbed.emulator.run import run
from fleetbed.emulator.wire.storage import read_run_file, write_atomically
from fleetbed.profiles.errors import BadInput, FleetbedError, HostCannot
from fleetbed.profiles.experiment import Experiment, RunConfig, runs
from fleetbed.profiles.loading import decode
from fleetbed.profiles.resolve import check_search
from fleetbed.profiles.settings import apply_settings

STUDY, LOCK = "study.json", "study.lock"


class Study(Struct, frozen=True):
    """What was asked for: complete, so that it can be resumed from anywhere."""

    experiment: Experiment
    search: tuple[str, ...]
    command: str

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(Path(text) for text in self.search)


def start_study(
    experiment: Experiment, folder: Path, *, search: Sequence[Path], command: str, watch: Observer
) -> list[Path]:
    """Carry out every run of the experiment; gives their folders."""
    with new_study(experiment, folder, search=search, command=command) as taken:
        return resume_study(taken, watch)


@contextlib.contextmanager
def new_study(
    experiment: Experiment, folder: Path, *, search: Sequence[Path], command: str, or_next: bool = False
) -> Iterator[Path]:
    """Take the folder for a study, whose runs are carried out within this; with `or_next`, if it exists, the next one.

    The folder is made before anything else, so that no two studies share one. The study is refused as a whole if any
    run of it is; what is refused, here or by the first run, leaves nothing behind.
    """
    study = Study(experiment, tuple(str(path.absolute()) for path in search), command)
    folder, made = _take(folder, or_next)
    try:
        for config in runs(experiment):
            lay_out(config, search)
        _write(folder, study)
        yield folder
    except BaseException as error:
        if isinstance(error, (BadInput, HostCannot)) or not (folder / STUDY).exists():
            _give_back(folder, made)
        raise


def _take(folder: Path, or_next: bool) -> tuple[Path, list[Path]]:
    """Make the folder, which must not exist; gives it and all that were made for it, the innermost first."""
    following = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    for each in itertools.chain([folder], following if or_next else ()):
        made = [path for path in (each, *each.parents) if not os.path.exists(path)]  # False, too, where it may not look
        try:
            each.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise BadInput(
                f"{folder}: the folder cannot be made ({error.strerror}); choose another with --out"
            ) from error
        return each, made
    raise BadInput(f"{folder}: the folder exists; choose another with --out, or continue with --resume {folder}")


def _give_back(folder: Path, made: Sequence[Path]) -> None:
    """Remove a study in which no run was begun; where there is anything else, nothing is removed."""
    if folder.exists() and {path.name for path in folder.iterdir()} <= {STUDY, LOCK}:
        for name in (STUDY, LOCK):
            (folder / name).unlink(missing_ok=True)
        for path in made:
            with contextlib.suppress(OSError):  # another study has been put into it
                path.rmdir()


def _write(folder: Path, study: Study) -> None:
    text = msgspec.json.encode(study)
    try:
        write_atomically(folder / STUDY, lambda part: part.write_bytes(text))
    except OSError as error:
        raise FleetbedError(f"{folder}: the folder cannot be written ({error.strerror})") from error


def locate(folder: Path) -> tuple[Path, str | None]:
    """The folder of the study, and the name of the run if it is a run's folder."""
    inner = folder.absolute()
    if not os.path.lexists(inner / STUDY) and os.path.lexists(inner.parent / STUDY):
        return inner.parent, inner.name
    return folder, None


def open_study(folder: Path) -> Study:
    path = folder / STUDY
    if not os.path.lexists(path):
        raise BadInput(f"{folder}: not the folder of a study or a run, there is no {STUDY} in it")
    try:
        tree = msgspec.json.decode(read_run_file(path))
        study = msgspec.convert(tree, Study)
    except (ValueError, RecursionError) as error:  # no JSON, no text, or other keys
        raise BadInput(f"{path}: not what a study of this version looks like: {error}") from error
    # what becomes a path is checked as if it had just been asked for
    decode(tree["experiment"], Experiment, str(path), "experiment")
    check_search(study.folders)
    return study


def add_rounds(folder: Path, sets: Sequence[str]) -> None:
    """Change the study's number of rounds as `--set rounds=N` says; every other change is refused by name."""
    study = open_study(folder)
    tree = apply_settings(msgspec.json.decode(msgspec.json.encode(study.experiment)), sets)
    asked = decode(tree, Experiment, " ".join([str(folder / STUDY), *(f"with --set {each}" for each in sets)]))
    changed = differences(study.experiment, asked)
    before, now = study.experiment.rounds, asked.rounds
    if others := sorted(changed.keys() - {"rounds"}):
        raise BadInput(
            f"{folder}: with --resume only rounds can be set, but {others[0]} would change "
            f"({changed[others[0]][0]} before, {changed[others[0]][1]} now); start a new study with --out"
        )
    if now < before:
        raise BadInput(f"{folder}: rounds is {now}, but the study has {before} already, and only more can be added")
    with _at_work(folder, None):
        for config in runs(asked):
            place = folder / config.name
            if run_folder.standing(place) not in ("absent", "unstarted"):
                run.check_resumable(config, place, search=study.folders)
        _write(folder, msgspec.structs.replace(study, experiment=asked))


def resume_study(folder: Path, watch: Observer, only: str | None = None) -> list[Path]:
    """Carry out what is not done: unfinished runs from their checkpoints, the others from the start.

    With `only`, this one of its runs, while other processes may carry out others. A run in which nothing was merged
    does not keep the others from being carried out, but the study fails with it in the end.
    """
    folder, own = locate(folder)
    only = only or own
    study = open_study(folder)
    configs = runs(study.experiment)
    names = [config.name for config in configs]
    if only is not None and only not in names:
        raise BadInput(f"{folder} has no run {only!r}, it has {', '.join(names)}")
    with _at_work(folder, only):
        for number, config in enumerate(configs, 1):
            if only in (None, config.name):
                watch.say(f"run {number} of {len(configs)}: {config.name}")
                try:
                    _carry_out(study, folder / config.name, config, watch)
                except run.NothingMerged as error:  # raised in the end, from what the records say
                    watch.say(f"without a result: {error}")
    chosen = [config for config in configs if only in (None, config.name)]
    conclude(folder, chosen, watch)
    return [folder / config.name for config in chosen]


def conclude(folder: Path, configs: Sequence[RunConfig], watch: Observer) -> None:
    """Say what each of these runs came to, and raise FleetbedError unless every one has a result."""
    without = []
    for config in configs:
        place = folder / config.name
        standing = run_folder.standing(place)
        if len(configs) > 1:
            result = read_result(place) if standing == "done" else None
            watch.say(f"{config.name}: {result or ('done' if standing == 'done' else 'without a result')}")
        if standing != "done":
            without.append(f"{config.name}: {run_folder.error_of(place) or 'not finished'}")
    if without:
        more = f" (and {len(without) - 1} more runs without a result)" if len(without) > 1 else ""
        raise FleetbedError(f"{without[0]}{more}")


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
            own.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(path: Path, kind: int) -> Iterator[None]:
    """Two processes at work on one run would spoil it; the kernel drops the lock of a killed one."""
    try:
        # neither through a link to a file outside, nor waiting for the other end of a pipe
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise FleetbedError(f"{path}: the lock cannot be opened ({error.strerror}); remove it") from error
    try:
        found = os.fstat(lock)
        if not stat.S_ISREG(found.st_mode):
            raise FleetbedError(f"{path}: the lock is not a regular file; remove it")
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink == 0:
                raise BlockingIOError("its owner removed the file after it was opened here: it keeps nobody out")
        except BlockingIOError as error:
            raise BadInput(f"{path.parent}: another process is at work here; wait for it, or end it first") from error
        yield
    finally:
        os.close(lock)


def _carry_out(study: Study, place: Path, config: RunConfig, watch: Observer) -> None:
    standing = run_folder.standing(place)
    if standing == "unstarted":
        run_folder.clear(place)
    if standing in ("absent", "unstarted"):
        run.start(config, place, search=study.folders, command=study.command, watch=watch)
    elif standing in ("done", "empty") and run_folder.rounds_of(place) == config.experiment.rounds:
        watch.say("done before" if standing == "done" else "ended before, without a result")
    else:
        run.resume(config, place, search=study.folders, watch=watch)
