"""A client of a run, with what was chosen for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleetbed.emulator.method.algorithm import Client
from fleetbed.models.work import Work
from fleetbed.profiles.types import ClientSpec


@dataclass
class Participant:
    spec: ClientSpec
    client: Client
    cap_bytes: int
    heaviest: Work  # the most that a task of this client asks for
    capped: bool = True  # False: a variant was forced on it that need not fit
    fit: bool = True  # False: it ran out of memory with the smallest variant and takes no part any more
    share: float = 1.0  # of a host core, while its task runs
    slowdown: float | None = None  # device seconds over host seconds of its heaviest task, where that was measured
    kept: str | None = None  # the committed file of what it keeps

    def step_down(self, variants: Sequence[str]) -> bool:
        """Go on with the next smaller variant and nothing kept; False if that cannot be: it takes no part any more."""
        position = variants.index(self.client.variant)
        self.fit = self.capped and position > 0
        if self.fit:
            self.client = replace(self.client, variant=variants[position - 1])
            self.kept = None
        return self.fit

    @property
    def worker(self) -> str:
        return f"client-{self.spec.name}"
