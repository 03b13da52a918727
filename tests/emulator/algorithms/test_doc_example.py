"""The example of docs/writing-an-algorithm.md is installed as a package would be, and run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from algorithm_harness import SGD, Bed, ToyDepth, accuracy, run

from fleetbed.emulator.algorithms import load_method, names
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import AlgorithmChoice, Training

PAGE = Path(__file__).parents[3] / "docs" / "writing-an-algorithm.md"


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_plugs_in_and_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = block("python")
    assert len(code.splitlines()) < 70
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "signvote.py").write_text(code)
    point = re.search(r'^signvote = "(.*)"$', block("toml"), re.MULTILINE)
    assert point is not None
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[fleetbed.algorithms]\nsignvote = {point[1]}\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert names()["signvote"] == "from my-package"
    bed = Bed(ToyDepth(None), ["one"] * 3, samples=40, training=Training(batch=8, optimizer=SGD))
    with pytest.raises(BadInput, match=r"params\.step is 0, but a number from 1e-12"):
        load_method(AlgorithmChoice(name="signvote", params={"step": 0}), bed.context)
    method = load_method(AlgorithmChoice(name="signvote", params={"step": 0.02}), bed.context)
    so_far = run(bed, method, 12)
    assert so_far.merged[0].metrics == {"voters": 3}
    assert so_far.replies[0][0].message.tensors["fc.weight"].dtype == torch.int8
    assert accuracy(bed, method, so_far) > accuracy(bed, method, run(bed, method, 0)) + 0.1
