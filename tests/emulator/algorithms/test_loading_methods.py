"""Methods by name, and what is said where a name or a parameter is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from algorithm_harness import Bed, ToyDepth

from fleetbed.emulator.algorithms import load_algorithm, load_method, names, read_params
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import AlgorithmChoice

METHODS = (
    "depthfl",
    "fd",
    "fedavg",
    "feddpa",
    "fedepth",
    "fedfomo",
    "fedhe",
    "fedhenn",
    "fedhenn_homo",
    "fedin",
    "fednova",
    "fedper",
    "fedproto",
    "fedprox",
    "fedrep",
    "fedrolex",
    "fedselect",
    "heteroavg",
    "heterofl",
    "heteroprox",
    "inclusivefl",
    "inco",
    "lgfedavg",
    "moon",
    "private",
    "scaffold",
    "scalefl",
)


def test_every_method_is_listed_with_one_line() -> None:
    listed = names()
    assert tuple(n for n in listed if n in METHODS) == METHODS
    for name in METHODS:
        assert 20 < len(listed[name]) <= 120
        assert listed[name].endswith(".")


def test_every_module_has_frozen_params_with_defaults_and_a_method() -> None:
    for name in METHODS:
        module = load_algorithm(name)
        assert callable(module.Method)
        assert module.Params.__struct_config__.frozen
        assert module.Params.__struct_config__.forbid_unknown_fields
        module.Params()  # every parameter has a default


def test_listing_imports_no_torch() -> None:
    code = "import sys; from fleetbed.emulator.algorithms import names; names(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"algorithms\.2\.name: there is no method 'fedavgg'; did you mean fedavg"):
        load_algorithm("fedavgg", "algorithms.2")


@pytest.mark.parametrize("name", ["_local", "__init__", "../fedavg", ""])
def test_what_is_no_method_is_not_loaded(name: str) -> None:
    with pytest.raises(BadInput, match="there is no method"):
        load_algorithm(name)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("heteroprox", {"mu": -1}, r"algorithms\.0\.params\.mu is -1, but a number from 0 to 1e12 is needed"),
        ("heteroprox", {"mu": "big"}, r"algorithms\.0\.params\.mu is .*big.*, but a number"),
        ("heteroprox", {"mi": 1}, r"algorithms\.0\.params\.mi: there is no key 'mi'; did you mean mu"),
        ("fedin", {"lamda": 1}, r"algorithms\.0\.params\.lamda: there is no key 'lamda'; did you mean lambda"),
        ("fedin", {"batch": 1}, r"algorithms\.0\.params\.batch is 1"),
        ("fedin", {"z": "best"}, r"algorithms\.0\.params\.z is .*best.*, but one of none, projection, simplified"),
        ("fedhenn", {"rad": 0}, r"algorithms\.0\.params\.rad is 0"),
    ],
)
def test_a_wrong_parameter_is_named_with_what_is_allowed(name: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_params(AlgorithmChoice(name=name, params=params), "algorithms.0")


def test_fedin_reads_lambda_by_its_own_name() -> None:
    params = read_params(AlgorithmChoice(name="fedin", params={"lambda": 3}))
    assert msgspec.to_builtins(params)["lambda"] == 3


def test_a_method_comes_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere.py").write_text("from fleetbed.emulator.algorithms.heteroavg import Method, Params\n")
    (tmp_path / "hollow.py").write_text("Params = 1\n")
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fleetbed.algorithms]\nelsewhere = elsewhere\nhollow = hollow\nmissing = nowhere_at_all\nfedavg = elsewhere\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert names()["elsewhere"] == "from elsewhere"
    bed = Bed(ToyDepth(None), ["one"])
    assert load_method(AlgorithmChoice(name="elsewhere"), bed.context).setup().tensors
    with pytest.raises(BadInput, match=r"hollow.* has no Params"):
        load_algorithm("hollow")
    with pytest.raises(BadInput, match=r"nowhere_at_all.* cannot be imported"):
        load_algorithm("missing")
    own = load_algorithm("fedavg").Method
    assert own.__module__ == "fleetbed.emulator.algorithms.fedavg"  # nobody takes the name of a shipped method
