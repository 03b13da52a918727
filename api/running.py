"""Carries out studies, for Python and for the command line: starts them, continues them, stops them cleanly."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import UNDISTURBED, Experiment, runs, settings_of
from fleetbed.profiles.files import check_new
from fleetbed.profiles.fleet import sizes
from fleetbed.profiles.resolve import load_experiment, load_fleet, make_experiment, search_folders
from fleetbed.profiles.settings import as_settings

if TYPE_CHECKING:
    from fleetbed.emulator.engine.observer import Observer
    from fleetbed.emulator.run.study import Carrier
    from fleetbed.node_pool import NodePool
    from fleetbed.results import Results

MOST_STUDY_BYTES = 1 << 20  # of the file of a study that is read twice

Beside = Callable[[Path], contextlib.AbstractContextManager[object]]


class StudyInterrupted(KeyboardInterrupt):
    """A study was interrupted; it stopped cleanly and can be continued."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"continue with fleetbed.run(resume={str(folder)!r})")
        self.folder = folder


def run(
    experiment: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    set: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    only: str | None = None,
    jobs: int = 1,
    on: str | None = None,
    address: str | None = None,
    profiles: Sequence[str | os.PathLike[str]] = (),
    progress: bool = True,
    track: str | Sequence[str] = (),
) -> Results:
    """Run an experiment and return its results, as `fleetbed.load` does.

    `experiment` is a name, the path of a YAML file, or a mapping with the content of one. `set` overrides keys, such as
    `{"training.optimizer.lr": 0.1}`; `out` is the folder of the study, which must not exist yet. With `resume` instead
    of an experiment the study or run in that folder is continued; then `only` names one of its runs, and
    `set={"rounds": 50}` adds rounds. `jobs` runs are carried out at the same time; with `on="ray"` as many as nodes
    of a Ray cluster carry. `address` is that of the cluster, for this and for `processes: ray`; without one Ray is
    started on this machine. `profiles` are folders with your own devices/, links/, fleets/ and experiments/. `track`
    names trackers that the runs are sent to while they go on: "tensorboard", "mlflow" or "wandb".

    An interrupt stops the study cleanly and raises `StudyInterrupted`, a `KeyboardInterrupt`.
    """
    from fleetbed.analysis.tracking.trackers import check_trackers
    from fleetbed.beside import tracked
    from fleetbed.results import load

    sets = as_settings(set or {})
    trackers = [track] if isinstance(track, str) else list(track)
    check_trackers(trackers)
    beside = partial(tracked, trackers=trackers)
    if (experiment is None) == (resume is None):
        raise BadInput("fleetbed.run needs either an experiment or resume=FOLDER.")
    if resume is not None:
        if out is not None or profiles:
            raise BadInput("a study continues in its own folder with its own profiles: leave out= and profiles= out.")
        folder, folders = resume_runs(
            Path(resume), sets=sets, only=only, jobs=jobs, on=on, address=address, show=progress, beside=beside
        )
    else:
        assert experiment is not None
        if only is not None:
            raise BadInput("only= needs resume=FOLDER; to run part of an experiment, use set=.")
        asked, search = ask_experiment(experiment, sets, profiles)
        name = "experiment" if isinstance(experiment, Mapping) else os.fspath(experiment)
        folder, folders = start_runs(
            asked,
            name,
            None if out is None else Path(out),
            search=search,
            command=_call(name, set, profiles),
            jobs=jobs,
            on=on,
            address=address,
            show=progress,
            beside=beside,
        )
    return load(*folders) if only is not None else load(folder)


def ask_experiment(
    experiment: str | os.PathLike[str] | Mapping[str, Any],
    sets: Sequence[str],
    profiles: Sequence[str | os.PathLike[str]],
) -> tuple[Experiment, tuple[Path, ...]]:
    """Return the experiment, read and checked, and the folders in which its names are looked up."""
    given = [Path(path) for path in profiles]
    if isinstance(experiment, str | os.PathLike):
        search = search_folders(given, os.fspath(experiment))
        return load_experiment(os.fspath(experiment), search, sets), search
    return make_experiment(experiment, sets), search_folders(given)


def _call(name: str, set: Mapping[str, Any] | None, profiles: Sequence[str | os.PathLike[str]]) -> str:
    """Return the call that repeats a study, for its records."""
    parts = [repr(name)]
    if set:
        parts.append(f"set={dict(set)!r}")
    if profiles:
        parts.append(f"profiles={[os.fspath(path) for path in profiles]!r}")
    return f"fleetbed.run({', '.join(parts)})"


