"""Generated inputs for the command line: shipped files with hostile or extreme values, damaged data, odd paths.

A case is one number: the same number gives the same files and arguments.
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import zipfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import inspect

from fleetbed.profiles.loading import TYPES, Kind
from fleetbed.profiles.resolve import available
from fleetbed.profiles.yaml_text import read_mapping

SMALL = ("demo", "fashion-small", "fedhe-small", "fedhenn-small", "fedin-small", "inco-small", "policies-small")
NAN, INF, MINUS_INF = "@@nan", "@@inf", "@@-inf"  # as YAML writes them, see `dump`
NUMBERS = (0, -1, 1, 2, 3, 0.5, 10**9, 10**12, 2**63 - 1, -(2**63), 1e-300, 5e-324, 1e-9, 1e300, NAN, INF, MINUS_INF)
TEXTS = (
    "",
    "x" * 300,
    "../..",
    "~nouser/x",
    "a\0b",
    "\ud800",
    "[bold]",
    "auto",
    "1e3",
    "512 MB",
    "é",
    "a\nb",
    "-",
    "demo",
)
TREES = (None, True, False, [], {}, [[]], {"a": {}}, [None] * 50, {"": 1})

Case = list[str]


class Maker:
    """Makes one case in a folder of its own."""

    def __init__(self, number: int, folder: Path) -> None:
        self.rng = random.Random(number)
        self.numbers = np.random.default_rng(number)
        self.folder = folder

    def case(self) -> Case:
        makers: list[tuple[int, Callable[[], Case]]] = [
            (8, self.experiment),
            (4, self.device),
            (3, self.link),
            (3, self.fleet),
            (3, self.trace),
            (3, self.data),
            (2, self.partition),
            (2, self.odd_path),
            (2, self.settings),
        ]
        weights, choices = zip(*makers, strict=True)
        return self.rng.choices(choices, weights)[0]()

    # what is asked of the command line

    def ask(self, path: Path, *, real: bool = True) -> Case:
        """Check it, forecast it, or carry it out."""
        what = self.rng.choices(("check", "forecast", "run"), (4, 5, 1 if real else 0))[0]
        if what == "check":
            return ["profiles", "check", str(path), "--kind", "experiment"]
        return ["run", str(path), *(["--dry-run"] if what == "forecast" else ["--out", str(self.folder / "out")])]

    def experiment(self) -> Case:
        tree = self.small()
        for _ in range(self.rng.randint(1, 3)):
            self.change(tree, "experiment")
        return self.ask(self.write("x.yaml", self.tamed(tree)))

    def device(self) -> Case:
        return self.part_of_fleet("device", "devices", lambda name: {"device": name, "count": 2})

    def link(self) -> Case:
        return self.part_of_fleet("link", "links", lambda name: {"device": "jetson-nano", "count": 2, "link": name})

    def part_of_fleet(self, kind: Kind, folder: str, member: Callable[[str], dict[str, Any]]) -> Case:
        tree = self.shipped(kind)
        for _ in range(self.rng.randint(1, 2)):
            self.change(tree, kind)
        path = self.write(f"profiles/{folder}/own.yaml", tree)
        if self.rng.random() < 0.3:
            return ["profiles", "check", str(path), "--kind", kind]
        self.write("profiles/fleets/own.yaml", {"title": "own", "members": [member("own")]})
        tree = self.small()
        tree["fleet"] = "own"
        return [*self.ask(self.write("x.yaml", self.tamed(tree))), "--profiles", str(self.folder / "profiles")]

    def fleet(self) -> Case:
        tree = self.shipped("fleet")
        for _ in range(self.rng.randint(1, 2)):
            self.change(tree, "fleet")
        path = self.write("fleet.yaml", tree)
        if self.rng.random() < 0.4:
            return ["profiles", "check", str(path), "--kind", "fleet"]
        tree = self.small()
        tree["fleet"] = str(path)
        return self.ask(self.write("x.yaml", self.tamed(tree)), real=False)

    def trace(self) -> Case:
        kind = self.rng.choice(("bandwidth", "trace"))
        time_s, lines = 0.0, []
        for number in range(self.rng.randint(1, 20)):
            step_s = self.rng.choice((0.0, 1e-9, 1e-3, 0.1, 1, 60, 1e5, 1e9, -1))
            end_s = time_s + step_s
            last = (
                self.rng.choice((0, 1e-9, 1e-3, 1, 20, 1e4, 1e300, "nan", "inf", "x")) if kind == "bandwidth" else end_s
            )
            first = [time_s] if kind == "bandwidth" else [number % 8, time_s]
            lines.append("\t".join(map(str, [*first, last])))
            time_s = end_s + (self.rng.choice((0, 1e-9, 1, 100)) if kind == "trace" else 0)
        path = self.folder / "trace.tsv"
        path.write_text("\n".join(lines))
        tree = self.small()
        tree["availability"] = {"kind": "trace", "trace": str(path)} if kind == "trace" else {"bandwidth": str(path)}
        return self.ask(self.write("x.yaml", self.tamed(tree)))

    def data(self) -> Case:
        path = self.folder / "own.npz"
        self.npz(path)
        tree = self.small()
        tree["data"] = {"name": str(path), "partition": {"kind": "iid", "min_size": 1}}
        if self.rng.random() < 0.3:
            self.change(tree["data"], "experiment", ["data"])
        return self.ask(self.write("x.yaml", self.tamed(tree)))

    def partition(self) -> Case:
        clients = self.rng.choice((8, 8, 8, 7, 0))
        parts: Any = [list(range(20 * k, 20 * k + 20)) for k in range(clients)]
        tree: Any = {"train": parts}
        match self.rng.randrange(6):
            case 0:
                parts[-1:] = [[self.rng.choice((-1, 10**9, 2**70, 0, 399))]]
            case 1:
                tree["test"] = self.rng.choice(([], [[0]] * clients, [[0, 0]] * clients, "x", [[10**9]] * clients))
            case 2:
                tree["public"] = self.rng.choice(([399], [0], None, 3))
            case 3:
                tree = self.rng.choice(([], None, "x", {"train": None}, {"train": [[0.5]]}))
        text = json.dumps(tree).encode()
        if self.rng.random() < 0.2:
            text = self.rng.choice((b"", b"[" * 100_000, b"\xff\xfe", text[: len(text) // 2], b" " * 2_000_000))
        path = self.folder / "split.json"
        path.write_bytes(text)
        tree = self.small()
        tree["data"]["partition"] = {"kind": "file", "file": str(path), "min_size": 1}
        return self.ask(self.write("x.yaml", self.tamed(tree)))

    def odd_path(self) -> Case:
        odd = self.rng.choice([*odd_paths(self.folder), *TEXTS[:6]])
        key = self.rng.choice(
            (
                "fleet",
                "data.name",
                "data.root",
                "data.partition",
                "trace",
                "bandwidth",
                "replay",
                "server",
                "file",
                "out",
                "profiles",
            )
        )
        tree = self.small()
        match key:
            case "fleet":
                tree["fleet"] = odd
            case "data.name" | "data.root":
                tree["data"][key[5:]] = odd
                if key == "data.root":
                    tree["data"]["name"] = "cifar10"
            case "data.partition":
                tree["data"]["partition"] = {"kind": "file", "file": odd}
            case "trace" | "bandwidth":
                tree["availability"] = {"kind": "trace", "trace": odd} if key == "trace" else {"bandwidth": odd}
            case "replay":
                tree["timing"] = {"source": "replay", "replay": odd}
            case "server":
                tree["server"] = {"device": odd}
        asked = self.ask(self.write("x.yaml", tree if key == "replay" else self.tamed(tree)), real=False)
        if key == "file":
            asked = ["profiles", "check", odd or "x"] if self.rng.random() < 0.5 else ["run", odd or "x", "--dry-run"]
        if key == "profiles":
            asked += ["--profiles", odd or "x"]
        if key == "out":
            asked = ["run", asked[1] if asked[0] == "run" else asked[2], "--out", (odd or "x") + "/y/run.sqlite/z"]
        return asked

    def settings(self) -> Case:
        keys = list(paths("experiment"))
        sets = []
        for _ in range(self.rng.randint(1, 3)):
            key = self.rng.choice(keys).replace("*", str(self.rng.randint(0, 2)))
            sets += ["--set", f"{key}={dump(self.hostile())}".replace("\0", "").encode(errors="replace").decode()]
        tame = [
            "timing.source=modelled",
            "processes=inline",
            "data.train_limit=400",
            "data.test_limit=100",
            "seeds=[1]",
        ]
        path = self.write("x.yaml", self.small())
        return ["run", str(path), "--dry-run", *sets, *(word for each in tame for word in ("--set", each))]

    # trees

    def small(self) -> dict[str, Any]:
        tree = deepcopy(EXPERIMENTS[self.rng.choice(SMALL)])
        tree["fleet"] = "demo"
        tree["algorithms"] = [self.rng.choice(tree["algorithms"])]
        tree["seeds"] = [1]
        tree["policies"] = [self.rng.choice(tree.get("policies", [{"kind": "sync"}]))]
        if tree.get("model", {}).get("assign"):
            tree["model"]["assign"] = tree["model"]["assign"][:8]
        tree.setdefault("data", {}).update(train_limit=400, test_limit=100)
        tree["data"].setdefault("partition", {})["min_size"] = 1
        tree["training"] = {**tree.get("training", {}), "max_steps": 1}
        tree["rounds"] = 1
        return tree

    def tamed(self, tree: Any) -> Any:
        """Without what needs this host's speed or processes: other tests have those."""
        if isinstance(tree, dict):
            timing = tree.get("timing")
            if timing is None or (isinstance(timing, dict) and timing.get("source", "enforced") == "enforced"):
                tree["timing"] = {"source": "modelled"}
            if tree.get("processes", "resident") in ("resident", "on-demand"):
                tree["processes"] = "inline"
        return tree

    def shipped(self, kind: Kind) -> dict[str, Any]:
        return deepcopy(read_mapping(self.rng.choice(sorted(available(kind).values()))))

    def change(self, tree: Any, kind: Kind, below: list[str] | None = None) -> None:
        """Set a key that there may be, or one that there is, to something else, or remove it."""
        above = ".".join(below or [])
        steps = self.rng.choice([p for p in paths(kind) if not above or p.startswith(f"{above}.")]).split(".")
        type_: Any = type_of(kind, steps)
        steps = steps[len(below or []) :]
        if self.rng.random() < 0.1 and tree:
            tree.pop(self.rng.choice(sorted(tree)))
            return
        node = tree
        for step, following in pairwise(steps):
            if isinstance(node, list):
                if not node:
                    return
                node = node[self.rng.randrange(len(node))]
                continue
            if not isinstance(node.get(step), dict | list):
                node[step] = [{}] if following == "*" else {}
            node = node[step]
        value = self.hostile() if self.rng.random() < 0.25 else self.extreme(type_)
        if isinstance(node, list):
            node.append(value)
        elif isinstance(node, dict):
            node[steps[-1]] = value

    def hostile(self) -> Any:
        return self.rng.choice((*NUMBERS, *NUMBERS, *TEXTS, *TREES, nested(self.rng.choice((40, 500)))))

    def extreme(self, type_: inspect.Type) -> Any:
        """Something that the type allows, most often at a border."""
        options = type_.types if isinstance(type_, inspect.UnionType) else (type_,)
        one = self.rng.choice(options)
        if isinstance(one, inspect.Metadata):
            return self.extreme(one.type)
        if isinstance(one, inspect.LiteralType):
            return self.rng.choice(one.values)
        if isinstance(one, inspect.BoolType):
            return self.rng.random() < 0.5
        if isinstance(one, inspect.IntType | inspect.FloatType):
            low, high = one.ge if one.ge is not None else one.gt or 0, one.le if one.le is not None else one.lt or 1
            between = math.exp(self.rng.uniform(math.log(low or 1e-3), math.log(high or 1)))
            value = self.rng.choice((low, high, between, between))
            return int(value) if isinstance(one, inspect.IntType) else float(value)
        if isinstance(one, inspect.StrType):
            return self.rng.choice((*TEXTS, "fedavg", "resnet10", "lstm", "vit-layer", "server", "3g"))
        if isinstance(one, inspect.VarTupleType):
            return [self.extreme(one.item_type) for _ in range(self.rng.randint(0, 3))]
        if isinstance(one, inspect.DictType):
            return {self.rng.choice(("mu", "base_width", "patch", "batch", "steps", "rad", "base")): self.hostile()}
        return None

    # files

    def write(self, name: str, tree: Any) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump(tree), errors="replace")
        return path

    def npz(self, path: Path) -> None:
        rng = self.numbers
        side = self.rng.choice((1, 2, 8, 28))
        count = self.rng.choice((0, 1, 20, 200))
        classes = self.rng.choice((1, 2, 10, 150))
        shape = self.rng.choice(
            ((count, side, side), (count, side, side, 3), (count, 3, side, side), (count,), (count, side))
        )
        kind: Any = self.rng.choice(("u1", "u1", "u1", "f4", "f8", "i8", "U5", "O", "c8", "M8[s]", "b", "V3", "f2"))
        x: Any = rng.integers(0, 256, shape, np.uint8) if kind != "O" else np.full(shape, {}, object)
        if kind == "f4":
            x = (x / 255).astype(kind)
        elif kind not in ("u1", "O"):
            x = x.astype("u1").astype("U5") if kind == "U5" else np.zeros(shape, kind)
        if kind in ("f8", "f2") and x.size:
            x.reshape(-1)[0] = self.rng.choice((math.nan, math.inf, -1, 2))
        y: Any = np.arange(count) % max(1, classes)
        if self.rng.random() < 0.2:
            y = self.rng.choice((y.astype(float), y + 10**12, y - 1, y[:-1], y.astype("U3"), y.astype(np.uint64)))
        prefix = "text" if kind == "U5" and len(shape) == 1 else "x"
        arrays = {f"{prefix}_train": x, "y_train": y, f"{prefix}_test": x, "y_test": y}
        if self.rng.random() < 0.1:
            arrays.pop(self.rng.choice(sorted(arrays)))
        np.savez_compressed(path, **arrays)
        content = bytearray(path.read_bytes())
        match self.rng.randrange(8):
            case 0:
                for _ in range(3):
                    content[self.rng.randrange(len(content))] ^= self.rng.randrange(1, 256)
                path.write_bytes(content)
            case 1:
                path.write_bytes(content[: self.rng.randrange(len(content))])
            case 2:
                self.lying(path, arrays)
            case 3:
                bomb(path)

    def lying(self, path: Path, arrays: dict[str, Any]) -> None:
        """Headers that promise what is not there."""
        shape = self.rng.choice(
            ("(1000000000000,)", "(-1, -1)", "(2, 10, 10)", "()", "(0, 1000000000000)", "(" + "9" * 4000 + ",)")
        )
        descr = self.rng.choice(("'|u1'", "'<U0'", "'<f8'", "'|O'", "'<U999999999'", "[('a', '<i4')]", "'bad'"))
        header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"
        header += " " * (63 - (len(header) + 10) % 64) + "\n"
        with zipfile.ZipFile(path, "w") as archive:
            for name in arrays:
                body = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
                archive.writestr(f"{name}.npy", body + b"\0" * self.rng.choice((0, 200, 5000)))


