"""Loads the scripts of the study, which are not part of the package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "study"


@pytest.fixture(scope="session")
def study() -> ModuleType:
    return _load("claims")


@pytest.fixture(scope="session")
def similarity() -> ModuleType:
    return _load("similarity")


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"study_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
