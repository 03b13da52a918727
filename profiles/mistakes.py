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
            if not sentence.startswith(self.where):
                sentence = f"{self.where}: {sentence}"
            follows = _STAND_IN in sentence or any(f" {key} " in sentence for key in self._replaced)
            if not follows and sentence not in self.sentences:
                self.sentences.append(sentence)

    def found(self, error: BadInput, key: str) -> None:
        """Add the error of a wrong value, whose key has a stand-in from now on."""
        self.sentences.append(str(error))
        self._replaced.add(key)


def read_on(path: Path, kind: Kind, mistakes: Mistakes) -> Profile | None:
    """Read the profile in a file, with stand-ins for wrong values; return None if that is impossible."""
    tree = mistakes.attempt(lambda: read_tree(path, kind))
    if tree is None:
        return None
    type_ = TYPES[kind]
    tree = deepcopy(tree)
    whole = True  # false if a required value was replaced
    while len(mistakes.sentences) < MOST:
        try:
            profile = msgspec.convert(tree, type_)
        except msgspec.ValidationError as error:
            what, steps, field = locate_mistake(error, tree)
            mistakes.found(explain(error, tree, type_, show_path(path)), ".".join([*steps, field] if field else steps))
            if what == "unknown":
                del value_at(tree, steps)[field]
            elif steps or field:
                whole &= _leave_out(tree, [*steps, field] if field else steps, type_, len(mistakes.sentences))
            else:
                return None
        else:
            if whole:
                mistakes.note(contradictions(profile, f"{show_path(path)}: "))
            return profile
    return None


def check_references(profile: Profile, search: Search, mistakes: Mistakes) -> None:
    """Check every profile that a device or a fleet refers to."""
    where = mistakes.where
    if isinstance(profile, Device):
        link = profile.link
        mistakes.attempt(lambda: load_link(link, search, f"{where}: link"))
    elif isinstance(profile, Fleet):
        for number, member in enumerate(profile.members[:MOST]):
            mistakes.attempt(lambda n=number, m=member: first_of(m, n, search, where))  # type: ignore[misc]


def _leave_out(tree: Any, steps: list[str], type_: type[Profile], number: int) -> bool:
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
