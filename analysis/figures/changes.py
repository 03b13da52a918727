"""Reads the changes of weights that runs kept (the papers' gradients of the rounds), and compares those of two runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from fleetbed.analysis.figures.similarity import Floats, linear_cka
from fleetbed.analysis.tables.runs import Run
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.records.kept_merges import CHANGES, kept_files
from fleetbed.emulator.wire.storage import Damaged, load_bundle
from fleetbed.profiles.errors import BadInput

_ROUND = re.compile(r'"round": (\d+)')


def files_by_round(run: Run, folder: str) -> dict[int, Path]:
    """Return the files of kept merges by round; of several in one round, the last."""
    found = {}
    for path in kept_files(run.folder, folder):
        try:
            with safe_open(path, framework="pt") as file:
                about = (file.metadata() or {}).get("values", "")
        except (SafetensorError, OSError) as error:
            raise damaged(path, error) from error
        if (match := _ROUND.search(about)) is None:
            raise damaged(path, "its round is missing")
        found[int(match[1])] = path
    return found


def load_kept(path: Path) -> Bundle:
    """Load what was kept of a merge."""
    try:
        return load_bundle(path)
    except Damaged as error:
        raise damaged(path, error) from error


def damaged(path: Path, why: object) -> BadInput:
    return BadInput(f"{path}: not what was kept of a merge ({why}); copy the run again.")


class KeptChanges:
    """The changes that a run kept; of several merges in one round, the last."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @cached_property
    def files(self) -> dict[int, Path]:
        """The files by round."""
        found = files_by_round(self._run, CHANGES)
        if not found:
            raise BadInput(
                f"{self._run.folder}: it kept no changes of weights; choose a run with evaluation.changes, such as "
                f"--set 'evaluation.changes=[\"*layer3.*.conv?.weight\"]', that has reached an evaluated round."
            )
        return found

    @cached_property
    def layers(self) -> list[str]:
        """The names of the tensors, with numbers in their order."""
        return sorted(self.of(next(iter(self.files))), key=_by_number)

    def of(self, round_: int) -> dict[str, Floats]:
        """Return the changes of a round, by the names of the tensors."""
        tensors = load_kept(self.files[round_]).tensors
        return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a key by which block 7 comes before block 11."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def common_layers(runs: Sequence[KeptChanges]) -> list[str]:
    """Return the layers of which all runs kept the changes."""
    found = [name for name in runs[0].layers if all(name in one.layers for one in runs)]
    if not found:
        raise BadInput("plot gradients: the runs kept changes of different weights; draw them one by one.")
    return found


def both(one: KeptChanges, other: KeptChanges) -> Iterator[tuple[int, dict[str, Floats], dict[str, Floats]]]:
    """Yield the changes of two runs in each round that both kept."""
    rounds = sorted(one.files.keys() & other.files.keys())
    if not rounds:
        raise BadInput("plot gradients: the runs kept the changes of different rounds; draw them one by one.")
    for round_ in rounds:
        yield round_, one.of(round_), other.of(round_)


def stage_of(layer: str) -> str:
    """Return the stage of a ResNet, or the block of a transformer, in which a layer is: its name up to a number."""
    model, _, name = layer.rpartition("/")
    match = re.match(r"\D*\d+", name)
    stage = name.partition(".")[0] if match is None else match[0]
    return f"{model}/{stage}" if model else stage


def similarity(one: Floats, other: Floats) -> float:
    """Return the linear CKA of two changes of a layer, whose rows are its outputs."""
    return linear_cka(one.reshape(len(one), -1), other.reshape(len(other), -1))


def statistics_of(one: Floats, other: Floats) -> dict[str, float]:
    """Return statistics of the difference between two changes of a layer."""
    difference = one - other
    return {
        "norm": float(np.linalg.norm(difference)),
        "mean |x|": float(np.abs(difference).mean()),
        "deviation": float(difference.std()),
    }


def norm(changes: dict[str, Floats], layers: Sequence[str]) -> float:
    """Return the Frobenius norm of the changes of these layers together."""
    return float(np.sqrt(sum(np.square(changes[name]).sum() for name in layers)))


def relative(values: dict[str, float]) -> dict[str, float]:
    """Divide the value of each layer by the smallest one of its stage; NaN where that is 0."""
    least: dict[str, float] = {}
    for layer, value in values.items():
        least[stage_of(layer)] = min(value, least.get(stage_of(layer), value))
    return {name: value / low if (low := least[stage_of(name)]) else float("nan") for name, value in values.items()}
