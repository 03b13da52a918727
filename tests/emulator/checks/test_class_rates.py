"""Rates by class, measured on this machine."""

from __future__ import annotations

import pytest

from fleetbed.emulator.checks import class_rates
from fleetbed.profiles.errors import FleetbedError
from fleetbed.profiles.types import Rates


def test_a_process_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_rates.interpreter, "module_command", lambda *_: ["false"])
    with pytest.raises(FleetbedError, match="ended early"):
        class_rates.measure_classes(1, 0.1)


@pytest.mark.slow
def test_the_rates_of_one_core_predict_two_training_steps() -> None:
    """CPU time of one thread, so it holds on a busy host too, only less well."""
    found, others = class_rates.host_rates(8.0)
    assert all(getattr(found.rates, name) > 0 for name in Rates.__struct_fields__)
    assert found.rates.depthwise_gflops < found.rates.conv_gflops
    assert [step.model for step in found.steps] == ["resnet18", "mobilenetv2_100"]
    bar = 0.15 if others < 0.2 else 0.3
    assert all(abs(step.error) <= bar for step in found.steps), found
