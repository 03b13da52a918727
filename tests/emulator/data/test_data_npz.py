"""A user's .npz: valid files are read, and everything else is refused with one sentence."""

from __future__ import annotations

import io
import pickle
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generated import bomb
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fleetbed.emulator.data.npz import read_npz
from fleetbed.profiles.errors import BadInput, HostCannot

Arrays = dict[str, Any]
Save = Callable[..., str]


def refused(path: str | Path) -> str:
    with pytest.raises(BadInput) as caught:
        read_npz(Path(path))
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    assert str(path) in message
    return message


def test_colour_images_are_taken_as_they_are(arrays: Arrays, save: Save) -> None:
    raw = read_npz(Path(save(arrays)))
    assert raw.classes == 3
    assert raw.kind == "images"
    np.testing.assert_array_equal(raw.x["train"], arrays["x_train"])
    np.testing.assert_array_equal(raw.y["test"], arrays["y_test"])
    assert raw.y["test"].dtype == np.int64


def test_grey_images_get_a_channel(arrays: Arrays, save: Save) -> None:
    for split in ("train", "test"):
        arrays[f"x_{split}"] = arrays[f"x_{split}"][..., 0]
    assert read_npz(Path(save(arrays))).x["train"].shape == (30, 6, 6, 1)


def test_floating_point_pixels_become_bytes(arrays: Arrays, save: Save) -> None:
    pixels = arrays["x_train"]
    arrays["x_train"] = (pixels / 255).astype(np.float32)
    np.testing.assert_array_equal(read_npz(Path(save(arrays))).x["train"], pixels)


def test_texts_are_taken(save: Save) -> None:
    path = save(
        {
            "text_train": np.array(["good", "bad"]),
            "y_train": np.array([1, 0]),
            "text_test": np.array(["so so"]),
            "y_test": np.array([1]),
        }
    )
    raw = read_npz(Path(path))
    assert raw.kind == "texts"
    assert raw.x["test"].tolist() == ["so so"]


@pytest.mark.parametrize("name", ["x_train", "y_train", "x_test", "y_test"])
def test_a_missing_array_is_named(arrays: Arrays, save: Save, name: str) -> None:
    del arrays[name]
    assert f"there is no array {name}" in refused(save(arrays))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"y_train": np.arange(29) % 3}, "30 samples and y_train has 29 labels"),
        ({"y_test": np.arange(13) % 3}, "12 samples and y_test has 13 labels"),
        ({"y_train": np.arange(30) % 3 - 1}, "y_train[0] is -1"),
        ({"y_train": np.full(30, 2**40)}, "y_train[0] is 1099511627776"),
        ({"y_train": np.arange(30) % 3 * 2}, "3 different labels up to 4, but not 1"),
        ({"y_test": np.array([0, 1, 7] + [0] * 9)}, "y_test[2] is 7; the labels of y_train allow 0 to 2"),
        ({"y_train": np.arange(30) % 3 / 2}, "y_train has 1 targets for each sample and y_test has classes"),
        ({"y_train": np.array(["a", "b", "c"] * 10)}, "labels must be integers"),
        ({"y_train": np.zeros((30, 3), np.int64)}, "y_train has shape (30, 3)"),
        ({"y_train": np.zeros(30, np.int64)}, "only the label 0; at least 2 classes"),
        ({"x_train": np.zeros((0, 6, 6, 3), np.uint8), "y_train": np.zeros(0, int)}, "x_train is empty"),
        ({"x_test": np.zeros((0, 6, 6, 3), np.uint8), "y_test": np.zeros(0, int)}, "x_test is empty"),
        ({"x_train": np.uint8(3)}, "x_train is empty"),
        ({"x_train": np.zeros((30, 36), np.uint8)}, "x_train has shape (30, 36)"),
        ({"x_train": np.zeros((30, 6, 6, 4), np.uint8)}, "with 1 or 3 channels"),
        ({"x_train": np.zeros((30, 3, 6, 6), np.uint8)}, "save x_train.transpose(0, 2, 3, 1)"),
        ({"x_train": np.zeros((30, 0, 6, 3), np.uint8)}, "x_train has shape (30, 0, 6, 3)"),
        ({"x_test": np.zeros((12, 5, 6, 3), np.uint8)}, "shape (6, 6, 3) and x_test of shape (5, 6, 3)"),
        ({"x_train": np.zeros((30, 6, 6, 3), np.int32)}, "x_train has type int32"),
        ({"x_train": np.full((30, 6, 6, 3), 1.5)}, "values from 1.5 to 1.5"),
        ({"x_train": np.full((30, 6, 6, 3), np.nan)}, "values from nan to nan"),
        ({"x_train": np.array(["a"] * 30)}, "x_train has type <U1"),
        ({"text_train": np.array(["a"] * 30)}, "it has both x_train and text_train"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays: Arrays, save: Save, change: Arrays, words: str) -> None:
    assert words in refused(save(arrays | change))


