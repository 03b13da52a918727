"""`--set`, paths, and the runs that a study consists of."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetbed.profiles import BadInput, load_experiment, runs
from fleetbed.profiles.experiment import Experiment
from fleetbed.profiles.loading import decode


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("rounds=20", "rounds", 20),
        ("training.optimizer.lr=1e-3", "training.optimizer.lr", 0.001),
        ("algorithms.0.params.mu=0.1", "algorithms.0.params", {"mu": 0.1}),
        ("algorithms.2.name=private", "algorithms.2.name", "private"),  # the place after the last adds one
        ("seeds=[4, 5]", "seeds", (4, 5)),
        ("seeds.0=9", "seeds", (9,)),
        ("data.augment.0=crop", "data.augment", ("crop",)),
        ("timing.time_scale=2", "timing.time_scale", 2.0),
        ("timing.time_scale=auto", "timing.time_scale", "auto"),
        ("data.name=cifar10", "data.name", "cifar10"),
        ("budgets.round_s=", "budgets.round_s", None),
        ("title=a=b", "title", "a=b"),
        ("model.options={}", "model.options", {}),
        (" rounds = 7", "rounds", 7),
    ],
)
def test_set(setting: str, key: str, value: object) -> None:
    found: object = load_experiment("demo", sets=[setting])
    for step in key.split("."):
        found = found[int(step)] if isinstance(found, tuple) else getattr(found, step)
    assert found == value


def test_settings_apply_in_order_and_the_whole_is_checked_after() -> None:
    sets = ["policies.0.kind=deadline", "policies.0.deadline_s=5", "policies.0.deadline_s=1e3"]
    assert load_experiment("demo", sets=sets).policies[0].deadline_s == 1000.0
    with pytest.raises(BadInput, match=r"with --set policies\.0\.kind=deadline: policies\.0\.kind is deadline, but"):
        load_experiment("demo", sets=sets[:1])


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("rounds", "--set rounds: key.path=value is needed, for example --set rounds=20."),
        ("=3", "--set =3: key.path=value is needed"),
        ("a..b=3", "--set a..b=3: the key path has an empty part"),
        ("title.x=3", "--set title.x=3: title is "),
        ("algorithms.7.name=x", '--set algorithms.7.name=x: algorithms is a list of 2, but "7" '),
        ("algorithms.first.name=x", '--set algorithms.first.name=x: algorithms is a list of 2, but "first" '),
        ("rounds=[", "--set rounds=[ is not valid YAML"),
        ("rounds={a: 1, a: 2}", "--set rounds={a: 1, a: 2}, line 1: the key a is given twice"),
    ],
)
def test_bad_settings(setting: str, expected: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_experiment("demo", sets=[setting])
    assert str(caught.value).startswith(expected), str(caught.value)


def test_every_combination_is_one_run_with_paired_seeds() -> None:
    study = load_experiment(
        "demo",
        sets=["seeds=[1, 2]", "policies=[{kind: sync}, {kind: async, label: async-4, concurrency: 4}]"],
    )
    assert [run.name for run in runs(study)] == [
        "heteroavg-sync-1",
        "heteroavg-sync-2",
        "heteroavg-async-4-1",
        "heteroavg-async-4-2",
        "fedin-sync-1",
        "fedin-sync-2",
        "fedin-async-4-1",
        "fedin-async-4-2",
    ]


def test_paths_of_an_experiment_are_relative_to_its_file_and_names_stay_names(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(
        "title: x\nfleet: fleets/f.yaml\nalgorithms: [{name: a}]\n"
        "data: {name: own.npz, root: torch, partition: {kind: file, file: p.json}}\n"
        "server: {device: jetson-nano}\n"
    )
    experiment = load_experiment(str(file))
    assert experiment.fleet == str(tmp_path / "fleets" / "f.yaml")
    assert experiment.data.name == str(tmp_path / "own.npz")
    assert experiment.data.root == str(tmp_path / "torch")
    assert experiment.data.partition.file == str(tmp_path / "p.json")
    assert experiment.server.device == "jetson-nano"


def test_paths_of_settings_are_relative_to_where_the_command_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And absolute from then on, because a study may be resumed from another folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    file = tmp_path / "my.yaml"
    file.write_text("title: x\nfleet: f.yaml\nalgorithms: [{name: a}]\ndata: {root: torch}\n")
    sets = ["data.name=own.npz", "timing={source: replay, replay: ../run}", "server.device=jetson-nano"]
    experiment = load_experiment("../my.yaml", sets=sets)
    assert experiment.data.name == str(tmp_path / "here" / "own.npz")
    assert Path(str(experiment.timing.replay)).is_absolute()
    assert Path(str(experiment.timing.replay)).resolve() == tmp_path / "run"
    assert experiment.server.device == "jetson-nano"
    assert (Path(experiment.fleet).resolve(), Path(str(experiment.data.root)).resolve()) == (
        tmp_path / "f.yaml",
        tmp_path / "torch",
    )


def test_an_experiment_of_ones_own_is_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "mine.yaml").write_text("title: Mine\nfleet: demo\nalgorithms: [{name: a}]\n")
    assert load_experiment("mine", [tmp_path]).title == "Mine"


BAD_TITLES = (
    *("..", ".", ".x", "/", "a/b", "../../x", "a\\b", "", " ", " a", "a "),
    *("a\n", "\n", "a\nb", "a\r", "a\x00", "a\x1b[0m", "a\x7f", "a\x85", "a\u2028b", "a\u202eb", "a\ud800", "a\ufeff"),
    *("x" * 61, "x" * 300, "\N{SNOWMAN}" * 60),
)


@pytest.mark.parametrize("title", BAD_TITLES, ids=ascii)
@pytest.mark.parametrize("key", ["algorithms.label", "algorithms.name", "policies.label"])
def test_a_title_that_is_no_part_of_a_folder_name_is_refused(key: str, title: str) -> None:
    if key == "algorithms.name" and title == "x" * 61:
        pytest.skip("a method may be called so")
    kind, field = key.split(".")
    tree = msgspec.to_builtins(load_experiment("demo"))
    tree["policies"], tree["algorithms"] = (
        [{"kind": "sync", "label": "\N{SNOWMAN}" * 20}],
        [{"name": "a", "label": None}],
    )
    tree[kind][0][field] = title
    if kind == "policies":
        tree["algorithms"][0]["label"] = "\N{SNOWMAN}" * 20
    with pytest.raises(BadInput) as refused:
        decode(tree, Experiment, "f.yaml")
    assert str(refused.value).startswith("f.yaml: ")
    assert "\n" not in str(refused.value)
    assert str(refused.value).isprintable()


@given(st.text(min_size=1), st.text(min_size=1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_whatever_the_labels_are_a_run_stays_in_its_study(tmp_path: Path, algorithm: str, policy: str) -> None:
    tree = msgspec.to_builtins(load_experiment("demo"))
    tree["algorithms"], tree["policies"] = [{"name": "heteroavg", "label": algorithm}], [{"label": policy}]
    try:
        (config, *_) = runs(decode(tree, Experiment, "f.yaml"))
    except BadInput:
        return
    folder = tmp_path / config.name
    assert folder.resolve().parent == tmp_path.resolve()
    folder.mkdir()
    (tmp_path / f".{config.name}.lock.1234567.part").write_text("")
    folder.rmdir()


def test_a_fleet_over_ray_needs_a_source_of_time_that_measures_no_host() -> None:
    with pytest.raises(
        BadInput,
        match=r"processes is ray, but timing\.source is enforced, which measures a single host: "
        r"set timing\.source to modelled or replay, or use another value of processes\.$",
    ):
        load_experiment("demo", sets=["processes=ray"])
    assert load_experiment("demo", sets=["processes=ray", "timing.source=modelled"]).processes == "ray"
