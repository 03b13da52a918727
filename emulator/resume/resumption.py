"""Finds out whether a run can continue, and from where: run and checkpoint must still belong together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from fleetbed.emulator.engine.layout import Layout, lay_out
from fleetbed.emulator.records.records import Records
from fleetbed.emulator.records.seal import Seal
from fleetbed.emulator.resume import identity
from fleetbed.emulator.resume.checkpoint import Checkpoint, Checkpoints, Loaded
from fleetbed.emulator.timeline.making_policies import make_policy
from fleetbed.emulator.wire.storage import Damaged
from fleetbed.models.plug_ins import code_files
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import RunConfig
from fleetbed.profiles.older import up_to_date


def look_up(config: RunConfig, folder: Path, records: Records, search: Sequence[Path]) -> tuple[Layout, Loaded]:
    """Check that the run is still the same, and find the newest checkpoint that it can continue from."""
    Checkpoints(folder).check_format()
    identity.check_same(str(folder), "versions", records.meta("versions"), identity.versions())
    try:
        before = msgspec.convert(up_to_date(records.meta("config")), RunConfig)
    except msgspec.ValidationError as error:
        raise Damaged(f"{folder / 'run.sqlite'}: the stored configuration is none of this version ({error})") from error
    more = config.experiment.rounds > before.experiment.rounds
    rounds = before.experiment.rounds if more else config.experiment.rounds
    as_before = replace(config, experiment=replace(config.experiment, rounds=rounds))
    identity.check_same(str(folder), "configuration", before, as_before)
    identity.check_same(str(folder), "files", records.meta("files") or {}, code_files(config.code))
    layout = lay_out(config, search)
    if more:
        _check_more_rounds(layout, before, folder)
    identity.check_same(str(folder), "profiles", records.meta("profiles"), identity.profiles(layout))
    for key in ("timing", "calibration"):
        if records.rows(f"SELECT count(*) FROM meta WHERE key = '{key}'") != [(1,)]:
            raise Damaged(f"{folder / 'run.sqlite'}: the entry {key} is missing from the records")
    owner = identity.run_digest(config)

    def check(found: Checkpoint) -> str | None:
        if found.run != owner:
            return "it belongs to another run"
        p = found.progress
        if Seal(records).upto(p.version, p.next_task, p.tasks) != found.records:
            return "the records are not those that it was written with"
        return None

    return layout, Checkpoints(folder).load(config.experiment.rounds, check)


def _check_more_rounds(layout: Layout, before: RunConfig, folder: Path) -> None:
    """Refuse to add rounds where the result would differ from a run that had so many from the beginning."""
    if layout.config.experiment.timing.source == "replay":
        raise BadInput(f"{folder}: rounds cannot be added: timing.source is replay and the recording ends there")
    needs = layout.stand_in.needs
    policies = [
        make_policy(each.experiment, each.policy, each.seed, dict.fromkeys(range(len(layout.specs)), 1.0), 1)
        for each in (before, layout.config)
    ]
    who = layout.config.algorithm.title if needs.total_rounds else "participation"
    if needs.total_rounds or policies[0] != policies[1]:
        raise BadInput(
            f"{folder}: rounds cannot be added: {who} goes by the number of all rounds; start a new run with --out"
        )
