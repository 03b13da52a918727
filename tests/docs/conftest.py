"""Loads the scripts of the study, which are not part of the package."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

sys.path.append(str(Path(__file__).parents[2] / "docs" / "study"))


@pytest.fixture(scope="session")
def study() -> ModuleType:
    return import_module("claims")


@pytest.fixture(scope="session")
def similarity() -> ModuleType:
    return import_module("similarity")


@pytest.fixture(scope="session")
def orders() -> ModuleType:
    return import_module("orders")


@pytest.fixture(scope="session")
def fitted() -> ModuleType:
    return import_module("fitted")


@pytest.fixture(scope="session")
def tried() -> ModuleType:
    return import_module("tried")


@pytest.fixture(scope="session")
def policies() -> ModuleType:
    return import_module("policies")
