"""Turns names into files, and files into profiles. A name is a path, a file in a user's folder, or a shipped one."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

import msgspec

from fleetbed.profiles.errors import BadInput, nearest
from fleetbed.profiles.experiment import Experiment
from fleetbed.profiles.files import is_folder, list_folder, open_regular, show_path, user_path
from fleetbed.profiles.fleet import on_own_link, overridden, sizes
from fleetbed.profiles.loading import Kind, T, decode, with_app
from fleetbed.profiles.settings import apply_settings, plain_tree
from fleetbed.profiles.types import ClientSpec, Device, Fleet, Link, Member
from fleetbed.profiles.yaml_text import QUOTE, read_mapping, shorten

Search = Sequence[Path]  # the folders given by --profiles, first one first

FOLDERS: Final[dict[Kind, str]] = {
    "device": "devices",
    "link": "links",
    "fleet": "fleets",
    "experiment": "experiments",
}
VARIABLE: Final = "FLEETBED_PROFILES"  # folders as by --profiles, separated as those of PATH
SUFFIXES: Final = (".yaml", ".yml")

# Keys that refer to another profile (a path only if it looks like one), and keys that are always a path.
_NAMES: Final[dict[Kind, tuple[str, ...]]] = {
    "device": ("link",),
    "link": (),
    "fleet": ("members.*.device", "members.*.link"),
    "experiment": (
        "fleet",
        "server.device",
        "server.link",
        "data.name",
        "model.family",
        "algorithms.*.name",
        "algorithms.*.model.family",
        "policies.*.kind",
    ),
}
_PATHS: Final = (
    "data.root",
    "data.partition.file",
    "availability.trace",
    "availability.bandwidth",
    "timing.replay",
    "flower.app",
)


def shipped() -> Path:
    """Return the folder of the profiles that come with the package."""
    return Path(str(resources.files("fleetbed.profiles")))


def search_folders(given: Search | None, name: str | None = None) -> tuple[Path, ...]:
    """Return the folders in which names are looked up before the shipped ones, checked.

    They are those given by --profiles, or by the environment, and the folder of the profile's own file, if `name` is a
    path and the folder holds profiles; of a file in a folder such as `experiments`, the folder above.
    """
    folders = list(given or ())
    if given:
        check_search(folders)
    elif listed := os.environ.get(VARIABLE):
        folders = [Path(part) for part in listed.split(os.pathsep) if part]
        check_search(folders, VARIABLE)
    if name is not None and looks_like_path(name):
        beside = user_path(name, "the profile").absolute().parent
        own = beside.parent if beside.name in FOLDERS.values() else beside
        if any(is_folder(own / each, "the profile") for each in FOLDERS.values()):
            folders.append(own)
    return tuple(folders)


def check_search(search: Search, given_by: str = "--profiles") -> None:
    """Refuse a folder that cannot contain any profile, before names are looked up in it."""
    for folder in search:
        where = f"{given_by} {show_path(folder)}"
        if not is_folder(folder, where):
            raise BadInput(f"{where}: there is no such folder.")
        if not any(is_folder(folder / name, where) for name in FOLDERS.values()):
            raise BadInput(f"{where}: that folder contains none of {', '.join(FOLDERS.values())}: create one.")


def available(kind: Kind, search: Search = ()) -> dict[str, Path]:
    """Return every profile of a kind by its name; of two with the same name, the one found first."""
    found: dict[str, Path] = {}
    for root in (*search, shipped()):
        folder, where = root / FOLDERS[kind], f"--profiles {show_path(root)}"
        for path in list_folder(folder, where) if is_folder(folder, where) else ():
            if path.suffix in SUFFIXES:
                found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def looks_like_path(name: str) -> bool:
    return "/" in name or os.sep in name or name.endswith((*SUFFIXES, ".npz", ".py"))


def find_profile(kind: Kind, name: str, search: Search = (), where: str = "") -> Path:
    """Return the file that a name refers to. `where` is the place of the name, for the error."""
    if looks_like_path(name):
        path = user_path(name, where or f"the {kind}")
        open_regular(path, "a YAML file", where).close()
        return path
    known = available(kind, search)
    if name not in known:
        raise nearest(name, known, kind, where)
    return known[name]


def load_device(name: str, search: Search = (), where: str = "") -> Device:
    return _load(find_profile("device", name, search, where), "device", Device)


def load_link(name: str, search: Search = (), where: str = "") -> Link:
    return _load(find_profile("link", name, search, where), "link", Link)


def load_fleet(name: str, search: Search = (), where: str = "") -> Fleet:
    return _load(find_profile("fleet", name, search, where), "fleet", Fleet)


def load_experiment(name: str, search: Search = (), sets: Sequence[str] = ()) -> Experiment:
    """Load the experiment, apply every `key.path=value` of `sets`, and check the result as a whole.

    Paths in a setting are relative to the current folder, and made absolute here, so that a study can be resumed from
    any folder.
    """
    path = find_profile("experiment", name, search)
    return _with_settings(_rebased(read_mapping(path), "experiment", path.parent), sets, show_path(path))


def make_experiment(content: Mapping[str, Any], sets: Sequence[str] = ()) -> Experiment:
    """Make an experiment of what its YAML file would hold; paths in it are relative to the current folder."""
    where = "the experiment"
    tree = plain_tree(content, where)
    if not isinstance(tree, dict):
        raise BadInput(f"{where} is {shorten(tree)}, but a name, a path or a mapping of keys to values is needed.")
    return _with_settings(tree, sets, where)


def _with_settings(tree: dict[str, Any], sets: Sequence[str], where: str) -> Experiment:
    told = where + "".join(f" with --set {shorten(item).strip(QUOTE)}" for item in sets)
    asked = _rebased(apply_settings(tree, sets), "experiment", Path())  # paths from a file are already absolute
    return decode(with_app(asked), Experiment, told)


def clients_of(fleet: Fleet, search: Search = (), where: str = "the fleet") -> tuple[ClientSpec, ...]:
    """Return every client of the fleet, numbered from 0 in file order, with device and link resolved."""
    clients: list[ClientSpec] = []
    for number, (member, size) in enumerate(zip(fleet.members, sizes(fleet), strict=True)):
        spec = first_of(member, number, search, where)
        first = len(clients)
        clients += [msgspec.structs.replace(spec, number=client) for client in range(first, first + size)]
    return tuple(clients)


def first_of(member: Member, number: int, search: Search, where: str) -> ClientSpec:
    """Return a client of the fleet's line `number`, with device and link resolved."""
    at = f"members.{number}"
    plain = load_device(member.device, search, f"{where}: {at}.device")
    device = overridden(plain, member.override, where, f"{at}.override")
    link_name = member.link or device.link
    link = load_link(link_name, search, f"{where}: {at}.link")
    if link_name == device.link:
        link = on_own_link(device, link)
    kind = Path(member.device).stem if looks_like_path(member.device) else member.device
    return ClientSpec(number=0, kind=kind, device=device, link_name=link_name, link=link)


