"""Checkpoints: what was stored is what comes back, the newest whole one is found, and nothing useful is removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from handmade_tasks import make_task

from fleetbed.emulator.engine.evaluation import Moment
from fleetbed.emulator.engine.participant import ClientProgress
from fleetbed.emulator.engine.progress import Progress
from fleetbed.emulator.engine.task import Task
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.resume.checkpoint import Checkpoint, Checkpoints
from fleetbed.emulator.timeline.availability import OnOff
from fleetbed.emulator.timeline.events import Event, Kind, Timeline
from fleetbed.emulator.timeline.making_policies import make_policy
from fleetbed.emulator.timeline.network import Pipe
from fleetbed.emulator.wire.messages import kept_name
from fleetbed.emulator.wire.storage import Damaged, load_bundle, save_bundle
from fleetbed.profiles.experiment import runs
from fleetbed.profiles.resolve import load_experiment

CONFIG = runs(load_experiment("demo", sets=("timing.source=modelled", "rounds=5")))[0]
STATE = {"w": torch.arange(1000.0), "n": torch.tensor([3], dtype=torch.int64)}


def task(number: int, client: int, kept: str | None = None) -> Task:
    return make_task(
        number=number,
        client=client,
        round=2,
        base_version=3,
        kept=kept,
        dispatched_s=1.5,
        host_queued_s=0.25,
        metrics={"norm": None},
    )


def progress(version: int = 3, **changes: object) -> Progress:
    timeline = Timeline(down=Pipe(1e6), up=Pipe(2e6), now_s=2.5)
    timeline.add(Event(3.5, Kind.COMPUTED, 1, 7))
    made = Progress(
        timeline=timeline,
        policy=make_policy(CONFIG.experiment, CONFIG.policy, 1, {0: 1.0, 1: 1.0}, 1),
        availability=OnOff(seed=1, mean_on_s=10.0, mean_off_s=5.0, away=[2]),
        clients={1: ClientProgress("resnet14", fit=False), 0: ClientProgress("resnet10")},
        state=Bundle(dict(STATE), {"count": 2, "names": ["a", None], "share": 0.1}),
        version=version,
        next_task=9,
        tasks={7: task(7, 1), 8: task(8, 0)},
        sent={7: Bundle(dict(STATE)), 8: Bundle({"w": STATE["w"] + 1})},
        merging=[(7,), ()],
        round_start_s=1.25,
        free_since={0: 0.5},
        failed_in_a_row=2,
        evaluated=Moment(2, 1, 1.25),
    )
    return msgspec.structs.replace(made, **changes)


def checkpoint(of: Progress, *, rounds: int = 5, run: str = "mine") -> Checkpoint:
    return Checkpoint(run=run, rounds=rounds, records="seal", host_s=12.5, progress=of)


def load(folder: Path, rounds: int = 5, check: Callable[[Checkpoint], str | None] = lambda _: None) -> Checkpoint:
    return Checkpoints(folder).load(rounds, check).checkpoint


def path_of(folder: Path, version: int) -> Path:
    return folder / "state" / f"checkpoint-{version:08d}.safetensors"


def test_what_was_stored_comes_back(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(checkpoint(progress()))
    found, wanted = load(tmp_path), progress()
    assert (found.run, found.rounds, found.records, found.host_s) == ("mine", 5, "seal", 12.5)
    assert found.progress.timeline.pop() == Event(3.5, Kind.COMPUTED, 1, 7)
    assert list(found.progress.clients.items()) == list(wanted.clients.items())  # in their order, which matters
    assert found.progress.state.values == wanted.state.values
    for name, tensor in wanted.state.tensors.items():
        back = found.progress.state.tensors[name]
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor)
    assert torch.equal(found.progress.sent[8].tensors["w"], STATE["w"] + 1)
    for field in Progress.__struct_fields__:
        if field not in ("timeline", "state", "sent"):  # bundles of tensors have no equality
            assert getattr(found.progress, field) == getattr(wanted, field)


def test_a_tensor_that_occurs_often_is_stored_once(tmp_path: Path) -> None:
    many = {number: Bundle(dict(STATE)) for number in range(50)}
    tasks = {number: task(number, number) for number in many}
    Checkpoints(tmp_path).save(checkpoint(progress(sent=many, tasks=tasks)))
    assert len(load_bundle(path_of(tmp_path, 3)).tensors) == len(STATE)
    found = load(tmp_path).progress
    assert found.sent[49].tensors["w"] is found.state.tensors["w"]


def test_the_two_newest_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert not checkpoints.found()
    for version in (1, 2, 3):
        checkpoints.save(checkpoint(progress(version)))
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == [
        "checkpoint-00000002.safetensors",
        "checkpoint-00000003.safetensors",
    ]
    assert load(tmp_path).progress.version == 3


def test_a_damaged_one_is_passed_over_named_and_put_aside(tmp_path: Path) -> None:
    for version in (2, 3):
        Checkpoints(tmp_path).save(checkpoint(progress(version)))
    newest = path_of(tmp_path, 3)
    newest.write_bytes(newest.read_bytes()[:-1])
    loaded = Checkpoints(tmp_path).load(5, lambda _: None)
    assert loaded.checkpoint.progress.version == 2
    assert list(loaded.damaged) == [newest]
    Checkpoints(tmp_path).clean(loaded.damaged)
    assert not newest.exists()
    assert newest.with_name(f"{newest.name}.damaged-1").exists()


def rewrite(path: Path, change: Callable[[Bundle], Bundle]) -> None:
    save_bundle(path, change(load_bundle(path)))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda b: Bundle(b.tensors, {"progress": "{}"}),  # as it was written before there was a number
            r"written by another fleetbed, as a checkpoint of format 1, but fleetbed \d\S+ reads format 3: continue",
        ),
        (lambda b: Bundle(b.tensors, {**b.values, "format": 4}), "as a checkpoint of format 4"),
        (lambda b: Bundle({}, b.values), "the tensor t0 is missing"),
        (lambda b: Bundle(b.tensors, {**b.values, "checkpoint": "{}"}), "not what a checkpoint of this version looks"),
        (lambda b: Bundle(b.tensors, {**b.values, "checkpoint": None}), "not what a checkpoint of this version looks"),
    ],
)
def test_what_is_no_checkpoint_of_this_version_is_refused(
    tmp_path: Path, change: Callable[[Bundle], Bundle], problem: str
) -> None:
    Checkpoints(tmp_path).save(checkpoint(progress()))
    rewrite(path_of(tmp_path, 3), change)
    with pytest.raises(Damaged, match=problem):
        load(tmp_path)


def test_the_checkpoint_of_another_merge_is_refused(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(checkpoint(progress(3)))
    path_of(tmp_path, 3).rename(path_of(tmp_path, 4))
    with pytest.raises(Damaged, match="it is the checkpoint of merge 3"):
        load(tmp_path)


def test_one_that_the_caller_objects_to_is_passed_over(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(checkpoint(progress(2)))
    Checkpoints(tmp_path).save(checkpoint(progress(3), run="another"))
    found = load(tmp_path, check=lambda each: None if each.run == "mine" else "it belongs to another run")
    assert found.progress.version == 2
    with pytest.raises(Damaged, match=r"it belongs to another run.*it belongs to another run; move .* away"):
        load(tmp_path, check=lambda _: "it belongs to another run")


def test_rounds_cannot_be_added_to_the_checkpoint_at_the_end(tmp_path: Path) -> None:
    ended = progress()
    ended.policy.round = 3
    Checkpoints(tmp_path).save(checkpoint(ended, rounds=2))
    assert load(tmp_path, rounds=2).is_end
    with pytest.raises(Damaged, match="only the checkpoint at the run's end is whole, and rounds cannot be added"):
        load(tmp_path, rounds=3)


def keep(folder: Path, client: int, number: int) -> str:
    """Write what a client keeps; returns its name."""
    name = kept_name(client, number)
    save_bundle(folder / name, Bundle({"w": torch.zeros(1)}))
    return name


def test_a_checkpoint_whose_clients_lost_their_files_is_refused(tmp_path: Path) -> None:
    name = keep(tmp_path, 0, 4)
    Checkpoints(tmp_path).save(checkpoint(progress(clients={0: ClientProgress("resnet10", kept=name)})))
    assert load(tmp_path).progress.clients[0].kept == name
    (tmp_path / name).unlink()
    with pytest.raises(Damaged, match=r"what a client kept is lost: .*task-00000004.*the file is missing"):
        load(tmp_path)


def test_a_file_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(checkpoint(progress(tasks={7: task(7, 1, kept="../../etc/passwd")})))
    with pytest.raises(Damaged, match=r"'../../etc/passwd' is not what a client keeps"):
        load(tmp_path)


def test_files_of_clients_go_once_no_checkpoint_needs_them(tmp_path: Path) -> None:
    old, new, planned, under_way, ahead = (keep(tmp_path, 0, number) for number in (3, 4, 5, 7, 9))
    checkpoints = Checkpoints(tmp_path)

    def kept_at(version: int, kept: str) -> set[str]:
        """The files that are left after a checkpoint at which the client keeps this."""
        tasks = {7: task(7, 0, kept=planned)} if version < 4 else {7: task(7, 0)}
        checkpoints.save(checkpoint(progress(version, tasks=tasks, clients={0: ClientProgress("resnet10", kept=kept)})))
        return {str(path.relative_to(tmp_path)) for path in tmp_path.glob("state/client-*/*")}

    everything = {old, new, planned, under_way, ahead}
    assert kept_at(2, old) == everything
    assert kept_at(3, new) == everything, "the checkpoint before this one is still there"
    assert kept_at(4, new) == everything - {old}
    assert kept_at(5, new) == everything - {old, planned}


def test_half_written_files_are_removed_and_strange_ones_are_not(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(checkpoint(progress()))
    half = tmp_path / "state" / ".checkpoint-00000004.safetensors.123.part"
    half.write_bytes(b"half")
    strange = tmp_path / "state" / ".notes.123.part"
    strange.write_bytes(b"mine")
    assert Checkpoints(tmp_path).parts() == [half]
    Checkpoints(tmp_path).clean([])
    assert not half.exists()
    assert strange.exists()


def test_a_run_of_another_version_is_refused_before_anything_is_compared(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.check_format()  # a run without checkpoints is nobody's
    checkpoints.save(checkpoint(progress(1)))
    checkpoints.save(checkpoint(progress(2)))
    checkpoints.check_format()
    newest, older = sorted((tmp_path / "state").glob("checkpoint-*"), reverse=True)
    newest.write_bytes(newest.read_bytes()[:-9])  # a damaged one says nothing about the version
    rewrite(older, lambda b: Bundle(b.tensors, {**b.values, "format": 2}))
    with pytest.raises(Damaged, match=r"as a checkpoint of format 2, .* continue with the version that began the run"):
        checkpoints.check_format()
