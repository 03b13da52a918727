"""Checks a client's reply against what its method declares, before the server uses any of it.

A bad reply costs its sender the task, never the run. `refused` is a reply that the method did not ask for: a tensor is
missing, of another type or shape or one too many, a scalar or a metric makes no sense, more was done than declared.
`diverged` is a reply of the right form whose values are not finite: that is what training that diverges sends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from fleetbed.emulator.engine.task import Task, assignment_of
from fleetbed.emulator.method.algorithm import Client, Expected, ServerHalf
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.wire.messages import Trained, kept_name

MOST_NAMED = 3  # how many problems an outcome's detail names


class Flaw(NamedTuple):
    """Why a reply is not merged: the outcome of its task, and the detail."""

    outcome: Literal["refused", "diverged"]
    detail: str


def flaw_in(
    method: ServerHalf, task: Task, client: Client, sent: Bundle, answer: Trained, message: Bundle
) -> Flaw | None:
    """Return why a reply must not be merged; None if it may be."""
    assignment = assignment_of(task, client)
    expected = method.expects(assignment, sent)
    wrong = [*_wrong_work(task, answer)]
    if expected is not None:
        wrong += [*_wrong_tensors(expected, message), *_wrong_values(expected, message)]
    wrong += [
        f"the metric {name!r} is {value}"
        for name, value in answer.metrics.items()
        if name != "loss" and not math.isfinite(value)
    ]
    if wrong:
        more = f", and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        return Flaw("refused", f"an invalid reply: {', '.join(wrong[:MOST_NAMED])}{more}")
    name = message.first_not_finite()
    if name is not None:
        return Flaw("diverged", f"{name} holds a value that is not finite")
    if not math.isfinite(answer.metrics.get("loss", 0.0)):
        return Flaw("diverged", f"the training loss is {answer.metrics['loss']}")
    objection = method.objection(assignment, message)
    return None if objection is None else Flaw("refused", f"an invalid reply: {objection}")


def _wrong_work(task: Task, answer: Trained) -> Iterator[str]:
    if task.declared_steps is not None and answer.steps > task.declared_steps:
        yield f"{answer.steps} steps where {task.declared_steps} were declared"
    if task.declared_samples is not None and answer.samples > task.declared_samples:
        yield f"{answer.samples} samples where {task.declared_samples} were declared"
    if answer.keep not in (None, kept_name(task.client, task.number)):
        yield f"it keeps {answer.keep[:100]!r}, which is not its own file"


def _wrong_tensors(expected: Expected, message: Bundle) -> Iterator[str]:
    for name, spec in expected.tensors.items():
        tensor = message.tensors.get(name)
        if tensor is None:
            yield f"{name} is missing"
        elif tensor.dtype != spec.dtype:
            yield f"{name} is {_name(tensor.dtype)} and should be {_name(spec.dtype)}"
        elif not _fits(tuple(tensor.shape), spec.shape):
            yield f"{name} has the shape {_shape(tensor.shape)} and should have {_shape(spec.shape)}"
    yield from (f"{name} was not asked for" for name in message.tensors if name not in expected.tensors)


def _wrong_values(expected: Expected, message: Bundle) -> Iterator[str]:
    for name, kind in expected.values.items():
        value = message.values.get(name)
        if type(value) is not kind:  # a bool does not count as a number
            yield f"the scalar {name} is {_short(value)} and should be of type {kind.__name__}"
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"the scalar {name} is {value}"
    yield from (f"the scalar {name} was not asked for" for name in message.values if name not in expected.values)


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(b is None or a == b for a, b in zip(shape, wanted, strict=True))


def _shape(sizes: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in sizes) + "]"


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