def _load(path: Path, kind: Kind, type_: type[T]) -> T:
    return decode(read_tree(path, kind), type_, show_path(path))


def read_tree(path: Path, kind: Kind) -> dict[str, Any]:
    """Return the content of a file, unchecked, but with its paths made absolute."""
    tree = _rebased(read_mapping(path), kind, path.parent)
    return with_app(tree) if kind == "experiment" else tree


def _rebased(tree: dict[str, Any], kind: Kind, folder: Path) -> dict[str, Any]:
    """Make paths absolute: those in a file are relative to that file, wherever the command is run."""
    for key in _NAMES[kind]:
        _rebase(tree, key, key.split("."), folder, always=False)
    for key in _PATHS if kind == "experiment" else ():
        _rebase(tree, key, key.split("."), folder, always=True)
    sweep = tree.get("sweep") if kind == "experiment" else None
    for key, values in sweep.items() if isinstance(sweep, dict) else ():
        pattern = re.sub(r"\.\d+\.", ".*.", key)
        if isinstance(values, list) and pattern in (*_NAMES[kind], *_PATHS):
            for place, value in enumerate(values):
                values[place] = _absolute(value, key, folder, always=pattern in _PATHS)
    return tree


def _rebase(tree: Any, key: str, steps: list[str], folder: Path, always: bool) -> None:
    if steps[0] == "*":
        for item in tree if isinstance(tree, list) else ():
            _rebase(item, key, steps[1:], folder, always)
    elif isinstance(tree, dict) and (value := tree.get(steps[0])) is not None:
        if len(steps) > 1:
            _rebase(value, key, steps[1:], folder, always)
        else:
            tree[steps[0]] = _absolute(value, key, folder, always)


def _absolute(value: Any, key: str, folder: Path, always: bool) -> Any:
    """Return a path made absolute; anything else as it is."""
    if isinstance(value, str) and value and (always or looks_like_path(value)):
        return str((folder / user_path(value, key)).absolute())
    return value
