"""Converts plain mappings to types. A mistake is one sentence: the key, what was found, what is allowed, what to do."""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import inspect

from fleetbed.profiles.errors import BadInput, nearest
from fleetbed.profiles.older import advice
from fleetbed.profiles.yaml_text import QUOTE, shorten

S = TypeVar("S", bound=msgspec.Struct)

_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<key>key` in `)?\$(?P<path>[^`]*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.([A-Za-z_][A-Za-z0-9_]*)|\[(\d+|\.\.\.)\]")
_TYPES = {dict: "object", list: "array", str: "str", int: "int", float: "float", bool: "bool", type(None): "null"}
_UNITS = {
    "mib": "MiB",
    "gflops": "GFLOPS",
    "mbit_s": "Mbit/s",
    "gb_s": "GB/s",
    "ghz": "GHz",
    "ms": "milliseconds",
    "s": "seconds",
    "w": "watts",
    "wh": "watt-hours",
    "bytes": "bytes",
}


def convert(tree: dict[str, Any], type_: type[S], where: str, prefix: str = "") -> S:
    """Convert a plain mapping to a structure whose values are valid one by one."""
    try:
        return msgspec.convert(tree, type_)
    except msgspec.ValidationError as error:
        raise explain(error, tree, type_, where, prefix) from None


def explain(error: msgspec.ValidationError, tree: Any, type_: Any, where: str, prefix: str = "") -> BadInput:
    """Return the sentence for `error`, raised by converting `tree` to `type_`. Keys are shown below `prefix`."""
    what, steps, field = locate_mistake(error, tree)
    allowed = type_at(inspect.type_info(type_), steps)
    fields = _fields(allowed)
    key = ".".join([prefix] * bool(prefix) + steps)

    if what == "unknown":
        name = f"{key}.{field}" if key else field
        if (instead := advice(name)) is not None:
            return BadInput(f"{where}: {name} is a key of earlier versions; {instead}.")
        return nearest(field, fields, "key", f"{where}: {shorten(name, 120).strip(QUOTE)}")
    if what == "missing":
        name = f"{key}.{field}" if key else field
        need = describe(type_at(allowed, [field]))
        return BadInput(f"{where}: the key {name} is missing: add it, with {need} as its value.")
    found = value_at(tree, steps)
    if (instead := advice(key, found)) is not None:
        return BadInput(f"{where}: {key} is {shorten(found)}, which no longer exists; {instead}.")
    hint = _hint(found, allowed, steps)
    return BadInput(f"{where}: {key or 'the top'} is {shorten(found)}, but {describe(allowed)} is needed{hint}.")


def locate_mistake(
    error: msgspec.ValidationError, tree: Any
) -> tuple[Literal["unknown", "missing", "wrong"], list[str], str]:
    """Return the kind of mistake, its key path, and the field there that is unknown or missing."""
    match = _AT.match(str(error))
    assert match is not None  # the pattern matches any text
    steps = [name or index for name, index in _STEP.findall(match["path"] or "")]
    if "..." in steps:  # msgspec does not say which value of a mapping it was
        steps = _locate(steps, tree, match["what"])
    if unknown := re.search(r"unknown field `(.*)`", match["what"], re.DOTALL):
        return "unknown", steps, unknown[1]
    if missing := re.search(r"missing required field `(.*)`", match["what"]):
        return "missing", steps, missing[1]
    return "wrong", steps, ""


def describe(type_: inspect.Type) -> str:
    """Describe in words what a type allows."""
    if isinstance(type_, inspect.Metadata):
        return describe(type_.type)
    if isinstance(type_, inspect.UnionType):
        floats = any(isinstance(part, inspect.FloatType) for part in type_.types)
        left_out = (inspect.NoneType, inspect.IntType) if floats else (inspect.NoneType,)
        return " or ".join(describe(part) for part in type_.types if not isinstance(part, left_out))
    if isinstance(type_, inspect.LiteralType):
        values = [shorten(value).strip('"') for value in type_.values]
        return values[0] if len(values) == 1 else "one of " + ", ".join(values)
    if isinstance(type_, (inspect.IntType, inspect.FloatType)):
        noun = "a whole number" if isinstance(type_, inspect.IntType) else "a number"
        return f"{noun}{_range(type_)}"
    if isinstance(type_, inspect.StrType):
        return "text" + (" of 1 to 60 characters, no slash, no dot first" if type_.pattern else "")
    if isinstance(type_, inspect.BoolType):
        return "true or false"
    if isinstance(type_, inspect.VarTupleType):
        least = f" of at least {type_.min_length}" if type_.min_length else ""
        return f"a list{least}"
    if isinstance(type_, inspect.StructType):
        return f"a mapping with keys from {', '.join(_fields(type_))}"
    if isinstance(type_, inspect.DictType):
        return "a mapping"
    return "a plain value"


def _range(type_: inspect.IntType | inspect.FloatType) -> str:
    if type_.ge is not None and type_.le is not None:
        return f" from {_digits(type_.ge)} to {_digits(type_.le)}"
    limits = (("above", type_.gt), ("of at least", type_.ge), ("below", type_.lt), ("at most", type_.le))
    parts = [f"{word} {_digits(limit)}" for word, limit in limits if limit is not None]
    return " " + " and ".join(parts) if parts else ""


def _digits(limit: float) -> str:
    if limit and not 1e-3 <= abs(limit) < 1e10:
        return f"{limit:g}".replace("e+", "e").replace("e-0", "e-")
    return str(int(limit)) if limit == int(limit) else str(limit)


def _hint(found: Any, type_: inspect.Type, steps: list[str]) -> str:
    if not isinstance(found, str) or "number" not in describe(type_):
        return ""
    if re.match(r"\s*[-+]?[.\d]", found):
        for suffix, unit in _UNITS.items():
            if steps and steps[-1].endswith("_" + suffix) and found.strip()[-1:].isalpha():
                return f": write the bare number, its unit is {unit}"
        return ": write the bare number, without unit or quotes"
    return ""


def bare(type_: inspect.Type) -> list[inspect.Type]:
    """Return the alternatives of a type, without null and metadata."""
    if isinstance(type_, inspect.Metadata):
        return bare(type_.type)
    if isinstance(type_, inspect.UnionType):
        return [each for part in type_.types for each in bare(part) if not isinstance(each, inspect.NoneType)]
    return [type_]


def type_at(type_: inspect.Type, steps: list[str]) -> inspect.Type:
    for step in steps:
        options = [inner for part in bare(type_) if (inner := _inner(part, step)) is not None]
        if not options:
            return inspect.AnyType()
        type_ = options[0]
    return type_


def _inner(type_: inspect.Type, step: str) -> inspect.Type | None:
    if isinstance(type_, inspect.StructType):
        return next((field.type for field in type_.fields if field.encode_name == step), None)
    if isinstance(type_, inspect.VarTupleType):
        return type_.item_type
    if isinstance(type_, inspect.DictType):
        return type_.value_type
    return None


def _fields(type_: inspect.Type) -> list[str]:
    return [field.encode_name for part in bare(type_) if isinstance(part, inspect.StructType) for field in part.fields]


def value_at(tree: Any, steps: list[str]) -> Any:
    for step in steps:
        tree = tree[int(step)] if isinstance(tree, list) else tree[step]
    return tree


def _locate(steps: list[str], tree: Any, what: str) -> list[str]:
    """Replace `...` by the key of the first value that msgspec objects to: of the type that it got, or empty."""
    at = steps.index("...")
    mapping: dict[str, Any] = value_at(tree, steps[:at])
    got = re.search(r"got `(\w+)`", what)
    wrong = [key for key, value in mapping.items() if (_TYPES[type(value)] == got[1] if got else not value)]
    return [*steps[:at], wrong[0]]
