"""The changes of chosen weights that a run keeps: one file for each merge of the rounds that are evaluated.

A change is what a merge did to a tensor of the server's state, after all that the method makes of the clients' results
(the papers' gradient of a round). A file replaces the one of the same merge, so that a merge that is done again after a
resumption leaves the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from torch import Tensor

from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.wire.storage import part_of, save_bundle
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Evaluation

FOLDER = "changes"
_NAME = re.compile(r"merge-(\d{8,})\.safetensors")


class Changes:
    """The changes of one run. Without patterns it keeps nothing."""

    def __init__(self, run: Path, evaluation: Evaluation) -> None:
        self._folder = run / FOLDER
        self._evaluation = evaluation

    def keep(self, version: int, round_: int, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Write what this merge changed, if it is one of those that are kept."""
        if not self._evaluation.changes or round_ % self._evaluation.every:
            return
        changed = {
            name: after[name] - before[name]
            for name in chosen(before, self._evaluation)
            if name in after and after[name].shape == before[name].shape
        }
        path = self._folder / f"merge-{version:08d}.safetensors"
        save_bundle(path, Bundle(changed, {"version": version, "round": round_}))

    def rewind(self, version: int) -> None:
        """Remove what was written after a checkpoint, and what is half written."""
        for path in self._folder.glob("merge-*"):
            if (match := _NAME.fullmatch(path.name)) and int(match[1]) > version:
                path.unlink()
        for path in self._folder.glob(".*.part"):
            if _NAME.fullmatch(part_of(path) or ""):
                path.unlink()

    def files(self) -> list[Path]:
        """Return the files, in the order of the merges."""
        return sorted(path for path in self._folder.glob("merge-*") if _NAME.fullmatch(path.name))


def chosen(state: Mapping[str, Tensor], evaluation: Evaluation) -> list[str]:
    """Return the tensors whose changes are kept: those of numbers that a pattern matches."""
    return [
        name
        for name, tensor in state.items()
        if tensor.is_floating_point() and any(fnmatchcase(name, pattern) for pattern in evaluation.changes)
    ]


def check_patterns(state: Mapping[str, Tensor], evaluation: Evaluation, method: str) -> None:
    """Refuse a pattern that matches nothing of what the method's server holds."""
    for number, pattern in enumerate(evaluation.changes):
        if not chosen(state, Evaluation(changes=(pattern,))):
            there = [name for name, tensor in state.items() if tensor.is_floating_point()]
            known = f"which are called {there[0]} to {there[-1]}" if there else "of which there are none"
            raise BadInput(
                f"evaluation.changes.{number} is {pattern}, which matches none of the weights that the server of "
                f"{method} holds, {known}: correct it, or leave it out."
            )


def size_text(state: Mapping[str, Tensor], evaluation: Evaluation) -> str:
    """Say how much is kept of a merge."""
    names = chosen(state, evaluation)
    size = sum(state[name].numel() * state[name].element_size() for name in names) / 2**20
    return f"keeping the change of {len(names)} tensors, {size:.1f} MiB for each merge"
