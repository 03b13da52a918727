"""The methods, found by name: a module of this package, or an entry point in the group `fleetbed.algorithms`.

A method's module has two names: `Params`, a frozen msgspec type, and `Method`, which makes the `Algorithm` from the
parameters and the context: a subclass of it, or a function.
"""

from __future__ import annotations

import ast
import traceback
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

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
    outside = {name: f"from {point.dist.name if point.dist else point.value}" for name, point in _outside().items()}
    own = {
        name: (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n", 1)[0] for name, path in _own().items()
    }
    return {**outside, **own}


def load_algorithm(name: str, where: str = "algorithm") -> AlgorithmModule:
    """The method's module. `where` is the key path of the choice, for the error."""
    if name in _own():
        return cast(AlgorithmModule, import_module(f"{__name__}.{name}"))
    outside = _outside()
    if name not in outside:
        raise nearest(name, names(), "method", f"{where}.name")
    return _plug_in(outside[name], f"{where}.name: {name}")


def _plug_in(point: EntryPoint, at: str) -> AlgorithmModule:
    """What an entry point names. Its code is not ours: whatever it does at import becomes one sentence."""
    from fleetbed.emulator.method.algorithm import Algorithm

    source = f"the distribution {point.dist.name} ({point.value})" if point.dist else point.value
    try:
        loaded = point.load()
        parts = [getattr(loaded, name, None) for name in ("Params", "Method")]
    except (Exception, SystemExit) as error:  # foreign code raises what it likes
        said = " ".join(str(error).split()) or "no reason given"
        raise BadInput(
            f"{at} comes from {source}, which cannot be imported: {type(error).__name__}: {said[:300]} "
            f"({_place(error)}); correct or uninstall it, or choose another method."
        ) from error
    params, method = parts
    if not (isinstance(params, type) and issubclass(params, msgspec.Struct)):
        raise BadInput(f"{at} comes from {source}, which has no Params: a method defines one, a Struct.")
    if not callable(method) or (isinstance(method, type) and not issubclass(method, Algorithm)):
        raise BadInput(f"{at} comes from {source}, which has no Method: a method defines one, an Algorithm.")
    return cast(AlgorithmModule, loaded)


def _place(error: BaseException) -> str:
    """The file and line of a plug-in at which its import ended."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    last = frames[-1]  # the first is ours: then nothing of the plug-in was found
    return f"{last.filename}, line {last.lineno}" if len(frames) > 1 else "its module was not found"


def read_params(choice: AlgorithmChoice, where: str = "algorithm") -> msgspec.Struct:
    """The parameters of a choice as its method's own type."""
    kind = load_algorithm(choice.name, where).Params
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


def _outside() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
