"""The methods, found by name: a module of this package, an entry point in the group `fleetbed.algorithms`, or a file.

A method's module has two names: `Params`, a frozen msgspec type, and `Method`, which makes the `Algorithm` from the
parameters and the context: a subclass of it, or a function.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from fleetbed.models.plug_ins import PlugIn, find_plug_in, outside, strict
from fleetbed.profiles.errors import BadInput, nearest
from fleetbed.profiles.experiment import AlgorithmChoice
from fleetbed.profiles.explain import explain

if TYPE_CHECKING:  # torch is imported with the method that is asked for
    from fleetbed.emulator.method.algorithm import Algorithm, Context

__all__ = ["GROUP", "AlgorithmModule", "load_algorithm", "load_method", "names", "read_params"]

GROUP = "fleetbed.algorithms"


class AlgorithmModule(Protocol):
    """What `load_algorithm` gives: a module, or whatever an entry point names that has these two."""

    Params: type[msgspec.Struct]
    Method: Callable[[Any, Context], Algorithm]


def names() -> dict[str, str]:
    """Every method by name, with one line about it. Nothing is imported."""
    others = {name: f"from {point.dist.name if point.dist else point.value}" for name, point in outside(GROUP).items()}
    own = {
        name: (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n", 1)[0] for name, path in _own().items()
    }
    return {**others, **own}


def load_algorithm(name: str, where: str = "algorithm") -> AlgorithmModule:
    """The method's module. `where` is the key path of the choice, for the error."""
    if name in _own():
        return cast(AlgorithmModule, import_module(f"{__name__}.{name}"))
    found = find_plug_in(GROUP, name, f"{where}.name")
    if found is None:
        raise nearest(name, names(), "method", f"{where}.name")
    return _checked(found)


def _checked(found: PlugIn) -> AlgorithmModule:
    from fleetbed.emulator.method.algorithm import Algorithm

    params, method = found.get("Params"), found.get("Method")
    if not (isinstance(params, type) and issubclass(params, msgspec.Struct)):
        raise BadInput(f"{found.source} has no Params: a method defines one, a Struct.")
    if not callable(method) or (isinstance(method, type) and not issubclass(method, Algorithm)):
        raise BadInput(f"{found.source} has no Method: a method defines one, an Algorithm.")
    return cast(AlgorithmModule, found.content)


def read_params(choice: AlgorithmChoice, where: str = "algorithm") -> msgspec.Struct:
    """The parameters of a choice as its method's own type."""
    kind = strict(load_algorithm(choice.name, where).Params)
    try:
        return msgspec.convert(choice.params, kind)
    except msgspec.ValidationError as error:
        at = f"the parameters of {choice.name}"
        raise explain(error, choice.params, kind, at, f"{where}.params") from None


def load_method(choice: AlgorithmChoice, context: Context, where: str = "algorithm") -> Algorithm:
    """The method with its parameters, ready to run; `where` is e.g. `algorithms.0`."""
    params = read_params(choice, where)
    method = load_algorithm(choice.name, where).Method(params, context)
    if method.needs.public_labels and context.public is not None:
        method.context = replace(context, public=context.public.with_labels())
    return method


def _own() -> dict[str, Path]:
    modules = sorted(Path(__file__).parent.glob("*.py"))
    return {path.stem: path for path in modules if not path.stem.startswith("_")}
