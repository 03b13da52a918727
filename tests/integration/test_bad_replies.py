"""A bad reply fails only its own task; a method that fails is reported with file and line, and can be resumed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from small_runs import OWN_MODEL, TINIER, query, tiny
from torch import Tensor

from fleetbed.emulator.algorithms import heteroavg
from fleetbed.emulator.engine.engine import Engine
from fleetbed.emulator.engine.evaluation import Evaluations
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.processes.executor import Outcome, outcome_of
from fleetbed.emulator.run import run
from fleetbed.emulator.wire import codec
from fleetbed.emulator.wire.messages import Trained
from fleetbed.emulator.wire.storage import load_bundle
from fleetbed.profiles.errors import FleetbedError

Start = Callable[..., Path]
RAD = "params: {rad: 12, eta: 1}"
METHODS = {
    "heteroavg": "{name: heteroavg}",
    "fedavg": "{name: fedavg}",
    "heteroprox": "{name: heteroprox}",
    "fedprox": "{name: fedprox}",
    "inclusivefl": "{name: inclusivefl}",
    "heterofl": "{name: heterofl}",
    "fedrolex": "{name: fedrolex}",
    "scalefl": "{name: scalefl, params: {gamma: 0.1}}",
    "depthfl": "{name: depthfl, params: {alpha: 0.1}}",
    "fedepth": "{name: fedepth}",
    "inco": "{name: inco}",
    "scaffold": "{name: scaffold}",
    "fednova": "{name: fednova}",
    "moon": "{name: moon}",
    "fedin": "{name: fedin}",
    "fedin-v1": "{name: fedin, params: {version: v1}}",
    "private": "{name: private}",
    "fedhe": "{name: fedhe, params: {cold_start: 0}}",
    "fedhenn": f"{{name: fedhenn, {RAD}}}",
    "fedhenn-client-side": "{name: fedhenn, params: {rad: 12, eta: 1, client_side_gram: true}}",
    "fedhenn_homo": f"{{name: fedhenn_homo, variant: resnet10, {RAD}}}",
}
QUICK = ("heteroavg",)


def first(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def act(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name = next(name for name, t in tensors.items() if t.is_floating_point())
        return {**tensors, name: change(tensors[name])}

    return act


#: what is done to a reply's tensors, its metrics and its meters
TENSORS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "shape": first(lambda t: torch.cat([t, t])),
    "one value": first(lambda t: t.reshape(-1)[:1].clone()),
    "scalar": first(lambda t: t.reshape(-1)[0].clone()),
    "missing": lambda tensors: dict(list(tensors.items())[1:]),
    "extra": lambda tensors: {**tensors, "more": torch.zeros(2)},
    "dtype": first(lambda t: t.double()),
    "none": lambda _: {},
    "NaN": first(lambda t: torch.full_like(t, math.nan)),
    "infinite": first(lambda t: torch.full_like(t, math.inf)),
}
METRICS: dict[str, object] = {
    "NaN metric": {"drift": math.nan},
    "text metric": {"loss": "low"},
    "NaN loss": {"loss": math.nan},
}
METERS = {"many steps": {"steps": 10**9}, "many samples": {"samples": 2**63}, "negative samples": {"samples": -4}}
WITHOUT_TENSORS = ("extra", *METRICS, *METERS)
OUTCOMES = {
    **dict.fromkeys(TENSORS, "refused"),
    "NaN": "diverged",
    "infinite": "diverged",
    "NaN metric": "refused",
    "NaN loss": "diverged",
    "text metric": "crash",
    "many steps": "refused",
    "many samples": "crash",
    "negative samples": "crash",
    "crash": "crash",
}


class Liar(Observer):
    """From the second round on replaces the replies of all clients but two, each in its own way or all in this one.

    The ways are taken in turn, beginning with the one at the position `first`.
    """

    def __init__(self, only: str | None = None, first: int = 0) -> None:
        self._only, self._first = only, first
        self.told: dict[int, str] = {}  # by task
        self._kinds: Iterator[str] = iter(())

    def start(self, engine: Engine, evaluations: Evaluations) -> None:
        self._engine, self._wait = engine, engine.executor.wait
        engine.executor.wait = self._replaced  # type: ignore[method-assign]

    def _replaced(self, number: int) -> Outcome:
        outcome = self._wait(number)
        task = self._engine.progress.tasks.get(number)
        if not isinstance(outcome.answer, Trained) or task is None or task.round < 2 or task.client in (0, 5):
            return outcome
        message = codec.unpack(outcome.frames)
        known = list(OUTCOMES) if message.tensors else list(WITHOUT_TENSORS)
        kind = self._only or known[(self._first + number) % len(known)]
        self.told[number] = kind
        return self._lie(kind, outcome, message)

    def _lie(self, kind: str, outcome: Outcome, message: Bundle) -> Outcome:
        about = {"type": "Trained", **msgspec.structs.asdict(outcome.answer), "sizes": []}
        tensors = message.tensors
        if kind == "crash":
            return Outcome(kind="crash", detail="killed")
        if kind in TENSORS:
            tensors = TENSORS[kind](tensors)
        elif kind in METRICS:
            about["metrics"] = METRICS[kind]
        else:
            about |= METERS[kind]
        frames = [msgspec.msgpack.encode(about), *codec.pack(Bundle(tensors, message.values))]
        try:
            return outcome_of(frames, outcome.host_start_s or 0.0, outcome.host_end_s or 0.0)
        except codec.WireError as error:
            return Outcome(kind="crash", detail=str(error))


def sets(method: str) -> tuple[str, ...]:
    here = (*TINIER, f"algorithms=[{METHODS[method]}]", "processes=inline", "data.public=20", "training.max_steps=1")
    return (*here, *OWN_MODEL.get(method, ()))


def models(folder: Path) -> dict[str, dict[str, Tensor]]:
    return {path.name: load_bundle(path).tensors for path in sorted((folder / "models").iterdir())}


@pytest.mark.parametrize("method", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in METHODS])
def test_bad_replies_cost_their_senders_a_task_and_change_no_result(start: Start, method: str) -> None:
    # two rounds of lies are most of the ways there are; the methods begin at different ones
    liar, absent, rounds = Liar(first=list(METHODS).index(method)), Liar(only="crash"), "rounds=3"
    folder = start(*sets(method), rounds, name="lied", observer=liar)
    told = {OUTCOMES[kind] for kind in liar.told.values()}
    assert len(set(liar.told.values())) > 5
    assert told == {"refused", "diverged", "crash"}
    for number, outcome in query(folder, "SELECT task, outcome FROM tasks"):
        expected = OUTCOMES[liar.told[number]] if number in liar.told else "ok"
        assert (number, outcome) == (number, expected), liar.told.get(number)
    assert query(folder, "SELECT value FROM meta WHERE key = 'status'") == [('"done"',)]
    without = start(*sets(method), rounds, name="absent", observer=absent)
    ours, theirs = models(folder), models(without)
    assert ours.keys() == theirs.keys()
    for name, tensors in ours.items():
        assert all(torch.equal(t, theirs[name][key]) for key, t in tensors.items())


class Spoiler(Observer):
    """Writes NaN over replies where they lie: in the memory that the broker shares with its workers."""

    def start(self, engine: Engine, evaluations: Evaluations) -> None:
        self._wait, self._engine, self.spoilt = engine.executor.wait, engine, 0
        engine.executor.wait = self._spoil  # type: ignore[method-assign]

    def _spoil(self, number: int) -> Outcome:
        outcome = self._wait(number)
        task = self._engine.progress.tasks.get(number)
        if isinstance(outcome.answer, Trained) and task is not None and task.client == 3:
            assert outcome.answer.sizes  # or it went by socket
            np.frombuffer(outcome.frames[1], np.float32)[-1] = math.nan
            self.spoilt += 1
        return outcome


@pytest.mark.slow
def test_values_that_are_not_finite_in_shared_memory_are_noticed(start: Start) -> None:
    observer = Spoiler()
    folder = start("model.options={base_width: 16}", "model.variants=[resnet10]", observer=observer)
    assert observer.spoilt == 2
    assert query(folder, "SELECT DISTINCT client FROM tasks WHERE outcome = 'diverged'") == [(3,)]
    assert query(folder, "SELECT merged FROM rounds") == [(7,), (7,)]
    assert all(torch.isfinite(t).all() for t in models(folder)["resnet10.safetensors"].values())


# the method's own code


def fails(self: object, *_: object) -> None:
    weights = torch.zeros(3)
    print(weights.reshape(2, 2))


@pytest.mark.parametrize(
    "hook",
    [
        "merge",
        *(
            pytest.param(hook, marks=pytest.mark.slow)
            for hook in ("server_work", "send", "work", "targets", "expects", "objection")
        ),
    ],
)
def test_a_method_that_raises_ends_the_run_with_its_name_and_place(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hook: str
) -> None:
    good, calls, most = getattr(heteroavg.Method, hook), 0, 1_000_000

    def up_to_the_last(self: heteroavg.Method, *args: object) -> object:
        nonlocal calls
        calls += 1
        return good(self, *args) if calls < most else fails(self)

    with monkeypatch.context() as patch:
        patch.setattr(heteroavg.Method, hook, up_to_the_last)
        whole = start(*TINIER, "processes=inline", name="whole")
        calls, most = 0, calls
        with pytest.raises(FleetbedError) as caught:
            start(*TINIER, "processes=inline")
    line = fails.__code__.co_firstlineno + 2
    said, folder = str(caught.value), tmp_path / "run"
    assert said.startswith(f"the method heteroavg failed in {hook} at {__file__}:{line}: RuntimeError: shape '[2, 2]'")
    assert "\n" not in said
    assert caught.value.exit_code == 1
    assert f"its traceback is in {folder / 'error.log'}" in said
    assert "in fails" in (folder / "error.log").read_text()
    assert query(folder, "SELECT value FROM meta WHERE key = 'status'") == [('"failed"',)]
    run.resume(tiny(*TINIER, "processes=inline"), folder, search=(), observer=Observer())
    rows = "SELECT task, client, outcome, uploaded_s, loss, merged_version FROM tasks ORDER BY task"
    assert query(folder, rows) == query(whole, rows)
    for name, tensors in models(folder).items():
        assert all(torch.equal(t, models(whole)[name][key]) for key, t in tensors.items())


@pytest.mark.parametrize(
    ("hook", "given", "says"),
    [
        ("merge", None, "merge returned NoneType where Merged is needed"),
        ("setup", {}, "setup returned dict where Bundle is needed"),
        ("send", Bundle({"w": [1.0]}), "send returned 'w', list, where a tensor by name is needed"),  # type: ignore[dict-item]
        ("send", Bundle({"w": torch.zeros(1).bfloat16()}), r"the tensor 'w' of torch\.bfloat16; convert it to one of"),
        ("work", 3, "heaviest returned int where Work is needed"),  # which asks for it
    ],
)
def test_a_method_that_gives_back_something_else_is_named(
    start: Start, monkeypatch: pytest.MonkeyPatch, hook: str, given: object, says: str
) -> None:
    monkeypatch.setattr(heteroavg.Method, hook, lambda *_: given)
    with pytest.raises(FleetbedError, match=f"the method heteroavg failed: .*{says}"):
        start(*TINIER, "processes=inline")


def test_metrics_of_tasks_are_recorded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    client = heteroavg.Method.client

    def reports(self: heteroavg.Method, job: object) -> object:
        reply = client(self, job)  # type: ignore[arg-type]
        return replace(reply, metrics={**reply.metrics, "drift": 0.5, "norm": 2.0})

    monkeypatch.setattr(heteroavg.Method, "client", reports)
    folder = start(*TINIER, "processes=inline")
    found = query(folder, "SELECT version, task, name, value FROM metrics WHERE task IS NOT NULL ORDER BY task, name")
    assert found == [
        (merged, task, name, value)
        for task, merged in query(folder, "SELECT task, merged_version FROM tasks ORDER BY task")
        for name, value in (("drift", 0.5), ("norm", 2.0))
    ]
    assert len(found) == 32
