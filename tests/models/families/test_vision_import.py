"""torchvision is patched only where its import fails for the missing operators."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

from fleetbed.models.families import vision


def test_models_work() -> None:
    net = vision.torchvision.models.resnet18(num_classes=3).eval()
    assert net(torch.zeros(1, 3, 32, 32)).shape == (1, 3)


def test_a_sound_torchvision_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = ModuleType("torchvision")

    def define(*_: Any) -> None:
        pytest.fail("declared an operator that torchvision has")

    monkeypatch.setattr(importlib, "import_module", lambda _: sound)
    monkeypatch.setattr(torch.library, "define", define)
    assert vision._import_torchvision() is sound


def test_the_operators_are_declared_before_a_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    declared: list[str] = []
    patched = ModuleType("torchvision")

    def import_module(_: str) -> ModuleType:
        if not declared:
            raise RuntimeError("operator torchvision::nms does not exist")
        return patched

    monkeypatch.setattr(vision.sys, "modules", {"torchvision.extension": ModuleType("left behind")})
    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr(torch.library, "define", lambda name, _: declared.append(name))
    assert vision._import_torchvision() is patched
    assert declared == ["torchvision::nms", "torchvision::qnms"]
    assert vision.sys.modules == {}


def test_another_failure_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(_: str) -> ModuleType:
        raise RuntimeError("different CUDA major versions")

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(RuntimeError, match="different CUDA"):
        vision._import_torchvision()
