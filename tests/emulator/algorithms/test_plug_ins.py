"""Methods of other distributions: whatever such a module does at import is one sentence, where it was asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fleetbed.cli.main import main
from fleetbed.emulator import algorithms
from fleetbed.emulator.algorithms import load_algorithm, names
from fleetbed.profiles.errors import BadInput

GOOD = """
from msgspec import Struct
from fleetbed.emulator.algorithms.fedavg import Method as Base
class Params(Struct, frozen=True): pass
class Method(Base): pass
"""
BROKEN = {
    "raises": ("x = 1\nraise RuntimeError('no licence\\nfound')", "RuntimeError: no licence found", "line 2"),
    "divides": ("1 / 0", "ZeroDivisionError: division by zero", "line 1"),
    "exits": ("import sys; sys.exit(7)", "SystemExit: 7", "line 1"),
    "quits": ("raise SystemExit", "SystemExit: no reason given", "line 1"),
    "syntax": ("x = 1\ndef broken(:\n", "SyntaxError: ", "line 2"),
    "needs": ("import no_such_module_anywhere", "ModuleNotFoundError: No module named", "line 1"),
    "recurses": ("def f(): f()\nf()", "RecursionError: ", "line 1"),
    "asserts": ("assert False, 'x' * 5000", "AssertionError: xxx", "line 1"),
    "empty": ("", "has no Params: a method defines one", ""),
    "no_method": ("from msgspec import Struct\nclass Params(Struct): pass", "has no Method: a method defines one", ""),
    "wrong": ("Params = 3\nMethod = 4", "has no Params", ""),
    "lazy": ("def __getattr__(name): raise KeyError(name)", "KeyError: 'Params'", "line 1"),
}


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with one entry point for each module, and one that names a module that is not there."""
    modules = {**{name: text for name, (text, _, _) in BROKEN.items()}, "good": GOOD}
    for name, text in modules.items():
        (tmp_path / f"plug_{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, f"plug_{name}", raising=False)
    info = tmp_path / "their_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-methods\nVersion: 1.0\n")
    points = [f"their-{name} = plug_{name}" for name in modules] + ["their-gone = plug_gone"]
    (info / "entry_points.txt").write_text("\n".join([f"[{algorithms.GROUP}]", *points]))
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_one_is_a_sentence(tmp_path: Path, name: str) -> None:
    _, says, line = BROKEN[name]
    with pytest.raises(BadInput) as caught:
        load_algorithm(f"their-{name}", "algorithms.0")
    sentence = str(caught.value)
    assert sentence.startswith(
        f"algorithms.0.name: their-{name} comes from the distribution their-methods (plug_{name})"
    )
    assert says in sentence
    assert "\n" not in sentence
    assert len(sentence) < 1000
    if line:
        assert f"{tmp_path}/plug_{name}.py, {line}" in sentence


def test_one_that_is_not_there() -> None:
    with pytest.raises(BadInput, match=r"their-methods .*No module named 'plug_gone' \(its module was not found\)"):
        load_algorithm("their-gone")


def test_nobody_who_did_not_ask_is_disturbed() -> None:
    assert "their-raises" in names()
    assert load_algorithm("fedavg").Method is not None
    assert load_algorithm("their-good").Method is not None
    with pytest.raises(BadInput, match="there is no method 'their-nothing'"):
        load_algorithm("their-nothing")


@pytest.mark.parametrize("command", [("profiles", "check"), ("run", "--dry-run")])
def test_the_command_ends_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: tuple[str, ...]
) -> None:
    file = tmp_path / "x.yaml"
    algorithms = "algorithms: [{name: fedavg}, {name: their-exits}]\n"
    file.write_text(f"title: x\nfleet: demo\ntiming: {{source: modelled}}\nprocesses: inline\n{algorithms}")
    with pytest.raises(SystemExit) as caught:
        main([*command, str(file)])
    assert caught.value.code == 2
    assert "their-exits comes from the distribution their-methods" in capsys.readouterr().err
