"""Prepared data: the content of the files, when they are written and when they are reused."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fleetbed.emulator.data import open_dataset, prepare_dataset
from fleetbed.emulator.data import store as store_module
from fleetbed.emulator.data.balance import balanced_counts
from fleetbed.emulator.data.images import convert_images
from fleetbed.emulator.data.text import encode, vocabulary, words
from fleetbed.profiles.errors import BadInput, FleetbedError, HostCannot
from fleetbed.profiles.experiment import Data, Partition

torch.set_num_threads(1)

Arrays = dict[str, Any]
Save = Callable[..., str]


def loaded(folder: Path, name: str) -> Any:
    return np.load(folder / f"{name}.npy")


def test_the_shipped_set_is_balanced_and_has_its_published_size() -> None:
    dataset = open_dataset(prepare_dataset(Data()))
    assert dataset.spec.shape == (1, 28, 28)
    assert dataset.spec.classes == 10
    assert np.bincount(dataset.y_train).tolist() == [1000] * 10
    assert np.bincount(dataset.y_test).tolist() == [200] * 10


def test_pixels_are_stored_channels_first_with_their_statistics(arrays: Arrays, save: Save) -> None:
    folder = prepare_dataset(Data(name=save(arrays)))
    x = arrays["x_train"]
    np.testing.assert_array_equal(loaded(folder, "x_train"), x.transpose(0, 3, 1, 2))
    meta = json.loads((folder / "meta.json").read_text())
    np.testing.assert_allclose(meta["mean"], (x / 255).mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(meta["std"], (x / 255).std(axis=(0, 1, 2)), rtol=1e-12)
    assert meta["classes"] == 3
    assert meta["shape"] == [3, 6, 6]


def test_it_is_made_once(arrays: Arrays, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Data(name=save(arrays))
    folder = prepare_dataset(data)
    monkeypatch.setattr(store_module, "_write", lambda *_: pytest.fail("made again"))
    assert prepare_dataset(data) == folder
    # who gets what and how the files came here change nothing of the arrays
    other = Data(name=data.name, public=5, root="elsewhere", download=True, partition=Partition(kind="iid"))
    assert prepare_dataset(other) == folder


@pytest.mark.parametrize("change", [{"image_size": 8}, {"channels": 1}, {"train_limit": 9}, {"normalise": False}])
def test_a_setting_that_shapes_the_data_makes_another_folder(arrays: Arrays, save: Save, change: Arrays) -> None:
    name = save(arrays)
    assert prepare_dataset(Data(name=name)) != prepare_dataset(Data(name=name, **change))


def test_a_changed_source_is_prepared_again(arrays: Arrays, save: Save) -> None:
    path = save(arrays)
    first = prepare_dataset(Data(name=path))
    arrays["x_train"] = arrays["x_train"] // 2
    save(arrays)
    os.utime(path, ns=(1, 1))  # whatever the clock's resolution
    second = prepare_dataset(Data(name=path))
    assert first != second
    np.testing.assert_array_equal(loaded(second, "x_train"), arrays["x_train"].transpose(0, 3, 1, 2))


@pytest.mark.parametrize("damage", ["cut", "gone", "meta", "meta-cut"])
def test_a_folder_that_is_not_whole_is_made_anew(arrays: Arrays, save: Save, damage: str) -> None:
    data = Data(name=save(arrays))
    folder = prepare_dataset(data)
    expected = loaded(folder, "x_train")
    file = folder / ("meta.json" if damage.startswith("meta") else "x_train.npy")
    if damage.endswith("cut"):
        file.write_bytes(file.read_bytes()[:-7])
    else:
        file.unlink()
    with pytest.raises(FleetbedError, match="is not a complete prepared data set"):
        open_dataset(folder)
    assert prepare_dataset(data) == folder
    np.testing.assert_array_equal(loaded(folder, "x_train"), expected)


def test_a_failed_preparation_leaves_nothing(
    arrays: Arrays, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    data = Data(name=save(arrays))
    monkeypatch.setattr(np, "save", full)
    with pytest.raises(HostCannot, match="No space left on device"):
        prepare_dataset(data)
    assert list((tmp_path / "cache/fleetbed/data").iterdir()) == []


def test_two_that_prepare_at_once_end_with_one_folder(
    arrays: Arrays, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Data(name=save(arrays))
    put = store_module.put_whole

    def other_was_quicker(made: Path, folder: Path) -> None:
        monkeypatch.setattr(store_module, "put_whole", put)
        prepare_dataset(data)
        put(made, folder)

    monkeypatch.setattr(store_module, "put_whole", other_was_quicker)
    folder = prepare_dataset(data)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    open_dataset(folder)


def test_limits_take_the_first_of_each_class_in_stored_order(arrays: Arrays, save: Save) -> None:
    arrays["y_train"] = np.array([0] * 20 + [1] * 2 + [2] * 8)
    folder = prepare_dataset(Data(name=save(arrays), train_limit=10, test_limit=2))
    # equal shares would be 4, 3, 3; class 1 has 2, so the others make up for it
    np.testing.assert_array_equal(loaded(folder, "y_train"), [0] * 4 + [1] * 2 + [2] * 4)
    kept = [0, 1, 2, 3, 20, 21, 22, 23, 24, 25]
    np.testing.assert_array_equal(loaded(folder, "x_train"), arrays["x_train"][kept].transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(loaded(folder, "y_test"), [0, 1])


@pytest.mark.parametrize(
    ("available", "total", "expected"),
    [
        ([10, 10, 10], 9, [3, 3, 3]),
        ([10, 10, 10], 11, [4, 4, 3]),
        ([1, 10, 10], 11, [1, 5, 5]),
        ([10, 1, 2], 13, [10, 1, 2]),
        ([3, 3, 4], 10, [3, 3, 4]),
        ([0, 5], 4, [0, 4]),
        ([5, 5], 0, [0, 0]),
    ],
)
def test_balanced_counts(available: list[int], total: int, expected: list[int]) -> None:
    assert balanced_counts(available, total) == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_limit": 31}, "data.train_limit is 31; the train split has 30 samples of 3 classes"),
        ({"train_limit": 2}, "allowed are 3 to 30"),
        ({"test_limit": 13}, "data.test_limit is 13; the test split has 12 samples"),
    ],
)
def test_a_limit_that_cannot_be_is_refused(arrays: Arrays, save: Save, change: Arrays, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        prepare_dataset(Data(name=save(arrays), **change))


def test_enlarging_by_two_interpolates_bilinearly() -> None:
    images = np.array([[0, 100], [200, 100]], np.uint8).reshape(1, 2, 2, 1)
    # by hand, with pixel centres at half: weights 3/4 and 1/4 between neighbours, the border repeated
    expected = [[0, 25, 75, 100], [50, 62.5, 87.5, 100], [150, 137.5, 112.5, 100], [200, 175, 125, 100]]
    np.testing.assert_allclose(convert_images(images, 4, None)[0, 0], expected, atol=0.51)


def test_channels_are_repeated_or_mixed() -> None:
    grey = np.arange(4, dtype=np.uint8).reshape(1, 2, 2, 1)
    three = convert_images(grey, None, 3)
    assert three.shape == (1, 3, 2, 2)
    assert (three == grey.transpose(0, 3, 1, 2)).all()
    colours = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]], np.uint8).reshape(1, 2, 2, 3)
    assert convert_images(colours, None, 1).reshape(-1).tolist() == [76, 150, 29, 255]


def test_words_are_lower_case_and_keep_their_apostrophe() -> None:
    assert words("Don't PANIC -- it's 42, «Größe»!") == ["don't", "panic", "it's", "42", "größe"]


def test_the_vocabulary_is_the_most_frequent_words_of_the_training_split(save: Save) -> None:
    texts = ["b b b a a c", "c a d"]
    assert vocabulary(texts, 3) == ["a", "b", "c"]  # a and b thrice, in order; c before d by count
    assert encode(["d a A, b c extra", ""], ["a", "b"], 4).tolist() == [[1, 2, 2, 3], [0, 0, 0, 0]]
    path = save(
        {
            "text_train": np.array(texts),
            "y_train": np.array([0, 1]),
            "text_test": np.array(["a unseen b"]),
            "y_test": np.array([1]),
        }
    )
    dataset = open_dataset(prepare_dataset(Data(name=path, tokens=5, vocabulary=3)))
    assert dataset.spec.shape == (5,)
    assert dataset.spec.vocabulary == 5  # padding, unknown and three words
    x, y = dataset.batch("test", np.array([0]))
    assert x.dtype == torch.int64
    assert x.tolist() == [[2, 1, 3, 0, 0]]
    assert y.tolist() == [1]


@pytest.mark.parametrize("change", [{"image_size": 8}, {"channels": 1}, {"augment": ("flip",)}])
def test_settings_for_images_are_refused_for_texts(save: Save, change: Arrays) -> None:
    arrays = {"text_train": np.array(["a", "b"]), "y_train": np.array([0, 1])}
    arrays |= {"text_test": np.array(["a"]), "y_test": np.array([1])}
    with pytest.raises(BadInput, match=f"data.{next(iter(change))} is .* contains texts"):
        prepare_dataset(Data(name=save(arrays), **change))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fashion-mnst", "there is no data set 'fashion-mnst'; did you mean fashion-mnist or fashion-mini"),
        (
            "zzz",
            "allowed are cifar10, cifar100, cinic10, fashion-mini, fashion-mnist, mnist, sensors, sentiment140, svhn",
        ),
        ("no/such.npz", "no/such.npz does not exist: give the path of an .npz file"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_names(name: str, words: str) -> None:
    with pytest.raises(BadInput, match="data.name.*" + words):
        prepare_dataset(Data(name=name))


def test_another_file_of_the_same_size_and_time_is_noticed(arrays: Arrays, save: Save) -> None:
    path = Path(save(arrays))
    then = path.stat()
    first = prepare_dataset(Data(name=str(path)))
    arrays["x_train"] = 255 - arrays["x_train"]
    other = Path(save(arrays, "other.npz"))
    os.utime(other, ns=(then.st_atime_ns, then.st_mtime_ns))
    other.replace(path)  # as an archive is unpacked
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (then.st_size, then.st_mtime_ns)
    second = prepare_dataset(Data(name=str(path)))
    assert first != second
    np.testing.assert_array_equal(loaded(second, "x_train"), arrays["x_train"].transpose(0, 3, 1, 2))


def test_a_file_that_was_written_over_in_place_is_noticed(arrays: Arrays, save: Save) -> None:
    path = Path(save(arrays))
    then, content = path.stat(), bytearray(path.read_bytes())
    first = prepare_dataset(Data(name=str(path)))
    with path.open("r+b") as file:
        file.seek(content.index(b"NUMPY") + 500)
        file.write(bytes(byte ^ 255 for byte in content[file.tell() : file.tell() + 8]))
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert path.stat().st_ino == then.st_ino
    with contextlib.suppress(BadInput):  # the archive's own checksum may tell before
        assert prepare_dataset(Data(name=str(path))) != first


def test_the_same_data_elsewhere_is_prepared_once(arrays: Arrays, save: Save) -> None:
    first = prepare_dataset(Data(name=save(arrays)))
    moved = Path(save(arrays, "own.npz")).with_name("moved")
    moved.mkdir()
    copy = moved / "own.npz"
    copy.write_bytes(Path(save(arrays)).read_bytes())
    assert prepare_dataset(Data(name=str(copy))) == first


def test_a_name_as_long_as_can_be(arrays: Arrays, save: Save) -> None:
    assert prepare_dataset(Data(name=save(arrays, "x" * 250 + ".npz"))).is_dir()


def test_images_that_do_not_fit_into_memory(arrays: Arrays, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(arrays)
    monkeypatch.setattr("fleetbed.emulator.machine.host.available_bytes", lambda: 100 << 20)
    with pytest.raises(HostCannot, match="42 images of 3145728 bytes are 126 MiB, more than half of the 100 MiB"):
        prepare_dataset(Data(name=path, image_size=1024))


def test_a_huge_file_of_nothing_is_not_even_hashed(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    begun_s = time.process_time()
    with pytest.raises(BadInput, match=r"cannot be read as an \.npz"):
        prepare_dataset(Data(name=str(path)))
    assert time.process_time() - begun_s < 5
