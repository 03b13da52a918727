"""Runs that are disturbed at random: each ends or can be resumed, with the same results, and leaves nothing behind."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
from fault_loop import Bed, Life, draw

SLOW_RUNS, SLOW_S = 60, 240.0
ALL_RUNS = 200


def loop(folder: Path, numbers: range, seconds: float) -> list[Life]:
    """Disturbed runs until there are enough, or no time is left; says what became of them."""
    bed, lives, end_s = Bed(folder), [], time.monotonic() + seconds
    for number in numbers:
        lives.append(bed.live(draw(number, bed.run_s), number))
        life = lives[-1]
        print(number, life.fault, life.hit, life.exits, f"{life.seconds:.1f} s", *life.problems, flush=True)
        if life.problems:
            print(life.said)
        if time.monotonic() > end_s:
            break
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
    judge(loop(tmp_path, range(SLOW_RUNS), SLOW_S))


@pytest.mark.soak
def test_all_disturbed_runs(tmp_path: Path) -> None:
    lives = loop(tmp_path, range(ALL_RUNS), float("inf"))
    judge(lives)
    assert len(lives) == ALL_RUNS
