"""Code of a user's own, named by its path: it runs in every process, is recorded, and may not change in between."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from small_runs import query

from fleetbed.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"
SMALL = ("data.train_limit=400", "data.test_limit=100", "data.partition.kind=iid", "rounds=2", "training.batch=4")
METHOD = """\
\"\"\"Average the weights, and report how many clients there were.\"\"\"

from fleetbed.emulator.algorithms.heteroavg import Method as Base
from fleetbed.emulator.algorithms.heteroavg import Params


class Method(Base):
    def metrics(self, state, arrivals):
        return {"clients": len(arrivals)}
"""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["run", *arguments])
    return int(end.value.code or 0)


def given(*sets: str) -> list[str]:
    return [word for each in (*SMALL, *sets) for word in ("--set", each)]


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """The experiment and the model of docs/writing-a-model.md, as files in a folder of their own."""
    (tmp_path / "my_net.py").write_text(blocks("writing-a-model.md", "python")[0])
    path = tmp_path / "mine.yaml"
    path.write_text(blocks("writing-a-model.md", "yaml")[0])
    return path


def test_the_example_runs_and_its_file_is_recorded_and_reported(experiment: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(str(experiment), *given("processes=inline", "fleet=iot-10"), "--out", str(out)) == 0
    digest = hashlib.sha256((tmp_path / "my_net.py").read_bytes()).hexdigest()
    for name in ("heteroavg-sync-1", "fedavg-sync-1"):
        ((files,),) = query(out / name, "SELECT value FROM meta WHERE key = 'files'")
        assert json.loads(files) == {str(tmp_path / "my_net.py"): digest}
    trained = query(out / "heteroavg-sync-1", "SELECT DISTINCT variant FROM clients")
    assert {variant for (variant,) in trained} <= {"small", "medium", "large"}
    page = tmp_path / "report.html"
    with pytest.raises(SystemExit, match="0"):
        main(["report", str(out), "--out", str(page)])
    assert f"my_net.py (SHA-256 {digest})" in page.read_text()
    assert "models: my_net;" in page.read_text()


@pytest.mark.slow
def test_the_example_runs_as_it_is_in_processes(experiment: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(str(experiment), "--out", str(out)) == 0
    tasks = query(out / "heteroavg-sync-1", "SELECT outcome, count(*) FROM tasks GROUP BY outcome")
    assert tasks == [("ok", 60)]


def test_the_example_with_cut_points_trains_with_fedin(experiment: Path, tmp_path: Path) -> None:
    (tmp_path / "my_net.py").write_text(blocks("writing-a-model.md", "python")[1])
    sets = given("processes=inline", "fleet=demo", "algorithms=[{name: fedin}, {name: fedproto}]", "rounds=1")
    assert run(str(experiment), *sets, "--out", str(tmp_path / "out")) == 0


@pytest.mark.parametrize("method", ["fedin", "moon", "fedproto", "fedrep", "fedper", "lgfedavg", "heterofl"])
def test_a_method_that_works_on_parts_says_what_a_plain_module_lacks(
    experiment: Path, tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = given("processes=inline", "fleet=demo", f"algorithms=[{{name: {method}}}]")
    assert run(str(experiment), *sets, "--out", str(tmp_path / "out")) == 2
    said = capsys.readouterr().err
    assert f"{method} works on parts of a model, but those of my_net are plain torch modules" in said
    assert not (tmp_path / "out").exists()


def test_a_method_comes_by_file_and_a_changed_one_is_not_resumed(
    experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_method.py").write_text(METHOD)
    text = experiment.read_text()
    experiment.write_text(re.sub(r"algorithms: .*", "algorithms: [{name: ./my_method.py}]", text))
    out = tmp_path / "out"
    assert run(str(experiment), *given("processes=inline", "fleet=demo"), "--out", str(out)) == 0
    merges = query(out / "my_method-sync-1", "SELECT name, value FROM metrics WHERE name = 'clients'")
    assert merges == [("clients", 8.0)] * 2
    (tmp_path / "my_method.py").write_text(METHOD + "\n# changed\n")
    capsys.readouterr()
    assert run("--resume", str(out), "--set", "rounds=3") == 2
    said = capsys.readouterr().err
    assert "cannot resume, the files changed" in said
    assert f"{tmp_path}/my_method.py" in said
    (tmp_path / "my_method.py").write_text(METHOD)
    assert run("--resume", str(out), "--set", "rounds=3") == 0


def test_a_client_half_that_fails_is_named_with_file_and_line(
    experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_method.py").write_text(METHOD + "\n    def client(self, job):\n        return self.nothing\n")
    experiment.write_text(re.sub(r"algorithms: .*", "algorithms: [{name: ./my_method.py}]", experiment.read_text()))
    assert run(str(experiment), *given("processes=inline", "rounds=1"), "--out", str(tmp_path / "out")) == 1
    line = (tmp_path / "my_method.py").read_text().splitlines().index("        return self.nothing") + 1
    assert (
        f"the first crash: AttributeError: 'Method' object has no attribute 'nothing' ({tmp_path}/my_method.py, "
        f"line {line})"
    ) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        (
            "my_net.py",
            "x = 1\n1 / 0\n",
            "model.family: {}/my_net.py cannot be imported: ZeroDivisionError: division by",
        ),
        ("my_net.py", "VARIANTS = ('a',)\n", "model.family: {}/my_net.py has no build"),
        ("my_method.py", "raise KeyError('x')\n", "name: {}/my_method.py cannot be imported: KeyError: 'x'"),
        ("my_method.py", "x = 1\n", "name: {}/my_method.py has no Params"),
    ],
)
def test_what_is_wrong_with_a_file_ends_the_command_with_exit_code_2(
    experiment: Path, tmp_path: Path, file: str, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_method.py").write_text(METHOD)
    (tmp_path / file).write_text(text)
    experiment.write_text(re.sub(r"algorithms: .*", "algorithms: [{name: ./my_method.py}]", experiment.read_text()))
    assert run(str(experiment), *given("processes=inline"), "--out", str(tmp_path / "out")) == 2
    said = capsys.readouterr().err
    assert says.format(tmp_path) in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_example_of_a_data_file_runs(tmp_path: Path) -> None:
    (tmp_path / "my_data.py").write_text(blocks("data.md", "python")[1])
    path = tmp_path / "waves.yaml"
    path.write_text(blocks("data.md", "yaml")[0])
    out = tmp_path / "out"
    sets = ("--set", "processes=inline", "--set", "training.batch=8")
    assert run(str(path), *sets, "--out", str(out)) == 0
    ((files,),) = query(out / "heteroavg-sync-1", "SELECT value FROM meta WHERE key = 'files'")
    assert list(json.loads(files)) == [str(tmp_path / "my_data.py")]
    accuracy, f1 = zip(*query(out / "heteroavg-sync-1", "SELECT accuracy, f1 FROM evaluations"), strict=True)
    assert max(accuracy) > 0.5 > accuracy[0]
    assert max(f1) > 0.4


REGRESSION = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
VARIANTS = ("small", "large")
def build(variant, spec):
    width = 8 if variant == "small" else 16
    return nn.Sequential(nn.Flatten(), nn.Linear(6, width), nn.ReLU(), nn.Linear(width, spec.outputs))
def make(samples):
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(samples))
    return TensorDataset(x, 20 * x[:, 0] + 100)
def train(): return make(400)
def test(): return make(100)
"""