def start_runs(
    asked: Experiment,
    name: str,
    out: Path | None,
    *,
    search: Sequence[Path],
    command: str,
    jobs: int = 1,
    on: str | None = None,
    address: str | None = None,
    show: bool = True,
    beside: Beside = contextlib.nullcontext,
) -> tuple[Path, list[Path]]:
    """Carry out a new study; return its folder and the folders of its runs.

    `beside` is entered with the folder while the runs go on. Without `out` the folder is a new one below runs/, named
    after the experiment. Raises StudyInterrupted.
    """
    if out is not None:
        check_new(out, "--out")
    check_nodes_asked(on, address, jobs)
    check_jobs(jobs, asked)
    asked = _with_rounds(asked)
    observer = _observer(show)
    with _nodes(on, address, asked, search) as pool, _host_reserved(asked, search, jobs, on, observer), _imported():
        from fleetbed.emulator.run.study import new_study

        folder = out or Path("runs") / f"{Path(name).stem}-{datetime.now():%Y%m%d-%H%M%S}"
        making = new_study(asked, folder, search=search, command=command, or_next=out is None, carrier=_carrier(asked))
        with making as taken, beside(taken):
            return taken, _carry_out(taken, None, jobs, pool, observer)


def resume_runs(
    folder: Path,
    *,
    sets: Sequence[str] = (),
    only: str | None = None,
    jobs: int = 1,
    on: str | None = None,
    address: str | None = None,
    show: bool = True,
    beside: Beside = contextlib.nullcontext,
) -> tuple[Path, list[Path]]:
    """Continue the study or run in this folder; return it and the folders of the runs. Raises StudyInterrupted."""
    if only is not None and jobs > 1:
        raise BadInput("--only RUN cannot be used with --jobs: it is a single run.")
    if only is not None and sets:
        raise BadInput("--set cannot be used with --only: all runs of a study have the same number of rounds.")
    check_nodes_asked(on, address, jobs)
    observer = _observer(show)
    with _host_reserved(_stored(folder), None, jobs, on, observer), _imported():
        from fleetbed.emulator.run.study import add_rounds, locate_study, open_study

        study, own = locate_study(folder)
        if own is not None and (sets or jobs > 1 or only not in (None, own)):
            raise BadInput(
                f"{folder} is a single run: use --set, --jobs and --only with the folder of its study, {study}."
            )
        if sets:
            add_rounds(study, sets)
        asked = open_study(study)
        with _nodes(on, address, asked.experiment, asked.folders) as pool, beside(folder):
            return folder, _carry_out(study, only or own, jobs, pool, observer)


def check_jobs(jobs: int, experiment: Experiment) -> None:
    """Refuse to run side by side what measures or paces itself on this host, or uses all of a cluster."""
    if jobs > 1 and uses_ray(experiment):
        raise BadInput(f"--jobs {jobs}: a run with processes: ray uses all cores of all nodes; remove --jobs.")
    for source in {one.timing.source for one in settings_of(experiment)} if jobs > 1 else ():
        if source not in UNDISTURBED:
            raise BadInput(
                f"--jobs {jobs}: a run with timing.source {source} needs the host to itself; "
                f"remove --jobs, or set timing.source to {' or '.join(UNDISTURBED)}."
            )


def check_nodes_asked(on: str | None, address: str | None, jobs: int) -> None:
    """Refuse, before anything else is done, a cluster that does not exist, and options that do not fit together."""
    if on is None:
        return
    if on != "ray":
        raise BadInput(f"--on {on}: allowed is ray.")
    if jobs > 1:
        raise BadInput("--jobs cannot be used with --on ray: a node carries out as many runs as it has cores.")
    from fleetbed.emulator.cluster.connection import check_reachable

    check_reachable(address)


def _nodes(
    on: str | None, address: str | None, asked: Experiment, search: Sequence[Path]
) -> contextlib.AbstractContextManager[NodePool | None]:
    """The nodes that carry out the runs; None: this host does, and is connected to Ray meanwhile if a run needs it."""
    if on is None:
        return _cluster(asked, address)
    if uses_ray(asked):
        raise BadInput("--on ray: a run with processes: ray uses all nodes by itself; remove --on ray.")
    from fleetbed.node_pool import node_pool

    return node_pool(address, asked, search)


def _carry_out(folder: Path, only: str | None, jobs: int, pool: NodePool | None, observer: Observer) -> list[Path]:
    """Carry out the unfinished runs of a study; return the folders of all its runs, or of this one."""
    from fleetbed.emulator.run.study import choose_runs, conclude, open_study, resume_study
    from fleetbed.side_by_side import run_side_by_side

    try:
        study = open_study(folder)
        experiment = study.experiment
        if pool is not None:
            from fleetbed.over_nodes import run_over_nodes

            chosen = choose_runs(folder, experiment, only)
            run_over_nodes(folder, chosen, study.folders, pool, observer.say)
            conclude(folder, chosen, observer)
            return [folder / config.name for config in chosen]
        if jobs == 1:
            return resume_study(folder, observer, only, _carrier(experiment))
        check_jobs(jobs, experiment)
        configs = runs(experiment)
        run_side_by_side(folder, [config.name for config in configs], jobs, observer.say)
        conclude(folder, configs, observer)
        return [folder / config.name for config in configs]
    except KeyboardInterrupt as stop:
        raise StudyInterrupted(folder) from stop


