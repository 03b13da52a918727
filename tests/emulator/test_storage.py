"""Bundles and checkpoints on disk: whole, checked, atomic."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from fleetbed.emulator import wire
from fleetbed.emulator.bundle import Bundle
from fleetbed.emulator.storage import DTYPES, Damaged, load_bundle, save_bundle, write_atomically


def test_a_bundle_comes_back_as_it_was_stored(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    tensors = {"a": whole, "same": whole.view(2, 3), "view": whole[2:4], "n": torch.tensor(3)}
    bundle = Bundle(tensors, {"x": [1, None], "y": "z"})
    save_bundle(tmp_path / "b.safetensors", bundle)
    found = load_bundle(tmp_path / "b.safetensors")
    assert found.values == bundle.values
    assert {name: t.tolist() for name, t in found.tensors.items()} == {
        "a": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
        "same": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
        "view": [2.0, 3.0],
        "n": 3,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind_of_tensor_comes_back_from_disk_and_wire(tmp_path: Path, dtype: torch.dtype) -> None:
    bundle = Bundle({"t": torch.tensor([0, 1, 1]).to(dtype)})
    save_bundle(tmp_path / "b.safetensors", bundle)
    for found in (load_bundle(tmp_path / "b.safetensors"), wire.unpack(wire.pack(bundle))):
        assert found.tensors["t"].dtype == dtype
        assert torch.equal(found.tensors["t"], bundle.tensors["t"])


def test_what_can_be_neither_sent_nor_kept_is_said_with_what_can(tmp_path: Path) -> None:
    bundle = Bundle({"t": torch.zeros(2, dtype=torch.bfloat16)})
    sentence = r"tensor 't' is torch\.bfloat16, which can be neither sent nor kept; convert it to one of float"
    with pytest.raises(TypeError, match=sentence):
        wire.pack(bundle)
    with pytest.raises(TypeError, match=sentence):
        save_bundle(tmp_path / "b.safetensors", bundle)
    assert list(tmp_path.iterdir()) == []


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "b.safetensors"
    save_bundle(path, Bundle({"a": torch.arange(100.0)}))
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)
    with pytest.raises(Damaged, match="checksum"):
        load_bundle(path)


@pytest.mark.parametrize("size", [0, 5, 60, -10])
def test_a_cut_file_is_noticed(tmp_path: Path, size: int) -> None:
    path = tmp_path / "b.safetensors"
    save_bundle(path, Bundle({"a": torch.arange(100.0)}))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(Damaged, match="not a whole safetensors file"):
        load_bundle(path)


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match="missing"):
        load_bundle(tmp_path / "none.safetensors")


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")

    def fail(part: Path) -> None:
        part.write_text("half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_not_finite_is_found_by_name() -> None:
    good = Bundle({"a": torch.ones(3), "n": torch.tensor(2)})
    assert good.first_not_finite() is None
    assert Bundle({**good.tensors, "b": torch.tensor([1.0, float("nan")])}).first_not_finite() == "b"
    assert Bundle({"c": torch.tensor([float("inf"), -float("inf")])}).first_not_finite() == "c"
    # a sum that overflows is not a value that is not finite
    assert Bundle({"d": torch.full((4,), 3e38)}).first_not_finite() is None


def test_a_file_that_nobody_needs_is_written_over(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    save_bundle(old, Bundle({"a": torch.arange(5000.0)}))
    inode = old.stat().st_ino
    save_bundle(new, Bundle({"b": torch.arange(10.0)}), over=old)
    assert not old.exists()
    assert new.stat().st_ino == inode
    assert load_bundle(new).tensors["b"].tolist() == list(range(10))
    save_bundle(old, Bundle({}), over=tmp_path / "none")
    assert load_bundle(old) == Bundle({})


def test_other_programs_read_it_too(tmp_path: Path) -> None:
    tensors = {
        str(dtype): torch.arange(7).to(dtype) for dtype in (torch.float16, torch.float64, torch.uint8, torch.bool)
    }
    save_bundle(tmp_path / "b", Bundle({**tensors, "empty": torch.zeros(0, 3)}))
    found = safetensors.torch.load_file(tmp_path / "b")
    assert found.pop("empty").shape == (0, 3)
    assert all(found[name].equal(tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("at", [0, 5000, 4096 * 3 - 1, 4096 * 3 + 5])
def test_every_byte_counts(tmp_path: Path, at: int) -> None:
    path = tmp_path / "b"
    save_bundle(path, Bundle({"a": torch.zeros(4096 * 3 + 9, dtype=torch.uint8)}))
    content = bytearray(path.read_bytes())
    content[len(content) - 4096 * 3 - 9 + at] = 1
    path.write_bytes(content)
    with pytest.raises(Damaged, match="checksum"):
        load_bundle(path)
