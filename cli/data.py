"""`fleetbed data list` and `fleetbed data partition EXPERIMENT`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct

from fleetbed.cli.common import AsJson, ProfileFolders, print_json, print_table
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Data, Experiment
from fleetbed.profiles.resolve import clients_of, load_experiment, load_fleet, search_folders
from fleetbed.profiles.yaml_text import plain

app = typer.Typer(help="List data sets, and show how samples are divided among clients.", no_args_is_help=True)


class _DataSet(Struct):
    name: str
    title: str
    ready: bool
    source: str


class _ClientSamples(Struct):
    client: int
    device: str
    train: int
    test: int
    labels: list[int]  # training samples of each class


class _Partitioned(Struct):
    experiment: str
    data: Data
    seed: int
    classes: int
    public: int
    clients: list[_ClientSamples]
    png: str
    split: str


@app.command("list")
def list_datasets(
    root: Annotated[
        str | None, typer.Option(metavar="DIR", help="The folder with the files, as data.root in an experiment.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the named data sets, and which of them can be used without a download."""
    from fleetbed.emulator.data.sources import DOWNLOADED, SHIPPED, root_of

    folder = root_of(Data(root=root))
    sets = [_DataSet(name, title, True, "shipped") for name, title in SHIPPED.items()]
    sets += [
        _DataSet(name, known.title, known.missing(folder) is None, str(folder)) for name, known in DOWNLOADED.items()
    ]
    if as_json:
        print_json(sets)
        return
    rows = [[each.name, each.title, "yes" if each.ready else "no", each.source] for each in sets]
    print_table(f"{len(sets)} data sets", ["name", "title", "ready", "source"], rows)
    print("To download one that is not ready, use --set data.download=true.")
    print("To use your own data, set data.name to the path of an .npz or .py file (docs/data.md).")


@app.command("partition")
def show_partition(
    experiment: Annotated[str, typer.Argument(help="The name or file of an experiment.")],
    seed: Annotated[int | None, typer.Option(min=0, help="Seed to use; default: the experiment's first.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for partition.png and partition.json.")] = Path(
        "out"
    ),
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a key of the experiment.")
    ] = None,
    profiles: ProfileFolders = None,
    as_json: AsJson = False,
) -> None:
    """Show how samples are divided among clients; write a picture, and a JSON file for `data.partition.file`."""
    search = search_folders(profiles, experiment)
    chosen = load_experiment(experiment, search, sets or ())
    fleet = load_fleet(chosen.fleet, search, f"{experiment}: fleet")
    devices = [client.kind for client in clients_of(fleet, search, chosen.fleet)]
    try:
        found = _partition(experiment, chosen, devices, chosen.seeds[0] if seed is None else seed, out)
    except BadInput as error:
        raise BadInput(f"experiment {experiment}: {error}") from error
    if as_json:
        print_json(found)
        return
    rows = [[c.client, c.device, c.train, c.test, " ".join(map(str, c.labels))] for c in found.clients]
    columns = ["client", "device", "train", "test", "training samples by class"]
    print_table(f"{_settings(chosen.data, found.seed)}, {found.public} public samples", columns, rows)
    print(plain(f"written: {found.png}, {found.split}"))


def _partition(name: str, experiment: Experiment, devices: list[str], seed: int, out: Path) -> _Partitioned:
    import numpy as np

    from fleetbed.emulator.data import divide, open_dataset, prepare_dataset
    from fleetbed.emulator.data.picture import draw_partition

    dataset = open_dataset(prepare_dataset(experiment.data))
    classes = max(1, dataset.spec.classes)
    split = divide(dataset, experiment.data, len(devices), seed)
    labels = dataset.strata("train"), dataset.strata("test")
    train = np.stack([np.bincount(labels[0][part], minlength=classes) for part in split.train])
    test = np.stack([np.bincount(labels[1][part], minlength=classes) for part in split.test])
    png, json = out / "partition.png", out / "partition.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        json.write_bytes(split.to_json())
        draw_partition(train, test, png, f"Samples by client: {experiment.title}", _settings(experiment.data, seed))
    except OSError as error:
        raise BadInput(f"--out {out} cannot be written to: {error.strerror}.") from error
    return _Partitioned(
        experiment=name,
        data=experiment.data,
        seed=seed,
        classes=classes,
        public=len(split.public),
        clients=[
            _ClientSamples(k, device, len(split.train[k]), len(split.test[k]), train[k].tolist())
            for k, device in enumerate(devices)
        ],
        png=str(png),
        split=str(json),
    )


def _settings(data: Data, seed: int) -> str:
    """Describe the partition in the words that the picture and the table show."""
    kind = data.partition.kind
    details = {
        "dirichlet": f" alpha {data.partition.alpha:g}",
        "shards": f" of {data.partition.classes_per_client} per client",
        "column": f" {data.partition.column}",
        "file": f" {data.partition.file}",
    }
    return f"{data.name}, {kind}{details.get(kind, '')}, seed {seed}"