def test_pickled_objects_are_refused_unopened(arrays: Arrays, save: Save, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    arrays["y_train"] = np.array([Trap()] * 30, object)
    assert "pickled Python objects, which are never loaded" in refused(save(arrays))
    bare = tmp_path / "bare.npz"
    bare.write_bytes(pickle.dumps(Trap()))
    assert "cannot be read as an .npz" in refused(bare)
    assert not (tmp_path / "sprung").exists()


def test_files_that_are_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    assert "does not exist" in refused(path)
    path.write_bytes(b"")
    assert "cannot be read as an .npz" in refused(path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    assert "contains a single array" in refused(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "there is no array x_train, only nothing" in refused(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x_train.npy", "hello")
    refused(path)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(arrays: Arrays, save: Save, kept: float) -> None:
    path = Path(save(arrays))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    assert "damaged" in refused(path)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(position=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255), count=st.integers(1, 8))
def test_a_flipped_byte_gives_the_same_data_or_a_refusal(
    tmp_path: Path, position: float, bits: int, count: int
) -> None:
    content = io.BytesIO()
    y = np.arange(6) % 2
    np.savez_compressed(content, x_train=np.zeros((6, 2, 2), np.uint8), y_train=y, x_test=np.ones((6, 2, 2)), y_test=y)
    damaged = bytearray(content.getvalue())
    start = int(position * len(damaged))
    for i in range(start, min(start + count, len(damaged))):
        damaged[i] ^= bits
    path = tmp_path / "flipped.npz"
    path.write_bytes(damaged)
    try:
        raw = read_npz(path)
    except BadInput:
        return
    assert len(raw.x["train"]) == len(raw.y["train"])


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    garbage=st.binary(max_size=300),
    magic=st.sampled_from([b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00", b"\x80\x05"]),
)
def test_garbage_is_refused(tmp_path: Path, garbage: bytes, magic: bytes) -> None:
    path = tmp_path / "garbage.npz"
    path.write_bytes(magic + garbage)
    refused(path)


ANY_ARRAY = hnp.arrays(
    st.one_of(
        hnp.integer_dtypes(),
        hnp.unsigned_integer_dtypes(),
        hnp.floating_dtypes(),
        hnp.unicode_string_dtypes(),
        hnp.boolean_dtypes(),
        hnp.complex_number_dtypes(),
        hnp.datetime64_dtypes(),
        hnp.byte_string_dtypes(),
    ),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3),
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    arrays=st.dictionaries(
        st.sampled_from(["x_train", "y_train", "x_test", "y_test", "text_train", "text_test", "other"]),
        ANY_ARRAY,
    )
)
def test_any_arrays_give_sound_data_or_a_refusal(tmp_path: Path, arrays: Arrays) -> None:
    path = tmp_path / "any.npz"
    np.savez(path, **arrays)
    try:
        raw = read_npz(path)
    except BadInput:
        return
    assert raw.classes >= 2
    assert len(raw.x["train"]) == len(raw.y["train"]) > 0


def npy(header: str, body: bytes = b"") -> bytes:
    header += " " * (63 - (len(header) + 10) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + body


@pytest.mark.parametrize("descr", ["'|u1'", "'<U0'", "'<f8'", "'<U99999999'", "[('a', '<i4')]"])
@pytest.mark.parametrize("shape", ["(1000000000000,)", "(2, 10, 10)", "(5,)", "()", "(10, 1000000000000)"])
def test_a_header_that_does_not_match_the_data(tmp_path: Path, descr: str, shape: str) -> None:
    path = tmp_path / "own.npz"
    with zipfile.ZipFile(path, "w") as archive:
        text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"
        archive.writestr("x_train.npy", npy(text, b"\0" * 77))
    assert "its header says" in refused(path)


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    bomb(path)
    before_s = time.process_time()
    assert "would unpack to 12288 MiB, more than 100 times as much" in refused(path)
    assert time.process_time() - before_s < 5
    with zipfile.ZipFile(path, "w") as archive:  # not packed at all, but larger than the memory
        archive.writestr("x_train.npy", b"")
        info = archive.getinfo("x_train.npy")
        info.file_size = info.compress_size = 4 << 40
    with pytest.raises(HostCannot, match="of memory are free"):
        read_npz(path)


def test_an_array_that_occurs_twice_or_is_compressed_differently(tmp_path: Path, arrays: Arrays, save: Save) -> None:
    path = tmp_path / "twice.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("y_train.npy", b"")
        archive.writestr("y_train", b"")
    assert "it contains the array y_train twice" in refused(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("y_train.npy", b"1")
    assert "compressed in a way that numpy does not use" in refused(path)


def test_more_classes_than_can_be(arrays: Arrays, save: Save) -> None:
    arrays["x_train"], arrays["y_train"] = np.zeros((10_001, 1, 1), np.uint8), np.arange(10_001)
    arrays["x_test"] = np.zeros((12, 1, 1), np.uint8)
    assert "at most 10000 classes are possible" in refused(save(arrays))
