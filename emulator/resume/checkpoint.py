"""Checkpoints: the progress of a run in one file, which is written whole or not at all and checked when read.

A checkpoint holds no results: tasks in flight are carried out again, which under repeatable timings gives the same.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from torch import Tensor

from fleetbed.emulator.engine.progress import Progress
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.timeline.own_policies import restored
from fleetbed.emulator.timeline.policies import AnyPolicy
from fleetbed.emulator.wire.storage import Damaged, load_bundle, part_of, save_bundle

FORMAT = 3  # raised when what a checkpoint holds changes
KEEP = 2  # the newest one may be damaged by what ended the run
_NAME = re.compile(r"checkpoint-(\d{8})\.safetensors")
_TASK = re.compile(r"task-\d{8,}\.safetensors")
_KEPT = re.compile(r"state/client-\d{3,}/task-(\d{8,})\.safetensors")


class Checkpoint(Struct, frozen=True, kw_only=True):
    run: str  # identifies the run, see `identity.run_digest`
    rounds: int  # how many the run was to have when this was written
    records: str  # the seal of the records that were final then
    host_s: float  # how long the run had been going
    progress: Progress

    @property
    def is_end(self) -> bool:
        """Whether it was written at the run's end: the next round was drawn, but no client invited."""
        return self.progress.policy.round > self.rounds

    def kept(self) -> set[str]:
        """The files of what clients keep, as of now and when the tasks in flight were dispatched."""
        names = {client.kept for client in self.progress.clients.values()}
        names |= {task.kept for task in self.progress.tasks.values()}
        return {name for name in names if name is not None}


class Loaded(NamedTuple):
    checkpoint: Checkpoint
    damaged: dict[Path, str]  # newer checkpoints, and what is wrong with each


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "state"
        self._run = folder
        self._kept_before: set[str] | None = None

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, and remove what is not needed any more.

        Its tensors go to a pool, each of them once: most of what was sent is still the state itself.
        """
        names: dict[int, str] = {}
        pool: dict[str, Tensor] = {}

        def put(tensor: Any) -> str:
            assert isinstance(tensor, Tensor), f"a checkpoint cannot hold {type(tensor).__name__}"
            name = names.setdefault(id(tensor), f"t{len(names)}")
            pool[name] = tensor
            return name

        text = msgspec.json.encode(checkpoint, enc_hook=put).decode()
        save_bundle(self._path(checkpoint.progress.version), Bundle(pool, {"format": FORMAT, "checkpoint": text}))
        for version in self._versions()[:-KEEP]:
            self._path(version).unlink()
        self._drop_unused(checkpoint)

    def parts(self) -> list[Path]:
        """The files that were half written when the run was killed."""
        found = []
        for path in [*self._folder.glob(".*.part"), *self._folder.glob("client-*/.*.part")]:
            ours = _NAME.fullmatch(name := part_of(path) or "") or _TASK.fullmatch(name)
            if ours and path.is_file():
                found.append(path)
        return found

    def found(self) -> bool:
        """Whether there is any checkpoint, whole or not."""
        return bool(self._versions())

    def check_format(self) -> None:
        """Refuse a run that another version began, before its settings are compared with those of today."""
        for version in reversed(self._versions()):
            try:
                bundle = load_bundle(self._path(version))
            except Damaged:
                continue
            _check_format(bundle, self._path(version))
            return

    def load(self, rounds: int, check: Callable[[Checkpoint], str | None]) -> Loaded:
        """The newest checkpoint that a run of so many rounds can continue from, and what is wrong with newer ones.

        `check` returns what else is wrong with a checkpoint, if anything. Changes nothing. Raises Damaged when there is
        no checkpoint to continue from.
        """
        problems: dict[Path, str] = {}
        ends = 0
        for version in reversed(self._versions()):
            path = self._path(version)
            try:
                found = _read(path, version)
            except Damaged as error:
                problems[path] = str(error)
                continue
            if found.is_end and found.rounds < rounds:
                ends += 1
            elif (problem := check(found) or self._lost(found)) is not None:
                problems[path] = f"{path}: {problem}"
            else:
                return Loaded(found, problems)
        reasons = list(problems.values()) or [f"{self._folder}: there is no checkpoint"]
        if ends:
            reasons.append("only the checkpoint at the run's end is whole, and rounds cannot be added to that")
        raise Damaged(f"{'; '.join(reasons)}; move {self._run} away, and --resume starts this run again")

    def clean(self, damaged: Iterable[Path]) -> None:
        """Remove files that were half written when the run was killed, and rename what would be in the way."""
        for part in self.parts():
            part.unlink()
        paths = [self._path(version) for version in self._versions()]
        for path in {*damaged, *(path for path in paths if path.is_symlink() or not path.is_file())}:
            names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
            os.rename(path, next(name for name in names if not os.path.lexists(name)))

    def _lost(self, checkpoint: Checkpoint) -> str | None:
        """What is wrong with the files that clients kept, if anything."""
        for name in sorted(checkpoint.kept()):
            if _KEPT.fullmatch(name) is None:
                return f"{name!r} is not what a client keeps"
            try:
                load_bundle(self._run / name)
            except Damaged as error:
                return f"what a client kept is lost: {error}"
        return None

    def _drop_unused(self, checkpoint: Checkpoint) -> None:
        """Remove files of clients that no checkpoint needs.

        The checkpoint before this one may still be needed, so its files stay until the next time.
        """
        kept, progress = checkpoint.kept(), checkpoint.progress
        if self._kept_before is not None:
            for path in self._folder.glob("client-*/task-*.safetensors"):
                name = str(path.relative_to(self._run))
                if (match := _KEPT.fullmatch(name)) is None or name in kept | self._kept_before:
                    continue
                # a client may have written its file long before its task ends in device time
                if int(match[1]) < progress.next_task and int(match[1]) not in progress.tasks:
                    path.unlink()
        self._kept_before = kept

    def _path(self, version: int) -> Path:
        return self._folder / f"checkpoint-{version:08d}.safetensors"

    def _versions(self) -> list[int]:
        names = (_NAME.fullmatch(path.name) for path in self._folder.glob("checkpoint-*"))
        return sorted(int(match[1]) for match in names if match is not None)


def _check_format(bundle: Bundle, path: Path) -> None:
    if (found := bundle.values.get("format", 1)) != FORMAT:
        raise Damaged(
            f"{path}: written by another fleetbed, as a checkpoint of format {found}, but fleetbed "
            f"{version_of('fleetbed')} reads format {FORMAT}: continue with the version that began the run"
        )


def _read(path: Path, version: int) -> Checkpoint:
    bundle = load_bundle(path)
    _check_format(bundle, path)

    def get(kind: type, name: Any) -> Tensor | AnyPolicy:
        if kind is AnyPolicy:
            return restored(name)
        if name not in bundle.tensors:
            raise Damaged(f"{path}: the tensor {name} is missing")
        return bundle.tensors[name]

    try:
        checkpoint = msgspec.json.decode(str(bundle.values.get("checkpoint")), type=Checkpoint, dec_hook=get)
    except msgspec.MsgspecError as error:
        raise Damaged(f"{path}: not what a checkpoint of this version looks like: {error}") from error
    if checkpoint.progress.version != version:
        raise Damaged(f"{path}: it is the checkpoint of merge {checkpoint.progress.version}")
    return checkpoint
