from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetbed.cli.main import main
from fleetbed.models.cost import validation
from fleetbed.models.cost.operations import Operations
from fleetbed.models.cost.timm_step import StepWork
from fleetbed.profiles import BadInput

HEADER = "device,what,model,input,batch,threads,metric,value,unit,notes\n"
ROW = "raspberry-pi-5-8gb,training,{model},3x64x64,4,4,time per batch,{value},{unit},\n"


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(args)
    return int(caught.value.code or 0)


@pytest.fixture(autouse=True)
def _counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step_work(name: str, shape: tuple[int, ...], batch: int) -> StepWork:
        if name != "net":
            raise BadInput(f"there is no model {name}")
        return StepWork(Operations(matmul_flop=133e9), ("odd::op",))

    monkeypatch.setattr(validation, "step_work", step_work)
    monkeypatch.chdir(tmp_path)


def points(tmp_path: Path, *rows: tuple[str, str, str]) -> str:
    path = tmp_path / "mine.csv"
    path.write_text(HEADER + "".join(ROW.format(model=m, value=v, unit=u) for m, v, u in rows))
    return str(path)


def test_a_table_the_errors_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = points(tmp_path, ("net", "1.25", "s"), ("net", "800", "ms"), ("other", "1", "s"), ("net", "0", "s"))
    assert run("validate", file, "--out", "there") == 0
    out = capsys.readouterr()
    assert "2 training steps" in out.out
    assert "-20%" in out.out
    assert "+25%" in out.out
    assert "derived" in out.out
    assert "row 4 is skipped: there is no model other" in out.err
    assert 'row 5 is skipped: value is "0", but a time above 0 is needed' in out.err
    assert out.err.count("the operator odd::op of net, net is in no class") == 1
    for suffix in ("png", "pdf"):
        assert (tmp_path / "there" / f"device-time.{suffix}").stat().st_size > 1000


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("validate", points(tmp_path, ("net", "2", "s")), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["points"][0]["error"] == pytest.approx(-0.5)
    assert found["devices"][0]["errors"]["median"] == pytest.approx(0.5)
    assert len(found["files"]) == 2


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "the points cannot be read"),
        ("", "the column device is missing"),
        (HEADER, "no row of this file can be used"),
        (HEADER + ROW.format(model="other", value=1, unit="s"), "row 2: there is no model other"),
        (HEADER + ROW.format(model="net", value=1, unit="fortnights"), "row 2: unit is"),
    ],
)
def test_a_file_that_cannot_be_compared_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, sentence: str
) -> None:
    if content is not None:
        (tmp_path / "bad.csv").write_text(content)
    assert run("validate", "bad.csv") == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert not (tmp_path / "validation").exists()
