"""Fixtures of tests with real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_runs import tiny

from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.run import run


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The data's cache and the calibration of the person who runs the tests stay untouched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Path]:
    """Carry a small run out; gives its folder."""

    def start_run(*sets: str, name: str = "run", observer: Observer | None = None) -> Path:
        folder = tmp_path / name
        run.start(tiny(*sets), folder, search=(), command="test", observer=observer or Observer())
        return folder

    return start_run
