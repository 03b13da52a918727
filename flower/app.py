"""Finds the parts of a Flower app and loads them; whatever is wrong with it is one sentence."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from fleetbed.profiles.errors import BadInput, HostCannot, nearest
from fleetbed.profiles.experiment import Experiment
from fleetbed.profiles.files import is_file, is_folder, show_path

Config = dict[str, bool | int | float | str]
OLDEST = (1, 32)
ROUNDS_KEY = "num-server-rounds"  # by which nearly all apps set their rounds
MOST_ROUNDS = 100_000
INSTALL = "pip install 'fleetbed[flower]'"
#: texts of errors that an app raises when it wants to load something from the network and cannot
_NETWORK = re.compile(
    r"ConnectionError|URLError|Max retries|name resolution|getaddrinfo|NameResolution|offline mode|couldn't connect"
    r"|Network is unreachable|ConnectError",
    re.IGNORECASE,
)
DOWNLOAD = "the app needs a download, and the network is not there: download its data first, or change where it looks"


@dataclass(frozen=True)
class AppParts:
    """An app as its pyproject.toml describes it; `server` and `client` are written module:attribute."""

    folder: Path
    server: str
    client: str
    config: Config

    def run_config(self, overrides: Mapping[str, bool | int | float | str]) -> Config:
        """The app's configuration with these values. Raises BadInput for keys that it does not have."""
        for key in overrides:
            if key not in self.config:
                raise nearest(key, self.config, "key", f"flower.run_config, of {show_path(self.folder)}")
        return {**self.config, **overrides}


def check_flower() -> str:
    """Return the version of Flower. Raises BadInput if it is missing or too old."""
    if sys.version_info < (3, 11):
        raise BadInput("Flower needs Python 3.11 or newer: install fleetbed[flower] with that.")
    try:
        found = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise BadInput(f"Flower is not installed: {INSTALL}") from None
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise BadInput(f"Flower {found} is installed, but {oldest} or newer is needed: {INSTALL}")
    return found


def read_app(folder: Path, where: str = "flower.app") -> AppParts:
    """Read what the app's pyproject.toml says, without importing anything of it."""
    shown = f"{where}: {show_path(folder)}"
    if not is_folder(folder, where):
        raise BadInput(f"{shown}: there is no such folder; give the folder that you would give to `flwr run`.")
    path = folder / "pyproject.toml"
    if not is_file(path, where):
        raise BadInput(f"{shown} is not a Flower app: there is no pyproject.toml in it.")
    if sys.version_info < (3, 11):
        raise HostCannot("Flower apps need Python 3.11 or newer, as Flower itself does.")
    import tomllib

    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise BadInput(f"{where}: {show_path(path)} cannot be read: {error}.") from None
    app = tree
    for key in ("tool", "flwr", "app"):
        app = app.get(key, {}) if isinstance(app, dict) else {}
    components = app.get("components") if isinstance(app, dict) else None
    if not isinstance(components, dict):
        raise BadInput(f"{shown} is not a Flower app: its pyproject.toml has no [tool.flwr.app.components].")
    found = {}
    for key in ("serverapp", "clientapp"):
        value = components.get(key)
        if not isinstance(value, str) or not re.fullmatch(r"[\w.]+:[\w.]+", value):
            raise BadInput(
                f"{shown}: tool.flwr.app.components.{key} is {value!r}, but module:attribute is needed, such as "
                f'{key} = "myapp.{key[:6]}_app:app".'
            )
        found[key] = value
    config = app.get("config", {})
    if not isinstance(config, dict):
        raise BadInput(f"{shown}: tool.flwr.app.config is not a table of its pyproject.toml.")
    return AppParts(folder, found["serverapp"], found["clientapp"], dict(_flat(config)))


def load_part(app: AppParts, reference: str, kind: type[Any]) -> Any:
    """Import the ServerApp or ClientApp. Raises BadInput where that fails; modules stay imported."""
    where = f"{show_path(app.folder)}: {reference}"
    if str(app.folder) not in sys.path:
        sys.path.insert(0, str(app.folder))
    module, _, attributes = reference.partition(":")
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise BadInput(f"{where} cannot be imported: {_reason(error)}") from error
    for name in attributes.split("."):
        if not hasattr(found, name):
            raise BadInput(f"{where}: the module {module} has no {attributes}; correct the app's pyproject.toml.")
        found = getattr(found, name)
    if not isinstance(found, kind):
        raise BadInput(f"{where} is of type {type(found).__name__}, but {kind.__name__} is needed.")
    return found


def needs_download(text: str) -> bool:
    """Whether the text of an error says that something could not be loaded from the network."""
    return _NETWORK.search(text) is not None


def _reason(error: BaseException) -> str:
    said = f"{type(error).__name__}: {error}".removesuffix(": ").splitlines()[0]
    if isinstance(error, ModuleNotFoundError):
        return f"{said}; install what the app depends on, for example with pip install of its folder."
    if needs_download(said):
        return f"{said}; {DOWNLOAD}."
    frames = traceback.extract_tb(error.__traceback__)
    return f"{said}, at {frames[-1].filename}:{frames[-1].lineno}."


def _flat(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        elif isinstance(value, (bool, int, float, str)):
            yield above + key, value


def config_of(experiment: Experiment) -> tuple[AppParts, Config]:
    """The app of an experiment, and its configuration for a run."""
    assert experiment.flower is not None
    parts = read_app(Path(experiment.flower.app))
    return parts, parts.run_config(experiment.flower.run_config)


def with_rounds(experiment: Experiment) -> Experiment:
    """The experiment with the number of rounds that its app's configuration gives, if it does."""
    rounds = config_of(experiment)[1].get(ROUNDS_KEY)
    if isinstance(rounds, bool) or not isinstance(rounds, int) or not 1 <= rounds <= MOST_ROUNDS:
        return experiment
    return replace(experiment, rounds=rounds)
