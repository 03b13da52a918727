"""Checkpoints: where a run stands, in one file that is written whole or not at all and checked when read.

It holds the timeline, the policy, the server's state, what was sent to tasks in flight and the names of what clients
keep. Results are not in it: tasks in flight are carried out again, which under repeatable timings gives the same.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct
from torch import Tensor

from fleetbed.emulator.engine.evaluation import Moment
from fleetbed.emulator.engine.participant import Participant
from fleetbed.emulator.engine.progress import Progress
from fleetbed.emulator.engine.task import Task
from fleetbed.emulator.method.bundle import Bundle, Value
from fleetbed.emulator.timeline.availability import AnyAvailability
from fleetbed.emulator.timeline.events import Timeline
from fleetbed.emulator.timeline.policies import AnyPolicy
from fleetbed.emulator.wire.storage import Damaged, load_bundle, part_of, save_bundle

KEEP = 2  # the newest one may be damaged by what ended the run
_NAME = re.compile(r"checkpoint-(\d{8})\.safetensors")
_TASK = re.compile(r"task-\d{8,}\.safetensors")
_KEPT = re.compile(r"state/client-\d{3,}/task-(\d{8,})\.safetensors")


class Packed(Struct, frozen=True):
    """A bundle whose tensors lie in the checkpoint's pool, because most of what was sent is still the state itself."""

    tensors: dict[str, str]
    values: dict[str, Value]


class Stored(Struct, frozen=True, kw_only=True):
    run: str  # whose it is, see `identity.run_digest`
    rounds: int  # how many the run was to have when this was written
    records: str  # the seal of the records that were final then
    timeline: Timeline
    policy: AnyPolicy
    availability: AnyAvailability
    version: int
    next_task: int
    tasks: list[Task]
    merging: list[tuple[int, ...]]
    round_start_s: float
    round_host_s: float
    host_s: float  # how long the run had been going
    failed_in_a_row: int
    free_since: dict[int, float] = {}  # those of earlier versions do not say
    evaluated: Moment | None
    kept: dict[int, str | None]
    variants: dict[int, str]
    unfit: list[int]
    state: Packed
    sent: dict[int, Packed]

    @property
    def is_end(self) -> bool:
        """Whether it was written at the run's end: the round that comes next was drawn, but nobody invited."""
        return self.policy.round > self.rounds


