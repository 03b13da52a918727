"""Methods that cut by width, from a whole run to its records and models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_runs import WIDTH, query, tiny

from fleetbed.emulator.engine.layout import lay_out
from fleetbed.emulator.method.local_training import recalibrate
from fleetbed.emulator.method.targets import all_inputs
from fleetbed.emulator.wire.storage import load_bundle

Start = Callable[..., Path]


def test_heterofl_sends_no_statistics_and_is_evaluated_with_those_of_all_clients_data(start: Start) -> None:
    sets = ("algorithms=[{name: heterofl}]", *WIDTH, "processes=inline")
    folder = start(*sets)
    assert query(folder, "SELECT DISTINCT outcome FROM tasks") == [("ok",)]
    layout = lay_out(tiny(*sets), ())
    nets, spec, data = layout.family, layout.dataset.spec, layout.dataset
    sizes = {v: sum(p.numel() for p in nets.outline(v, spec).parameters()) for v in nets.variants}
    used = query(folder, "SELECT DISTINCT variant, bytes_down, bytes_up FROM tasks ORDER BY variant")
    assert len({variant for variant, _, _ in used}) == 2
    for variant, down, up in used:  # the rest is the envelope; statistics would add 1,904 bytes or more to it
        assert 0 <= down - 4 * sizes[variant] < 3_000
        assert 0 <= up - 4 * sizes[variant] - spec.classes < 3_000
    ((version,),) = query(folder, "SELECT max(version) FROM evaluations")
    rows = query(folder, f"SELECT target, accuracy FROM evaluations WHERE version = {version}")
    assert len(rows) == 2
    test = torch.arange(len(data.y_test)).numpy()
    x, y = data.batch("test", test, None)
    for variant, accuracy in rows:
        tensors = load_bundle(folder / "models" / f"{variant}.safetensors").tensors
        model = nets.load(variant, spec, dict(tensors)).eval()
        with torch.no_grad():
            assert float((model(x).argmax(1) == y).float().mean()) == pytest.approx(accuracy)
        recalibrate(model, all_inputs(data, layout.split, tiny(*sets).experiment.evaluation.batch))
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())
