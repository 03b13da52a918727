"""The file that describes a study: what was asked for, so that it can be resumed from any folder."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Experiment
from fleetbed.profiles.loading import decode

STUDY = "study.json"


class Study(Struct, frozen=True):
    """The complete request."""

    experiment: Experiment
    search: tuple[str, ...]
    command: str

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(Path(text) for text in self.search)


def parse_study(content: bytes, path: Path) -> Study:
    """Return the study in the content of its file."""
    try:
        tree = msgspec.json.decode(content)
        study = msgspec.convert(tree, Study)
    except (ValueError, RecursionError) as error:  # not JSON, not text, or unknown keys
        raise BadInput(f"{path}: not a study of this version: {error}") from error
    # names that become paths are checked as if the user had just given them
    decode(tree["experiment"], Experiment, str(path), "experiment")
    return study
