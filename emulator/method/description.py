"""What a method says about itself, for readers: `fleetbed methods` and docs/methods.md show it."""

from __future__ import annotations

import ast
import inspect
import re

from msgspec import NODEFAULT, Struct, structs

COMMENT = re.compile(r"\s#:?\s+(.*)$")


class Description(Struct, frozen=True, kw_only=True):
    """What travels and what lasts, in values of 4 bytes.

    P is the number of parameters of a client's variant, b that of its floating-point buffers, C the number of classes,
    d the width of the features.
    """

    paper: str
    down: str
    up: str
    client: str  # what a client keeps between its tasks
    server: str  # what the server holds
    policies: str = "all"


class Parameter(Struct, frozen=True, kw_only=True):
    name: str
    default: str
    text: str  # the comment beside it in the source


def parameters(kind: type[Struct]) -> list[Parameter]:
    """The parameters of a method, with what its source says of each."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base not in (object, Struct) and issubclass(base, Struct):
            texts.update(_comments(base))
    return [
        Parameter(name=field.encode_name, default=default_text(field), text=texts.get(field.name, ""))
        for field in structs.fields(kind)
    ]


def default_text(field: structs.FieldInfo) -> str:
    """Return the default of a field as a table shows it."""
    if field.default is not NODEFAULT:
        value = field.default
    else:
        value = None if field.default_factory is NODEFAULT else field.default_factory()
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None or value == {} else str(value) if not isinstance(value, float) else f"{value:g}"


def _comments(kind: type) -> dict[str, str]:
    """The comment behind each field, or the lines of comment above it, by the field's name."""
    lines = inspect.getsource(kind).splitlines()
    body = ast.parse(inspect.cleandoc("\n" + "\n".join(lines))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            behind = COMMENT.search(lines[(node.end_lineno or node.lineno) - 1])
            above: list[str] = []
            for line in reversed(lines[: node.lineno - 1]):
                if not line.strip().startswith("#"):
                    break
                above.insert(0, line.strip().lstrip("#: "))
            found[node.target.id] = behind[1] if behind else " ".join(above)
    return found
