"""The shipped experiments: each is complete, its methods can be created, and its settings are those of the paper."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fleetbed.emulator.algorithms import load_method, read_params
from fleetbed.emulator.data.sources import DOWNLOADED as NAMED
from fleetbed.emulator.data.sources import SHIPPED
from fleetbed.emulator.engine.layout import Layout, check_method, lay_out
from fleetbed.emulator.method.algorithm import Client, Context
from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.profiles import available, clients_of, load_experiment, load_fleet, runs
from fleetbed.profiles.experiment import Experiment, RunConfig

pytestmark = pytest.mark.usefixtures("own_cache")
EXPERIMENTS = {name: load_experiment(name) for name in available("experiment")}
SMALL = sorted(name for name, found in EXPERIMENTS.items() if found.data.name in ("fashion-mini", "sensors"))
DOWNLOADED = sorted(EXPERIMENTS.keys() - set(SMALL))
FULL = [name for name in DOWNLOADED if not name.endswith("-small")]
DOCS = Path(__file__).parents[2] / "docs" / "experiments.md"
#: channels, height and width, classes, training samples
SHAPES = {
    "cifar10": (3, 32, 10, 50_000),
    "cifar100": (3, 32, 100, 50_000),
    "fashion-mnist": (1, 28, 10, 60_000),
    "mnist": (1, 28, 10, 60_000),
    "svhn": (3, 32, 10, 73_257),
}
#: by the beginning of the file's name: clients, ratio, rounds, epochs, batch, optimiser
PAPERS = {
    "fedin-table": (100, 0.1, 500, 5, 16, "adam"),
    "fedin-figure": (100, 0.1, 500, 5, 16, "adam"),
    "fedin-v1": (10, 1.0, 200, 5, 64, "adam"),
    "inco": (100, 0.1, 500, 5, 64, "adam"),
    "fedhenn": (100, 0.1, 200, 20, 10, "sgd"),
}
EXCEPTIONS = {
    "fedin-table2": {"rounds": 100},  # ViTs
    "fedin-table3": {"ratio": 1.0, "rounds": 2, "epochs": 1},  # bytes alone
    "inco-table1": {"clients": 10, "ratio": 1.0, "rounds": 100},  # the case study
    "inco-table2-vit": {"rounds": 200, "optimizer": "sgd"},
}


@dataclass(frozen=True)
class Pool:
    """As many samples of the server's own as the experiment gives it."""

    size: int

    def __len__(self) -> int:
        return self.size

    def draw(self, count: int, seed: int) -> Tensor:
        raise AssertionError("nothing is drawn before a run")


def spec_of(experiment: Experiment) -> InputSpec:
    channels, size, classes, _ = SHAPES[experiment.data.name]
    side = experiment.data.image_size or size
    return InputSpec((experiment.data.channels or channels, side, side), classes)


def groups(experiment: Experiment, config: RunConfig) -> tuple[str, ...]:
    return (config.algorithm.variant,) if config.algorithm.variant else config.model.assign


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_parameters_belong_to_the_method(name: str) -> None:
    for number, choice in enumerate(EXPERIMENTS[name].algorithms):
        read_params(choice, f"algorithms.{number}")


@pytest.mark.parametrize("name", DOWNLOADED)
def test_methods_go_with_family_data_policy_and_pool(name: str) -> None:
    """What `lay_out` checks, without the data, which may have to be downloaded first."""
    experiment = EXPERIMENTS[name]
    assert experiment.data.name in NAMED
    assert experiment.data.download
    assert experiment.data.public < SHAPES[experiment.data.name][3]
    spec = spec_of(experiment)
    for config in runs(load_experiment(name, sets=["seeds=[1]"])):
        # pre-trained weights would be downloaded; the outline is the same without them
        options = {"pretrained": False} if config.model.family == "vit-layer" else {}
        models = family(config.model.family, {**config.model.options, **options})
        models.check_input(spec)
        names = groups(experiment, config)
        assert names, "a paper says which client has which model"
        for variant in names:
            models.check_variant(variant)
        context = Context(
            seed=config.seed,
            spec=spec,
            family=models,
            clients=tuple(Client(number, variant, 100) for number, variant in enumerate(names)),
            training=experiment.training,
            rounds=experiment.rounds,
            public=Pool(experiment.data.public) if experiment.data.public else None,
        )
        check_method(config, load_method(config.algorithm, context))


@pytest.mark.parametrize("name", [name for name in FULL if not name.startswith("fedhe-")])
def test_the_papers_settings(name: str) -> None:
    experiment = EXPERIMENTS[name]
    stated = next(values for start, values in PAPERS.items() if name.startswith(start))
    keys = ("clients", "ratio", "rounds", "epochs", "batch", "optimizer")
    expected = {**dict(zip(keys, stated, strict=True)), **EXCEPTIONS.get(name, {})}
    training = experiment.training
    assert expected == {
        "clients": len(clients_of(load_fleet(experiment.fleet))),
        "ratio": experiment.participation.ratio,
        "rounds": experiment.rounds,
        "epochs": training.epochs,
        "batch": training.batch,
        "optimizer": training.optimizer.name,
    }
    assert training.optimizer.lr == (0.001 if training.optimizer.name == "adam" else 0.01)
    assert (training.max_steps is None) == (name != "fedin-table3")
    assert experiment.timing.source == "modelled"
    assert len(experiment.seeds) == (1 if name == "fedin-table3" else 3)


