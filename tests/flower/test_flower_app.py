"""What is wrong with a Flower app, or with an experiment that has one, is one sentence."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from fleetbed.flower.app import check_flower, load_part, needs_download, read_app, with_rounds
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.resolve import load_experiment, make_experiment

pytest.importorskip("flwr")
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fleetbed.flower.grid import FleetGrid
from fleetbed.flower.serverapp import running

APPS = Path(__file__).parent / "apps"


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A copy of an app, to be spoilt."""
    return Path(shutil.copytree(APPS / "quick_numpy", tmp_path / "app"))


def test_the_parts_and_the_run_config_of_an_app() -> None:
    parts = read_app(APPS / "quick_numpy")
    assert (parts.server, parts.client) == ("quick_numpy.server_app:app", "quick_numpy.client_app:app")
    assert parts.run_config({"num-server-rounds": 7}) == {"num-server-rounds": 7, "fraction-evaluate": 1.0}
    assert isinstance(load_part(parts, parts.client, ClientApp), ClientApp)
    with pytest.raises(BadInput, match="'num-server-round'; did you mean num-server-rounds"):
        parts.run_config({"num-server-round": 7})


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("[tool.flwr.app.components]", "[tool.other]", r"is not a Flower app: its pyproject.toml has no \[tool.flwr"),
        ('serverapp = "quick_numpy.server_app:app"', "", "components.serverapp is None, but module:attribute is"),
        ('clientapp = "quick_numpy.client_app:app"', 'clientapp = "client"', "components.clientapp is 'client'"),
        ("[project]", "[project", "cannot be read"),
    ],
)
def test_a_folder_that_is_no_app(app: Path, old: str, new: str, sentence: str) -> None:
    file = app / "pyproject.toml"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(BadInput, match=sentence):
        read_app(app)


def test_a_folder_without_anything(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no such folder"):
        read_app(tmp_path / "missing")
    with pytest.raises(BadInput, match=r"is not a Flower app: there is no pyproject.toml"):
        read_app(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("lacks", "import flwr_datasets_of_nobody", "install what the app depends on"),
        ("broken", "x = 1 / 0", r"ZeroDivisionError: division by zero, at .*broken.py:1"),
        ("wants", "raise ConnectionError('Max retries exceeded')", "the app needs a download"),
        ("other", "app = 3", "is of type int, but ServerApp is needed"),
        ("empty", "", "the module spoilt.empty has no app"),
    ],
)
def test_a_part_that_cannot_be_imported(app: Path, name: str, text: str, sentence: str) -> None:
    (app / "spoilt").mkdir()
    (app / "spoilt" / f"{name}.py").write_text(text)
    file = app / "pyproject.toml"
    file.write_text(file.read_text().replace("quick_numpy.server_app", f"spoilt.{name}"))
    parts = read_app(app)
    try:
        with pytest.raises(BadInput, match=sentence):
            load_part(parts, parts.server, ServerApp)
    finally:
        sys.path.remove(str(app))
        for module in [each for each in sys.modules if each.split(".")[0] == "spoilt"]:
            del sys.modules[module]


def test_flower_that_is_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_flower() == metadata.version("flwr")
    monkeypatch.setattr(metadata, "version", lambda _: "1.9.0")
    with pytest.raises(BadInput, match=r"Flower 1.9.0 is installed, but 1.32 or newer is needed: pip install"):
        check_flower()

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(BadInput, match="Flower is not installed: pip install"):
        check_flower()


def test_an_error_of_the_network_is_told_from_others() -> None:
    assert needs_download("gaierror: [Errno -3] Temporary failure in name resolution")
    assert not needs_download("ValueError: a connection of neurons")


def test_a_serverapp_that_wants_to_download_is_told_so(tmp_path: Path) -> None:
    for why, hint in (("Couldn't reach the Hub", True), ("no luck", False)):
        grid = FleetGrid([1])
        app = ServerApp()

        @app.main()
        def main(grid: Grid, context: Context, why: str = why) -> None:
            raise (ConnectionError if "Hub" in why else ValueError)(why)

        with running(app, grid, {}, 1, tmp_path, lambda *_: None):
            grid.listen(lambda: None)
        assert "the ServerApp failed at" in str(grid.error)
        assert ("the app needs a download" in str(grid.error)) == hint
        assert why in (tmp_path / "error.log").read_text()


def test_an_experiment_with_an_app_is_metered_and_has_its_rounds(tmp_path: Path) -> None:
    file = tmp_path / "asked.yaml"
    shutil.copytree(APPS / "quick_numpy", tmp_path / "mine")
    file.write_text("title: T\nfleet: iot-10\nflower: {app: ./mine, run_config: {num-server-rounds: 4}}\n")
    found = with_rounds(load_experiment(str(file)))
    assert (found.rounds, found.timing.source) == (4, "metered")
    assert found.flower is not None
    assert found.flower.app == str(tmp_path / "mine")
    assert [choice.title for choice in found.algorithms] == ["mine"]


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("timing.source=enforced", "only metered is possible"),
        ("algorithms=[{name: fedavg}]", "flower.app is the algorithm"),
        ("data.name=fashion-mnist", "data is given, but a Flower app decides about that itself"),
        ("policies=[{kind: async}]", "policies is given"),
        ("processes=inline", "a Flower app needs processes of this host"),
        ("flower.hang_s=0", "flower.hang_s is 0"),
    ],
)
def test_settings_that_an_app_does_not_read(setting: str, sentence: str) -> None:
    tree = {"title": "T", "fleet": "iot-10", "flower": {"app": str(APPS / "quick_numpy")}}
    with pytest.raises(BadInput, match=sentence):
        make_experiment(tree, [setting])


def test_only_an_app_is_metered() -> None:
    with pytest.raises(BadInput, match="metered, which is for Flower apps"):
        load_experiment("demo", (), ["timing.source=metered"])


def test_the_command_refuses_a_folder_that_is_no_app(tmp_path: Path) -> None:
    asked = [sys.executable, "-m", "fleetbed.cli.main", "flower", str(tmp_path), "--fleet", "iot-10"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "is not a Flower app" in done.stderr
    assert list(tmp_path.iterdir()) == []
