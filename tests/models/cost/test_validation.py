"""Predicted against measured times: the fit, leave-one-out, and skipped rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from fleetbed.models.cost import validation
from fleetbed.models.cost.operations import Operations, seconds_of
from fleetbed.models.cost.points import LeftOut, Point, Points, read_points, shipped_points
from fleetbed.models.cost.rate_fit import FEWEST_MODELS, errors, fit_rates
from fleetbed.models.cost.timm_step import StepWork
from fleetbed.profiles import BadInput, load_device
from fleetbed.profiles.rates import REFERENCE, rates_of
from fleetbed.profiles.types import Rates

RATES = Rates(
    conv_1x1_gflops=20.0, conv_gflops=25.0, depthwise_gflops=0.4, matmul_gflops=44.0, memory_gb_s=0.8, call_us=30.0
)


def works(count: int, seed: int = 0) -> list[Operations]:
    amounts = np.random.default_rng(seed).uniform(0.1e9, 50e9, (count, 6))
    return [
        Operations(
            conv_1x1_flop=a[0], conv_flop=a[1], depthwise_flop=a[2] / 50, matmul_flop=a[3], memory_bytes=a[4], calls=500
        )
        for a in amounts
    ]


def test_the_fit_finds_the_rates_that_made_the_times() -> None:
    made = works(12)
    found = fit_rates(made, [seconds_of(RATES, work) for work in made], call_us=30.0)
    for name in Rates.__struct_fields__:
        assert getattr(found, name) == pytest.approx(getattr(RATES, name), rel=2e-3)


def test_a_class_that_no_model_uses_adds_nothing() -> None:
    made = [replace(work, depthwise_flop=0.0) for work in works(12)]
    found = fit_rates(made, [seconds_of(RATES, work) for work in made], call_us=30.0)
    assert found.depthwise_gflops == 1e9
    assert found.conv_gflops == pytest.approx(25.0, rel=2e-3)


def test_errors_by_hand() -> None:
    found = errors([1.1, 2.0, 2.7, 4.4], [1.0, 2.0, 3.0, 4.0])
    assert (found.points, found.median, found.worst) == (4, pytest.approx(0.1), pytest.approx(0.1))
    assert found.rank == pytest.approx(1.0)
    assert errors([3.0, 2.0, 1.0], [1.0, 2.0, 3.0]).rank == pytest.approx(-1.0)
    assert errors([1.0, 1.0], [1.0, 2.0]).rank is None


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Points:
    """A device whose rates are exact, but for one model that takes twice as long."""
    models = dict(zip((f"net{n}" for n in range(FEWEST_MODELS + 2)), works(FEWEST_MODELS + 2), strict=True))

    def step_work(name: str, shape: tuple[int, ...], batch: int) -> StepWork:
        if name not in models:
            raise BadInput(f"there is no {name}")
        return StepWork(models[name], ("odd.op",) if name == "net1" else ())

    monkeypatch.setattr(validation, "step_work", step_work)
    device = replace(load_device(REFERENCE), rates=RATES)
    used = [
        Point(
            row=n, device="a", model=name, shape=(3, 32, 32), batch=1, seconds=seconds_of(RATES, work) * (1 + (n == 2))
        )
        for n, (name, work) in enumerate(models.items(), start=2)
    ]
    used.append(Point(row=99, device="a", model="none", shape=(3, 32, 32), batch=1, seconds=1.0))
    return Points(file="f.csv", used=used, left_out=[LeftOut(50, "bad")], devices={"a": device})


def test_a_model_is_predicted_by_rates_that_were_fitted_without_it(made_up: Points) -> None:
    found = validation.validate_points(made_up)
    assert [(row.row, row.reason) for row in found.left_out] == [(50, "bad"), (99, "there is no none")]
    assert found.unknown_operators == {"odd.op": ["net1"]}
    (result,) = found.devices
    assert result.rates_from[0] == "fitted"
    assert result.errors.median < 1e-9
    assert found.compared[0].error == pytest.approx(-0.5)
    # without the odd one the fit is exact, so its own left-out prediction is half, as the rates say
    assert found.compared[0].unseen_error == pytest.approx(-0.5, abs=1e-3)
    assert result.unseen is not None
    assert result.unseen.worst > result.errors.median
    assert result.best_fit is not None


def test_derived_rates_have_nothing_to_leave_out(made_up: Points) -> None:
    derived = replace(made_up, devices={"a": replace(made_up.devices["a"], rates=None, provenance=())})
    (result,) = validation.validate_points(derived).devices
    assert result.rates_from == ("derived",)
    assert result.unseen is None


def test_a_file_without_a_known_model_is_refused(made_up: Points) -> None:
    with pytest.raises(BadInput, match=r"f\.csv: no row of this file can be used; row 50: bad"):
        validation.validate_points(replace(made_up, used=made_up.used[-1:]))


@pytest.mark.slow
def test_the_shipped_points_hold_the_bars() -> None:
    """Leave one model out: median at most 12 %, 90th percentile at most 35 %; and the profile has these rates."""
    found = validation.validate_points(read_points(shipped_points()))
    assert [row.row for row in found.left_out] == [28, 32]
    (result,) = found.devices
    assert result.unseen is not None
    assert result.unseen.points == 36
    assert result.unseen.median <= 0.12
    assert result.unseen.p90 <= 0.35
    assert result.unseen.rank is not None
    assert result.unseen.rank >= 0.92
    assert found.unknown_operators == {}
    shipped = rates_of(load_device(REFERENCE))
    assert result.best_fit is not None
    for name in Rates.__struct_fields__:
        assert getattr(result.best_fit, name) == pytest.approx(getattr(shipped, name), rel=0.02)


@pytest.mark.slow
def test_an_unusual_model_or_input_is_left_out_with_a_sentence(tmp_path: Path) -> None:
    header = "device,what,model,input,batch,threads,metric,value,unit,notes\n"
    rows = [
        f"raspberry-pi-5-8gb,training,{model},{shape},{batch},4,time per batch,3,s,\n"
        for model, shape, batch in (
            ("mobilenetv3_small_075", "3x64x64", 4),
            ("resnet18", "3x32x32", 1),  # batch norm needs two values
            ("no_such_net", "3x64x64", 4),
            ("resnet18", "3x1x1", 4),
        )
    ]
    path = tmp_path / "p.csv"
    path.write_text(header + "".join(rows))
    found = validation.validate_points(read_points(path))
    assert found.compared[0].point.row == 2
    assert found.compared[0].predicted_s > 0
    reasons = {row.row: row.reason for row in found.left_out}
    assert "more than 1 value per channel" in reasons[3]
    assert "there is no model of timm 'no_such_net'" in reasons[4]