@pytest.mark.parametrize("name", [name for name in FULL if name.startswith("fedhe-")])
def test_fedhes_settings(name: str) -> None:
    experiment = EXPERIMENTS[name]
    assert len(clients_of(load_fleet(experiment.fleet))) == 10
    assert (experiment.training.batch, experiment.training.max_steps) == (50, 3)
    assert (experiment.training.optimizer.name, experiment.training.optimizer.lr) == ("adam", 0.001)
    assert experiment.data.partition.kind == "contiguous"
    if "figure" in name:
        (policy,) = experiment.policies
        in_rounds = name.endswith("-rounds")
        assert (policy.kind, policy.concurrency) == (("sync", None) if in_rounds else ("async", 1))
        in_turn = int(10 * experiment.participation.ratio)
        assert (experiment.rounds * in_turn, experiment.evaluation.every * in_turn) == (50_000, 100)


SETTING = re.compile(r"--set (?:'([^']+)'|([\w.]+=(?:\[[^\]]*\]|[^\s,;)]+)))")


def settings_in(name: str) -> list[list[str]]:
    """What the header of a file tells the reader to give to --set, one list per command."""
    text = available("experiment")[name].read_text()
    comments = [line[2:] for line in text.splitlines()[1:] if line.startswith("# ")]
    joined = re.sub(r"\n {2,}(?=--set)", " ", "\n".join(comments))
    found = (SETTING.findall(line) for line in joined.splitlines() if "--set" in line and ".N." not in line)
    return [[quoted or plain for quoted, plain in settings] for settings in found]


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_the_settings_in_the_header_can_be_given(name: str) -> None:
    for sets in settings_in(name):
        assert sets
        changed = load_experiment(name, sets=sets)
        assert changed != EXPERIMENTS[name], sets
        for choice in changed.algorithms:
            read_params(choice)
            model = choice.model or changed.model
            for variant in (choice.variant,) if choice.variant else model.assign:
                family(model.family, model.options).check_variant(variant)
        assert clients_of(load_fleet(changed.fleet))
        assert changed.data.name in {*SHIPPED, *NAMED}


def test_the_headers_contain_settings() -> None:
    """The pattern above finds what is there."""
    assert ["data.name=svhn", "data.augment=[cutout]"] in settings_in("fedin-table1")
    assert sum(len(settings_in(name)) for name in FULL) > 40


@pytest.mark.parametrize("name", SMALL)
def test_small_experiments_can_be_laid_out(name: str) -> None:
    experiment = EXPERIMENTS[name]
    torch.set_num_threads(1)
    for config in runs(load_experiment(name, sets=["seeds=[1]"])):
        layout = lay_out(config, ())
        assert set(layout.assigned.values()) == set(groups(experiment, config))
        assert min(len(part) for part in layout.split.train) >= experiment.data.partition.min_size


def laid_out(*sets: str) -> Layout:
    small = ("data.train_limit=600", "data.public=64")
    return lay_out(runs(load_experiment("fashion-small", sets=(*small, *sets)))[0], ())


def test_variants_are_dealt_in_contiguous_groups() -> None:
    assigned = laid_out("algorithms=[{name: heteroavg}]").assigned
    names = ("resnet10", "resnet14", "resnet18", "resnet22", "resnet26")
    assert assigned == {number: names[number // 2] for number in range(10)}


def test_uneven_groups_differ_by_one_and_the_first_are_larger() -> None:
    assigned = laid_out("algorithms=[{name: heteroavg}]", "model.assign=[resnet10,resnet18,resnet26]").assigned
    assert Counter(assigned.values()) == {"resnet10": 4, "resnet18": 3, "resnet26": 3}
    assert [assigned[number] for number in (3, 4, 7)] == ["resnet10", "resnet18", "resnet26"]


def test_fedin_v1_has_the_papers_models() -> None:
    assert "".join(EXPERIMENTS["fedin-v1-table2"].model.assign) == "AABCCDDEEE"


@pytest.mark.parametrize("name", sorted(EXPERIMENTS.keys() - {"demo"}))
def test_the_page_names_every_experiment(name: str) -> None:
    assert f"`{name}`" in DOCS.read_text()


def test_the_page_names_no_other_experiment() -> None:
    named = set(re.findall(r"^\| `([^`]+)`", DOCS.read_text(), re.MULTILINE))
    assert named == EXPERIMENTS.keys() - {"demo"}
