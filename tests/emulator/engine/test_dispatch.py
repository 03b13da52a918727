"""The plan of a task in phases, and to what it is cut where the policy takes partial work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from fleetbed.emulator.engine.dispatch import Dispatcher
from fleetbed.emulator.engine.timing import Modelled, TrainingCosts
from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.models.work import Pass, Phase, Work
from fleetbed.profiles.experiment import Optimizer
from fleetbed.profiles.resolve import load_device
from fleetbed.profiles.types import Link

HEAD = Phase(steps=6, batch=4, trains="classifier", each_step=(Pass("forward", "features", 4),))
WORK = Work(earlier=(HEAD,), steps=3, batch=4, bytes_down=1_000_000, bytes_up=1_000_000)
BOARD = msgspec.structs.replace(load_device("raspberry-pi-4b-4gb", (), ""), throttle=None, train_scale=100.0)
LINK = Link(title="8 Mbit/s", down_mbit_s=8, up_mbit_s=8, rtt_ms=0)  # a second for a megabyte
TIMING = Modelled(TrainingCosts(family("resnet-stage", {"base_width": 4}), InputSpec((3, 32, 32), 10), Optimizer()))
WHOLE = TIMING.plan(BOARD, "resnet10", WORK, 0)


def planned(deadline_s: float | None, *, partial: bool = True, work: Work = WORK) -> tuple[Any, Work, int | None]:
    """What the dispatcher makes of the work of a client whose download is a megabyte."""
    policy = SimpleNamespace(partial=partial, deadline_s=deadline_s)
    server = Link(title="fast", down_mbit_s=1000, up_mbit_s=1000, rtt_ms=0)
    layout: Any = SimpleNamespace(config=SimpleNamespace(policy=policy), server_link=server, rates=None)
    prepared: Any = SimpleNamespace(participants={}, method=None, timing=TIMING)
    progress: Any = SimpleNamespace(next_task=0, timeline=SimpleNamespace(now_s=0.0))
    who: Any = SimpleNamespace(
        spec=SimpleNamespace(device=BOARD, link=LINK, number=0), client=SimpleNamespace(variant="resnet10")
    )
    nobody: Any = None
    return Dispatcher(layout, prepared, nobody, progress)._plan(who, work, 1_000_000)


def test_a_task_in_phases_has_a_pace_for_each() -> None:
    plan, work, most = planned(None, partial=False)
    assert [pace.steps for pace in plan.paces] == [6, 3]
    assert plan.paces[0].step_s < plan.paces[1].step_s
    assert (work, most) == (WORK, None)


@pytest.mark.parametrize("steps", range(1, 9))
def test_partial_work_is_cut_to_the_steps_that_fit_in_either_phase(steps: int) -> None:
    """Half a step of slack, a second for each transfer."""
    fits_s = (WHOLE.first_s(steps) + WHOLE.first_s(steps + 1)) / 2 + 2.0
    plan, work, most = planned(fits_s)
    assert most == steps
    assert (work.earlier[0].steps, work.steps) == (min(6, steps), max(0, steps - 6))
    assert plan.total_s == pytest.approx(WHOLE.first_s(steps))
    assert [pace.steps for pace in plan.paces] == ([6, steps - 6] if steps > 6 else [steps])


def test_what_fits_whole_is_not_cut_and_one_step_is_the_least() -> None:
    assert planned(WHOLE.total_s + 2.01)[2] is None
    assert planned(WHOLE.total_s + 2.01)[1] == WORK
    assert planned(0.001)[2] == 1


def test_the_upload_is_as_large_as_declared() -> None:
    """Where nothing is sent back there is a second more for steps."""
    tight_s = WHOLE.total_s + 1.01
    assert planned(tight_s)[2] is not None
    assert planned(tight_s, work=msgspec.structs.replace(WORK, bytes_up=0))[2] is None