@pytest.mark.slow
def test_a_regression_is_judged_by_its_error_from_the_run_to_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "both.py").write_text(REGRESSION)
    path, out = tmp_path / "numbers.yaml", tmp_path / "out"
    path.write_text(
        "title: numbers\nfleet: demo\ndata: {name: ./both.py, partition: {kind: iid}}\nmodel: {family: ./both.py}\n"
        "algorithms: [{name: heteroavg}, {name: fedprox}]\nrounds: 4\nprocesses: inline\ntiming: {source: modelled}\n"
        "training: {epochs: 5, optimizer: {lr: 0.002}}\nevaluation: {targets: [30]}\n"
    )
    assert run(str(path), "--out", str(out)) == 0
    assert re.search(r"heteroavg-sync-1: mean absolute error [\d.]+ after round 4", capsys.readouterr().err)
    rows = query(out / "heteroavg-sync-1", "SELECT accuracy, f1, mae FROM evaluations ORDER BY version")
    assert all(accuracy is None and f1 is None for accuracy, f1, _ in rows)
    assert rows[-1][2] < 30 < rows[0][2]
    with pytest.raises(SystemExit, match="0"):
        main(["report", str(out), "--out", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    assert "Test mean absolute error against device time" in page
    assert "Best final mean absolute error" in page
    assert "ccuracy<" not in page
    capsys.readouterr()
    assert "Cost to mean absolute error 30" in page
    with pytest.raises(SystemExit, match="0"):
        main(["compare", str(out), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["targets"] == [30.0]
    errors = query(out / "heteroavg-sync-1", "SELECT device_s, mae FROM evaluations ORDER BY version")
    assert found["methods"][0]["time_to_30"] == next(device_s for device_s, mae in errors if mae <= 30)
    with pytest.raises(SystemExit, match="0"):
        main(["compare", str(out), "--target", "0.9"])
    said = capsys.readouterr().out
    assert "Final mean absolute error" in said
    assert "Time to mean absolute error 0.9" in said
    assert "%" not in said.split("Peak memory")[0]
    with pytest.raises(SystemExit, match="0"):
        main(["plot", "time", str(out), "--out", str(tmp_path / "figures")])


def test_a_target_beyond_all_accuracies_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sensors", "--set", "evaluation.targets=[0.5, 60]", "--out", str(tmp_path / "out")) == 2
    assert "evaluation.targets.1 is 60, but the labels are classes, so it is an accuracy" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["fedhe", "fd"])
def test_a_method_that_goes_by_classes_refuses_numbers(
    tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "both.py").write_text(REGRESSION)
    path = tmp_path / "numbers.yaml"
    path.write_text(
        "title: numbers\nfleet: demo\ndata: {name: ./both.py, partition: {kind: iid}}\nmodel: {family: ./both.py}\n"
        f"algorithms: [{{name: {method}}}]\n"
    )
    assert run(str(path), "--out", str(tmp_path / "out")) == 2
    assert f"{method} goes by the classes of samples, but the labels of" in capsys.readouterr().err
