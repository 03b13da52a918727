"""`fleetbed init`: writes an experiment of your own, with everything that it refers to, which runs as it is."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.files import check_new, reason, show_path
from fleetbed.profiles.resolve import FOLDERS
from fleetbed.profiles.yaml_text import plain
from fleetbed.schema import schema_text

#: the templates by where they go; code has another suffix, because it is not part of this package
FILES = {
    "experiment.yaml": "experiment.yaml",
    "fleets/my-fleet.yaml": "my-fleet.yaml",
    "devices/my-board.yaml": "my-board.yaml",
    "my_net.py": "my_net.py.txt",
    "my_method.py": "my_method.py.txt",
}


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the files; it may exist.")] = Path(),
) -> None:
    """Write an experiment, a fleet, a device, a model and a method of your own, which run as they are."""
    templates = resources.files("fleetbed.cli") / "templates"
    texts = {place: (templates / name).read_text(encoding="utf-8") for place, name in FILES.items()}
    texts |= {f"schemas/{kind}.json": schema_text(kind) for kind in FOLDERS}
    for place in texts:
        check_new(folder / place, "init")
        if os.path.lexists(folder / place):
            raise BadInput(f"init: {show_path(folder / place)} already exists: choose another folder, or move it away.")
    try:
        for place, text in texts.items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).write_text(text, encoding="utf-8")
            print(plain(str(folder / place)))
    except OSError as error:
        raise BadInput(f"init: {show_path(folder)} cannot be written to: {reason(error)}.") from error
    print(plain(f"Run it with: fleetbed run {folder / 'experiment.yaml'}"))
