"""Tasks made by hand, for tests of what happens to them."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetbed.emulator.engine.task import Task


def make_task(**fields: Any) -> Task:
    """A task of client 0 in round 1, dispatched at 0 s, with these fields."""
    plain = Task(
        number=0,
        client=0,
        variant="resnet10",
        round=1,
        stage="train",
        base_version=0,
        kept=None,
        cap_bytes=1 << 20,
        dispatched_s=0.0,
        host_queued_s=0.0,
    )
    return msgspec.structs.replace(plain, **fields)
