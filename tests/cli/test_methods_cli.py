"""`fleetbed methods`: the list, one method, and what is no method."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fleetbed.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["methods", *args])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_the_list_has_every_method_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == 0
    assert "heteroavg" in out
    assert "HeteroAvg: layer-wise averaging of the weights of unequal models." in out


def test_one_method_with_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "heteroprox", "--json")
    info = json.loads(out)
    assert code == 0
    assert (info["down"], info["up"], info["client"]) == ("P + b", "P + b", "nothing")
    (mu,) = [each for each in info["parameters"] if each["name"] == "mu"]
    assert mu["default"] == "0.1"
    assert mu["text"].startswith("strength of the pull")


def test_an_unknown_method_gets_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "heteroagv")
    assert (code, out) == (2, "")
    assert "there is no method 'heteroagv'; did you mean heteroavg" in err


def test_the_list_imports_no_torch() -> None:
    code = "import sys\nfrom fleetbed.cli.methods import methods\nmethods()\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
