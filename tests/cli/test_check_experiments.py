"""`profiles check` of experiments: everything they refer to exists and fits together, and every mistake is listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from fleetbed.cli.main import main
from fleetbed.profiles.loading import TYPES
from fleetbed.profiles.settings import apply_settings
from fleetbed.profiles.yaml_text import parse_mapping

BASE = """
title: x
fleet: demo
data: {name: fashion-mini, train_limit: 200, test_limit: 100, partition: {kind: iid}}
model: {family: resnet-stage, options: {base_width: 4}}
algorithms: [{name: heteroavg}, {name: fedprox, params: {mu: 0.1}}]
timing: {source: modelled}
"""


def check(capsys: pytest.CaptureFixture[str], file: Path, *sets: str) -> list[str]:
    """The sentences, without the file that leads them all."""
    tree = apply_settings(parse_mapping(BASE, "base"), sets)
    file.write_bytes(msgspec.json.encode(tree))
    code: Any = 0
    try:
        main(["profiles", "check", str(file), "--kind", "experiment"])
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert (code == 2) == bool(lines)
    assert bool(out) == (not lines)
    assert all(line.startswith(f"fleetbed: {file}: ") for line in lines)
    return [line.removeprefix(f"fleetbed: {file}: ") for line in lines]


def test_the_base_is_sound(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert check(capsys, tmp_path / "x.yaml") == []


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (
            ["algorithms.0.name=heteroavgg"],
            "algorithms.0.name: there is no method 'heteroavgg'; did you mean heteroavg",
        ),
        (["algorithms.1.params.muu=1"], "algorithms.1.params.muu: there is no key 'muu'; did you mean mu?"),
        (["algorithms.1.params.mu=-1"], "algorithms.1.params.mu is -1, but a number from 0"),
        (["algorithms.0.variant=resnet99"], "there is no variant 'resnet99'"),
        (["model.family=resnet-stag"], "model.family: there is no model family 'resnet-stag'"),
        (["model.options.base_width=1000000000"], "model.options.base_width is 1000000000, but a whole number from 1"),
        (["model.options.widht=3"], "model.options.widht: there is no key 'widht'"),
        (["model.variants=[resnet10, resnet11]"], "there is no variant 'resnet11'"),
        (["model.assign=[resnet10, resnet11]"], "model.assign, of the family resnet-stage: there is no variant"),
        (["model.family=lstm", "model.options={}"], "lstm needs text, but the data is images"),
        (["model.family=fedhenn-cnn", "model.options={}", "data.image_size=8"], "needs images of at least 28x28"),
        (["data.name=fashion-mimi"], "there is no data set 'fashion-mimi'; did you mean fashion-mini"),
        (["data.name=no/such.npz"], "does not exist: give the path of an .npz file"),
        (["data.train_limit=1000000"], "data.train_limit is 1000000"),
        (["data.partition.min_size=1000"], "data.partition.min_size is 1000"),
        (["data.partition={kind: file, file: no.json}"], "no.json does not exist: give the path of a partition file"),
        (["availability={kind: trace, trace: no.tsv}"], "no.tsv does not exist: give the path of a trace file"),
        (["availability.bandwidth=no"], "no does not exist: give the path of a trace file"),
        (["timing={source: replay, replay: no}"], "is not the folder of a run"),
        (["policies=[{kind: over-select, invite: 9, take: 3}]"], "invite is 9, but 8 clients take part"),
        (["policies=[{kind: async}]", "participation.selection=tier"], "async has no rounds"),
        (["policies=[{kind: synk}]"], "policies.0.kind: there is no policy 'synk'; did you mean sync"),
        (["policies=[{kind: sync, params: {a: 1}}]"], "policies.0.params is given, but kind is sync, which has none"),
        (["evaluation.targets=[0.5, 60]"], "evaluation.targets.1 is 60, but the labels are classes"),
        (["algorithms=[{name: fedhenn}]"], "data.public"),
        (
            ["algorithms=[{name: heteroavg}]", "model.family=fedhe-cnn", "model.options={}"],
            "whose variants share no tensors",
        ),
    ],
)
def test_missing_or_inconsistent_settings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, sets: list[str], says: str
) -> None:
    (sentence, *_) = check(capsys, tmp_path / "x.yaml", *sets)
    assert says in sentence


def test_model_partition_and_policy_are_checked_one_by_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("1 / 0\n")
    sets = ["model.family=lstm", "model.options={}", "data.partition={kind: column, column: user}"]
    found = check(capsys, tmp_path / "x.yaml", *sets, "policies=[{kind: mine.py}]", "evaluation.targets=[2]")
    assert len(found) == 4
    assert "evaluation.targets.0 is 2" in found[0]
    assert "data.partition.column is user, but fashion-mini has no such column" in found[1]
    assert "lstm needs text" in found[2]
    assert f"policies.0.kind: {tmp_path}/mine.py cannot be imported: ZeroDivisionError" in found[3]


def test_all_mistakes_are_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wrong = [
        "roundz=3",
        "rounds=-1",
        "fleet=demmo",
        "server.device=sever",
        "data.name=none",
        "data.partition.alpha=-3",
        "model.family=resnet-stag",
        "algorithms.0.name=nomethod",
        "algorithms.1.params.muu=1",
        "policies=[{kind: sync, take: 3}]",
        "seeds=[1, 1]",
    ]
    keys = ["roundz", "rounds", "fleet", "server.device", "data.name", "data.partition.alpha", "model.family"]
    keys += ["algorithms.0.name", "algorithms.1.params.muu", "policies.0.take", "seeds"]
    found = check(capsys, tmp_path / "x.yaml", *wrong)
    assert len(found) == len(wrong)
    for key in keys:
        assert any(key in sentence for sentence in found), key


def test_no_mistake_is_listed_twice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A value that is wrong by itself has no consequences: nothing else is known of it."""
    for change in ("policies=[{kind: deadline, deadline_s: -1}]", "algorithms.0.name=3", "fleet=", "algorithms=[]"):
        assert len(check(capsys, tmp_path / "x.yaml", change)) == 1, change


