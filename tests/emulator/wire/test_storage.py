"""Bundles and checkpoints on disk: whole, checked, atomic."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.wire import codec
from fleetbed.emulator.wire.storage import DTYPES, Damaged, load_bundle, read_run_file, save_bundle, write_atomically


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


@pytest.mark.parametrize("values", [1 << 18, (1 << 18) + 1, 3 * (1 << 18) - 1000])
def test_what_goes_past_the_page_cache_is_the_same_and_not_in_it(tmp_path: Path, values: int) -> None:
    """Whether a page of a file is in the cache is what `mincore` says of a mapping of it."""
    bundle = Bundle({"a": torch.arange(values), "b": torch.ones(3, dtype=torch.bool)}, {"x": 1})
    usual, direct = tmp_path / "usual.safetensors", tmp_path / "direct.safetensors"
    save_bundle(usual, bundle)
    assert cached_pages(usual) > 500
    save_bundle(direct, bundle, cached=False)
    if not direct_io(tmp_path):
        pytest.skip("this file system has no direct I/O")
    assert cached_pages(direct) == 0
    assert direct.read_bytes() == usual.read_bytes()
    found = load_bundle(direct, cached=False)
    assert cached_pages(direct) == 0
    assert torch.equal(found.tensors["a"], torch.arange(values))
    assert found.values == {"x": 1}


def cached_pages(path: Path) -> int:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as view:
        size = len(view)
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        address = np.frombuffer(view, np.uint8).ctypes.data
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
        return sum(page & 1 for page in pages)


def direct_io(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "try", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_where_there_is_no_direct_io_a_bundle_is_written_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system refuses it, as one in memory may."""
    opened = os.open

    def without(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", without)
        save_bundle(tmp_path / "b.safetensors", Bundle({"a": torch.arange(1 << 18)}), cached=False)
    assert torch.equal(load_bundle(tmp_path / "b.safetensors").tensors["a"], torch.arange(1 << 18))
    assert [each.name for each in tmp_path.iterdir()] == ["b.safetensors"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind_of_tensor_comes_back_from_disk_and_wire(tmp_path: Path, dtype: torch.dtype) -> None:
    bundle = Bundle({"t": torch.tensor([0, 1, 1]).to(dtype)})
    save_bundle(tmp_path / "b.safetensors", bundle)
    path = tmp_path / "b.safetensors"
    for found in (load_bundle(path), load_bundle(path, cached=False), codec.unpack(codec.pack(bundle))):
        assert found.tensors["t"].dtype == dtype
        assert torch.equal(found.tensors["t"], bundle.tensors["t"])


def test_what_can_be_neither_sent_nor_kept_is_said_with_what_can(tmp_path: Path) -> None:
    bundle = Bundle({"t": torch.zeros(2, dtype=torch.bfloat16)})
    sentence = r"tensor 't' is torch\.bfloat16, which can be neither sent nor kept; convert it to one of float"
    with pytest.raises(TypeError, match=sentence):
        codec.pack(bundle)
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


def test_other_programs_read_it_too(tmp_path: Path) -> None:
    tensors = {
        str(dtype): torch.arange(7).to(dtype) for dtype in (torch.float16, torch.float64, torch.uint8, torch.bool)
    }
    save_bundle(tmp_path / "b", Bundle({**tensors, "empty": torch.zeros(0, 3)}))
    found = safetensors.torch.load_file(tmp_path / "b")
    assert found.pop("empty").shape == (0, 3)
    assert all(found[name].equal(tensor) for name, tensor in tensors.items())


VICTIM = Bundle({"a": torch.arange(3000.0), "n": torch.arange(40).reshape(5, 8)}, {"x": [1, None], "y": "z"})


def assert_noticed_or_the_same(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for cached in (True, False):
        try:
            found = load_bundle(path, cached=cached)
        except Damaged:
            continue
        assert found.values == VICTIM.values
        assert found.tensors.keys() == VICTIM.tensors.keys()
        for name, tensor in VICTIM.tensors.items():
            assert found.tensors[name].dtype == tensor.dtype
            assert torch.equal(found.tensors[name], tensor)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("bundles") / "b.safetensors"
    save_bundle(path, VICTIM)
    return path, path.read_bytes()


@given(st.data())
@settings(deadline=None)
def test_swapped_words_are_noticed(written: tuple[Path, bytes], data: st.DataObject) -> None:
    """As a sum over the words would not."""
    path, content = written
    words = range((len(content) - 3000 * 4) // 8 + 1, len(content) // 8)
    one, other = (data.draw(st.sampled_from(words)) for _ in range(2))
    changed = bytearray(content)
    changed[one * 8 : one * 8 + 8], changed[other * 8 : other * 8 + 8] = (
        content[other * 8 : other * 8 + 8],
        content[one * 8 : one * 8 + 8],
    )
    assert_noticed_or_the_same(path, bytes(changed))


@given(st.data())
@settings(deadline=None)
def test_any_change_is_noticed(written: tuple[Path, bytes], data: st.DataObject) -> None:
    """Bits flipped, pieces cut out, put in or moved, in the header and in the tensors."""
    path, content = written
    at = data.draw(st.integers(0, len(content) - 1))
    length = data.draw(st.integers(0, 64))
    kind = data.draw(st.sampled_from(["flip", "cut", "zero", "insert", "end"]))
    changed = {
        "flip": content[:at] + bytes([content[at] ^ 1 << length % 8]) + content[at + 1 :],
        "cut": content[:at] + content[at + length :],
        "zero": content[:at] + bytes(min(length, len(content) - at)) + content[at + length :],
        "insert": content[:at] + content[:length] + content[at:],
        "end": content[:at],
    }[kind]
    assert_noticed_or_the_same(path, changed)


def test_a_file_of_an_earlier_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "old.safetensors"
    safetensors.torch.save_file({"a": torch.ones(2)}, path, {"values": "{}", "checksum": "12"})
    with pytest.raises(Damaged, match=r"old\.safetensors: written by an earlier version"):
        load_bundle(path)


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "link"])
def test_what_is_no_ordinary_file_is_a_sentence(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "b.safetensors"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path if kind == "loop" else "/dev/zero")
    with pytest.raises(Damaged, match="not a regular file"):
        load_bundle(path)
    with pytest.raises(Damaged, match="not a regular file"):
        read_run_file(path)
