"""What a worker's process has done before its first order."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs

from fleetbed.emulator.algorithms import load_method
from fleetbed.emulator.checks.memory_meter import Case
from fleetbed.emulator.checks.memory_meter import workplace as place
from fleetbed.emulator.method.bundle import Bundle, prefixed
from fleetbed.emulator.processes import forking, task_runner
from fleetbed.emulator.processes.task_runner import TaskRunner
from fleetbed.emulator.wire.messages import EXTRAS, Evaluate, Measure
from fleetbed.models.base import InputSpec
from fleetbed.profiles.experiment import AlgorithmChoice, Optimizer


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TaskRunner:
    monkeypatch.setattr(task_runner, "_rehearsed", set())
    return place(
        Case("resnet-width", "resnet26-eighth", InputSpec((1, 16, 16), 4), batch=2, optimizer=Optimizer()), tmp_path
    )


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The variants of the steps that lead nowhere, in the order in which they are made."""
    made: list[str] = []
    real = TaskRunner._pass

    def counted(self: TaskRunner, order: Measure, model: object) -> object:
        made.append(order.variant)
        return real(self, order, model)  # type: ignore[arg-type]

    monkeypatch.setattr(TaskRunner, "_pass", counted)
    return made


def steps_in_a_fork(here: TaskRunner, steps: list[str], variant: str) -> int:
    """How many more steps a client makes before its first paced task."""
    before = len(steps)

    def client() -> None:
        here.rehearse(variant)
        os._exit(len(steps) - before)

    return os.waitstatus_to_exitcode(os.waitpid(forking.fork(client), 0)[1])


def test_the_models_in_use_are_rehearsed_once_for_all_forks(here: TaskRunner, steps: list[str]) -> None:
    forking.warm(here.warm_up)
    forking.warm(here.warm_up)
    assert steps == ["resnet26-eighth"]
    assert steps_in_a_fork(here, steps, "resnet26-eighth") == 0
    assert steps_in_a_fork(here, steps, "resnet26-quarter") == 1


def test_a_fork_rehearses_for_itself_where_the_zygote_cannot(
    here: TaskRunner, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    forking.warm(here.warm_up)
    assert steps == []
    assert steps_in_a_fork(here, steps, "resnet26-eighth") == 1


def test_a_target_with_extras_is_evaluated_by_the_methods_own_predictor(here: TaskRunner) -> None:
    """Prototypes that are the features of the test samples themselves find each sample's own class."""
    choice = AlgorithmChoice(name="fedproto", params={"predictor": "prototype"})
    here = replace(here, method=load_method(choice, here.context))
    model = here.context.initial("resnet26-eighth")
    net = here.context.family.load("resnet26-eighth", here.context.spec, dict(model)).eval()
    x, y = here.dataset.batch("test", here.split.test[0], None)
    with torch.no_grad():
        h, logits = net.features(x), net(x)
    found = y.unique()
    prototypes = torch.stack([h[y == c].mean(0) for c in found])
    nearest = found[torch.cdist(h, prototypes).argmin(1)]
    order = Evaluate(task=-1, variant="resnet26-eighth", kept=None, prefix="", local_client=0, batch=3)
    plain = here.evaluate(order, Bundle(model))
    assert plain.accuracy == pytest.approx(float((logits.argmax(1) == y).float().mean()))
    extras = prefixed(EXTRAS, {"class": found.int(), "prototypes": prototypes})
    by_distance = here.evaluate(order, Bundle({**model, **extras}))
    assert by_distance.accuracy == pytest.approx(float((nearest == y).float().mean()))
    assert by_distance.samples == plain.samples == len(y)
    assert by_distance.loss != plain.loss


def test_the_first_step_of_a_task_is_slower_than_the_others(here: TaskRunner) -> None:
    """It takes up the model in new memory; a time scale from hot steps alone would make short tasks late."""
    variant = here.context.family.variants[-1]
    order = Measure(task=-1, variant=variant, kind="train", part="all", samples=4, optimise=True)

    def compare() -> None:
        assert here.measure(structs.replace(order, kind="first")).seconds > here.measure(order).seconds

    forking.run_in_fork(compare)  # measuring changes how the process keeps its heap