def bomb(path: Path, size: int = 3 << 30) -> None:
    """Four arrays of zeros that pack a thousand times. Only their beginning is there: nobody should unpack it."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({size},), }}"
    header += " " * (63 - (len(header) + 10) % 64) + "\n"
    head = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            archive.writestr(f"{name}.npy", head + b"\0" * (1 << 20))
            archive.getinfo(f"{name}.npy").file_size = len(head) + size  # the directory is written at the end


def odd_paths(folder: Path) -> list[str]:
    """Everything that can lie where a file is expected."""
    for name, make in (("fifo", os.mkfifo), ("dir", os.mkdir)):
        if not (folder / name).exists():
            make(folder / name)
    if not (folder / "sock").exists() and len(str(folder)) < 90:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(folder / "sock"))
    if not (folder / "loop").is_symlink():
        (folder / "loop").symlink_to(folder / "loop")
    there = [str(folder / name) for name in ("fifo", "dir", "sock", "loop", "none", "none/x.npz", "fifo/x.yaml")]
    ends = [path + end for path in there for end in ("", "/", ".yaml", ".npz")]
    return [
        *ends,
        "/dev/zero",
        "/dev/full",
        "/proc/kmsg",
        "/proc/self/mem",
        "/" + "x" * 300,
        "/" + "y/" * 3000,
        "~nouser/a.yaml",
    ]


def nested(depth: int) -> Any:
    tree: Any = 1
    for _ in range(depth):
        tree = {"a": tree} if depth % 3 else [tree]
    return tree


def dump(tree: Any) -> str:
    """JSON, which is YAML too, with YAML's own words for what JSON lacks."""
    text = json.dumps(tree)
    for mark, word in ((NAN, ".nan"), (INF, ".inf"), (MINUS_INF, "-.inf")):
        text = text.replace(f'"{mark}"', word)
    return text


