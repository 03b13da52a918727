"""Which model each device of an experiment can train, in Python."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fleetbed.profiles.settings import as_settings
from fleetbed.results import RecordTable
from fleetbed.running import ask_experiment


def fit(
    experiment: str | os.PathLike[str] | Mapping[str, Any],
    *,
    set: Mapping[str, Any] | None = None,
    profiles: Sequence[str | os.PathLike[str]] = (),
) -> RecordTable:
    """Return which variant each kind of device would train under each method, and what stops the next larger one.

    The arguments are those of `fleetbed.run`; nothing is run.
    """
    asked, search = ask_experiment(experiment, as_settings(set or {}), profiles)
    from fleetbed.emulator.run.fit_table import fit_experiment
    from fleetbed.models.cost.choose import FitRow

    rows = [msgspec.to_builtins(row) for row in fit_experiment(asked, search)]
    return RecordTable("fit", FitRow.__struct_fields__, [list(row.values()) for row in rows])
