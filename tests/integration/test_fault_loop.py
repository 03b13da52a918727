"""Runs that are disturbed at random moments end or can be resumed, with the same results, and leave nothing behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from fault_loop import FILES, SIGNALS, TARGETS, Bed, Life, draw

#: every signal to every process, and every file; the moment is drawn from the position
KINDS = [*((signal, target) for target in TARGETS for signal in SIGNALS), *((file, "") for file in FILES)]
ALL_RUNS = 200


def loop(folder: Path, kinds: Sequence[tuple[str, str] | None]) -> list[Life]:
    """Carry out one disturbed run for each kind of fault, drawn where it is None; print what became of them."""
    bed, lives = Bed(folder), []
    for number, kind in enumerate(kinds):
        lives.append(bed.live(draw(number, bed.run_s, kind), number))
        life = lives[-1]
        print(number, life.fault, life.hit, life.exits, f"{life.seconds:.1f} s", *life.problems, flush=True)
        if life.problems:
            print(life.said)
    print(len(lives), "runs,", sum(life.hit for life in lives), "of them hit;", bed.run_s, "s undisturbed")
    print(Counter((life.fault.what, life.fault.target) for life in lives if life.hit))
    print("exits of disturbed commands:", Counter(life.exits[0] for life in lives if life.hit))
    print("longest:", max(life.seconds for life in lives))
    return lives


def judge(lives: list[Life]) -> None:
    assert [(life.fault, life.problems, life.said[-1500:]) for life in lives if life.problems] == []
    assert sum(life.hit for life in lives) > len(lives) / 2


@pytest.mark.slow
def test_disturbed_runs(tmp_path: Path) -> None:
    judge(loop(tmp_path, KINDS))


@pytest.mark.soak
def test_all_disturbed_runs(tmp_path: Path) -> None:
    judge(loop(tmp_path, [None] * ALL_RUNS))
