"""`fleetbed profiles list|show|check` and `fleetbed schema KIND`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from fleetbed.cli.common import AsJson, ProfileFolders, complain, print_json, print_table
from fleetbed.profiles.checks.provenance import without_provenance
from fleetbed.profiles.errors import BadInput, nearest
from fleetbed.profiles.experiment import Experiment, runs
from fleetbed.profiles.files import show_path, user_path
from fleetbed.profiles.fleet import sizes
from fleetbed.profiles.loading import TYPES, Kind
from fleetbed.profiles.mistakes import Mistakes, check_references, read_on
from fleetbed.profiles.rates import rates_of, rates_provenance
from fleetbed.profiles.resolve import (
    FOLDERS,
    available,
    clients_of,
    find_profile,
    load_device,
    load_experiment,
    load_fleet,
    load_link,
    looks_like_path,
    search_folders,
)
from fleetbed.profiles.runtimes import RUNTIMES
from fleetbed.profiles.types import Device, Fleet, Link, Profile, Provenance
from fleetbed.profiles.yaml_text import plain, read_mapping
from fleetbed.schema import schema_text

app = typer.Typer(help="List, show and check devices, links, fleets and experiments.", no_args_is_help=True)

KindOption = Annotated[Kind | None, typer.Option("--kind", help="The kind of profile, if the file does not show it.")]
_COLUMNS: dict[Kind, tuple[str, ...]] = {
    "device": ("name", "title", "trains_on", "rate_gflops", "cap_mib", "link"),
    "link": ("name", "title", "down_mbit_s", "up_mbit_s", "rtt_ms", "loss"),
    "fleet": ("name", "title", "clients", "devices"),
    "experiment": ("name", "title", "fleet", "methods", "runs"),
}


@app.command("list")
def list_profiles(
    kind: Annotated[Kind | None, typer.Argument(help="Only this kind.")] = None,
    profiles: ProfileFolders = None,
    as_json: AsJson = False,
) -> None:
    """List every profile by kind: yours first, then those shipped with fleetbed."""
    search = search_folders(profiles)
    kinds: list[Kind] = [kind] if kind else list(FOLDERS)
    found = {
        each: [_summary(_load(each, str(path), search), name, path) for name, path in available(each, search).items()]
        for each in kinds
    }
    if as_json:
        print_json({FOLDERS[each]: rows for each, rows in found.items()})
        return
    for each, rows in found.items():
        columns = _COLUMNS[each]
        print_table(f"{len(rows)} {FOLDERS[each]}", columns, [[row[column] for column in columns] for row in rows])


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A name, or the path of a file.")],
    kind: KindOption = None,
    profiles: ProfileFolders = None,
    as_json: AsJson = False,
) -> None:
    """Show one profile with all defaults filled in, and the source of each figure."""
    search = search_folders(profiles, name)
    kind, path = _find(name, kind, search)
    profile = _load(kind, str(path), search)
    if as_json:
        print_json({"kind": kind, "file": str(path), "profile": profile, **_extra(profile, str(path), search)})
    elif isinstance(profile, Fleet):
        _show_fleet(profile, path, search)
    elif isinstance(profile, (Device, Link)):
        _show_figures(profile, path)
    else:
        import yaml

        print(plain(f"# {path}, with every default"))
        print(yaml.safe_dump(msgspec.to_builtins(profile), sort_keys=False, allow_unicode=True), end="")


@app.command("check")
def check_profiles(
    names: Annotated[list[str] | None, typer.Argument(help="Names or paths; default: every profile.")] = None,
    kind: KindOption = None,
    profiles: ProfileFolders = None,
    as_json: AsJson = False,
) -> None:
    """Check profiles and everything they refer to, and list every mistake; exit code 2 if there is one."""
    if names:
        results = [_check(name, kind, search_folders(profiles, name)) for name in names]
    else:
        search = search_folders(profiles)
        kinds: list[Kind] = [kind] if kind else list(FOLDERS)
        results = [_check(str(path), each, search) for each in kinds for path in available(each, search).values()]
    if as_json:
        print_json(results)
    else:
        for result in results:
            if not result["errors"]:
                missing = result["without_provenance"]
                remarks = [f"no provenance: {', '.join(missing)}"] if missing else result["remarks"]
                note = f" ({'; '.join(remarks)})" if remarks else ""
                print(plain(f"{result['kind']} {result['file']}: ok{note}"))
    wrong = [sentence for result in results for sentence in result["errors"]]
    for sentence in wrong:
        complain(sentence)
    if wrong:
        raise typer.Exit(BadInput.exit_code)


def schema(kind: Annotated[Kind, typer.Argument(help="The kind of file.")]) -> None:
    """Print the JSON Schema of a kind of file, so that editors can complete and check the YAML."""
    print(schema_text(kind), end="")


def _load(kind: Kind, name: str, search: Sequence[Path]) -> Profile:
    if kind == "device":
        return load_device(name, search)
    if kind == "link":
        return load_link(name, search)
    return load_fleet(name, search) if kind == "fleet" else load_experiment(name, search)


def _find(name: str, kind: Kind | None, search: Sequence[Path]) -> tuple[Kind, Path]:
    """Return the kind and the file of a name; without the option, work out the kind."""
    if kind:
        return kind, find_profile(kind, name, search)
    if looks_like_path(name):
        path = user_path(name, "the profile")
        return _kind_of(path), path
    kinds: list[Kind] = [each for each in FOLDERS if name in available(each, search)]
    if not kinds:
        everything = {known for each in FOLDERS for known in available(each, search)}
        raise nearest(name, everything, "profile", "")
    if len(kinds) > 1:
        raise BadInput(
            f"{name} is the name of {' and '.join(f'one {each}' for each in kinds)}: choose one with --kind."
        )
    return kinds[0], find_profile(kinds[0], name, search)


def _kind_of(path: Path) -> Kind:
    """Work out the kind of a file from the name of its folder, otherwise from its keys."""
    for kind, folder in FOLDERS.items():
        if path.absolute().parent.name == folder:
            return kind
    keys = set(read_mapping(path))
    hits = {kind: len(keys & {f.name for f in msgspec.structs.fields(type_)}) for kind, type_ in TYPES.items()}
    best = [kind for kind, count in hits.items() if count and count == max(hits.values())]
    if len(best) != 1:
        raise BadInput(f"{path}: its keys do not show which kind it is ({', '.join(FOLDERS)}): choose one with --kind.")
    return best[0]


def _check(name: str, kind: Kind | None, search: Sequence[Path]) -> dict[str, Any]:
    result: dict[str, Any] = {"file": name, "kind": kind, "errors": [], "remarks": [], "without_provenance": []}
    try:
        found, path = _find(name, kind, search)
    except BadInput as error:
        return {**result, "errors": [str(error)]}
    result |= {"file": str(path), "kind": found}
    mistakes = Mistakes(show_path(path))
    profile = read_on(path, found, mistakes)
    if profile is not None:
        check_references(profile, search, mistakes)
    if isinstance(profile, (Device, Link)):
        result["without_provenance"] = without_provenance(profile)
    if isinstance(profile, Experiment):
        from fleetbed.emulator.run.checking import check_experiment

        result["remarks"] = check_experiment(profile, search, mistakes)
    return {**result, "errors": mistakes.sentences}


def _extra(profile: Profile, where: str, search: Sequence[Path]) -> dict[str, Any]:
    """Resolve everything that a profile refers to; a wrong reference is an error."""
    if isinstance(profile, Device):
        return {
            "link": load_link(profile.link, search, f"{where}: link"),
            "rates": rates_of(profile),
            "rates_provenance": rates_provenance(profile),
            "runtime_mib": profile.runtime_mib,
        }
    if isinstance(profile, Fleet):
        return {"clients": clients_of(profile, search, where)}
    if isinstance(profile, Experiment):
        load_device(profile.server.device, search, f"{where}: server.device")
        load_link(profile.server.link, search, f"{where}: server.link")
        fleet = load_fleet(profile.fleet, search, f"{where}: fleet")
        return {
            "runs": [run.name for run in runs(profile)],
            "clients": len(clients_of(fleet, search, profile.fleet)),
        }
    return {}


def _summary(profile: Profile, name: str, path: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "file": str(path), **msgspec.to_builtins(profile)}
    row.pop("provenance", None)
    if isinstance(profile, Device):
        row |= {"rate_gflops": profile.rate_gflops, "cap_mib": profile.cap_mib}
    elif isinstance(profile, Fleet):
        devices = sorted({member.device for member in profile.members})
        row |= {"clients": sum(sizes(profile)), "devices": ", ".join(devices)}
    elif isinstance(profile, Experiment):
        titles = ", ".join(choice.title for choice in profile.algorithms)
        row = {key: row[key] for key in ("name", "file", "title", "fleet")}
        row |= {"algorithms": titles, "methods": len(profile.algorithms), "runs": len(runs(profile))}
    return row


def _show_fleet(fleet: Fleet, path: Path, search: Sequence[Path]) -> None:
    clients = clients_of(fleet, search, str(path))
    rows = []
    first = 0
    for size in sizes(fleet):
        if size:
            one = clients[first]
            numbers = one.name if size == 1 else f"{one.name}-{clients[first + size - 1].name}"
            rates = f"{one.link.down_mbit_s:g} / {one.link.up_mbit_s:g}"
            rows.append([numbers, size, one.kind, one.device.rate_gflops, one.device.cap_mib, one.link_name, rates])
        first += size
    columns = ["clients", "count", "device", "rate_gflops", "cap_mib", "link", "down / up Mbit/s"]
    print_table(f"{fleet.title} ({path})", columns, rows)


def _show_figures(profile: Device | Link, path: Path) -> None:
    origin = {entry.figure: entry for entry in profile.provenance}
    if isinstance(profile, Device):
        profile, origin = _filled_in(profile, origin)
    rows = []
    for key, value in _leaves(msgspec.to_builtins(profile)):
        groups = [key.rsplit(".", n)[0] for n in range(key.count(".") + 1)]
        entry = next((origin[group] for group in groups if group in origin), None)
        source = "; ".join(part for part in (entry.source, entry.note) if part) if entry else ""
        rows.append([key, value, entry.kind if entry else "", source])
    print_table(f"{profile.title} ({path})", ["figure", "value", "kind", "source"], rows)


def _filled_in(device: Device, origin: dict[str, Provenance]) -> tuple[Device, dict[str, Provenance]]:
    """Fill in the rates and the runtime's memory, which follow from the device's other figures."""
    origin = {**origin, **{entry.figure: entry for entry in rates_provenance(device)}}
    memory = device.memory
    if memory.runtime_mib is None:
        runtime = RUNTIMES[device.runtime]
        memory = msgspec.structs.replace(memory, runtime_mib=runtime.memory_mib)
        origin["memory.runtime_mib"] = Provenance(
            figure="memory.runtime_mib", kind=runtime.kind, source=runtime.source or None, note=runtime.note
        )
    return msgspec.structs.replace(device, memory=memory, rates=rates_of(device)), origin


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            found += _leaves(value, f"{prefix}{key}.")
        elif value is not None and key not in ("provenance", "title"):
            found.append((prefix + key, value))
    return found
