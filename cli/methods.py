"""`fleetbed methods`: which methods there are, what each sends and keeps, and its parameters."""

from __future__ import annotations

from typing import Annotated

import typer
from msgspec import Struct

from fleetbed.cli.common import AsJson, print_json, print_table


class MethodInfo(Struct, frozen=True, kw_only=True):
    name: str
    title: str
    paper: str = ""
    down: str = ""
    up: str = ""
    client: str = ""
    server: str = ""
    policies: str = ""
    parameters: list[dict[str, str]] = []


def methods(
    name: Annotated[str | None, typer.Argument(help="A method, for its parameters and what it sends.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods of federated learning, or describe one of them."""
    from fleetbed.emulator.algorithms import names

    if name is not None:
        _describe(name, as_json)
        return
    found = names()
    if as_json:
        print_json([{"name": each, "title": title} for each, title in found.items()])
    else:
        print_table("methods", ("name", "what it does"), list(found.items()))
        print("fleetbed methods NAME describes one of them.")


def _describe(name: str, as_json: bool) -> None:
    info = method_info(name)
    if as_json:
        print_json(info)
        return
    print(f"{info.title}\n")
    facts = [
        ("paper", info.paper),
        ("down (values)", info.down),
        ("up (values)", info.up),
        ("a client keeps", info.client),
        ("the server holds", info.server),
        ("policies", info.policies),
    ]
    for title, text in facts:
        if text:
            print(f"{title + ':':<18} {text}")
    if any((info.down, info.up)):
        print("\nP: parameters of the client's variant, b: its buffers, C: classes, d: width of the features.")
    print_table(
        "parameters",
        ("parameter", "default", "what it is"),
        [(each["name"], each["default"], each["text"]) for each in info.parameters],
    )


def method_info(name: str) -> MethodInfo:
    """What a method says about itself; a plug-in may say nothing but its parameters."""
    from msgspec import structs

    from fleetbed.emulator.algorithms import load_algorithm, names
    from fleetbed.emulator.method.description import Description, parameters

    module = load_algorithm(name, "fleetbed methods")
    about = getattr(module, "ABOUT", None)
    return MethodInfo(
        name=name,
        title=names().get(name) or (getattr(module, "__doc__", None) or name).split("\n", 1)[0],
        **(structs.asdict(about) if isinstance(about, Description) else {}),
        parameters=[structs.asdict(each) for each in parameters(module.Params)],
    )
