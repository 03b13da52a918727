"""The changes that a run keeps: which tensors, of which merges, and what is left of them after a rewind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fleetbed.emulator.records.changes import Changes, check_patterns, size_text
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


def test_a_file_holds_what_the_merge_did_to_the_chosen_tensors(tmp_path: Path) -> None:
    changes = Changes(tmp_path, Evaluation(changes=("*conv?.weight", "*tracked", "grows")))
    changes.keep(7, 3, BEFORE, AFTER)
    (path,) = changes.files()
    assert path == tmp_path / "changes" / "merge-00000007.safetensors"
    found = load_bundle(path)
    assert found.values == {"version": 7, "round": 3}
    assert list(found.tensors) == ["a/layer1.0.conv1.weight"], "no counters, nothing whose shape has changed"
    assert found.tensors["a/layer1.0.conv1.weight"].tolist() == [[0.5, 0.0], [-1.0, 0.0]]


def test_only_merges_of_evaluated_rounds_are_kept_and_none_without_patterns(tmp_path: Path) -> None:
    changes = Changes(tmp_path, Evaluation(every=2, changes=("*",)))
    for version in (1, 2, 3, 4):
        changes.keep(version, version, BEFORE, AFTER)
    assert [path.name for path in changes.files()] == ["merge-00000002.safetensors", "merge-00000004.safetensors"]
    Changes(tmp_path / "off", Evaluation()).keep(2, 2, BEFORE, AFTER)
    assert not (tmp_path / "off").exists()


def test_a_rewind_removes_later_merges_and_half_written_files_but_nothing_else(tmp_path: Path) -> None:
    changes = Changes(tmp_path, Evaluation(changes=("*",)))
    for version in (1, 2, 3):
        changes.keep(version, version, BEFORE, AFTER)
    folder = tmp_path / "changes"
    (folder / ".merge-00000003.safetensors.99.part").write_bytes(b"half")
    for name in ("merge-notes.txt", ".notes.99.part"):
        (folder / name).write_bytes(b"somebody's")
    changes.rewind(1)
    assert {path.name for path in folder.iterdir()} == {
        "merge-00000001.safetensors",
        "merge-notes.txt",
        ".notes.99.part",
    }
    assert len(changes.files()) == 1


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
