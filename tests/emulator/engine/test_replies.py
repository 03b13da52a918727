"""Every method against every kind of bad reply: whatever is not what the method declared never reaches its merge."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from algorithm_harness import Bed, ToyDepth, ToyStrangers, ToyWidth, flaw, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fleetbed.emulator.method.algorithm import Algorithm, Assignment, Client, Reply
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.wire import codec
from fleetbed.emulator.wire.messages import from_worker
from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.models.work import Work

#: the method, its parameters and the stage whose reply it is
METHODS: dict[str, tuple[str, dict[str, Any], str]] = {
    "heteroavg": ("heteroavg", {}, "train"),
    "heteroprox": ("heteroprox", {}, "train"),
    "fedavg": ("fedavg", {}, "train"),
    "fedprox": ("fedprox", {}, "train"),
    "fedin": ("fedin", {}, "train"),
    "fedin-v1": ("fedin", {"version": "v1"}, "train"),
    "fedin-without-in": ("fedin", {"without_in": True}, "train"),
    "heterofl": ("heterofl", {}, "train"),
    "fedrolex": ("fedrolex", {}, "train"),
    "inclusivefl": ("inclusivefl", {}, "train"),
    "inco": ("inco", {"base": "fedin"}, "train"),
    "scaffold": ("scaffold", {}, "train"),
    "fednova": ("fednova", {}, "train"),
    "moon": ("moon", {}, "train"),
    "private": ("private", {}, "train"),
    "fedhe": ("fedhe", {"cold_start": 0}, "train"),
    "fedhe-plus-one": ("fedhe", {"plus_one": True}, "train"),
    "fd": ("fd", {}, "train"),
    "fedproto": ("fedproto", {}, "train"),
    "fedper": ("fedper", {}, "train"),
    "fedrep": ("fedrep", {"head_epochs": 1}, "train"),
    "fedfomo": ("fedfomo", {}, "train"),
    "fedselect": ("fedselect", {"every": 1}, "train"),
    "feddpa": ("feddpa", {"share_personal": False}, "train"),
    "lgfedavg": ("lgfedavg", {}, "train"),
    "fedhenn": ("fedhenn", {"rad": 12}, "train"),
    "fedhenn-client-train": ("fedhenn", {"rad": 12, "client_side_gram": True}, "train"),
    "fedhenn-client-gram": ("fedhenn", {"rad": 12, "client_side_gram": True}, "gram"),
    "fedhenn_homo": ("fedhenn_homo", {"rad": 12}, "train"),
}
WITH_TENSORS = sorted(METHODS.keys() - {"private", "fedhenn-client-train"})


@dataclass(frozen=True)
class Case:
    """A method in its third round, and a reply to it that is as it should be."""

    method: Algorithm
    client: Client
    stage: str
    sent: Bundle
    work: Work
    reply: Reply

    def flaw(self, message: Bundle, metrics: dict[str, float] | None = None) -> tuple[str, str] | None:
        metrics = self.reply.metrics if metrics is None else metrics
        reply = replace(self.reply, message=message, metrics=metrics)
        return flaw(self.method, self.client, self.stage, self.sent, self.work, reply)

    def outcome(self, tensors: dict[str, Tensor]) -> str | None:
        found = self.flaw(Bundle(tensors, self.reply.message.values))
        return None if found is None else found[0]


@cache
def case(title: str) -> Case:
    name, params, stage = METHODS[title]
    if name == "inco":
        spec = InputSpec((1, 32, 32), 3)
        bed = Bed(family("resnet-stage", {"base_width": 4}), ["resnet14", "resnet18"], samples=8, spec=spec)
    elif name in ("heterofl", "fedrolex"):
        bed = Bed(ToyWidth(None), ["half", "full"])
    elif name == "fedhenn":
        bed = Bed(ToyStrangers(None), ["thin", "thick"], public=20)
    elif name == "fedhenn_homo":
        bed = Bed(ToyDepth(None), ["two", "two"], public=20)
    else:
        bed = Bed(ToyDepth(None), ["one", "two"])
    method = bed.method(name, **params)
    so_far = run(bed, method, 2)
    client = bed.context.clients[0]
    if stage == "gram":
        so_far.state = Bundle({"rad": so_far.state.tensors["rad"]}, so_far.state.values)
    task = Assignment(client=client, task=9, stage=stage)
    message = method.send(so_far.state, task)
    reply = method.client(bed.job(client, message, so_far.kept.get(0), 9, stage))
    return Case(method, client, stage, message, method.work(so_far.state, task), reply)


@pytest.mark.parametrize("title", sorted(METHODS))
def test_a_good_reply_is_not_refused(title: str) -> None:
    assert case(title).flaw(case(title).reply.message) is None


Change = Callable[[Tensor], Tensor]
#: what becomes of one tensor, and the outcome
CHANGES: dict[str, tuple[Change, str]] = {
    "one row more": (lambda t: torch.cat([t, t[:1]]) if t.ndim else t[None], "refused"),
    "another dimension": (lambda t: t[None], "refused"),
    "one value": (lambda t: t.reshape(-1)[:1].clone(), "refused"),
    "a scalar": (lambda t: t.reshape(-1)[0].clone(), "refused"),
    "nothing in it": (lambda t: torch.empty(0, dtype=t.dtype), "refused"),
    "flat": (lambda t: t.reshape(-1, 1, 1, 1, 1), "refused"),
    "another float": (lambda t: t.double() if t.is_floating_point() else t.float(), "refused"),
    "half": (lambda t: t.half(), "refused"),
    "whole numbers": (lambda t: t.to(torch.int16), "refused"),
    "NaN": (lambda t: torch.full_like(t, math.nan), "diverged"),
    "one NaN": (lambda t: torch.cat([t.reshape(-1)[:-1], t.new_tensor([math.nan])]).reshape(t.shape), "diverged"),
    "infinite": (lambda t: torch.full_like(t, math.inf), "diverged"),
    "two infinities": (lambda t: torch.linspace(-1, 1, t.numel()).sign().mul(math.inf).reshape(t.shape), "diverged"),
}


@settings(max_examples=60, deadline=None)
@given(title=st.sampled_from(WITH_TENSORS), change=st.sampled_from(sorted(CHANGES)), seed=st.integers(0, 10_000))
def test_a_tensor_that_is_not_as_declared_costs_its_sender_the_task(title: str, change: str, seed: int) -> None:
    one, (act, outcome) = case(title), CHANGES[change]
    tensors = dict(one.reply.message.tensors)
    names = [name for name, t in tensors.items() if outcome == "refused" or t.is_floating_point()]
    name = names[seed % len(names)]
    changed = act(tensors[name])
    same_form = changed.shape == tensors[name].shape and changed.dtype == tensors[name].dtype
    if outcome == "refused" and same_form:  # such as a scalar made of a counter
        return
    found = one.flaw(Bundle({**tensors, name: changed}, one.reply.message.values))
    assert found is not None
    if METHODS[title][0] in ("fd", "fedhe", "fedproto") and change == "one row more":
        assert found[0] == "refused"  # the number of rows is the client's own, but both tensors must have it
    else:
        assert (found[0], name in found[1]) == (outcome, True)


@pytest.mark.parametrize("change", sorted(CHANGES))
@pytest.mark.parametrize("title", WITH_TENSORS)
def test_every_method_refuses_every_kind(title: str, change: str) -> None:
    """All tensors changed at once: none of these reaches a merge."""
    one, (act, outcome) = case(title), CHANGES[change]
    tensors = {
        name: act(t) if outcome == "refused" or t.is_floating_point() else t
        for name, t in one.reply.message.tensors.items()
    }
    assert one.outcome(tensors) == outcome


@settings(max_examples=30, deadline=None)
@given(title=st.sampled_from(WITH_TENSORS), drop=st.integers(1, 100), seed=st.integers(0, 1000))
def test_missing_tensors_are_refused(title: str, drop: int, seed: int) -> None:
    one = case(title)
    names = list(one.reply.message.tensors)
    gone = {names[(seed + i) % len(names)] for i in range(min(drop, len(names)))}
    left = {n: t for n, t in one.reply.message.tensors.items() if n not in gone}
    found = one.flaw(Bundle(left, one.reply.message.values))
    assert found is not None
    assert found[0] == "refused"
    assert "is missing" in found[1]


@pytest.mark.parametrize("title", sorted(METHODS))
def test_what_was_not_asked_for_is_refused(title: str) -> None:
    one = case(title)
    tensors, values = one.reply.message.tensors, one.reply.message.values
    for extra in ("w", "features/in2", "c/fc.weight", "rad/x", "newest/0/fc.weight", " "):
        found = one.flaw(Bundle({**tensors, extra: torch.zeros(3)}, values))
        assert found == ("refused", f"an invalid reply: {extra} was not asked for")
    assert one.flaw(Bundle(tensors, {**values, "samples": 10**9})) == (
        "refused",
        "an invalid reply: the scalar samples was not asked for",
    )


@pytest.mark.parametrize("title", sorted(METHODS))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_has_diverged_and_another_metric_is_refused(title: str, value: float) -> None:
    one = case(title)
    message = one.reply.message
    diverged = one.flaw(message, {"loss": value})
    assert diverged == ("diverged", f"the training loss is {value}")
    assert one.flaw(message, {"loss": 1.0, "drift": value}) == (
        "refused",
        f"an invalid reply: the metric 'drift' is {value}",
    )


@pytest.mark.parametrize(
    ("classes", "rows"),
    [
        ([0, 0], 2),
        ([-1], 1),
        ([3], 1),
        ([2**31 - 1], 1),
        ([0, 1, 2, 0], 4),
        ([0], 2),
        ([0, 1], 1),
        ([0] * 10_000, 10_000),
    ],
)
def test_fedhe_takes_every_class_once_and_no_other(classes: list[int], rows: int) -> None:
    one = case("fedhe")
    message = {"class": torch.tensor(classes, dtype=torch.int32), "logits": torch.zeros(rows, 3)}
    assert one.outcome(message) == "refused"
    assert one.outcome({"class": torch.tensor([2, 0], dtype=torch.int32), "logits": torch.zeros(2, 3)}) is None


GOOD: dict[str, Any] = {
    "task": 1,
    "keep": None,
    "metrics": {"loss": 1.0},
    "steps": 2,
    "samples": 8,
    "seconds": 1.0,
    "cpu_s": 1.0,
    "throttled_s": None,
    "peak_bytes": 1,
    "anon_bytes": 1,
}


@pytest.mark.parametrize("key", ["steps", "samples", "peak_bytes", "anon_bytes", "seconds", "cpu_s", "throttled_s"])
@pytest.mark.parametrize("value", [-1, 2**63, 2**64 - 1, math.nan, math.inf, 1e300, "2", True, [2], {"a": 1}])
def test_meters_that_no_client_can_have_are_no_answer(key: str, value: object) -> None:
    codec.parse_control(from_worker, msgspec.msgpack.encode({"type": "Trained", **GOOD}))
    with pytest.raises(codec.WireError):
        codec.parse_control(from_worker, msgspec.msgpack.encode({"type": "Trained", **GOOD, key: value}))


@pytest.mark.parametrize(
    "metrics", [None, 3, [1.0], {"loss": "low"}, {"loss": True}, {"loss": None}, {1: 1.0}, {"": 1.0}, {"n" * 257: 1.0}]
)
def test_metrics_of_a_wrong_type_are_no_answer(metrics: object) -> None:
    with pytest.raises(codec.WireError):
        codec.parse_control(from_worker, msgspec.msgpack.encode({"type": "Trained", **GOOD, "metrics": metrics}))
    many = {f"m{i}": 1.0 for i in range(1001)}
    with pytest.raises(codec.WireError):
        codec.parse_control(from_worker, msgspec.msgpack.encode({"type": "Trained", **GOOD, "metrics": many}))


@pytest.mark.parametrize("title", sorted(METHODS))
def test_more_work_than_declared_is_refused(title: str) -> None:
    one = case(title)
    for key, beyond in (("steps", one.work.all_steps + 1), ("samples", one.work.all_samples + 1)):
        found = flaw(one.method, one.client, one.stage, one.sent, one.work, one.reply, **{key: beyond})
        assert found is not None
        assert found[0] == "refused"
        assert "were declared" in found[1]
    found = flaw(one.method, one.client, one.stage, one.sent, one.work, one.reply, keep="../../somewhere")
    assert found == ("refused", "an invalid reply: it keeps '../../somewhere', which is not its own file")
