"""`fleetbed models`: costs of variants, and which devices can train them, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetbed.cli.main import main

MIB = 1 << 20
DEVICE = """
title: A board
trains_on: cpu
cpu: {{description: one core, cores: 1, fp32_gflops: 4}}
memory:
  {{installed_mib: 1024, visible_mib: 1000, available_mib: {available}, runtime_mib: 100, bandwidth_gb_s_measured: 2}}
link: wifi4
"""
FLEET = """
title: Two kinds of boards
members:
  - {device: roomy, count: 2}
  - {device: tight, count: 1}
"""


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["models", *args])
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


@pytest.fixture
def boards(tmp_path: Path) -> str:
    """A fleet of two boards with 900 MiB for training and one with 3."""
    for folder in ("devices", "fleets"):
        (tmp_path / folder).mkdir()
    (tmp_path / "devices" / "roomy.yaml").write_text(DEVICE.format(available=1000))
    (tmp_path / "devices" / "tight.yaml").write_text(DEVICE.format(available=103))
    (tmp_path / "fleets" / "mine.yaml").write_text(FLEET)
    return str(tmp_path)


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list", "--family", "resnet-stage", "--family", "lstm", "--batch", "8", "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["variant"] for row in rows] == [*(f"resnet{n}" for n in (10, 14, 18, 22, 26)), "lstm1", "lstm2"]
    first = rows[0]
    assert first["parameters"] == 4_910_922
    assert first["macs"] == first["forward_flops"] / 2 == 18_142_208
    assert first["training_flops"] > 2.5 * first["forward_flops"]
    # twelve layers of batch norm with 2,880 channels in all: a mean and a variance each, and a counter per layer
    assert first["state_bytes"] == 4 * 4_910_922 + 2 * 4 * 2_880 + 8 * 12
    assert first["memory_bytes"] == sum(first["memory"].values())
    assert first["memory_bytes"] > 4 * first["state_bytes"]  # received, model, gradients, momentum


def test_list_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list", "--family", "fedhenn-cnn", "--image", "3x32x32", "--optimizer", "adam")
    lines = out.splitlines()
    assert code == 0
    assert "trained with adam, batch 16" in lines[0]
    assert len(lines) == 2 + 5 + 4
    assert lines[7] == "model.options"
    assert lines[9].split() == ["fedhenn-cnn", "filters", "a", "list", "of", "at", "least", "3", "(64,", "64,", "64)"]
    assert "307842" in next(line for line in lines if "conv2-fc3" in line)


def test_fit_as_json(capsys: pytest.CaptureFixture[str], boards: str) -> None:
    code, out, _ = run(capsys, "fit", "--fleet", "mine", "--family", "fedhenn-cnn", "--profiles", boards, "--json")
    roomy, tight = json.loads(out)
    assert code == 0
    assert (roomy["device"], roomy["link"], roomy["clients"], roomy["variant"]) == (
        "roomy",
        "wifi4",
        [0, 1],
        "conv1-fc2",
    )
    assert roomy["stopped_by"] is None
    assert roomy["cap_bytes"] == 900 * MIB
    assert roomy["round_bytes"] == 2 * 4 * 1_511_474
    assert (tight["clients"], tight["variant"]) == ([2], None)
    assert tight["stopped_by"]["name"] == "memory"
    assert tight["stopped_by"]["allowed"] == pytest.approx(0.9 * 3 * MIB)
    assert tight["reason"].startswith("no variant fits: conv1-fc1 needs ")


def test_fit_counts_steps_and_follows_settings(capsys: pytest.CaptureFixture[str], boards: str) -> None:
    common = ("fit", "--fleet", "mine", "--family", "fedhenn-cnn", "--profiles", boards, "--json")
    _, out, _ = run(capsys, *common, "--samples", "100")
    _, twice, _ = run(capsys, *common, "--samples", "100", "--set", "training.epochs=2")
    assert json.loads(twice)[0]["compute_s"] == pytest.approx(2 * json.loads(out)[0]["compute_s"])
    _, out, _ = run(capsys, *common, "--set", "budgets.round_bytes=2e6", "--set", "budgets.memory_margin=0")
    assert json.loads(out)[0]["variant"] == "conv3-fc3"
    assert json.loads(out)[0]["stopped_by"]["name"] == "bytes"
    _, out, _ = run(capsys, *common, "--set", "model.variants=[conv1-fc1]")
    assert json.loads(out)[0]["variant"] == "conv1-fc1"


def test_fit_as_a_table(capsys: pytest.CaptureFixture[str], boards: str) -> None:
    code, out, _ = run(capsys, "fit", "--fleet", "mine", "--family", "fedhenn-cnn", "--profiles", boards)
    assert code == 0
    roomy, tight = out.splitlines()[2:]
    assert roomy.split()[:3] == ["roomy", "2", "conv1-fc2"]
    assert "is the largest variant" in roomy
    assert tight.split()[:3] == ["tight", "1", "none"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("list", "--family", "resnet-stag"), "did you mean resnet-stage"),
        (("list", "--batch", "0"), "--batch is 0"),
        (("list", "--family", "lstm", "--classes", "1"), "a number from 2 to 10000"),
        (("list", "--image", "32x32"), '--image is "32x32"'),
        (("list", "--image", "3x0x32"), '--image is "3x0x32"'),
        (("list", "--family", "resnet-stage", "--image", "3x2x2"), "images of at least"),
        (("fit", "--fleet", "iot-1000"), "there is no fleet"),
        (("fit", "--fleet", "iot-100", "--family", "vgg"), "vgg"),
        (("fit", "--fleet", "iot-100", "--samples", "0"), "--samples is 0"),
        (("fit", "--fleet", "iot-100", "--set", "model.variants=[resnet12]"), "resnet12"),
        (("fit", "--fleet", "iot-100", "--set", "training.batch=0"), "training.batch"),
        (("check-memory", "--batches", "8,many"), "--batches is '8,many'"),
        (("check-memory", "--batches", "0"), "--batches is 0"),
        (("check-memory", "--family", "vgg"), "vgg"),
        (("check-memory", "--out", "/nowhere/at/all.md"), "the folder /nowhere/at does not exist"),
    ],
)
def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], words: str) -> None:
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert words in err
