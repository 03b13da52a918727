"""A run that keeps the changes of weights, and the figures that are drawn of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import TINIER, tiny

from fleetbed.analysis.figures.nets import dataset_of, final_models, initial_tensors
from fleetbed.analysis.tables.runs import open_run
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.run.run import check
from fleetbed.emulator.run.study import start_study
from fleetbed.emulator.wire.storage import load_bundle
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.resolve import load_experiment


class Listener(Observer):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def test_the_changes_of_all_rounds_add_up_to_how_far_the_weights_moved(tmp_path: Path) -> None:
    sets = (*TINIER, "rounds=3", "processes=inline", "evaluation.changes=['layer[34].*conv?.weight', fc.weight]")
    observer = Listener()
    (folder,) = start_study(
        load_experiment("demo", (), sets), tmp_path / "study", search=(), command="test", observer=observer
    )
    changes = [load_bundle(path) for path in sorted((folder / "changes").iterdir())]
    assert [each.values for each in changes] == [{"version": n, "round": n} for n in (1, 2, 3)]
    run = open_run(folder)
    dataset = dataset_of(run)
    model = final_models(run, dataset)[-1]
    start, end = initial_tensors(run, dataset, model), model.net.state_dict()
    names = set(changes[0].tensors)
    assert names == {n for n in end if (n.startswith(("layer3", "layer4")) and ".conv" in n) or n == "fc.weight"}
    for name in names:
        moved = torch.stack([each.tensors[name] for each in changes]).sum(0)
        assert moved.abs().max() > 0
        torch.testing.assert_close(moved, end[name] - start[name], rtol=0, atol=1e-6)
    size = sum(t.numel() for t in changes[0].tensors.values()) * 4 / 2**20
    assert f"keeping the change of {len(names)} tensors, {size:.1f} MiB for each merge" in observer.said


def test_patterns_are_checked_against_what_the_server_of_each_method_holds() -> None:
    check(tiny("algorithms=[{name: fedavg}]", "evaluation.changes=['resnet10/layer3.0.conv1.weight']"), ())
    with pytest.raises(BadInput, match=r"evaluation\.changes\.0 .*server of fedavg holds, which are called resnet10/"):
        check(tiny("algorithms=[{name: fedavg}]", "evaluation.changes=['layer3.0.conv1.weight']"), ())
    with pytest.raises(BadInput, match=r"server of private holds, of which there are none"):
        check(tiny("algorithms=[{name: private}]", "evaluation.changes=['*']"), ())
