"""Carries out the runs of one experiment in one folder; a study can be resumed after any interruption."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.records.results import read_result
from fleetbed.emulator.records.study_file import STUDY, Study, parse_study
from fleetbed.emulator.resume import run_folder
from fleetbed.emulator.resume.identity import differences
from fleetbed.emulator.run import run
from fleetbed.emulator.wire.storage import read_run_file, write_atomically
from fleetbed.profiles.errors import BadInput, FleetbedError, HostCannot
from fleetbed.profiles.experiment import Experiment, RunConfig, runs
from fleetbed.profiles.loading import decode
from fleetbed.profiles.resolve import check_search
from fleetbed.profiles.settings import apply_settings

LOCK = "study.lock"


class Carrier(Protocol):
    """A module that carries out single runs: that of the emulator's methods, or one for code of another framework."""

    def check(self, config: RunConfig, search: Sequence[Path]) -> None:
        """Raise the error that `start` would raise, without writing anything."""
        ...

    def start(
        self, config: RunConfig, folder: Path, *, search: Sequence[Path], command: str, observer: Observer
    ) -> None: ...

    def resume(self, config: RunConfig, folder: Path, *, search: Sequence[Path], observer: Observer) -> None: ...


def start_study(
    experiment: Experiment, folder: Path, *, search: Sequence[Path], command: str, observer: Observer
) -> list[Path]:
    """Carry out every run of the experiment; return their folders."""
    with new_study(experiment, folder, search=search, command=command) as created:
        return resume_study(created, observer)


@contextlib.contextmanager
def new_study(
    experiment: Experiment,
    folder: Path,
    *,
    search: Sequence[Path],
    command: str,
    or_next: bool = False,
    carrier: Carrier = run,
) -> Iterator[Path]:
    """Create the folder of a study, and yield it to carry out the runs; with `or_next`, avoid a folder that exists.

    The folder is created before anything else, so that no two studies share one. If any run is refused, the whole study
    is refused. A study that is refused, here or by its first run, leaves nothing behind.
    """
    study = Study(experiment, tuple(str(path.absolute()) for path in search), command)
    folder, made = _create_folder(folder, or_next)
    try:
        for config in runs(experiment):
            carrier.check(config, search)
        _write(folder, study)
        yield folder
    except BaseException as error:
        if isinstance(error, (BadInput, HostCannot)) or not (folder / STUDY).exists():
            _remove_unused(folder, made)
        raise


def _create_folder(folder: Path, or_next: bool) -> tuple[Path, list[Path]]:
    """Create the folder, which must not exist; return it and all folders created for it, innermost first."""
    following = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    for each in itertools.chain([folder], following if or_next else ()):
        made = [path for path in (each, *each.parents) if not os.path.exists(path)]  # also without permission
        try:
            each.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise BadInput(
                f"{folder}: the folder cannot be created ({error.strerror}); choose another with --out"
            ) from error
        return each, made
    raise BadInput(
        f"{folder}: the folder already exists; choose another with --out, or continue with --resume {folder}"
    )


def _remove_unused(folder: Path, made: Sequence[Path]) -> None:
    """Remove a study in which no run was started; if its folder contains anything else, remove nothing."""
    if folder.exists() and {path.name for path in folder.iterdir()} <= {STUDY, LOCK}:
        for name in (STUDY, LOCK):
            (folder / name).unlink(missing_ok=True)
        for path in made:
            with contextlib.suppress(OSError):  # another study may be in it by now
                path.rmdir()


def _write(folder: Path, study: Study) -> None:
    text = msgspec.json.encode(study)
    try:
        write_atomically(folder / STUDY, lambda part: part.write_bytes(text))
    except OSError as error:
        raise FleetbedError(f"{folder}: the folder is not writable ({error.strerror})") from error


def locate_study(folder: Path) -> tuple[Path, str | None]:
    """Return the folder of the study, and the name of the run if `folder` is that of a run."""
    inner = folder.absolute()
    if not os.path.lexists(inner / STUDY) and os.path.lexists(inner.parent / STUDY):
        return inner.parent, inner.name
    return folder, None


def open_study(folder: Path) -> Study:
    path = folder / STUDY
    if not os.path.lexists(path):
        raise BadInput(f"{folder}: not the folder of a study or a run: there is no {STUDY} in it")
    study = parse_study(read_run_file(path), path)
    check_search(study.folders)
    return study


