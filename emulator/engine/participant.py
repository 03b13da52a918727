"""A client of a run, with what was chosen for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from fleetbed.emulator.method.algorithm import Client
from fleetbed.models.work import Work
from fleetbed.profiles.types import ClientSpec


class ClientProgress(Struct):
    """The part of a client that changes during a run, and that checkpoints hold."""

    variant: str
    kept: str | None = None  # the committed file of what it keeps
    fit: bool = True  # False: it ran out of memory with the smallest variant and takes no part any more


@dataclass(frozen=True, kw_only=True)
class Participant:
    spec: ClientSpec
    samples: int
    progress: ClientProgress
    cap_bytes: int
    heaviest: Work  # the most that a task of this client asks for
    capped: bool  # False: a variant was forced on it that need not fit
    share: float  # of a host core, while its task runs
    slowdown: float | None  # device seconds over host seconds of its heaviest task, where that was measured

    @property
    def client(self) -> Client:
        """The client as methods see it."""
        return Client(self.spec.number, self.progress.variant, self.samples)

    @property
    def worker(self) -> str:
        return f"client-{self.spec.name}"

    def step_down(self, variants: Sequence[str]) -> bool:
        """Continue with the next smaller variant and nothing kept; False if there is none, so that it drops out."""
        now = self.progress
        position = variants.index(now.variant)
        now.fit = self.capped and position > 0
        if now.fit:
            now.variant, now.kept = variants[position - 1], None
        return now.fit