@pytest.mark.parametrize("kind", TYPES)
def test_every_number_has_bounds(kind: Any) -> None:
    """So that no quantity without sense gets through, and editors know it from the schemas."""

    def look(type_: inspect.Type, at: str) -> None:
        free = ("override", "run_config")  # of another key, or of a Flower app
        if isinstance(type_, inspect.IntType | inspect.FloatType) and not any(name in at for name in free):
            low = type_.ge if type_.ge is not None else type_.gt
            high = type_.le if type_.le is not None else type_.lt
            assert low is not None, at
            assert high is not None, at
            assert abs(high) <= 1e12, at
        for part in getattr(type_, "types", ()):
            look(part, at)
        for inner in ("type", "item_type", "value_type"):
            if isinstance(found := getattr(type_, inner, None), inspect.Type):
                look(found, at)
        for field in getattr(type_, "fields", ()):
            look(field.type, f"{at}.{field.name}")

    look(inspect.type_info(TYPES[kind]), kind)


@pytest.mark.parametrize(
    "change",
    [
        "rounds=1000000000",
        "data.image_size=1000000000",
        "training.batch=1000000000000",
        "training.epochs=1000000000000",
        "training.max_steps=1000000000000",
        "model.options.base_width=1000000000",
        "data.tokens=1000000000",
        "training.optimizer.lr=1e300",
        "training.optimizer.lr=.nan",
        "evaluation.batch=1000000000",
        "timing.time_scale=1e300",
        "availability.mean_on_s=1e-9",
        "availability.day_s=1e-9",
        "device_time_limit_s=1e300",
    ],
)
def test_quantities_without_sense(capsys: pytest.CaptureFixture[str], change: str) -> None:
    sets = [change, "timing.source=modelled", "processes=inline"]
    with pytest.raises(SystemExit) as caught:
        main(["run", "demo", "--dry-run", *(word for each in sets for word in ("--set", each))])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert change.split("=")[0] in err
    assert "is needed" in err


def test_all_mistakes_of_parameters_and_of_a_sweep_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "title: Many mistakes\n"
        "fleet: demo\n"
        "algorithms: [{name: fedprox, params: {mu: much, nu: 1}}, {name: fedin}]\n"
        "policies: [{kind: deadline}]\n"
        "sweep: {training.batch: [8, none], seeds: [[1]], model.family: [resnet-stage, lstm, resnot]}\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(["profiles", "check", str(path)])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    for part in (
        "algorithms.0.params.mu is",
        "algorithms.0.params.nu: there is no key 'nu'",
        "policies.0.deadline_s is missing",
        "with sweep batch=none: training.batch is",
        "sweep.seeds cannot be swept",
    ):
        assert told.count(part) == 1, part
    path.write_text(
        "title: Wrong at some points\n"
        "fleet: demo\n"
        "algorithms: [{name: fedprox}, {name: fedin}]\n"
        "sweep: {model.family: [resnet-stage, lstm, resnot], algorithms.0.params.mu: [0.1, much]}\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(["profiles", "check", str(path)])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    for part in ("lstm needs text", "there is no model family 'resnot'", 'algorithms.0.params.mu is "much"'):
        assert told.count(part) == 1, part
