"""Data of a user's own: values, tokens, targets and users in an .npz, or data sets of a Python file."""

# ruff: noqa: E501  a mistake and its sentence are on one line

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fleetbed.emulator.data import Dataset, divide, open_dataset, prepare_dataset
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Data, Partition

Save = Callable[..., str]


def values(users: int = 4) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        "values_train": rng.normal(3, 2, (40, 2, 9)),
        "values_test": rng.normal(3, 2, (16, 2, 9)),
        "y_train": np.arange(40) % 3,
        "y_test": np.arange(16) % 3,
        "user_train": np.array([f"u{i % users}" for i in range(40)]),
        "user_test": np.array([f"u{i % users}" for i in range(16)]),
    }


def opened(name: str, **settings: Any) -> Dataset:
    return open_dataset(prepare_dataset(Data(name=name, **settings)))


def by_user(**settings: Any) -> Data:
    return Data(partition=Partition(kind="column", column="user", min_size=1), **settings)


def test_values_of_any_shape_are_standardised_by_channel(save: Save) -> None:
    arrays = values()
    found = opened(save(arrays))
    assert (found.spec.shape, found.spec.classes, found.spec.kind) == ((2, 9), 3, "values")
    x, y = found.batch("train", np.arange(40))
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert x.mean(dim=(0, 2)).abs().max() < 1e-5
    assert (x.std(dim=(0, 2), unbiased=False) - 1).abs().max() < 1e-5
    raw, _ = opened(save(arrays), normalise=False).batch("train", np.array([5]))
    assert np.allclose(raw[0].numpy(), arrays["values_train"][5].astype(np.float32))


def test_a_table_of_integers_is_values_too_and_a_constant_column_stays_finite(save: Save) -> None:
    table = np.stack([np.arange(40), np.full(40, 7)], axis=1)
    found = opened(save({**values(), "values_train": table, "values_test": table[:16]}))
    x, _ = found.batch("train", np.arange(40))
    assert x.shape == (40, 2)
    assert torch.isfinite(x).all()


def test_the_page_turns_a_table_into_such_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas", reason="pandas is in the dev extra")
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    (code,) = (text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "read_csv" in text)
    rows = [f"m{i % 4},{60 + i % 9},{i % 5},{i % 7},{i % 3}" for i in range(1100)]
    (tmp_path / "machines.csv").write_text("\n".join(["machine,temperature,current,vibration,fault", *rows]))
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    found = opened(str(tmp_path / "machines.npz"))
    assert (found.spec.shape, found.spec.classes, len(found.y_train), len(found.y_test)) == ((3,), 3, 1000, 100)
    assert len(set(found.columns["user"]["train"].tolist())) == 4


def test_tokens_have_the_vocabulary_of_their_numbers(save: Save) -> None:
    tokens = np.arange(40 * 5).reshape(40, 5) % 11
    arrays = {k: v for k, v in values().items() if not k.startswith("values")}
    found = opened(save({**arrays, "tokens_train": tokens, "tokens_test": tokens[:16]}))
    assert (found.spec.shape, found.spec.vocabulary, found.spec.kind) == ((5,), 11, "text")
    x, _ = found.batch("train", np.array([1]))
    assert x.tolist() == [tokens[1].tolist()]


def test_floating_point_labels_are_targets(save: Save) -> None:
    arrays = {**values(), "y_train": np.linspace(0, 1, 40), "y_test": np.linspace(0, 1, 16)}
    found = opened(save(arrays))
    assert (found.spec.classes, found.spec.targets, found.spec.outputs) == (0, 1, 1)
    _, y = found.batch("train", np.array([0, 39]))
    assert y.tolist() == [[0.0], [1.0]]
    split = divide(found, Data(partition=Partition(kind="iid", min_size=1)), 4, seed=1)
    assert sorted(np.concatenate(split.train)) == list(range(40))
    with pytest.raises(BadInput, match=r"kind is dirichlet, which goes by classes, but the labels of .* are numbers"):
        divide(found, Data(), 4, seed=1)


