"""Parses strict YAML into plain mappings, lists, strings, numbers, true/false and null, or raises one BadInput.

PyYAML's own safe loader uses the last of two equal keys, reads `1e3` as a string and `no` as false, and expands aliases
from one line to gigabytes. So only its parser is used; scalars follow the core schema of YAML 1.2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.files import is_text, read_regular, show_path

MAX_BYTES = 256 << 10  # a fleet of a thousand members has half of this, and the parser needs seconds for more
MAX_DEPTH = 32
#: control characters (escape sequences start with one), line separators, direction marks, halves of surrogate pairs
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
QUOTE = '"'  # around text in a sentence
_INT_LIMIT = 2**63


class _Strict(yaml.composer.Composer):
    """Composes nodes without aliases and down to a limited depth."""

    check_event: Callable[..., bool]  # of the parser
    peek_event: Callable[[], Any]
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(
                None, None, "an alias (*name) is not allowed: write the value out", event.start_mark
            )
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise RecursionError
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Loader(_Strict, yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own name)


_TAG = "tag:yaml.org,2002:"
for _name, _pattern, _first in (
    ("null", r"^(?:null|Null|NULL|~|)$", ["n", "N", "~", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?[0-9]+$", list("-+0123456789")),
    (
        "float",
        r"^[-+]?(?:(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(_pattern), _first)

if yaml.__with_libyaml__:
    from yaml._yaml import CParser

    class _FastLoader(_Strict, yaml.resolver.BaseResolver, CParser):
        """The same on top of libyaml's parser, which is five times faster."""

        yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

        def __init__(self, text: str) -> None:
            CParser.__init__(self, text)
            _Strict.__init__(self)
            yaml.resolver.BaseResolver.__init__(self)


def read_mapping(path: Path) -> dict[str, Any]:
    """Read the mapping in a file; raise BadInput if there is none."""
    return parse_mapping(_read(path), show_path(path))


def parse_mapping(text: str, where: str) -> dict[str, Any]:
    tree = parse(text, where)
    if tree is None:
        raise BadInput(f"{where} is empty: a mapping of keys to values is needed.")
    if not isinstance(tree, dict):
        raise BadInput(f"{where} has {shorten(tree)} at the top, but a mapping (key: value) is needed.")
    return tree


def parse(text: str, where: str) -> Any:
    """Parse any single YAML value. `where` describes the text in the error."""
    try:
        node = _compose(text)
        return None if node is None else _plain(node, "", where)
    except RecursionError:  # PyYAML's own parser may reach Python's recursion limit before MAX_DEPTH
        raise BadInput(f"{where} is nested too deeply: at most {MAX_DEPTH} levels are allowed.") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise BadInput(f"{where} is not valid YAML: {_reason(error)}.") from None


def _compose(text: str) -> Any:
    if yaml.__with_libyaml__:
        try:
            return _FastLoader(text).get_single_node()
        except (yaml.YAMLError, ValueError):
            pass  # PyYAML's own parser describes the mistake better
    return yaml.compose(text, Loader=_Loader)


def shorten(value: Any, limit: int = 60) -> str:
    """Format a value for use in a sentence: text in quotes, cut to `limit` characters."""
    if isinstance(value, dict):
        return f"a mapping with {_few(value)}" if value else "an empty mapping"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = "".join(c if c.isprintable() else "?" for c in str(value))
    text = text if len(text) <= limit else text[: limit - 3] + "..."
    return f"{QUOTE}{text}{QUOTE}" if isinstance(value, str) else text


def _read(path: Path) -> str:
    data = read_regular(path, "a YAML file", MAX_BYTES)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{show_path(path)} is not UTF-8 text (byte {error.start}): save it as UTF-8.") from None


def _plain(node: yaml.Node, path: str, where: str) -> Any:
    line = f"{where}, line {node.start_mark.line + 1}"
    spot = path or "the top"
    if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
        return _mapping(node, path, where)
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        return [_plain(item, _join(path, str(i)), where) for i, item in enumerate(node.value)]
    kind = node.tag.removeprefix(_TAG)
    if not isinstance(node, yaml.ScalarNode) or kind not in ("null", "bool", "int", "float", "str"):
        raise BadInput(f"{line}: {spot} has the tag {shorten(node.tag)}, but only plain values are allowed: remove it.")
    return _scalar(kind, node.value, f"{line}: {spot}")


def _mapping(node: yaml.MappingNode, path: str, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = f"{where}, line {key_node.start_mark.line + 1}"
        key = _plain(key_node, _join(path, "?"), where)
        if not isinstance(key, str):
            raise BadInput(f"{line}: {path or 'the top'} has the key {shorten(key)}, but keys are text: quote it.")
        if key in found:
            raise BadInput(f"{line}: the key {_join(path, key)} is given twice: keep one of them.")
        found[key] = _plain(value_node, _join(path, key), where)
    return found


def _scalar(kind: str, text: str, spot: str) -> Any:
    if kind == "null":
        return None
    if kind == "str":
        if not is_text(text):
            raise BadInput(
                f"{spot} is {shorten(text, 30)}, which is not UTF-8 text (half a surrogate pair): remove it."
            )
        return text
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        number = int(text) if len(text) < 100 else _INT_LIMIT
        if abs(number) >= _INT_LIMIT:
            raise BadInput(f"{spot} is {shorten(text, 30)}, but a number below 2^63 is needed.")
        return number
    value = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if not math.isfinite(value):
        raise BadInput(f"{spot} is {text}, but a finite number is needed.")
    return value


def _join(path: str, key: str) -> str:
    key = shorten(key, 40).strip(QUOTE)
    return f"{path}.{key}" if path else key


def _few(mapping: dict[str, Any]) -> str:
    keys = [shorten(key, 20).strip(QUOTE) for key in list(mapping)[:3]]
    return "the key " + keys[0] if len(mapping) == 1 else f"{len(mapping)} keys ({', '.join(keys)}...)"


def _reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        text = error.problem or error.context or "it cannot be parsed"
        return f"{text} (line {mark.line + 1})" if mark is not None else text
    return " ".join(str(error).split())


def plain(text: str) -> str:
    """Return the text on one line: white space becomes blanks, other unprintable characters their Python escapes."""
    return _UNPRINTABLE.sub(lambda found: " " if found[0].isspace() else ascii(found[0])[1:-1], text)
