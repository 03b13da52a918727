"""The identity of a run: what must be unchanged when it is resumed or replayed, and what differs."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import FieldInfo, fields, replace

from fleetbed.emulator.engine.layout import Layout
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import RunConfig

VERSIONS = ("fleetbed", "torch", "torchvision", "numpy", "pyzmq")


def versions() -> dict[str, str]:
    return {name: version(name) for name in VERSIONS}


def profiles(layout: Layout) -> dict[str, str]:
    """Digests of everything that the configuration only names: devices, links, traces, data and partition."""
    parts: dict[str, Any] = {"server": [layout.server, layout.server_link], "partition": layout.split.to_json()}
    parts["data"] = (
        layout.folder.name
    )  # it stands for the content of the files and the settings that they were prepared with
    parts["traces"] = [layout.presence, layout.rates]
    parts |= {f"client {spec.name} {spec.kind}": [spec.device, spec.link] for spec in layout.specs}
    return {name: hashlib.blake2b(msgspec.json.encode(part), digest_size=6).hexdigest() for name, part in parts.items()}


def run_digest(config: RunConfig) -> str:
    """A digest that identifies a run among all studies, without its number of rounds, which may grow.

    Defaults are left out, so that a key that is new in a later version does not make it another run.
    """
    fixed = replace(config, experiment=replace(config.experiment, rounds=1))
    return hashlib.blake2b(msgspec.json.encode(_stated(fixed), order="deterministic"), digest_size=16).hexdigest()


def _stated(value: Any) -> Any:
    if isinstance(value, Struct):
        default = {field.name: _default(field) for field in fields(value)}
        return {name: _stated(part) for name in default if (part := getattr(value, name)) != default[name]}
    return [_stated(part) for part in value] if isinstance(value, tuple) else value


def _default(field: FieldInfo) -> Any:
    return field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default


def check_same(where: str, what: str, then: Any, now: Any) -> None:
    """Refuse to resume a run whose inputs changed."""
    differing = [f"{key} ({a} then, {b} now)" for key, (a, b) in differences(then, now).items()]
    if differing:
        raise BadInput(
            f"{where}: cannot resume, the {what} changed: {', '.join(differing)}; "
            "restore what the run was started with, or start a new run with --out"
        )


def differences(then: Any, now: Any) -> dict[str, tuple[Any, Any]]:
    """The dotted key paths at which two trees of data differ, with both values."""
    one, other = _flat("", _plain(then)), _flat("", _plain(now))
    keys = sorted(one.keys() | other.keys())
    found = {key: (one.get(key, "missing"), other.get(key, "missing")) for key in keys}
    return {key: values for key, values in found.items() if values[0] != values[1]}


def _plain(tree: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(tree))


def _flat(prefix: str, tree: Any) -> dict[str, Any]:
    if isinstance(tree, dict) and tree:
        return {k: v for key, part in tree.items() for k, v in _flat(f"{prefix}{key}.", part).items()}
    return {prefix.rstrip("."): tree}
