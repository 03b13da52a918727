"""Work in phases: their order, their sums, and where it is cut."""

from __future__ import annotations

import pytest

from fleetbed.models.work import Pass, Phase, Work

HEAD = Phase(steps=4, batch=8, trains="classifier", each_step=(Pass("forward", "features", 8),))
WORK = Work(earlier=(HEAD,), steps=3, batch=5, parameter_passes=2, held_models=1, bytes_up=7)


def test_the_last_phase_is_the_works_own() -> None:
    assert WORK.phases == (HEAD, Phase(steps=3, batch=5, parameter_passes=2))
    assert Work(steps=3, batch=5).phases == (Phase(steps=3, batch=5),)


def test_steps_and_samples_are_those_of_all_phases() -> None:
    assert (WORK.all_steps, WORK.all_samples) == (7, 4 * 8 + 3 * 5)
    assert (Work(steps=3, batch=5).all_steps, Work(steps=3, batch=5).all_samples) == (3, 15)


@pytest.mark.parametrize(
    ("steps", "first", "last"), [(0, 0, 0), (1, 1, 0), (4, 4, 0), (5, 4, 1), (7, 4, 3), (100, 4, 3)]
)
def test_a_cut_ends_the_phases_in_order(steps: int, first: int, last: int) -> None:
    cut = WORK.cut(steps)
    assert (cut.earlier[0].steps, cut.steps, cut.all_steps) == (first, last, min(steps, 7))
    assert (cut.earlier[0].trains, cut.parameter_passes, cut.held_models, cut.bytes_up) == ("classifier", 2, 1, 7)


def test_a_cut_of_the_whole_is_the_same_work() -> None:
    assert WORK.cut(7) == WORK
    assert WORK.all_steps == 7  # cutting changes nothing in place
