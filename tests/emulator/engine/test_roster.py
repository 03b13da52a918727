"""Who can be invited, and what becomes of a client that runs out of memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fleetbed.emulator.engine.participant import ClientProgress, Participant
from fleetbed.emulator.engine.prepared import Prepared
from fleetbed.emulator.engine.progress import Progress
from fleetbed.emulator.engine.roster import Roster
from fleetbed.emulator.engine.task import Task
from fleetbed.emulator.method.algorithm import Client
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.wire.storage import load_bundle, save_bundle
from fleetbed.models.work import Work
from fleetbed.profiles.errors import FleetbedError
from fleetbed.profiles.resolve import clients_of, load_fleet

VARIANTS = ("small", "middle", "large")


@dataclass
class Method:
    """The part of a method that a roster speaks to."""

    clients: list[Client] = field(default_factory=list)
    context: Any = field(default_factory=lambda: SimpleNamespace(family=SimpleNamespace(variants=VARIANTS)))

    def reassign(self, clients: list[Client]) -> None:
        self.clients = clients

    def step_down(self, kept: Bundle, client: Client) -> Bundle | None:
        """Of what was kept, the head serves the middle variant too; the small one can use nothing."""
        return Bundle({"head": kept.tensors["head"]}) if client.variant == "middle" else None


class RosterBed:
    def __init__(
        self,
        *variants: str,
        on_oom: str = "step-down",
        capped: bool = True,
        needed: int = 1,
        folder: Path = Path("nowhere"),
    ) -> None:
        specs = clients_of(load_fleet("demo", (), ""), (), "")
        clients = {number: ClientProgress(variant) for number, variant in enumerate(variants)}
        participants = {
            number: Participant(
                spec=specs[number],
                samples=10,
                progress=client,
                cap_bytes=1,
                heaviest=Work(),
                capped=capped,
                share=1.0,
                slowdown=None,
            )
            for number, client in clients.items()
        }
        self.method = Method()
        self.clients = clients
        self.tasks: dict[int, object] = {}
        self.away: list[int] = []
        timing = SimpleNamespace(on_oom=on_oom)
        prepared = SimpleNamespace(participants=participants, method=self.method, timing=timing)
        progress = SimpleNamespace(
            clients=clients,
            tasks=self.tasks,
            availability=SimpleNamespace(away=self.away),
            policy=SimpleNamespace(min_clients=needed),
        )
        self.roster = Roster(cast(Prepared, prepared), cast(Progress, progress), folder)


def test_clients_that_are_busy_away_or_unfit_are_not_idle() -> None:
    bed = RosterBed("small", "small", "small", "small", "small")
    bed.tasks[9] = SimpleNamespace(client=1)
    bed.away += [2, 1]
    bed.clients[3].fit = False
    assert bed.roster.idle() == [0, 4]
    assert bed.roster.away() == [2], "one that is busy could not be invited anyway"
    assert bed.roster.is_away(2)
    assert not bed.roster.is_away(0)


def ended(client: int, number: int = 7) -> Task:
    return cast(Task, SimpleNamespace(client=client, number=number))


def test_a_client_that_ran_out_of_memory_gets_the_next_smaller_variant() -> None:
    bed = RosterBed("large", "middle")
    kind, text = bed.roster.step_down(ended(0), "killed")
    assert kind == "step-down"
    assert text.endswith("ran out of memory with large, now middle")
    assert bed.clients[0] == ClientProgress("middle")
    assert bed.method.clients == [Client(0, "middle", 10), Client(1, "middle", 10)]


def test_it_keeps_what_still_serves_it(tmp_path: Path) -> None:
    bed = RosterBed("large", folder=tmp_path)
    bed.clients[0].kept = "state/client-000/task-00000001.safetensors"
    kept = Bundle({"head": torch.ones(2), "body": torch.ones(3)})
    save_bundle(tmp_path / bed.clients[0].kept, kept)
    bed.roster.step_down(ended(0), "killed")
    assert bed.clients[0].kept == "state/client-000/task-00000007.safetensors"
    assert load_bundle(tmp_path / bed.clients[0].kept).tensors.keys() == {"head"}
    bed.roster.step_down(ended(0, 8), "killed")
    assert bed.clients[0] == ClientProgress("small"), "nothing serves the small one"


@pytest.mark.parametrize(("variant", "capped"), [("small", True), ("large", False)])
def test_one_without_a_smaller_variant_leaves_the_run(variant: str, capped: bool) -> None:
    """A variant that the experiment fixes is not exchanged."""
    bed = RosterBed(variant, "small", capped=capped, needed=2)
    bed.roster.check_enough()
    kind, text = bed.roster.step_down(ended(0), "killed")
    assert kind == "unfit"
    assert text.endswith(f"ran out of memory with {variant} and leaves the run")
    assert bed.roster.idle() == [1]
    with pytest.raises(FleetbedError, match="clients that can still take part: 1, needed for a merge: 2"):
        bed.roster.check_enough()


def test_where_the_timeline_must_not_depend_on_this_host_the_run_ends() -> None:
    bed = RosterBed("large", on_oom="end")
    with pytest.raises(FleetbedError, match=r"large, which should fit: killed; raise budgets\.memory_margin"):
        bed.roster.step_down(ended(0), "killed")
