"""A task on the device: which samples it sees, in which order, at which pace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fleetbed.emulator.method.algorithm import Assignment, Client, Context
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.job import LocalJob
from fleetbed.emulator.method.optimizers import make_optimizer
from fleetbed.emulator.method.schedule import batch_of, steps_of
from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.profiles.experiment import LearningRate, Optimizer, Training

SPEC = InputSpec((1, 8, 8), 3)
FAMILY = family("resnet-stage", {"base_width": 4, "stem": "3x3"})


class Numbered:
    """A data set whose samples are their own index, so that a test sees which were drawn."""

    def strata(self, split: str) -> np.ndarray:
        assert split == "train"
        return np.arange(200) % 3

    def batch(self, split: str, rows: np.ndarray, rng: object) -> tuple[torch.Tensor, torch.Tensor]:
        assert split == "train"
        return torch.from_numpy(np.asarray(rows)).float(), torch.from_numpy(np.asarray(rows) % 3)


class CountingPacer:
    steps = 0

    def step(self) -> None:
        self.steps += 1


def test_the_learning_rate_is_that_of_the_round() -> None:
    changes = (LearningRate(round=3, lr=0.02), LearningRate(round=5, lr=0.003))
    training = Training(optimizer=Optimizer(lr=0.1, momentum=0.0), schedule=changes)
    assert [training.optimizer_in(n).lr for n in range(1, 7)] == [0.1, 0.1, 0.02, 0.02, 0.003, 0.003]
    assert training.optimizer_in(4) == Optimizer(lr=0.02, momentum=0.0)


def job(
    samples: int = 10,
    task: int = 0,
    client: int = 2,
    pacer: CountingPacer | None = None,
    most_steps: int | None = None,
    **training: int,
) -> LocalJob:
    context = Context(
        seed=5,
        spec=SPEC,
        family=FAMILY,
        clients=(),
        training=Training(**{"batch": 4, **training}),  # type: ignore[arg-type]
        rounds=1,
    )
    return LocalJob(
        context=context,
        assignment=Assignment(client=Client(client, "resnet10", samples), task=task),
        message=Bundle(),
        kept=None,
        dataset=Numbered(),  # type: ignore[arg-type]
        indices=np.arange(100, 100 + samples),
        pacer=pacer,
        most_steps=most_steps,
    )


def seen(task: LocalJob, **how: Any) -> list[list[int]]:
    return [[int(v) for v in x] for x, _ in task.batches(**how)]


def test_an_epoch_is_a_permutation_without_the_last_incomplete_batch() -> None:
    batches = seen(job(10))
    assert [len(batch) for batch in batches] == [4, 4]
    flat = [sample for batch in batches for sample in batch]
    assert len(set(flat)) == 8
    assert set(flat) <= set(range(100, 110))


def test_epochs_differ_and_all_samples_come_round() -> None:
    batches = seen(job(10), epochs=40)
    assert len(batches) == 80
    assert {sample for batch in batches for sample in batch} == set(range(100, 110))
    assert batches[:2] != batches[2:4]


@pytest.mark.parametrize(("samples", "batch", "expected"), [(3, 4, [3]), (4, 4, [4]), (9, 4, [4, 4]), (1, 4, [2])])
def test_small_clients(samples: int, batch: int, expected: list[int]) -> None:
    # a lone sample is shown twice: batch norm cannot take a batch of one
    assert [len(b) for b in seen(job(samples, batch=batch))] == expected


def test_the_plan_counts_the_steps_that_are_made() -> None:
    for samples in (1, 3, 4, 10, 33):
        for training in (Training(batch=4), Training(batch=4, epochs=3), Training(batch=4, epochs=3, max_steps=5)):
            task = job(samples, epochs=training.epochs, **({"max_steps": 5} if training.max_steps else {}))
            assert len(seen(task)) == steps_of(samples, training) == task.steps
            assert batch_of(samples, training.batch) == min(4, samples)


def test_random_batches_are_of_the_asked_number_and_size() -> None:
    batches = seen(job(10), steps=3, batch=6)
    assert [len(batch) for batch in batches] == [6, 6, 6]
    assert all(len(set(batch)) == 6 for batch in batches)


def test_the_order_is_keyed_by_client_and_task() -> None:
    assert seen(job()) == seen(job())
    assert seen(job()) != seen(job(task=1))
    assert seen(job()) != seen(job(client=3))


def test_every_step_is_paced_after_it_was_made() -> None:
    pacer = CountingPacer()
    for number, _ in enumerate(job(10, pacer=pacer).batches()):
        assert pacer.steps == number
    assert pacer.steps == 2


def test_a_sample_larger_than_the_data_repeats() -> None:
    x, _ = job(3).sample(5, "features")
    assert len(x) == 5
    x, _ = job(10).sample(5, "features")
    assert len(set(x.tolist())) == 5


def test_a_model_holds_a_copy_and_trains() -> None:
    torch.manual_seed(1)
    tensors = dict(FAMILY.build("resnet10", SPEC).state_dict())
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    net = job(10).model(tensors)
    optimizer = make_optimizer(Optimizer(lr=0.1), net)
    net(torch.randn(4, 1, 8, 8)).sum().backward()
    optimizer.step()
    assert all(torch.equal(tensors[name], before[name]) for name in before)
    assert any(not torch.equal(p, before[name]) for name, p in net.named_parameters())


def test_phases_see_orders_of_their_own_and_calls_of_one_phase_the_same() -> None:
    first, again, head = (seen(job(), phase=phase) for phase in ("", "", "head"))
    assert first == again == seen(job())
    assert head != first
    assert seen(job(), steps=3, phase="head") != seen(job(), steps=3)
    assert seen(job(task=1), phase="head") != head


def test_steps_and_pace_go_on_from_phase_to_phase() -> None:
    pacer = CountingPacer()
    task = job(10, pacer=pacer)
    for phase in ("head", ""):
        seen(task, epochs=2, phase=phase)
    assert (task.steps, task.samples, pacer.steps) == (8, 32, 8)


@pytest.mark.parametrize(("most", "made"), [(1, [1, 0]), (4, [4, 0]), (6, [4, 2]), (9, [4, 4])])
def test_partial_work_is_cut_across_phases(most: int, made: list[int]) -> None:
    task = job(10, most_steps=most)
    assert [len(seen(task, epochs=2, phase=phase)) for phase in ("head", "")] == made
    assert task.steps == min(most, 8)


def test_no_epochs_are_no_steps() -> None:
    assert seen(job(10), epochs=0) == []


def test_the_data_once_in_order_is_no_step() -> None:
    pacer = CountingPacer()
    task = job(10, pacer=pacer)
    batches = list(task.ordered(4))
    assert [[int(v) for v in x] for x, _ in batches] == [[100, 101, 102, 103], [104, 105, 106, 107], [108, 109]]
    assert torch.equal(torch.cat([y for _, y in batches]), torch.arange(100, 110) % 3)
    assert (task.steps, task.samples, pacer.steps) == (0, 0, 0)


def test_class_counts_are_of_the_clients_own_samples() -> None:
    assert job(10).class_counts().tolist() == [3, 4, 3]  # 100 to 109, of which 100, 103, 106 and 109 are of class 1
    assert job(1).class_counts().tolist() == [0, 1, 0]  # a class that it lacks counts 0


def test_a_batch_says_where_its_samples_are_in_stored_order() -> None:
    for kind in ({"epochs": 2}, {"steps": 5}):
        task = job(10)
        for x, _ in task.batches(**kind):
            assert torch.equal(task.rows + 100, x.long())
    lone = job(1)
    for _ in lone.batches(epochs=1):
        assert lone.rows.tolist() == [0, 0]  # shown twice


def test_steps_on_data_that_was_sent_are_counted_paced_and_cut() -> None:
    pacer = CountingPacer()
    task = job(10, pacer=pacer)
    epochs = list(task.foreign(9, epochs=2, batch=4, phase="match"))
    assert [len(rows) for rows in epochs] == [4, 4, 4, 4]
    assert all(len({*torch.cat(two).tolist()}) == 8 for two in (epochs[:2], epochs[2:]))
    assert (task.steps, task.samples, pacer.steps) == (4, 16, 4)
    again = job(10, most_steps=3)
    assert [rows.tolist() for rows in again.foreign(9, epochs=2, batch=4, phase="match")] == [
        rows.tolist() for rows in epochs[:3]
    ]
    assert seen(again) == []  # nothing is left for its own data
    assert [rows.tolist() for rows in job(10).foreign(1, epochs=1, batch=4, phase="")] == [[0, 0]]
