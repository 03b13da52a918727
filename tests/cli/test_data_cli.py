"""`fleetbed data`: its output, its files and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetbed.cli.main import main


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.chdir(tmp_path)


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["data", *args])
    code = caught.value.code
    return code if isinstance(code, int) else 0


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert run(*args) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.startswith("fleetbed: ")
    assert out.err.count("\n") == 1
    return out.err


def experiment(path: Path, data: dict[str, Any]) -> str:
    content = {"title": "t", "fleet": "demo", "algorithms": [{"name": "heteroavg"}], "data": data}
    path.write_text(json.dumps(content))  # JSON is YAML too
    return str(path)


def test_list_shows_which_sets_are_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "--json") == 0
    sets = {row["name"]: row["ready"] for row in json.loads(capsys.readouterr().out)}
    expected = dict.fromkeys(
        ("fashion-mnist", "mnist", "cifar10", "cifar100", "svhn", "cinic10", "sentiment140"), False
    )
    assert sets == expected | {"fashion-mini": True, "sensors": True}
    assert run("list") == 0
    assert "fashion-mini" in capsys.readouterr().out


def test_partition_writes_a_picture_and_the_split(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("partition", "demo", "--seed", "5", "--out", "o", "--json", "--set", "data.public=40") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["seed"] == 5
    assert report["public"] == 40
    written = json.loads((tmp_path / "o/partition.json").read_text())
    assert len(written["train"]) == len(report["clients"]) == 8
    assert [len(part) for part in written["train"]] == [row["train"] for row in report["clients"]]
    assert [sum(row["labels"]) for row in report["clients"]] == [row["train"] for row in report["clients"]]
    assert sum(row["train"] for row in report["clients"]) == 10_000 - 40
    png = (tmp_path / "o/partition.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 10_000


def test_the_written_partition_can_be_used_as_a_partition_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("partition", "demo") == 0
    assert "written: out/partition.png" in capsys.readouterr().out
    own = experiment(tmp_path / "own.yaml", {"partition": {"kind": "file", "file": "out/partition.json"}})
    assert run("partition", own, "--out", "again", "--seed", "77") == 0
    assert (tmp_path / "again/partition.json").read_bytes() == (tmp_path / "out/partition.json").read_bytes()


def test_a_large_fleet_with_many_classes_can_be_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    y = np.arange(2400) % 40
    x = np.zeros((2400, 4, 4), np.uint8)
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    own = experiment(tmp_path / "own.yaml", {"name": "own.npz", "partition": {"kind": "iid"}})
    assert run("partition", own, "--json", "--set", "fleet=iot-100") == 0
    assert json.loads(capsys.readouterr().out)["classes"] == 40


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("data.name=fashion-mni", "did you mean fashion-m"),
        ("data.name=cifar10", "set data.download=true"),
        ("data.name=own/none.npz", "does not exist"),
        ("data.train_limit=20000", "data.train_limit is 20000"),
        ("data.public=10000", "data.public is 10000"),
        ("data.partition.min_size=2000", "8 clients need 16000 training samples"),
        ("data.partition.kind=shards", "multiple of 5 clients"),
        ("data.partition.kind=file", "data.partition.file is missing"),
        ("data.partition.kind=even", "even"),
        ("data.nmae=x", "nmae"),
        ("fleet=demos", "demo"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str], change: str, words: str) -> None:
    message = refused(capsys, "partition", "demo", "--set", change)
    assert words in message
    assert "demo" in message


def test_a_damaged_file_is_named_with_the_experiment(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "own.npz").write_bytes(b"PK\x03\x04 and no more")
    own = experiment(tmp_path / "own.yaml", {"name": "own.npz"})
    message = refused(capsys, "partition", own)
    assert "own.yaml" in message
    assert "own.npz cannot be read as an .npz file" in message


def test_an_output_folder_that_is_a_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    assert "--out taken cannot be written to" in refused(capsys, "partition", "demo", "--out", "taken")