def add_rounds(folder: Path, sets: Sequence[str]) -> None:
    """Change the study's number of rounds to that of `--set rounds=N`; refuse any other change, and name it."""
    study = open_study(folder)
    tree = apply_settings(msgspec.json.decode(msgspec.json.encode(study.experiment)), sets)
    asked = decode(tree, Experiment, " ".join([str(folder / STUDY), *(f"with --set {each}" for each in sets)]))
    changed = differences(study.experiment, asked)
    before, now = study.experiment.rounds, asked.rounds
    if others := sorted(changed.keys() - {"rounds"}):
        raise BadInput(
            f"{folder}: with --resume only rounds can be set, but this would change {others[0]} "
            f"({changed[others[0]][0]} before, {changed[others[0]][1]} now); start a new study with --out"
        )
    if now < before:
        raise BadInput(f"{folder}: rounds is {now}, but the study already has {before}, and rounds can only be added")
    with locked(folder, None):
        for config in runs(asked):
            path = folder / config.name
            if run_folder.standing(path) not in ("absent", "unstarted"):
                run.check_resumable(config, path, search=study.folders)
        _write(folder, msgspec.structs.replace(study, experiment=asked))


def choose_runs(folder: Path, experiment: Experiment, only: str | None) -> list[RunConfig]:
    """Return the run with this name, or all runs of the study. Raises BadInput if there is no such run."""
    configs = runs(experiment)
    names = [config.name for config in configs]
    if only is not None and only not in names:
        raise BadInput(f"{folder} has no run {only!r}; its runs are {', '.join(names)}")
    return [config for config in configs if only in (None, config.name)]


def is_finished(folder: Path, config: RunConfig) -> bool:
    """Whether this run has ended, with a result or without one, after all of its rounds."""
    return run_folder.standing(folder) in ("done", "empty") and run_folder.rounds_of(folder) == config.experiment.rounds


def resume_study(folder: Path, observer: Observer, only: str | None = None, carrier: Carrier = run) -> list[Path]:
    """Carry out the runs that are not done: started runs from their checkpoints, the others from the start.

    With `only`, carry out just this run, while other processes may carry out others. A run in which nothing was merged
    does not stop the others, but makes the study fail at the end.
    """
    folder, own = locate_study(folder)
    only = only or own
    study = open_study(folder)
    configs, chosen = runs(study.experiment), choose_runs(folder, study.experiment, only)
    with locked(folder, only):
        for number, config in enumerate(configs, 1):
            if config in chosen:
                observer.say(f"run {number} of {len(configs)}: {config.name}")
                try:
                    _carry_out(study, folder / config.name, config, observer, carrier)
                except run.NothingMerged as error:  # raised at the end, from the records
                    observer.say(f"no result: {error}")
    conclude(folder, chosen, observer)
    return [folder / config.name for config in chosen]


def conclude(folder: Path, configs: Sequence[RunConfig], observer: Observer) -> None:
    """Report the result of each of these runs, and raise FleetbedError unless every one has a result."""
    without = []
    for config in configs:
        path = folder / config.name
        standing = run_folder.standing(path)
        if len(configs) > 1:
            result = read_result(path) if standing == "done" else None
            observer.say(f"{config.name}: {result or ('done' if standing == 'done' else 'no result')}")
        if standing != "done":
            without.append(f"{config.name}: {run_folder.error_of(path) or 'not finished'}")
    if without:
        more = f" (and {len(without) - 1} more runs without a result)" if len(without) > 1 else ""
        raise FleetbedError(f"{without[0]}{more}")


@contextlib.contextmanager
def locked(folder: Path, only: str | None) -> Iterator[None]:
    """Lock the whole study against other processes, or one run of it, so that others can carry out other runs."""
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
    """Lock a file, because two processes would ruin a run; the kernel releases the lock of a killed process."""
    try:
        # do not follow a link to a file elsewhere, and do not wait for the other end of a pipe
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
                raise BlockingIOError("its owner removed the file after it was opened here, so that it locks nothing")
        except BlockingIOError as error:
            raise BadInput(
                f"{path.parent}: another process is using this folder; wait for it, or stop it first"
            ) from error
        yield
    finally:
        os.close(lock)


def _carry_out(study: Study, path: Path, config: RunConfig, observer: Observer, carrier: Carrier) -> None:
    standing = run_folder.standing(path)
    if standing == "unstarted":
        run_folder.clear(path)
    if standing in ("absent", "unstarted"):
        carrier.start(config, path, search=study.folders, command=study.command, observer=observer)
    elif is_finished(path, config):
        observer.say("already done" if standing == "done" else "already ended, with no result")
    else:
        carrier.resume(config, path, search=study.folders, observer=observer)
