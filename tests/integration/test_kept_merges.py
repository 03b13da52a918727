"""A run that keeps what its merges did to the weights, and the models that they were made of."""

from __future__ import annotations

import pytest
import torch
from small_runs import TINIER, tiny

from fleetbed.analysis.figures.nets import client_models, dataset_of, final_models, initial_tensors
from fleetbed.analysis.figures.plot import draw_figures
from fleetbed.analysis.tables.curves import mean_accuracy
from fleetbed.analysis.tables.runs import Run, open_run
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.records.kept_merges import CHANGES, CLIENTS, kept_files
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


KEPT = (
    "model.assign=[resnet10, resnet14]",
    "evaluation.changes=['layer[34].*conv?.weight', fc.weight]",
    "evaluation.client_models=true",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    observer = Listener()
    experiment = load_experiment("demo", (), (*TINIER, "rounds=3", "processes=inline", *KEPT))
    folder = tmp_path_factory.mktemp("kept") / "study"
    (one,) = start_study(experiment, folder, search=(), command="test", observer=observer)
    assert any(text.startswith("keeping the change of ") for text in observer.said)
    return open_run(one)


def test_the_changes_of_all_rounds_add_up_to_how_far_the_weights_moved(run: Run) -> None:
    changes = [load_bundle(path) for path in kept_files(run.folder, CHANGES)]
    assert [each.values for each in changes] == [{"version": n, "round": n} for n in (1, 2, 3)]
    dataset = dataset_of(run)
    model = final_models(run, dataset)[-1]
    start, end = initial_tensors(run, dataset, model), model.net.state_dict()
    names = set(changes[0].tensors)
    assert names == {n for n in end if (n.startswith(("layer3", "layer4")) and ".conv" in n) or n == "fc.weight"}
    for name in names:
        moved = torch.stack([each.tensors[name] for each in changes]).sum(0)
        assert moved.abs().max() > 0
        torch.testing.assert_close(moved, end[name] - start[name], rtol=0, atol=1e-6)


def test_the_models_of_the_clients_are_those_that_the_last_merge_averaged(run: Run) -> None:
    dataset = dataset_of(run)
    path = kept_files(run.folder, CLIENTS)[-1]
    models = client_models(run, dataset, path)
    assert [model.client for model in models] == list(range(8))
    assert {model.variant for model in models} == {"resnet10", "resnet14"}
    mean = torch.stack([model.net.get_parameter("fc.weight").detach() for model in models]).mean(0)
    merged = final_models(run, dataset)[0].net.get_parameter("fc.weight").detach()
    torch.testing.assert_close(mean, merged, rtol=0, atol=1e-6)
    assert [model.client for model in client_models(run, dataset, path, most=3)] == [0, 4, 7]


def test_similarity_is_that_of_the_clients_models_and_is_drawn_against_accuracy(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetbed.analysis.figures.model_plots.CKA_SAMPLES", 24)
    figures = draw_figures("cka", [run], ())
    assert list(figures) == ["cka", "cka_stages", "cka_accuracy"]
    labels = [text.get_text() for text in figures["cka"].axes[0].get_yticklabels()]
    assert labels[0] == "000 resnet10"
    assert len(labels) == 8
    first, *_ = figures["cka_accuracy"].axes
    heights = [float(dots.get_offsets()[0, 1]) for dots in first.collections]
    by_round = {n: mean_accuracy([e for e in run.evaluations if e.round == n]) for n in (1, 2, 3)}
    assert heights == pytest.approx(list(by_round.values())), "a dot for each round, after its merge"


def test_only_a_method_whose_clients_send_whole_models_can_keep_them() -> None:
    keep = "evaluation.client_models=true"
    check(tiny("algorithms=[{name: fedin}]", keep), ())
    for name in ("fedhe", "fedrep", "private"):
        with pytest.raises(
            BadInput, match=rf"client_models is true, but the clients of {name} do not send whole models"
        ):
            check(tiny(f"algorithms=[{{name: {name}}}]", keep), ())


def test_patterns_are_checked_against_what_the_server_of_each_method_holds() -> None:
    check(tiny("algorithms=[{name: fedavg}]", "evaluation.changes=['resnet10/layer3.0.conv1.weight']"), ())
    with pytest.raises(BadInput, match=r"evaluation\.changes\.0 .*server of fedavg holds, which are called resnet10/"):
        check(tiny("algorithms=[{name: fedavg}]", "evaluation.changes=['layer3.0.conv1.weight']"), ())
    with pytest.raises(BadInput, match=r"server of private holds, of which there are none"):
        check(tiny("algorithms=[{name: private}]", "evaluation.changes=['*']"), ())