class Loaded(NamedTuple):
    stored: Stored
    progress: Progress
    damaged: dict[Path, str]  # newer checkpoints, and what is wrong with each


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "state"
        self._run = folder
        self._named_before: set[str] | None = None

    def save(
        self,
        progress: Progress,
        participants: dict[int, Participant],
        *,
        run: str,
        rounds: int,
        records: str,
        host_s: float,
    ) -> None:
        pool: dict[str, Tensor] = {}
        names: dict[int, str] = {}

        def pack(bundle: Bundle) -> Packed:
            for tensor in bundle.tensors.values():
                if id(tensor) not in names:
                    names[id(tensor)] = f"t{len(names)}"
                    pool[names[id(tensor)]] = tensor
            return Packed({name: names[id(t)] for name, t in bundle.tensors.items()}, bundle.values)

        stored = Stored(
            run=run,
            rounds=rounds,
            records=records,
            timeline=progress.timeline,
            policy=progress.policy,
            availability=progress.availability,
            version=progress.version,
            next_task=progress.next_task,
            tasks=list(progress.tasks.values()),
            merging=progress.merging,
            round_start_s=progress.round_start_s,
            round_host_s=progress.round_host_s,
            host_s=host_s,
            failed_in_a_row=progress.failed_in_a_row,
            free_since=progress.free_since,
            evaluated=progress.evaluated,
            kept={number: who.kept for number, who in participants.items()},
            unfit=[number for number, who in participants.items() if not who.fit],
            variants={number: who.client.variant for number, who in participants.items()},
            state=pack(progress.state),
            sent={number: pack(bundle) for number, bundle in progress.sent.items()},
        )
        text = msgspec.json.encode(stored).decode()
        save_bundle(self._path(progress.version), Bundle(pool, {"progress": text}))
        for version in self._versions()[:-KEEP]:
            self._path(version).unlink()
        self._drop_unused(stored)

    def parts(self) -> list[Path]:
        """What was half written when the run was killed."""
        found = []
        for path in [*self._folder.glob(".*.part"), *self._folder.glob("client-*/.*.part")]:
            ours = _NAME.fullmatch(name := part_of(path) or "") or _TASK.fullmatch(name)
            if ours and path.is_file():
                found.append(path)
        return found

    def found(self) -> bool:
        """Whether there is any, whole or not."""
        return bool(self._versions())

    def load(self, rounds: int, check: Callable[[Stored], str | None]) -> Loaded:
        """The newest checkpoint that a run of so many rounds can continue from, and what is wrong with newer ones.

        `check` gives what else is wrong with one, if anything. Nothing is changed. Raises Damaged when there is none.
        """
        problems: dict[Path, str] = {}
        ends = 0
        for version in reversed(self._versions()):
            path = self._path(version)
            try:
                stored, progress = self._read(path, version)
            except Damaged as error:
                problems[path] = str(error)
                continue
            if stored.is_end and stored.rounds < rounds:
                ends += 1
            elif (problem := check(stored) or self._lost(stored)) is not None:
                problems[path] = f"{path}: {problem}"
            else:
                return Loaded(stored, progress, problems)
        found = list(problems.values()) or [f"{self._folder}: there is no checkpoint"]
        if ends:
            found.append("only the checkpoint at the run's end is whole, and rounds cannot be added to that")
        raise Damaged(f"{'; '.join(found)}; move {self._run} away, and --resume carries this run out anew")

    def clean(self, damaged: Iterable[Path]) -> None:
        """Remove what was half written when the run was killed, and set aside what would be in the way."""
        for part in self.parts():
            part.unlink()
        paths = [self._path(version) for version in self._versions()]
        for path in {*damaged, *(path for path in paths if path.is_symlink() or not path.is_file())}:
            names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
            os.rename(path, next(name for name in names if not os.path.lexists(name)))

    def _read(self, path: Path, version: int) -> tuple[Stored, Progress]:
        bundle = load_bundle(path)
        try:
            stored = msgspec.json.decode(str(bundle.values.get("progress")), type=Stored)
        except msgspec.MsgspecError as error:
            raise Damaged(f"{path}: not what a checkpoint of this version looks like: {error}") from error
        if stored.version != version:
            raise Damaged(f"{path}: it is the checkpoint of merge {stored.version}")

        def unpack(packed: Packed) -> Bundle:
            if lost := set(packed.tensors.values()) - bundle.tensors.keys():
                raise Damaged(f"{path}: the tensor {min(lost)} is missing")
            return Bundle({name: bundle.tensors[t] for name, t in packed.tensors.items()}, packed.values)

        progress = Progress(
            timeline=stored.timeline,
            policy=stored.policy,
            availability=stored.availability,
            state=unpack(stored.state),
            version=stored.version,
            next_task=stored.next_task,
            tasks={task.number: task for task in stored.tasks},
            sent={number: unpack(packed) for number, packed in stored.sent.items()},
            merging=stored.merging,
            round_start_s=stored.round_start_s,
            round_host_s=stored.round_host_s,
            failed_in_a_row=stored.failed_in_a_row,
            free_since=stored.free_since,
            evaluated=stored.evaluated,
        )
        return stored, progress

    def _lost(self, stored: Stored) -> str | None:
        """What is wrong with the files that clients kept, if anything."""
        for name in [*stored.kept.values(), *(task.kept for task in stored.tasks)]:
            if name is not None:
                if _KEPT.fullmatch(name) is None:
                    return f"{name!r} is not what a client keeps"
                try:
                    load_bundle(self._run / name)
                except Damaged as error:
                    return f"what a client kept is lost: {error}"
        return None

    def _drop_unused(self, stored: Stored) -> None:
        """Remove what clients kept that no checkpoint can come back to.

        The checkpoint before this one may still be needed, so what it names stays until the next time.
        """
        named = {name for name in stored.kept.values() if name is not None}
        named |= {task.kept for task in stored.tasks if task.kept is not None}
        if self._named_before is not None:
            # a client may have written its file long before its task ends in device time
            under_way = {task.number for task in stored.tasks}
            for path in self._folder.glob("client-*/task-*.safetensors"):
                name = str(path.relative_to(self._run))
                if (match := _KEPT.fullmatch(name)) is None or name in named | self._named_before:
                    continue
                if int(match[1]) < stored.next_task and int(match[1]) not in under_way:
                    path.unlink()
        self._named_before = named

    def _path(self, version: int) -> Path:
        return self._folder / f"checkpoint-{version:08d}.safetensors"

    def _versions(self) -> list[int]:
        names = (_NAME.fullmatch(path.name) for path in self._folder.glob("checkpoint-*"))
        return sorted(int(match[1]) for match in names if match is not None)