def uses_ray(experiment: Experiment) -> bool:
    """Whether the tasks of a run are carried out by Ray."""
    return any(one.processes == "ray" for one in settings_of(experiment))


@contextlib.contextmanager
def _cluster(experiment: Experiment, address: str | None) -> Iterator[None]:
    """Be connected to Ray meanwhile, if a run needs it. Raises HostCannot before anything is written."""
    if not uses_ray(experiment):
        if address is not None:
            raise BadInput(f"--address {address} is for --on ray, and for processes: ray, which no run has.")
        yield
        return
    from fleetbed.emulator.cluster.connection import connected
    from fleetbed.emulator.cluster.nodes import check_nodes, nodes

    with connected(address):
        check_nodes(nodes(), address)
        yield


def _with_rounds(experiment: Experiment) -> Experiment:
    """The experiment with the rounds of its Flower app, if it has one."""
    if experiment.flower is None:
        return experiment
    from fleetbed.flower.app import with_rounds

    return with_rounds(experiment)


def _carrier(experiment: Experiment) -> Carrier:
    """The module that carries out the runs of this experiment."""
    if experiment.flower is not None:
        from fleetbed.flower.app import check_flower

        check_flower()
        from fleetbed.flower import run as flower

        return flower
    from fleetbed.emulator.run import run as own

    return own


def _stored(folder: Path) -> Experiment | None:
    """The experiment of the study in this folder or above it, read without torch; None if it is unreadable."""
    from fleetbed.emulator.records.study_file import STUDY, parse_study

    for path in (folder / STUDY, folder.absolute().parent / STUDY):
        with contextlib.suppress(OSError, BadInput):  # reported when it is opened to be continued
            if path.is_file() and path.stat().st_size < MOST_STUDY_BYTES:
                return parse_study(path.read_bytes(), path).experiment
    return None


@contextlib.contextmanager
def _host_reserved(
    asked: Experiment | None, search: Sequence[Path] | None, jobs: int, on: str | None, observer: Observer
) -> Iterator[None]:
    """Block measurements of this host meanwhile, unless other processes do the work and block them.

    With folders to search, refuse fleets that do not fit.
    Also start the zygote before this process imports torch, so that both import it at the same time; but only if the
    run will need one.
    """
    from fleetbed.emulator.machine import measuring_lock
    from fleetbed.emulator.machine.capacity import can_start_zygote, check_processes_fit
    from fleetbed.emulator.processes.early_start import zygote_started_early

    if _in_main_thread() and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent may have ignored it, which hides how children end
    does_the_work = jobs == 1 and on is None
    kinds = set() if asked is None else {(one.fleet, one.processes) for one in settings_of(asked)}
    if search is not None and on is None:
        for fleet, processes in kinds:
            check_processes_fit(sum(sizes(load_fleet(fleet, search, "fleet"))), processes)
    needs_zygote = does_the_work and any(processes not in ("inline", "ray") for _, processes in kinds)
    if search is None:  # a study that is resumed: errors come later
        needs_zygote = needs_zygote and can_start_zygote()
    with contextlib.ExitStack() as stack:
        if does_the_work:
            stack.enter_context(measuring_lock.in_use(observer.say))
        if needs_zygote:
            stack.enter_context(zygote_started_early())
        yield


@contextlib.contextmanager
def _imported() -> Iterator[None]:
    """Import everything a run needs, as quickly as possible, and let the garbage collector ignore it meanwhile.

    At the end torch has its number of threads back: a run with `processes: inline` computes with one.
    """
    collecting = gc.isenabled()
    gc.disable()  # imports leave no garbage, and searching for it takes a fifth of their time
    try:
        with _interrupts_held():
            from fleetbed.emulator.run import study  # noqa: F401 (brings in all of the emulator)
    finally:
        if collecting:
            gc.enable()
    import torch

    threads = torch.get_num_threads()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Deliver interrupts only at the end, because torch aborts the process if one is raised during its import."""
    held: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ours = {number: how for number, how in before.items() if how is not None and _in_main_thread()}
    for number in ours:
        signal.signal(number, lambda number, _: held.append(number))
    try:
        yield
    finally:
        for number, how in ours.items():
            signal.signal(number, how)
    if held:
        signal.raise_signal(held[0])


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _observer(show: bool) -> Observer:
    if show:
        from fleetbed.live import make_observer

        return make_observer()
    from fleetbed.emulator.engine.observer import Observer

    return Observer()