def test_a_client_has_all_samples_of_its_users_and_only_those(save: Save) -> None:
    found = opened(save(values(users=6)))
    split = divide(found, by_user(), 3, seed=1)
    owners = [{i % 6 for i in part} for part in split.train]
    assert sorted(user for users in owners for user in users) == list(range(6))
    assert [len(users) for users in owners] == [2, 2, 2]
    assert sorted(np.concatenate(split.train)) == list(range(40))
    assert [{i % 6 for i in part} for part in split.test] == owners
    assert divide(found, by_user(), 3, seed=1).to_json() == split.to_json()


def test_what_a_column_cannot_do_is_one_sentence(save: Save) -> None:
    found = opened(save(values(users=4)))
    with pytest.raises(BadInput, match=r"user has 4 different values in the training set, but the fleet has 5 clients"):
        divide(found, by_user(), 5, seed=1)
    data = Data(name="own.npz", partition=Partition(kind="column", column="place"))
    with pytest.raises(BadInput, match=r"column is place, but own\.npz has no such column \(it has user\)"):
        divide(found, data, 2, seed=1)


def test_without_users_in_the_test_set_its_samples_are_drawn_by_labels(save: Save) -> None:
    arrays = values(users=4)
    del arrays["user_test"]
    split = divide(opened(save(arrays)), by_user(), 2, seed=1)
    assert all(len(part) for part in split.test)


def test_a_limit_keeps_users_and_samples_together(save: Save) -> None:
    found = opened(save(values(users=4)), train_limit=9)
    assert len(found.columns["user"]["train"]) == len(found.y_train) == 9


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"values_train": np.full((40, 2), np.nan)}, r"values_train\[0, 0\] is nan; every value must be finite"),
    ({"values_train": np.zeros(40)}, r"values_train has shape \(40,\); values must be \(samples, features\)"),
    ({"values_train": np.array(["a"] * 40)}, "values_train has type <U1"),
    ({"y_train": np.full(40, np.inf), "y_test": np.zeros(16)}, r"y_train\[0\] is inf; every target must be finite"),
    ({"y_train": np.zeros((40, 2)), "y_test": np.zeros(16)}, "y_train has 2 targets for each sample and y_test has 1"),
    ({"y_train": np.zeros((40, 2, 2)), "y_test": np.zeros(16)}, r"targets must be \(samples,\) or"),
    ({"y_train": np.zeros(40, int)}, "y_train has only the label 0; at least 2 classes are needed"),
    ({"user_train": np.arange(7)}, r"user_train has shape \(7,\), but y_train has 40 labels"),
    ({"x_train": np.zeros((40, 2, 2))}, "it has both x_train and values_train"),
]


