"""Generated experiments, devices, links, fleets, traces, partitions and data files at the command line.

Whatever they hold, a command ends with exit code 0, 2 or 3, without a traceback, within half a minute of computing.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from generated import Maker

from fleetbed.cli.main import main

SOME, ALL = 12, 2000
MOST_CPU_S, MOST_WALL_S = 30, 180  # of a case; other processes of the host may take their share of the second


class _Late(BaseException):
    pass


@contextlib.contextmanager
def patience(seconds: int) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def carry_out(args: list[str]) -> tuple[object, str]:
    """The exit code, and what was said on stderr; other ends are told by a word instead of the code."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with patience(MOST_WALL_S), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(args)
    except SystemExit as end:
        return end.code or 0, err.getvalue()
    except _Late:
        return "late", err.getvalue()
    except BaseException:  # noqa: BLE001 - it is what is looked for
        return "raised", traceback.format_exc()
    return 0, err.getvalue()


def failures(numbers: Iterable[int], folder: Path) -> tuple[list[str], Counter[object]]:
    found, codes = [], Counter[object]()
    for number in numbers:
        place = folder / str(number)
        place.mkdir()
        args = Maker(number, place).case()
        begun_s = time.process_time()
        code, said = carry_out(args)
        seconds = time.process_time() - begun_s
        codes[code] += 1
        if code not in (0, 2, 3) or "Traceback" in said or (code != 0 and not said) or seconds > MOST_CPU_S:
            found.append(f"case {number}: {code} after {seconds:.0f} s: fleetbed {' '.join(args)}\n{said[-1500:]}")
        shutil.rmtree(place)
    return found, codes


def test_some_of_them(tmp_path: Path) -> None:
    found, codes = failures(range(SOME), tmp_path)
    assert not found, "\n".join(found)
    assert codes[0] > 0  # the generator must not make only invalid cases
    assert codes[2] > 0


@pytest.mark.slow
def test_more_of_them(tmp_path: Path) -> None:
    found, _ = failures(range(SOME, 100), tmp_path)
    assert not found, "\n".join(found)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, ALL, 100))
def test_all_of_them(tmp_path: Path, first: int) -> None:
    found, codes = failures(range(first, first + 100), tmp_path)
    print(dict(codes))
    assert not found, "\n".join(found)
