"""What trackers are sent, checked against the rows of run.sqlite and read back from the trackers' own stores."""

from __future__ import annotations

import fcntl
import shutil
import sqlite3
import struct
from collections import Counter
from contextlib import closing
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import write_run
from test_report_commands import run_command

from fleetbed.analysis.tables.runs import Run, open_run
from fleetbed.analysis.tracking import trackers
from fleetbed.analysis.tracking.points import Sent, TrackedPoint, new_points, part, settings
from fleetbed.analysis.tracking.sending import Sender
from fleetbed.profiles.errors import FleetbedError

Curves = dict[str, list[tuple[int, float, float]]]  # by name: round, device seconds, value

ROUNDS = 6
STARTED_S = 1735787045.0  # 2025-01-02T03:04:05+00:00


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in a study."""
    return write_run(tmp_path_factory.mktemp("study"), "fedin", rounds=ROUNDS)


def query(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder / "run.sqlite")) as db:
        return db.execute(sql).fetchall()


def curves(points: list[TrackedPoint]) -> Curves:
    found: Curves = {}
    for point in points:
        for name, value in point.values.items():
            found.setdefault(name, []).append((point.round, point.device_s, value))
    return found


def test_accuracy_is_the_mean_over_models_by_round_and_device_time(folder: Path) -> None:
    points, sent = new_points(open_run(folder), Sent())
    rows = query(folder, "SELECT round, device_s, avg(accuracy) FROM evaluations GROUP BY version ORDER BY version")
    assert curves(points)["test/accuracy"] == [pytest.approx(row) for row in rows]
    assert len(rows) == ROUNDS + 1
    assert sent == Sent(ROUNDS, ROUNDS)
    (final,) = query(folder, "SELECT accuracy, f1, loss FROM evaluations WHERE target = 'resnet14' AND round = 6")
    assert curves(points)["models/resnet14/accuracy"][-1][2] == final[0]
    assert curves(points)["models/resnet14/loss"][-1][2] == pytest.approx(final[2])


def test_resources_are_those_of_the_tasks_of_each_kind(folder: Path) -> None:
    found = curves(new_points(open_run(folder), Sent())[0])
    ends = query(folder, "SELECT round, device_end_s FROM rounds ORDER BY round")
    end = "coalesce(ended_s, uploaded_s, compute_end_s, compute_start_s, downloaded_s, dispatched_s)"
    for kind in ("pi-zero-2w", "jetson-nano"):
        of = f"FROM tasks JOIN clients USING (client) WHERE device = '{kind}' AND {end} <="
        for number, end_s in ends:
            sums = query(
                folder, f"SELECT sum(bytes_down + coalesce(bytes_up, 0)), sum(cpu_s), sum(joules) {of} {end_s}"
            )
            for name, expected in zip(("bytes", "cpu_s", "joules"), sums[0], strict=True):
                points = {at: value for at, _, value in found[f"devices/{kind}/{name}"]}
                assert points[number] == pytest.approx(expected)
                assert points[0] == 0
            peaks = query(folder, f"SELECT max(1.0 * peak_bytes / cap_bytes) {of} {end_s} AND tasks.round = {number}")
            points = {at: value for at, _, value in found[f"devices/{kind}/peak_of_cap"]}
            assert points[number] == pytest.approx(peaks[0][0])
    assert "devices/phone-2018/joules" not in found  # nobody knows its power


def grown(run: Run, merges: int, evaluated: int, status: str = "running") -> Run:
    """The run as its records were after so many merges and evaluated versions."""
    end_s = max((one.device_end_s for one in run.rounds if one.version <= merges), default=0.0)
    return replace(
        run,
        meta={**run.meta, "status": status},
        rounds=tuple(one for one in run.rounds if one.version <= merges),
        tasks=tuple(task for task in run.tasks if task.end_s <= end_s),
        evaluations=tuple(one for one in run.evaluations if one.version <= evaluated),
        metrics=tuple(one for one in run.metrics if one.version <= merges),
    )


def test_points_that_came_one_by_one_are_those_of_the_whole_run(folder: Path) -> None:
    run = open_run(folder)
    states = [(0, 0), (1, 0), (1, 1), (3, 2), (2, 2), (4, 2), (4, 4), (6, 5), (6, 6)]  # (2, 2): killed and resumed
    sent, points = Sent(), []
    for merges, evaluated in states:
        new, sent = new_points(grown(run, merges, evaluated), sent)
        points += new
    new, sent = new_points(run, sent)
    one_by_one, at_once = curves([*points, *new]), curves(new_points(run, Sent())[0])
    assert {name: sorted(curve) for name, curve in one_by_one.items()} == at_once
    assert new_points(run, sent) == ([], sent)


def test_models_that_are_still_being_evaluated_wait(folder: Path) -> None:
    run = grown(open_run(folder), 2, 2)
    half = replace(run, evaluations=run.evaluations[:-1])
    points, sent = new_points(half, Sent())
    assert [at for at, _, _ in curves(points)["test/accuracy"]] == [0, 1]
    assert sent.version == 1


def test_names_fit_every_tracker_and_settings_are_text(folder: Path) -> None:
    assert part("theta/layer1") == "theta.layer1"
    assert part("größe <b>=1") == "gr__e _b__1"
    assert part("/") == "_"
    found = settings(open_run(folder))
    assert found["experiment.rounds"] == "6"
    assert found["algorithm.name"] == "fedin"
    assert found["clients.pi-zero-2w"] == "2"
    assert found["command"] == "fleetbed run synthetic --seed 1"


def expected(folder: Path) -> Curves:
    return curves(new_points(open_run(folder), Sent())[0])


def same(found: Curves, folder: Path) -> bool:
    """Whether a tracker has every point once; TensorBoard keeps 32 bits of a value, MLflow milliseconds."""
    wanted = expected(folder)
    return found.keys() == wanted.keys() and all(
        [(at, pytest.approx(s, abs=1e-3), pytest.approx(value, rel=1e-6)) for at, s, value in wanted[name]]
        == found[name]
        for name in wanted
    )


def cut(folder: Path, merges: int) -> None:
    """Take the records back to so many merges, as they were while the run went on."""
    with closing(sqlite3.connect(folder / "run.sqlite", isolation_level=None)) as db:
        ((end_s,),) = db.execute("SELECT device_end_s FROM rounds WHERE version = ?", (merges,)).fetchall()
        for table in ("rounds", "evaluations", "metrics"):
            db.execute(f"DELETE FROM {table} WHERE version > ?", (merges,))
        db.execute("DELETE FROM tasks WHERE dispatched_s >= ?", (end_s,))
        db.execute("DELETE FROM notices WHERE device_s > ?", (end_s,))
        db.execute("UPDATE meta SET value = '\"running\"' WHERE key = 'status'")


def send_in_two_parts(name: str, folder: Path, study: Path) -> Path:
    """Send a run that was killed after three rounds, then, from another process as it were, the rest of it."""
    run = study / folder.name
    shutil.copytree(folder, run)
    cut(run, 3)
    says: list[str] = []
    Sender(name, study, says.append).follow(lambda: True)
    shutil.copyfile(folder / "run.sqlite", run / "run.sqlite")
    for _ in range(2):  # the second time there is nothing left to send
        Sender(name, study, says.append).finish(going_on=True)
    assert says == []
    return study / "trackers"


def test_tensorboard(folder: Path, tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader", reason="no tensorboard")
    tensor_util = pytest.importorskip("tensorboard.util.tensor_util", reason="no tensorboard")
    place = send_in_two_parts("tensorboard", folder, tmp_path) / "tensorboard" / folder.name
    files = sorted(place.glob("events.out.tfevents.*"))
    assert len(files) == 2
    found: Curves = {}
    texts: dict[str, list[str]] = {}
    for event in (event for path in files for event in loader.LegacyEventFileLoader(str(path)).Load()):
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                found.setdefault(value.tag, []).append((event.step, event.wall_time - STARTED_S, value.simple_value))
            else:
                texts.setdefault(value.tag, []).append(tensor_util.make_ndarray(value.tensor)[0].decode())
    assert same(found, folder)
    assert "| experiment.rounds | 6 |" in texts["configuration"][0]
    assert texts["status"] == ["killed", "done"]
    assert "fedin" in (place / "report.html").read_text()


def test_mlflow(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    pytest.importorskip("mlflow", reason="no mlflow")
    place = send_in_two_parts("mlflow", folder, tmp_path) / "mlflow"
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=place.as_uri())
    experiment = client.get_experiment_by_name("Synthetic fleet")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == folder.name
    assert (run.info.status, run.data.tags["status"]) == ("FINISHED", "done")
    assert run.data.params["experiment.rounds"] == "6"
    found = {
        name: [
            (m.step, m.timestamp / 1000 - STARTED_S, m.value) for m in client.get_metric_history(run.info.run_id, name)
        ]
        for name in run.data.metrics
    }
    assert same(found, folder)
    report = client.download_artifacts(run.info.run_id, "report.html", str(tmp_path))
    assert "fedin" in Path(report).read_text()


def wandb_records(path: Path) -> list[bytes]:
    """The records in the file of an offline run: blocks of 32 KiB with records in pieces, as LevelDB writes its log."""
    content, found, piece, at = path.read_bytes(), [], b"", 7
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        piece += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            found.append(piece)
            piece = b""
    return found


def test_wandb_offline(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="no wandb")
    place = send_in_two_parts("wandb", folder, tmp_path) / "wandb"
    files = sorted(place.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    assert len(files) == 2
    assert files[0].name == files[1].name  # the same run, continued
    found: Curves = {}
    steps: Counter[int] = Counter()
    kinds: Counter[str] = Counter()
    for content in (content for path in files for content in wandb_records(path)):
        record = proto.Record()
        record.ParseFromString(content)
        kinds[record.WhichOneof("record_type")] += 1
        if record.HasField("history"):
            row = {(item.key or "/".join(item.nested_key)): float(item.value_json) for item in record.history.item}
            steps[record.history.step.num] += 1
            at, device_s = int(row["round"]), row["time/device_s"]
            for key, value in row.items():
                if not key.startswith("_") and key != "round":
                    found.setdefault(key, []).append((at, device_s, value))
    assert max(steps.values()) == 1
    assert sorted(steps) == list(range(len(steps)))
    wanted = expected(folder)
    wanted["time/device_s"] = found["time/device_s"]  # every row has it
    assert {name: sorted(curve) for name, curve in found.items()} == {
        name: [pytest.approx(point) for point in sorted(curve)] for name, curve in wanted.items()
    }
    assert kinds["artifact"] >= 1 or kinds["request"] >= 1
    assert any(b"report-" in content for path in files for content in wandb_records(path))


def test_a_tracker_that_fails_loses_nothing(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="no tensorboard")
    shutil.copytree(folder, tmp_path / folder.name)
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "tensorboard").write_text("a file where TensorBoard wants its folder")
    says: list[str] = []
    looks = iter([False, True])
    with pytest.raises(
        FleetbedError, match=rf"TensorBoard did not get everything .*fleetbed track tensorboard {tmp_path}"
    ):
        Sender("tensorboard", tmp_path, says.append).follow(lambda: next(looks))
    assert len(says) == 1
    assert says[0].startswith("TensorBoard: ")
    assert says[0].endswith("the run goes on, and this is tried again")
    (tmp_path / "trackers" / "tensorboard").unlink()
    Sender("tensorboard", tmp_path, says.append).finish(going_on=True)
    assert (tmp_path / "trackers" / "tensorboard" / folder.name / "report.html").exists()


def test_two_processes_do_not_send_the_same(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="no tensorboard")
    shutil.copytree(folder, tmp_path / folder.name)
    Sender("tensorboard", tmp_path, print).finish(going_on=True)
    with (tmp_path / "trackers" / "tensorboard.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(FleetbedError, match="another process sends it to TensorBoard; wait for that one"):
            Sender("tensorboard", tmp_path, print).finish(going_on=True)


def test_bad_input_ends_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "study"
    assert run_command("run", "demo", "--out", out, "--track", "mlfow") == 2
    error = "track: there is no tracker 'mlfow'; did you mean mlflow? allowed are mlflow, tensorboard, wandb."
    assert capsys.readouterr().err == f"fleetbed: {error}\n"
    monkeypatch.setattr(trackers, "find_spec", lambda _: ModuleSpec("wandb", None))  # a folder that it left behind
    assert run_command("run", "demo", "--out", out, "--track", "wandb") == 3
    error = "fleetbed: track wandb: Weights & Biases is not installed here; pip install 'fleetbed[wandb]' brings it.\n"
    assert capsys.readouterr().err == error
    assert not out.exists()
    monkeypatch.undo()
    monkeypatch.setattr(trackers, "find_spec", lambda _: ModuleSpec("tensorboard", None, origin="somewhere"))
    assert run_command("track", "tensorboard", tmp_path) == 2
    assert "no run, there is no run.sqlite in it" in capsys.readouterr().err