@pytest.mark.parametrize(("change", "says"), WRONG)
def test_wrong_arrays_are_refused(save: Save, change: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        opened(save({**values(), **change}))


def test_sensor_values_that_are_called_x_get_a_hint(save: Save) -> None:
    arrays = {k.replace("values", "x"): v for k, v in values().items()}
    with pytest.raises(BadInput, match=r"values from .* if it holds no images but other numbers, .* values_train"):
        opened(save(arrays))


def test_the_arrays_that_are_there_are_listed(save: Save) -> None:
    arrays = {k: v for k, v in values().items() if k != "y_test"}
    with pytest.raises(
        BadInput, match=r"no array y_test, only user_test, user_train, values_test, values_train, y_train"
    ):
        opened(save(arrays))


def file_of(folder: Path, text: str) -> str:
    path = folder / "my_data.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


TORCH = """
import torch
from torch.utils.data import TensorDataset
def make(samples):
    return TensorDataset(torch.randn(samples, 3, 5, generator=torch.Generator().manual_seed(1)), torch.arange(samples) % 2)
def train(): return make(30)
def test(): return make(10)
"""


def test_a_torch_data_set_comes_by_file(tmp_path: Path) -> None:
    found = opened(file_of(tmp_path, TORCH))
    assert (found.spec.shape, found.spec.classes, len(found.y_train), len(found.y_test)) == ((3, 5), 2, 30, 10)


def test_items_may_be_mappings_with_columns_as_hugging_face_has_them(tmp_path: Path) -> None:
    text = """
    rows = [{"x": f"text number {i}", "y": i % 2, "user": f"u{i % 3}"} for i in range(30)]
    def train(): return rows
    def test(): return rows[:9]
    """
    found = opened(file_of(tmp_path, text))
    assert found.spec.kind == "text"
    assert found.columns["user"]["train"].tolist() == [i % 3 for i in range(30)]


def test_a_package_brings_a_torch_data_set_with_users_by_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = TORCH.replace(
        "def train",
        "def named(rows): return [{'x': x, 'y': y, 'user': i % 3} for i, (x, y) in enumerate(rows)]\ndef train",
    )
    (tmp_path / "their_data.py").write_text(
        mapped.replace("return make(30)", "return named(make(30))").replace("return make(10)", "return named(make(10))")
    )
    info = tmp_path / "their_sets-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-sets\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fleetbed.data]\ntheir-waves = their_data\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = opened("their-waves")
    assert (found.spec.shape, len(found.y_train)) == ((3, 5), 30)
    split = divide(found, by_user(name="their-waves"), 3, seed=1)
    assert sorted({i % 3 for i in part}.pop() for part in split.train) == [0, 1, 2]
    assert [len(part) for part in split.train] == [10, 10, 10]


def test_what_the_file_reads_may_change(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((8, 2)))
    text = f"""
    import numpy as np
    def train(): return [(row, i % 2) for i, row in enumerate(np.load({str(tmp_path / "x.npy")!r}))]
    test = train
    """
    first = prepare_dataset(Data(name=file_of(tmp_path, text)))
    np.save(tmp_path / "x.npy", np.ones((8, 2)))
    again = prepare_dataset(Data(name=file_of(tmp_path, text + "# a new process would read it anew\n")))
    assert first != again


FILES = {
    "raises": ("1 / 0", r"my_data\.py cannot be imported: ZeroDivisionError: division by zero \(.*my_data\.py, line 1\)"),
    "no-train": ("def test(): return []", r"has no train: a data file defines train\(\) and test\(\)"),
    "train-raises": ("def train():\n    return open('/nowhere/at/all')\ntest = train", r"failed in train\(\): FileNotFoundError.*, line 2"),
    "no-data-set": ("def train(): return 3\ntest = train", r"train\(\) returns int, which is no data set"),
    "empty": ("def train(): return []\ntest = train", r"train\(\) has 0 samples"),
    "no-label": ("def train(): return [[1.0, 2.0, 3.0]]\ntest = train", r"item 0 of train\(\) is 3 parts, but a pair \(x, y\) is needed"),
    "no-pair": ("def train(): return [1.0]\ntest = train", r"item 0 of train\(\) is float, but a pair .* it has no label"),
    "no-y": ("def train(): return [{'x': 1.0, 'label': 2}]\ntest = train", r"item 0 of train\(\) has no y, only x, label; .*rename_columns"),
    "splits": ("def train(): return {'train': [1], 'test': [2]}\ntest = train", r"train\(\) returns a mapping with train, test, but one data set is needed"),
    "text-labels": ("def train(): return [([1.0], 'a'), ([2.0], 'b')]\ntest = train", "y_train has type <U1; labels must be .*; number the classes"),
    "in-a-library": ("import json\ndef train():\n    return json.loads('x')\ntest = train", r"failed in train\(\): JSONDecodeError.*my_data\.py, line 3\)"),
    "shapes": ("def train(): return [([1.0], 0), ([1.0, 2.0], 1)]\ntest = train", r"x has shape \(1,\) in item 0 and \(2,\) in item 1"),
    "objects": ("def train(): return [(object(), 0)]\ntest = train", r"x of item 0 is object; it must be numbers or text"),
    "one-class": ("def train(): return [([1.0], 0), ([2.0], 0)]\ntest = train", r"y_train has only the label 0; at least 2 classes"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_what_is_wrong_with_a_file_is_one_sentence(tmp_path: Path, name: str) -> None:
    text, says = FILES[name]
    with pytest.raises(BadInput, match=says) as caught:
        opened(file_of(tmp_path, text))
    assert str(caught.value).startswith(f"data.name: {tmp_path}/my_data.py")
    assert "\n" not in str(caught.value)


def test_the_shipped_sensors_have_a_user_for_every_client_of_tiny_iot() -> None:
    found = opened("sensors")
    assert (found.spec.shape, found.spec.classes) == ((3, 128), 5)
    split = divide(found, Data(name="sensors", partition=Partition(kind="column", column="user")), 20, seed=1)
    assert [len(part) for part in split.train] == [80] * 20
    assert [len(part) for part in split.test] == [20] * 20
