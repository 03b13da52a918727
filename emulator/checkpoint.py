"""Checkpoints: where a run stands, in one file that is written whole or not at all and checked when read.

It holds the timeline, the policy, the server's state, what was sent to tasks in flight and the names of what clients
keep. Results are not in it: tasks in flight are carried out again, which under repeatable timings gives the same.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
from msgspec import Struct
from torch import Tensor

from fleetbed.emulator.availability import AnyAvailability
from fleetbed.emulator.bundle import Bundle, Value
from fleetbed.emulator.evaluation import Moment
from fleetbed.emulator.participant import Participant
from fleetbed.emulator.policies import AnyPolicy
from fleetbed.emulator.progress import Progress
from fleetbed.emulator.storage import Damaged, load_bundle, save_bundle
from fleetbed.emulator.task import Task
from fleetbed.emulator.timeline import Timeline

KEEP = 2  # the newest one may be damaged by what ended the run
_NAME = re.compile(r"checkpoint-(\d{8})\.safetensors")


class Packed(Struct, frozen=True):
    """A bundle whose tensors lie in the checkpoint's pool, because most of what was sent is still the state itself."""

    tensors: dict[str, str]
    values: dict[str, Value]


class Stored(Struct, frozen=True, kw_only=True):
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
    fruitless: int
    evaluated: Moment | None
    kept: dict[int, str | None]
    variants: dict[int, str]
    unfit: list[int]
    state: Packed
    sent: dict[int, Packed]


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "state"
        self._run = folder
        self._spare = self._folder / ".spare.part"  # an old one, whose room the next one takes
        self._ours: set[int] = set()  # the versions that were written by this very object
        self._named_before: set[str] | None = None

    def save(self, progress: Progress, participants: dict[int, Participant], host_s: float) -> None:
        pool: dict[str, Tensor] = {}
        names: dict[int, str] = {}

        def pack(bundle: Bundle) -> Packed:
            for tensor in bundle.tensors.values():
                if id(tensor) not in names:
                    names[id(tensor)] = f"t{len(names)}"
                    pool[names[id(tensor)]] = tensor
            return Packed({name: names[id(t)] for name, t in bundle.tensors.items()}, bundle.values)

        stored = Stored(
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
            fruitless=progress.fruitless,
            evaluated=progress.evaluated,
            kept={number: who.kept for number, who in participants.items()},
            unfit=[number for number, who in participants.items() if not who.fit],
            variants={number: who.client.variant for number, who in participants.items()},
            state=pack(progress.state),
            sent={number: pack(bundle) for number, bundle in progress.sent.items()},
        )
        text = msgspec.json.encode(stored).decode()
        save_bundle(self._path(progress.version), Bundle(pool, {"progress": text}), over=self._spare)
        self._ours.add(progress.version)
        for version in self._versions()[:-KEEP]:
            if version in self._ours:
                self._ours.remove(version)
                os.replace(self._path(version), self._spare)
            else:  # tensors that were read from it still lie in it
                self._path(version).unlink()
        self._drop_unused(stored)

    def close(self) -> None:
        """There will be no next one."""
        self._spare.unlink(missing_ok=True)

    def found(self) -> bool:
        """Whether there is any, whole or not."""
        return bool(self._versions())

    def load(self) -> tuple[Stored, Progress, list[str]]:
        """The newest whole checkpoint, and what is wrong with newer ones. Raises Damaged when there is none."""
        self._sweep()
        problems = []
        for version in reversed(self._versions()):
            try:
                stored, progress = self._read(self._path(version))
            except Damaged as error:
                problems.append(str(error))
                continue
            return stored, progress, problems
        raise Damaged(f"{'; '.join(problems)}; remove {self._run}, and --resume starts this run anew")

    def _read(self, path: Path) -> tuple[Stored, Progress]:
        bundle = load_bundle(path)
        try:
            stored = msgspec.json.decode(str(bundle.values.get("progress")), type=Stored)
        except msgspec.MsgspecError as error:
            raise Damaged(f"{path}: not what a checkpoint of this version looks like: {error}") from error

        def unpack(packed: Packed) -> Bundle:
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
            fruitless=stored.fruitless,
            evaluated=stored.evaluated,
        )
        return stored, progress

    def _sweep(self) -> None:
        """Remove what was half written when the run was killed."""
        for part in self._folder.rglob(".*.part"):
            part.unlink()

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
                number, name = _task_of(path), str(path.relative_to(self._run))
                if number < stored.next_task and number not in under_way and name not in named | self._named_before:
                    path.unlink()
        self._named_before = named

    def _path(self, version: int) -> Path:
        return self._folder / f"checkpoint-{version:08d}.safetensors"

    def _versions(self) -> list[int]:
        names = (_NAME.fullmatch(path.name) for path in self._folder.glob("checkpoint-*"))
        return sorted(int(match[1]) for match in names if match is not None)


def _task_of(path: Path) -> int:
    return int(path.stem.removeprefix("task-"))
