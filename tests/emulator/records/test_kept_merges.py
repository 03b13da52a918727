"""What a run keeps of merges: which tensors, of which merges, and what is left of them after a rewind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fleetbed.emulator.method.algorithm import Arrival, Assignment, Client
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.records.kept_merges import KeptMerges, check_patterns, kept_files, size_text
from fleetbed.emulator.wire.storage import load_bundle
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Evaluation

BEFORE = {
    "a/layer1.0.conv1.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    "a/layer1.0.bn1.weight": torch.ones(2),
    "layer1.0.bn1.num_batches_tracked": torch.tensor(3),
    "grows": torch.zeros(1),
}
AFTER = {
    "a/layer1.0.conv1.weight": torch.tensor([[1.5, 2.0], [2.0, 4.0]]),
    "a/layer1.0.bn1.weight": torch.ones(2),
    "layer1.0.bn1.num_batches_tracked": torch.tensor(4),
    "grows": torch.zeros(2),
}


def arrival(client: int, variant: str, value: float) -> Arrival:
    message = Bundle({"fc.weight": torch.full((2,), value), "features/in": torch.zeros(9)})
    return Arrival(assignment=Assignment(client=Client(client, variant, 5)), sent=Bundle(), message=message)


def test_a_file_holds_what_the_merge_did_to_the_chosen_tensors(tmp_path: Path) -> None:
    kept = KeptMerges(tmp_path, Evaluation(changes=("*conv?.weight", "*tracked", "grows")))
    kept.keep(7, 3, BEFORE, AFTER, [])
    (path,) = kept_files(tmp_path, "changes")
    assert path == tmp_path / "changes" / "merge-00000007.safetensors"
    found = load_bundle(path)
    assert found.values == {"version": 7, "round": 3}
    assert list(found.tensors) == ["a/layer1.0.conv1.weight"], "no counters, nothing whose shape has changed"
    assert found.tensors["a/layer1.0.conv1.weight"].tolist() == [[0.5, 0.0], [-1.0, 0.0]]
    assert kept_files(tmp_path, "client-models") == []


def test_the_models_of_clients_are_kept_without_what_goes_with_them(tmp_path: Path) -> None:
    arrivals = [arrival(8, "resnet14", 1.0), arrival(3, "resnet10", 2.0)]
    KeptMerges(tmp_path, Evaluation(client_models=True)).keep(2, 1, BEFORE, AFTER, arrivals)
    (path,) = kept_files(tmp_path, "client-models")
    found = load_bundle(path)
    assert found.values == {"version": 2, "round": 1, "clients": [8, 3], "variants": ["resnet14", "resnet10"]}
    assert {name: tensor.tolist() for name, tensor in found.tensors.items()} == {
        "0/fc.weight": [1.0, 1.0],
        "1/fc.weight": [2.0, 2.0],
    }


def test_only_merges_of_evaluated_rounds_are_kept_and_none_unless_asked_for(tmp_path: Path) -> None:
    kept = KeptMerges(tmp_path, Evaluation(every=2, changes=("*",)))
    for version in (1, 2, 3, 4):
        kept.keep(version, version, BEFORE, AFTER, [])
    names = [path.name for path in kept_files(tmp_path, "changes")]
    assert names == ["merge-00000002.safetensors", "merge-00000004.safetensors"]
    KeptMerges(tmp_path / "off", Evaluation()).keep(2, 2, BEFORE, AFTER, [arrival(0, "resnet10", 1.0)])
    assert not (tmp_path / "off").exists()


@pytest.mark.parametrize("folder", ["changes", "client-models"])
def test_a_rewind_removes_later_merges_and_half_written_files_but_nothing_else(tmp_path: Path, folder: str) -> None:
    kept = KeptMerges(tmp_path, Evaluation(changes=("*",), client_models=True))
    for version in (1, 2, 3):
        kept.keep(version, version, BEFORE, AFTER, [arrival(0, "resnet10", 1.0)])
    (tmp_path / folder / ".merge-00000003.safetensors.99.part").write_bytes(b"half")
    for name in ("merge-notes.txt", ".notes.99.part"):
        (tmp_path / folder / name).write_bytes(b"somebody's")
    kept.rewind(1)
    left = {path.name for path in (tmp_path / folder).iterdir()}
    assert left == {"merge-00000001.safetensors", "merge-notes.txt", ".notes.99.part"}
    assert len(kept_files(tmp_path, folder)) == 1


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    check_patterns(BEFORE, Evaluation(changes=("*bn1*",)), "fedavg")
    with pytest.raises(
        BadInput, match=r"evaluation\.changes\.1 is layer9\.\*, which matches none .*fedavg.*conv1\.weight"
    ):
        check_patterns(BEFORE, Evaluation(changes=("*bn1*", "layer9.*")), "fedavg")
    with pytest.raises(BadInput, match="of which there are none"):
        check_patterns({"count": torch.tensor(1)}, Evaluation(changes=("*",)), "private")


def test_the_size_of_what_is_kept_is_said() -> None:
    state = {"a": torch.zeros(2**18), "b": torch.zeros(2**17), "c": torch.zeros(5)}
    assert size_text(state, Evaluation(changes=("a", "b"))) == "keeping the change of 2 tensors, 1.5 MiB for each merge"
