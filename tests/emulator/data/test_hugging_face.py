"""Data sets of the package `datasets`, as a Python file gives them: formats, images, users, and what goes wrong."""

# ruff: noqa: E501  a mistake and its sentence are on one line

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetbed.emulator.data import Dataset, divide, open_dataset, prepare_dataset
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Data, Partition

pytest.importorskip("datasets", reason="the package `datasets` is not installed")

DOCS = Path(__file__).parents[3] / "docs"
HEAD = "import numpy as np\nfrom datasets import ClassLabel, Dataset, DatasetDict, Features, Image\n"


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hub")


def opened(folder: Path, text: str) -> Dataset:
    path = folder / "my_data.py"
    path.write_text(text)
    return open_dataset(prepare_dataset(Data(name=str(path))))


def test_the_example_of_the_page_gives_clients_their_own_machines(tmp_path: Path) -> None:
    (example,) = (
        text
        for text in re.findall(r"```python\n(.*?)```", (DOCS / "data.md").read_text(), re.DOTALL)
        if "load_dataset" in text
    )
    for name, rows in (("train", 60), ("test", 24)):
        lines = [f"{20 + i},{i / 7:.3f},{i % 2},m{i % 4}" for i in range(rows)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["temperature,current,fault,machine", *lines]))
    found = opened(tmp_path, example)
    assert (found.spec.shape, found.spec.classes, len(found.y_train), len(found.y_test)) == ((2,), 2, 60, 24)
    x, y = found.batch("train", np.arange(60))
    raw = np.array([[20 + i, round(i / 7, 3)] for i in range(60)])
    assert np.allclose(x.numpy(), (raw - raw.mean(0)) / raw.std(0), atol=1e-5)
    assert y.tolist() == [i % 2 for i in range(60)]
    split = divide(found, Data(partition=Partition(kind="column", column="user", min_size=1)), 4, seed=1)
    assert [sorted({i % 4 for i in part}) for part in split.train] == [
        [i] for i in (part[0] % 4 for part in split.train)
    ]
    assert [{i % 4 for i in part} for part in split.test] == [{i % 4 for i in part} for part in split.train]


@pytest.mark.parametrize("form", ["", ".with_format('torch')", ".with_format('numpy')"])
def test_formats_give_the_same(tmp_path: Path, form: str) -> None:
    made = f"Dataset.from_dict({{'x': np.arange(60.0).reshape(20, 3), 'y': [i % 2 for i in range(20)]}}){form}"
    found = opened(tmp_path, f"{HEAD}def train(): return {made}\ntest = train\n")
    raw = np.arange(60.0).reshape(20, 3)
    assert np.allclose(found.batch("train", np.arange(20))[0].numpy(), (raw - raw.mean(0)) / raw.std(0), atol=1e-5)


def test_images_and_named_classes(tmp_path: Path) -> None:
    text = """
    from PIL import Image as Picture
    def train():
        pictures = [Picture.fromarray(np.full((8, 6, 3), 10 * i, np.uint8)) for i in range(20)]
        kinds = Features({"x": Image(), "y": ClassLabel(names=["cat", "dog"])})
        return Dataset.from_dict({"x": pictures, "y": [i % 2 for i in range(20)]}, features=kinds)
    test = train
    """
    found = opened(tmp_path, HEAD + textwrap.dedent(text))
    assert (found.spec.shape, found.spec.classes, found.spec.kind) == ((3, 8, 6), 2, "images")


def one(**columns: Any) -> str:
    return f"Dataset.from_dict({columns!r})"


WRONG = {
    "splits": (f"DatasetDict(train={one(x=[[1.0]], y=[0])})", "returns a mapping with train, but one data set is needed"),
    "stream": (f"{one(x=[[1.0]], y=[0])}.to_iterable_dataset()", "returns IterableDataset, .*without streaming"),
    "names": (one(text=["a"], label=[0]), r"has no x, only text, label; .*rename_columns"),
    "text": (one(x=[[1.0], [2.0]], y=["a", "b"]), "number the classes"),
    "nothing": (one(x=[[1.0], None], y=[0, 1]), "x of item 1 is NoneType; it must be numbers or text"),
    "mapping": (one(x=[[1.0]], y=[0], more=[{"a": 1}]), "more of item 0 is dict; .* leave that column out"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_sentence(tmp_path: Path, name: str) -> None:
    made, says = WRONG[name]
    with pytest.raises(BadInput, match=says) as caught:
        opened(tmp_path, f"{HEAD}def train(): return {made}\ntest = train\n")
    assert str(caught.value).startswith(f"data.name: {tmp_path}/my_data.py")
    assert "\n" not in str(caught.value)
