"""Guards the server half of a method: an error in its code ends the run with one sentence that says where it is.

The records stay whole and the run can be resumed, once the method is fixed.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fleetbed.emulator.method.algorithm import (
    Algorithm,
    Arrival,
    Assignment,
    Client,
    Context,
    Expected,
    Job,
    Merged,
    Needs,
    Reply,
    Target,
)
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.wire.storage import DTYPES
from fleetbed.models.work import ServerWork, Work
from fleetbed.profiles.errors import FleetbedError

T = TypeVar("T")
TORCH = str(Path(torch.__file__).parent)


class MethodFailed(FleetbedError):
    """A method's own code raised an error, or returned something invalid."""

    def __init__(self, sentence: str, trace: str = "") -> None:
        super().__init__(sentence)
        self.trace = trace


def make_guarded(name: str, make: Callable[[], Algorithm]) -> Guarded:
    with _named(name, "its constructor"):
        method = make()
    return Guarded(name, method)


class Guarded(Algorithm):
    """Stands in for the method on the server. The client half runs in other processes and is not guarded here."""

    def __init__(self, name: str, method: Algorithm) -> None:
        self.name = name
        self.method = method

    @property
    def params(self) -> Any:
        return self.method.params

    @property
    def context(self) -> Context:  # type: ignore[override]
        return self.method.context

    @property
    def needs(self) -> Needs:
        with _named(self.name, "needs"):
            return self._is(self.method.needs, Needs, "needs")

    def check(self) -> None:
        with _named(self.name, "check"):
            self.method.check()

    def reassign(self, clients: Sequence[Client]) -> None:
        with _named(self.name, "reassign"):
            self.method.reassign(clients)

    def setup(self) -> Bundle:
        with _named(self.name, "setup"):
            return self._bundle(self.method.setup(), "setup")

    def step_down(self, kept: Bundle, client: Client) -> Bundle | None:
        with _named(self.name, "step_down"):
            saved = self.method.step_down(kept, client)
        return None if saved is None else self._bundle(saved, "step_down")

    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        with _named(self.name, "send"):
            return self._bundle(self.method.send(state, assignment), "send")

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        with _named(self.name, "work"):
            return self._is(self.method.work(state, assignment), Work, "work")

    def heaviest(self, state: Bundle, client: Client) -> Work:
        with _named(self.name, "heaviest"):
            return self._is(self.method.heaviest(state, client), Work, "heaviest")

    def client(self, job: Job) -> Reply:
        return self.method.client(job)

    def expects(self, assignment: Assignment, sent: Bundle) -> Expected | None:
        with _named(self.name, "expects"):
            return self.method.expects(assignment, sent)

    def objection(self, assignment: Assignment, message: Bundle) -> str | None:
        with _named(self.name, "objection"):
            return self.method.objection(assignment, message)

    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        with _named(self.name, "merge"):
            merged = self._is(self.method.merge(state, arrivals), Merged, "merge")
        self._bundle(merged.state, "merge")
        for name, value in merged.metrics.items():
            if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, (int, float)):
                raise self._wrong("merge", f"the metric {name!r}, {type(value).__name__}, where a number is needed")
        return merged

    def foresee(self, state: Bundle, arrivals: Sequence[Arrival]) -> Bundle:
        with _named(self.name, "foresee"):
            return self._bundle(self.method.foresee(state, arrivals), "foresee")

    def server_work(self, state: Bundle, arrivals: Sequence[Arrival]) -> ServerWork:
        with _named(self.name, "server_work"):
            return self._is(self.method.server_work(state, arrivals), ServerWork, "server_work")

    def targets(self, state: Bundle) -> list[Target]:
        with _named(self.name, "targets"):
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

    def _wrong(self, hook: str, what: str) -> MethodFailed:
        return MethodFailed(f"the method {self.name} failed: {hook} returned {what}")


@contextmanager
def _named(method: str, hook: str) -> Iterator[None]:
    try:
        yield
    except FleetbedError:  # its sentence says what is wrong
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        # torch raises deep inside itself; the author of a method can change the line that called it
        place = next((each for each in reversed(frames) if not each.filename.startswith(TORCH)), frames[-1])
        said = f"{type(error).__name__}: {error}".removesuffix(": ").splitlines()[0]
        raise MethodFailed(
            f"the method {method} failed in {hook} at {place.filename}:{place.lineno}: {said}", traceback.format_exc()
        ) from error
