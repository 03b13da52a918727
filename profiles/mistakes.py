"""Finds all mistakes of a file at once: a wrong value is removed or replaced by a stand-in, and reading continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.explain import bare, explain, locate_mistake, type_at, value_at
from fleetbed.profiles.files import show_path
from fleetbed.profiles.loading import TYPES, Kind, contradictions
from fleetbed.profiles.resolve import Search, first_of, load_link, read_tree
from fleetbed.profiles.types import Device, Fleet, Profile

V = TypeVar("V")
S = TypeVar("S", bound=msgspec.Struct)

MOST = 50  # a file with more is something else
_STAND_IN = "(stand-in)"


class Mistakes:
    """Collects sentences, except those about a replaced value, whose mistake is already listed."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.sentences: list[str] = []
        self._replaced: set[str] = set()

    def attempt(self, call: Callable[[], V]) -> V | None:
        """Return the result of the call; if it raises BadInput, note that and return None."""
        try:
            return call()
        except BadInput as error:
            self.note([error])
            return None

    def note(self, errors: Iterable[BadInput]) -> None:
        """Add the errors that are new."""
        for error in errors:
            sentence = str(error)
            if _STAND_IN not in sentence and not any(f" {key} " in sentence for key in self._replaced):
                self._add(sentence)

    def found(self, error: BadInput, key: str) -> None:
        """Add the error of a wrong value, whose key has a stand-in from now on."""
        self._add(str(error))
        self._replaced.add(key)

    def _add(self, sentence: str) -> None:
        if not sentence.startswith(self.where):
            sentence = f"{self.where}: {sentence}"
        if sentence not in self.sentences:
            self.sentences.append(sentence)


def read_on(path: Path, kind: Kind, mistakes: Mistakes) -> Profile | None:
    """Read the profile in a file, with stand-ins for wrong values; return None if that is impossible."""
    tree = mistakes.attempt(lambda: read_tree(path, kind))
    if tree is None:
        return None
    profile, whole = convert_on(tree, TYPES[kind], show_path(path), mistakes)
    if profile is not None and whole:
        mistakes.note(contradictions(profile, f"{show_path(path)}: "))
    return profile


def convert_on(
    tree: dict[str, Any], type_: type[S], where: str, mistakes: Mistakes, prefix: str = ""
) -> tuple[S | None, bool]:
    """Convert a mapping with stand-ins for wrong values; return it, and whether no required value was replaced."""
    tree = deepcopy(tree)
    whole = True
    while len(mistakes.sentences) < MOST:
        try:
            return msgspec.convert(tree, type_), whole
        except msgspec.ValidationError as error:
            what, steps, field = locate_mistake(error, tree)
            key = [*steps, field] if field else steps
            mistakes.found(explain(error, tree, type_, where, prefix), ".".join([prefix] * bool(prefix) + key))
            if what == "unknown":
                del value_at(tree, steps)[field]
            elif key:
                whole &= _leave_out(tree, key, type_, len(mistakes.sentences))
            else:
                return None, False
    return None, False


def check_references(profile: Profile, search: Search, mistakes: Mistakes) -> None:
    """Check every profile that a device or a fleet refers to."""
    where = mistakes.where
    if isinstance(profile, Device):
        link = profile.link
        mistakes.attempt(lambda: load_link(link, search, f"{where}: link"))
    elif isinstance(profile, Fleet):
        for number, member in enumerate(profile.members[:MOST]):
            mistakes.attempt(lambda n=number, m=member: first_of(m, n, search, where))  # type: ignore[misc]


def _leave_out(tree: Any, steps: list[str], type_: type[msgspec.Struct], number: int) -> bool:
    """Remove a value if it has a default and return True; otherwise replace it by a valid one and return False."""
    *way, last = steps
    holder = value_at(tree, way)
    above = type_at(inspect.type_info(type_), way)
    fields = [field for part in bare(above) if isinstance(part, inspect.StructType) for field in part.fields]
    required = any(field.encode_name == last and field.required for field in fields)
    if isinstance(holder, dict) and not required:
        holder.pop(last, None)
        return True
    holder[int(last) if isinstance(holder, list) else last] = _stand_in(type_at(above, [last]), number)
    return False


def _stand_in(type_: inspect.Type, number: int) -> Any:
    first = bare(type_)[0]
    if isinstance(first, (inspect.IntType, inspect.FloatType)):
        return first.ge if first.ge is not None else (first.gt or 0) + 1
    if isinstance(first, inspect.LiteralType):
        return first.values[0]
    if isinstance(first, inspect.BoolType):
        return False
    if isinstance(first, inspect.VarTupleType):
        return [_stand_in(first.item_type, number) for _ in range(first.min_length or 0)]
    if isinstance(first, inspect.StructType):
        return {field.encode_name: _stand_in(field.type, number) for field in first.fields if field.required}
    if isinstance(first, inspect.DictType):
        return {}
    return f"{_STAND_IN} {number}"  # so that no two are equal
