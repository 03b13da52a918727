"""Cached results are found again, and never trusted if they are damaged or come from other code."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetbed.models.cost import cache as module
from fleetbed.models.cost.cache import cached


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def never() -> int:
    raise AssertionError("computed although it is cached")


def test_it_is_computed_once() -> None:
    assert cached(["a", 1], int, lambda: 7) == 7
    assert cached(["a", 1], int, never) == 7
    assert cached(["a", 2], int, lambda: 8) == 8


def test_other_code_computes_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cached("a", int, lambda: 7) == 7
    monkeypatch.setattr(module, "_code", lambda: "other")
    assert cached("a", int, lambda: 8) == 8


def test_a_spoilt_file_is_replaced(tmp_path: Path) -> None:
    cached("a", int, lambda: 7)
    (path,) = tmp_path.rglob("*.json")
    path.write_bytes(b'"seven')
    assert cached("a", int, lambda: 8) == 8
    assert cached("a", int, never) == 8


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cached("a", int, lambda: 7) == 7
    assert cached("a", int, lambda: 8) == 8
