"""What a run keeps of the merges of evaluated rounds, if it is asked to: one file for each merge.

A change is what a merge did to a tensor of the server's state, after all that the method makes of the clients' results
(the papers' gradient of a round). The models of clients are those that they sent. A file replaces the one of the same
merge, so that a merge that is done again after a resumption leaves the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from torch import Tensor

from fleetbed.emulator.method.algorithm import Arrival, Assignment, ServerHalf
from fleetbed.emulator.method.bundle import Bundle, Value
from fleetbed.emulator.wire.storage import part_of, save_bundle
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Evaluation

CHANGES, CLIENTS = "changes", "client-models"  # folders of a run
_NAME = re.compile(r"merge-(\d{8,})\.safetensors")


class KeptMerges:
    """The files of one run."""

    def __init__(self, run: Path, evaluation: Evaluation) -> None:
        self._run = run
        self._evaluation = evaluation

    def keep(
        self,
        version: int,
        round_: int,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        arrivals: Sequence[Arrival],
    ) -> None:
        """Write what this merge changed, and what it was made of, if it is one of those that are kept."""
        if round_ % self._evaluation.every:
            return
        about: dict[str, Value] = {"version": version, "round": round_}
        if self._evaluation.changes:
            changed = {
                name: after[name] - before[name]
                for name in chosen(before, self._evaluation)
                if name in after and after[name].shape == before[name].shape
            }
            save_bundle(self._path(CHANGES, version), Bundle(changed, about))
        if self._evaluation.client_models:
            about["clients"] = [a.client.number for a in arrivals]
            about["variants"] = [a.client.variant for a in arrivals]
            sent = {
                f"{place}/{name}": tensor
                for place, a in enumerate(arrivals)
                for name, tensor in a.message.tensors.items()
                if "/" not in name  # else it goes with the weights
            }
            save_bundle(self._path(CLIENTS, version), Bundle(sent, about))

    def rewind(self, version: int) -> None:
        """Remove what was written after a checkpoint, and what is half written."""
        for folder in (self._run / CHANGES, self._run / CLIENTS):
            for path in folder.glob("merge-*"):
                if (match := _NAME.fullmatch(path.name)) and int(match[1]) > version:
                    path.unlink()
            for path in folder.glob(".*.part"):
                if _NAME.fullmatch(part_of(path) or ""):
                    path.unlink()

    def _path(self, folder: str, version: int) -> Path:
        return self._run / folder / f"merge-{version:08d}.safetensors"


def kept_files(run: Path, folder: str) -> list[Path]:
    """Return the files in one of the folders of a run, in the order of the merges."""
    return sorted(path for path in (run / folder).glob("merge-*") if _NAME.fullmatch(path.name))


def check_kept(method: ServerHalf, evaluation: Evaluation, title: str) -> None:
    """Refuse what this method cannot give."""
    if not (evaluation.changes or evaluation.client_models):
        return
    state = method.setup()
    check_patterns(state.tensors, evaluation, title)
    if evaluation.client_models:
        context, stage = method.context, method.needs.stages[0]
        assignment = Assignment(client=context.clients[0], stage=stage)
        expected = method.expects(assignment, method.send(state, assignment))
        whole = context.family.tensors(context.clients[0].variant, context.spec)
        if expected is None or not set(whole) <= set(expected.tensors):
            raise BadInput(
                f"evaluation.client_models is true, but the clients of {title} do not send whole models: "
                f"leave it out, or choose a method that averages whole models, such as heteroavg or fedavg."
            )


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