def paths(kind: Kind) -> Iterator[str]:
    """The dotted path of every key that a kind of profile may have; `*` is a place in a list."""
    yield from _paths(inspect.type_info(TYPES[kind]), "")


def _paths(type_: inspect.Type, prefix: str) -> Iterator[str]:
    for part in _parts(type_):
        if isinstance(part, inspect.StructType):
            for field in part.fields:
                yield f"{prefix}{field.encode_name}"
                yield from _paths(field.type, f"{prefix}{field.encode_name}.")
        elif isinstance(part, inspect.VarTupleType):
            yield from _paths(part.item_type, f"{prefix}*.")


def type_of(kind: Kind, steps: list[str]) -> inspect.Type:
    type_: inspect.Type = inspect.type_info(TYPES[kind])
    for step in steps:
        for part in _parts(type_):
            if isinstance(part, inspect.StructType) and step != "*":
                type_ = next(field.type for field in part.fields if field.encode_name == step)
            elif isinstance(part, inspect.VarTupleType) and step == "*":
                type_ = part.item_type
    return type_


def _parts(type_: inspect.Type) -> list[inspect.Type]:
    if isinstance(type_, inspect.Metadata):
        return _parts(type_.type)
    if isinstance(type_, inspect.UnionType):
        return [each for part in type_.types for each in _parts(part)]
    return [type_]


EXPERIMENTS = {name: read_mapping(available("experiment")[name]) for name in SMALL}
