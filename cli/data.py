"""`fleetbed data list` and `fleetbed data partition EXPERIMENT`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct

from fleetbed.cli.common import AsJson, ProfileFolders, print_json, print_table
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Data, Experiment
from fleetbed.profiles.resolve import check_search, clients_of, load_experiment, load_fleet
from fleetbed.profiles.yaml_text import plain

app = typer.Typer(help="Which data sets there are, and who gets which samples.", no_args_is_help=True)


class _Set(Struct):
    name: str
    title: str
    ready: bool
    source: str


class _Holding(Struct):
    client: int
    device: str
    train: int
    test: int
    labels: list[int]  # training samples of each class


class _Dealt(Struct):
    experiment: str
    data: Data
    seed: int
    classes: int
    public: int
    clients: list[_Holding]
    png: str
    split: str


@app.command("list")
def list_(
    root: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where the files are: data.root of an experiment.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the data sets that have a name, and which of them can be used without a download."""
    from fleetbed.emulator.data.sources import SHIPPED, SHIPPED_TITLE, root_of
    from fleetbed.emulator.data.torchvision_sets import KNOWN

    folder = root_of(Data(root=root))
    sets = [_Set(SHIPPED, SHIPPED_TITLE, True, "shipped")]
    sets += [_Set(name, known.title, known.missing(folder) is None, str(folder)) for name, known in KNOWN.items()]
    if as_json:
        print_json(sets)
        return
    rows = [[each.name, each.title, "yes" if each.ready else "no", each.source] for each in sets]
    print_table(f"{len(sets)} data sets", ["name", "title", "ready", "source"], rows)
    print("--set data.download=true downloads one that is not ready.")
    print("Your own data is one .npz file, and data.name its path.")


@app.command()
def partition(
    experiment: Annotated[str, typer.Argument(help="A name or the path of a file.")],
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of the first seed of the experiment.")] = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where partition.png and partition.json are written.")
    ] = Path("out"),
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change the experiment.")
    ] = None,
    profiles: ProfileFolders = None,
    as_json: AsJson = False,
) -> None:
    """Draw who has what, and write the split as JSON, which `data.partition.file` takes."""
    search = profiles or []
    check_search(search)
    chosen = load_experiment(experiment, search, sets or ())
    fleet = load_fleet(chosen.fleet, search, f"{experiment}: fleet")
    devices = [client.kind for client in clients_of(fleet, search, chosen.fleet)]
    try:
        dealt = _deal(experiment, chosen, devices, chosen.seeds[0] if seed is None else seed, out)
    except BadInput as error:
        raise BadInput(f"experiment {experiment}: {error}") from error
    if as_json:
        print_json(dealt)
        return
    rows = [[c.client, c.device, c.train, c.test, " ".join(map(str, c.labels))] for c in dealt.clients]
    columns = ["client", "device", "train", "test", "training samples by class"]
    print_table(f"{_settings(chosen.data, dealt.seed)}, {dealt.public} public samples", columns, rows)
    print(plain(f"written: {dealt.png}, {dealt.split}"))


def _deal(name: str, experiment: Experiment, devices: list[str], seed: int, out: Path) -> _Dealt:
    import numpy as np

    from fleetbed.emulator.data import open_dataset, partition, prepare
    from fleetbed.emulator.data.picture import draw_partition

    dataset = open_dataset(prepare(experiment.data))
    classes = dataset.spec.classes
    split = partition(dataset.y_train, dataset.y_test, classes, experiment.data, len(devices), seed)
    train = np.stack([np.bincount(dataset.y_train[part], minlength=classes) for part in split.train])
    test = np.stack([np.bincount(dataset.y_test[part], minlength=classes) for part in split.test])
    png, json = out / "partition.png", out / "partition.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        json.write_bytes(split.to_json())
        draw_partition(train, test, png, f"Who has what: {experiment.title}", _settings(experiment.data, seed))
    except OSError as error:
        raise BadInput(f"--out {out} cannot be written to: {error.strerror}.") from error
    return _Dealt(
        experiment=name,
        data=experiment.data,
        seed=seed,
        classes=classes,
        public=len(split.public),
        clients=[
            _Holding(k, device, len(split.train[k]), len(split.test[k]), train[k].tolist())
            for k, device in enumerate(devices)
        ],
        png=str(png),
        split=str(json),
    )


def _settings(data: Data, seed: int) -> str:
    """The partition in words, as the picture and the table show it."""
    kind = data.partition.kind
    details = {
        "dirichlet": f" alpha {data.partition.alpha:g}",
        "shards": f" of {data.partition.classes_per_client} per client",
        "file": f" {data.partition.file}",
    }
    return f"{data.name}, {kind}{details.get(kind, '')}, seed {seed}"
