"""A study and its folder: added rounds, files that must stay, refusals, and exit codes."""

from __future__ import annotations

import hashlib
import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from observers import StopAfter, Stopped
from same_runs import results
from small_runs import SMALL_NETS, TINIER, query

from fleetbed.analysis.tables.compare import compare_runs
from fleetbed.analysis.tables.runs import open_runs
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.method.algorithm import Needs
from fleetbed.emulator.records.results import read_result
from fleetbed.emulator.run.study import add_rounds, new_study, resume_study, start_study
from fleetbed.live import PlainObserver
from fleetbed.profiles.errors import BadInput, FleetbedError
from fleetbed.profiles.resolve import load_experiment


def study(folder: Path, *sets: str, observer: Observer | None = None) -> list[Path]:
    experiment = load_experiment("demo", (), (*TINIER, "processes=inline", *sets))
    return start_study(experiment, folder, search=(), command="test", observer=observer or Observer())


NOISE = (".lock", ".sqlite-shm", ".sqlite-wal")


def contents(folder: Path) -> dict[str, str]:
    """A digest of every file below a folder."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in NOISE)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


# adding rounds

SMALL = ("algorithms=[{name: fedavg}]", *SMALL_NETS)
EXTENDED = {
    "sync": (*SMALL, "participation.ratio=0.5"),
    "async": (*SMALL, "policies=[{kind: async, concurrency: 3}]"),
    "buffered": (*SMALL, "policies=[{kind: buffered, buffer: 3, concurrency: 4}]"),
    "late results": ("policies=[{kind: deadline, deadline_s: 0.12, late: next-round}]",),
    "over-select": (*SMALL, "policies=[{kind: over-select, invite: 6, take: 3}]"),
    "kept models": (*SMALL_NETS, "algorithms=[{name: fedhe, params: {batch: 4}}]", "participation.ratio=0.5"),
    "stages": (*SMALL_NETS, "algorithms=[{name: fedhenn, params: {rad: 8, client_side_gram: true}}]", "data.public=8"),
    "seldom evaluated": (*SMALL, "participation.ratio=0.5", "evaluation.every=3"),
    "seldom stored": (*SMALL, "participation.ratio=0.5", "checkpoint_every=3"),
    "never stored": (*SMALL, "participation.ratio=0.5", "checkpoint_every=50"),
    "away": ("availability={kind: on-off, mean_on_s: 1, mean_off_s: 1}",),
}


@pytest.mark.parametrize(
    "sets",
    [pytest.param(sets, id=name, marks=[] if name == "sync" else [pytest.mark.slow])
     for name, sets in EXTENDED.items()],
)  # fmt: skip
def test_a_run_with_added_rounds_equals_one_with_all_rounds(tmp_path: Path, sets: tuple[str, ...]) -> None:
    (expected,) = study(tmp_path / "whole", *sets, "rounds=5")
    (folder,) = study(tmp_path / "s", *sets, "rounds=2")
    add_rounds(tmp_path / "s", ["rounds=4"])
    with pytest.raises(Stopped):
        resume_study(tmp_path / "s", StopAfter(7))
    add_rounds(tmp_path / "s", ["rounds=5"])  # to a run that is not finished
    assert resume_study(tmp_path / "s", Observer()) == [folder]
    assert results(folder) == results(expected)
    ((config,),) = query(folder, "SELECT value FROM meta WHERE key = 'config'")
    assert msgspec.json.decode(config)["experiment"]["rounds"] == 5
    assert query(folder, "SELECT count(*) > 0 FROM notices WHERE kind = 'rounds'") == [(1,)]


@pytest.mark.slow
def test_rounds_are_added_to_all_runs_and_stay_so_when_interrupted(tmp_path: Path) -> None:
    whole = [results(each) for each in study(tmp_path / "whole", "seeds=[1, 2]", "rounds=3")]
    study(tmp_path / "s", "seeds=[1, 2]", "rounds=1")
    add_rounds(tmp_path / "s", ["rounds=3"])
    with pytest.raises(Stopped):
        resume_study(tmp_path / "s", StopAfter(5))
    assert [results(each) for each in resume_study(tmp_path / "s", Observer())] == whole


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (["training.batch=8"], r"only rounds can be set, but this would change training\.batch \(4 before, 8 now\)"),
        (["rounds=9", "title=x"], r"only rounds can be set, but this would change title"),
        (["seeds=[1, 2]"], r"only rounds can be set, but this would change seeds"),
        (["algorithms.0.label=../../x"], r"algorithms\.0\.label is"),
        (["rounds=1"], r"rounds is 1, but the study already has 2, and rounds can only be added"),
        (["rounds=many"], r"rounds is \"many\", but a whole number"),
        (["rounds=0"], r"rounds is 0, but a whole number"),
        (["roundz=4"], r"did you mean rounds\?"),
        (["rounds"], r"key\.path=value is needed"),
    ],
)
def test_other_changes_are_refused_by_name(tmp_path: Path, done: Path, sets: list[str], sentence: str) -> None:
    folder = copied(done, tmp_path)
    before = contents(folder)
    with pytest.raises(BadInput, match=sentence):
        add_rounds(folder, sets)
    assert contents(folder) == before


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("done") / "s"
    study(folder)
    return folder


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "s"))


def test_rounds_are_not_added_where_the_result_would_be_another(
    tmp_path: Path, done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(done, tmp_path)
    before = contents(folder)
    shutil.rmtree(folder / "heteroavg-sync-1" / "state")
    with pytest.raises(FleetbedError, match=r"there is no checkpoint"):
        add_rounds(folder, ["rounds=5"])
    shutil.rmtree(folder)
    folder = copied(done, tmp_path)
    (folder / "heteroavg-sync-1" / "state" / "checkpoint-00000001.safetensors").unlink()
    with pytest.raises(FleetbedError, match=r"only the checkpoint at the run's end is whole"):
        add_rounds(folder, ["rounds=5"])
    shutil.rmtree(folder)
    folder = copied(done, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("fleetbed.emulator.algorithms.heteroavg.Method.needs", Needs(total_rounds=True))
        with pytest.raises(BadInput, match=r"rounds cannot be added: heteroavg goes by the number of all rounds"):
            add_rounds(folder, ["rounds=5"])
    assert contents(folder) == before
    assert resume_study(folder, Observer())  # it is still what it was
    assert contents(folder) == before


def test_rounds_are_not_added_to_a_replay(tmp_path: Path, done: Path) -> None:
    replay = f"timing={{source: replay, replay: {done / 'heteroavg-sync-1'}}}"
    study(tmp_path / "s", replay)
    with pytest.raises(BadInput, match=r"rounds cannot be added: timing\.source is replay"):
        add_rounds(tmp_path / "s", ["rounds=5"])


# what is kept


def test_a_finished_run_is_not_changed_even_if_other_files_are_missing(tmp_path: Path, done: Path) -> None:
    folder = copied(done, tmp_path)
    run = folder / "heteroavg-sync-1"
    for name in ("state", "models"):
        shutil.rmtree(run / name)
    for name in ("setup.json", "clients.json", "partition.json"):
        (run / name).unlink()
    (run / "notes.txt").write_text("mine")
    before = contents(folder)
    assert resume_study(folder, Observer()) == [run]
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["notes.txt", "state/notes.txt", "state/client-000/task-00000001.safetensors"])
def test_an_unstarted_run_with_other_files_is_not_removed(tmp_path: Path, done: Path, name: str) -> None:
    folder = copied(done, tmp_path)
    run = folder / "heteroavg-sync-1"
    for path in ("state", "models"):
        shutil.rmtree(run / path)
    (run / "run.sqlite").write_bytes(b"")
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text("mine")
    before = contents(folder)
    with pytest.raises(FleetbedError, match=r"no checkpoint, but its folder holds .*move .* away"):
        resume_study(folder, Observer())
    assert contents(folder) == before


def test_an_unfinished_run_without_checkpoints_is_not_removed(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        study(tmp_path / "s", "rounds=3", observer=StopAfter(40))
    run = tmp_path / "s" / "heteroavg-sync-1"
    shutil.rmtree(run / "state")
    before = query(run, "SELECT * FROM tasks")
    with pytest.raises(FleetbedError, match=r"no checkpoint is left, so the run cannot continue; move .* away"):
        resume_study(tmp_path / "s", Observer())
    assert query(run, "SELECT * FROM tasks") == before


def _edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = msgspec.json.decode((folder / "study.json").read_bytes())
    change(content)
    (folder / "study.json").write_bytes(msgspec.json.encode(content))


@pytest.mark.parametrize("key", ["label", "name"])
@pytest.mark.parametrize("title", ["../outside", "..", "/tmp/x", "x\n", "x" * 300, "", "a\x00b"])
def test_a_study_that_leads_outside_is_refused(tmp_path: Path, done: Path, key: str, title: str) -> None:
    folder = copied(done, tmp_path)
    for name in ("outside-sync-1", "outside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text("precious")
    before = contents(tmp_path)
    _edit(folder, lambda content: content["experiment"]["algorithms"][0].update({key: title}))
    with pytest.raises(BadInput, match=r"study\.json"):
        resume_study(folder, Observer())
    after = contents(tmp_path)
    assert {**after, "s/study.json": ""} == {**before, "s/study.json": ""}


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(search=["/nowhere"]),
        lambda content: content.update(search="x"),
        lambda content: content.pop("command"),
        lambda content: content["experiment"].update(seeds=[1, 1]),
        lambda content: content["experiment"].update(rounds=-1),
        lambda content: content["experiment"].update(other=1),
    ],
)
def test_a_study_that_was_edited_is_checked_like_a_new_one(
    tmp_path: Path, done: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    folder = copied(done, tmp_path)
    _edit(folder, change)
    with pytest.raises(BadInput):
        resume_study(folder, Observer())


# taking a folder


def test_no_two_studies_share_a_folder(tmp_path: Path) -> None:
    experiment = load_experiment("demo", (), (*TINIER, "rounds=1"))
    folder = tmp_path / "runs" / "x"
    with new_study(experiment, folder, search=(), command="one", or_next=True) as one:
        taken = (one / "study.json").read_bytes()
        with new_study(experiment, folder, search=(), command="two", or_next=True) as two:
            pass
        with (
            pytest.raises(BadInput, match="the folder already exists"),
            new_study(experiment, folder, search=(), command="3"),
        ):
            pass
        assert (one / "study.json").read_bytes() == taken
    assert (one, two) == (folder, tmp_path / "runs" / "x-2")
    assert sorted(path.name for path in folder.parent.iterdir()) == ["x", "x-2"]


@pytest.mark.parametrize("name", ["x" * 300, "file/s"])
def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="the folder cannot be created"):
        study(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_folder_is_taken_before_anything_is_laid_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = load_experiment("demo", (), (*TINIER, "rounds=1"))

    def lay_out(*_: object) -> None:
        raise AssertionError("the folder is not ours")

    (tmp_path / "s").mkdir()
    monkeypatch.setattr("fleetbed.emulator.run.run.lay_out", lay_out)
    with pytest.raises(BadInput, match="exists"), new_study(experiment, tmp_path / "s", search=(), command=""):
        pass


@pytest.mark.parametrize(
    "setting",
    [
        "model.variants=[nonsense]",  # refused when it is laid out
        "policies=[{kind: deadline, deadline_s: 1e-3}]",  # refused by the run itself
    ],
)
def test_a_refused_study_leaves_nothing_behind(tmp_path: Path, setting: str) -> None:
    with pytest.raises(BadInput):
        study(tmp_path / "a" / "b" / "s", setting)
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_that_is_refused_leaves_the_first(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        study(tmp_path / "s", "rounds=1", "policies=[{kind: sync}, {kind: deadline, deadline_s: 1e-3}]")
    assert results(tmp_path / "s" / "heteroavg-sync-1")


# how it ends


def test_a_run_without_any_merge_is_no_success(tmp_path: Path) -> None:
    out = io.StringIO()
    limited = "device_time_limit_s=1e-3"
    with pytest.raises(FleetbedError, match=r"no result was merged \(tasks by outcome: \d+ late\)") as failed:
        study(tmp_path / "s", limited, "seeds=[1, 2]", observer=PlainObserver(out))
    assert failed.value.exit_code == 1
    assert "heteroavg-sync-1: no result" in out.getvalue()
    assert "heteroavg-sync-2: no result" in out.getvalue()  # the first did not keep it from being carried out
    with pytest.raises(FleetbedError, match="no result was merged"):
        resume_study(tmp_path / "s", Observer())
    runs = open_runs([tmp_path / "s"])
    assert [run.about.status for run in runs] == ["empty", "empty"]
    assert not any(run.finished for run in runs)
    assert any("no result was merged" in note for note in compare_runs(runs, None, ()).notes)


RESULT = re.compile(r"accuracy ([\d.]+)% after round (\d+)")


def test_an_accuracy_is_shown_with_its_own_round_and_the_last_one_at_the_end(tmp_path: Path) -> None:
    out = io.StringIO()
    folders = study(tmp_path / "s", "rounds=4", "seeds=[1, 2]", "evaluation.every=3", observer=PlainObserver(out))
    lines = out.getvalue().splitlines()
    shown = [RESULT.search(line) for line in lines if "accuracy" in line]
    assert len(shown) > 4
    assert all(shown)
    recorded = {
        (round_, f"{100 * accuracy:.1f}")
        for folder in folders
        for round_, accuracy in query(folder, "SELECT round, avg(accuracy) FROM evaluations GROUP BY version")
    }
    assert {(int(found[2]), found[1]) for found in shown if found} <= recorded
    finals = [read_result(folder) for folder in folders]
    assert [final.round for final in finals if final] == [4, 4]
    assert lines.count(f"done: {finals[0]}") >= 1
    assert lines[-2:] == [f"heteroavg-sync-1: {finals[0]}", f"heteroavg-sync-2: {finals[1]}"]


HOMO = "{name: fedhenn_homo, params: {rad: 8}, variant: resnet10}"


def test_series_are_never_mixed(tmp_path: Path) -> None:
    (folder,) = study(tmp_path / "s", f"algorithms=[{HOMO}]", "data.public=8", "rounds=1")
    found = read_result(folder)
    assert found is not None
    assert {"global", "personal-own"} <= found.scores.keys()
    assert "global model" in str(found)
    assert "personal models on own data" in str(found)
    ((mean,),) = query(folder, "SELECT avg(accuracy) FROM evaluations WHERE client IS NULL AND round = 1")
    assert found.scores["global"] == pytest.approx(mean)
