"""What is kept is found again, and never believed where it is spoilt or of other code."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetbed.models.cost import cache as module
from fleetbed.models.cost.cache import kept


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def never() -> int:
    raise AssertionError("computed although it is kept")


def test_it_is_computed_once() -> None:
    assert kept(["a", 1], int, lambda: 7) == 7
    assert kept(["a", 1], int, never) == 7
    assert kept(["a", 2], int, lambda: 8) == 8


def test_other_code_computes_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept("a", int, lambda: 7) == 7
    monkeypatch.setattr(module, "_code", lambda: "other")
    assert kept("a", int, lambda: 8) == 8


def test_a_spoilt_file_is_replaced(tmp_path: Path) -> None:
    kept("a", int, lambda: 7)
    (path,) = tmp_path.rglob("*.json")
    path.write_bytes(b'"seven')
    assert kept("a", int, lambda: 8) == 8
    assert kept("a", int, never) == 8


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kept("a", int, lambda: 7) == 7
    assert kept("a", int, lambda: 8) == 8
