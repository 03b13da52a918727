"""Guards the server half of a method: an error in its code ends the run with one sentence that says where it is.

The records stay whole and the run can be resumed, once the method is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from fleetbed.emulator.method.algorithm import (
    Arrival,
    Assignment,
    Client,
    Context,
    Expected,
    Merged,
    Needs,
    ServerHalf,
    Target,
)
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.failures import CodeFailed, named
from fleetbed.emulator.wire.storage import DTYPES
from fleetbed.models.work import ServerWork, Work

T = TypeVar("T")


def make_guarded(name: str, make: Callable[[], ServerHalf]) -> Guarded:
    with named(f"the method {name}", "its constructor"):
        method = make()
    return Guarded(name, method)


class Guarded(ServerHalf):
    """Stands in for the method on the server. The client half runs in other processes."""

    def __init__(self, name: str, method: ServerHalf) -> None:
        self.name = name
        self.method = method
        self._who = f"the method {name}"

    @property
    def context(self) -> Context:  # type: ignore[override]
        return self.method.context

    @property
    def needs(self) -> Needs:
        with named(self._who, "needs"):
            return self._is(self.method.needs, Needs, "needs")

    def check(self) -> None:
        with named(self._who, "check"):
            self.method.check()

    def reassign(self, clients: Sequence[Client]) -> None:
        with named(self._who, "reassign"):
            self.method.reassign(clients)

    def setup(self) -> Bundle:
        with named(self._who, "setup"):
            return self._bundle(self.method.setup(), "setup")

    def step_down(self, kept: Bundle, client: Client) -> Bundle | None:
        with named(self._who, "step_down"):
            saved = self.method.step_down(kept, client)
        return None if saved is None else self._bundle(saved, "step_down")

    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        with named(self._who, "send"):
            return self._bundle(self.method.send(state, assignment), "send")

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        with named(self._who, "work"):
            return self._is(self.method.work(state, assignment), Work, "work")

    def heaviest(self, state: Bundle, client: Client) -> Work:
        with named(self._who, "heaviest"):
            return self._is(self.method.heaviest(state, client), Work, "heaviest")

    def expects(self, assignment: Assignment, sent: Bundle) -> Expected | None:
        with named(self._who, "expects"):
            return self.method.expects(assignment, sent)

    def objection(self, assignment: Assignment, message: Bundle) -> str | None:
        with named(self._who, "objection"):
            return self.method.objection(assignment, message)

    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        with named(self._who, "merge"):
            merged = self._is(self.method.merge(state, arrivals), Merged, "merge")
        self._bundle(merged.state, "merge")
        for name, value in merged.metrics.items():
            if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, (int, float)):
                raise self._wrong("merge", f"the metric {name!r}, {type(value).__name__}, where a number is needed")
        return merged

    def foresee(self, state: Bundle, arrivals: Sequence[Arrival]) -> Bundle:
        with named(self._who, "foresee"):
            return self._bundle(self.method.foresee(state, arrivals), "foresee")

    def server_work(self, state: Bundle, arrivals: Sequence[Arrival]) -> ServerWork:
        with named(self._who, "server_work"):
            return self._is(self.method.server_work(state, arrivals), ServerWork, "server_work")

    def targets(self, state: Bundle) -> list[Target]:
        with named(self._who, "targets"):
            return list(self.method.targets(state))

    def _bundle(self, found: Bundle, hook: str) -> Bundle:
        """Return the bundle after checking that it can be sent and stored."""
        tensors: Mapping[Any, Any] = self._is(found, Bundle, hook).tensors
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise self._wrong(hook, f"{name!r}, {type(tensor).__name__}, where a tensor by name is needed")
            if tensor.dtype not in DTYPES:
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
                raise self._wrong(hook, f"the tensor {name!r} of {tensor.dtype}; convert it to one of {known}")
        return found

    def _is(self, found: T, kind: type[T], hook: str) -> T:
        if not isinstance(found, kind):
            raise self._wrong(hook, f"{type(found).__name__} where {kind.__name__} is needed")
        return found

    def _wrong(self, hook: str, what: str) -> CodeFailed:
        return CodeFailed(f"{self._who} failed: {hook} returned {what}")
