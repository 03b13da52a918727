from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Arrays = dict[str, Any]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the user's cache or downloads is read or written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))


@pytest.fixture
def arrays() -> Arrays:
    """A small sound set: 3 classes, 30 training and 12 test images of 6x6 pixels and 3 channels."""
    rng = np.random.default_rng(5)
    return {
        "x_train": rng.integers(0, 256, (30, 6, 6, 3), dtype=np.uint8),
        "y_train": np.arange(30) % 3,
        "x_test": rng.integers(0, 256, (12, 6, 6, 3), dtype=np.uint8),
        "y_test": np.arange(12) % 3,
    }


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., str]:
    def save(arrays: Arrays, name: str = "own.npz") -> str:
        path = tmp_path / name
        np.savez(path, **arrays)
        return str(path)

    return save
