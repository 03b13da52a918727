"""The Grid that a ServerApp talks to: its messages go to the engine's clients, and its waiting is device time.

A ServerApp runs in a thread of its own beside the engine, and the two take turns. The engine moves on only while the
ServerApp waits for replies, and the ServerApp only while the engine waits for its next request. So the host's speed
changes nothing about the order of things.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fleetbed.flower import identity

LOOK_S = 0.1  # how often the engine looks after its display while the ServerApp computes


class Stopped(BaseException):
    """The run has ended while the ServerApp was waiting. Not an Exception, so that no app takes it for a failure."""


@dataclass(eq=False)
class Request:
    """What a ServerApp waits for: the replies to all of these messages, or to any of them."""

    ids: list[str]
    everything: bool = True
    timeout_s: float | None = None  # device seconds
    expires: bool = False  # a message without a reply in time gets an error as its reply
    opened: int = -1  # number of the opening in which the engine learned of it
    due: bool = False  # the engine has released it


@dataclass
class _Together:
    """Calls of several threads that make one request."""

    calls: int
    request: Request = field(default_factory=lambda: Request([], expires=True))


class FleetGrid(Grid):
    def __init__(self, nodes: Sequence[int]) -> None:
        self._nodes = list(nodes)
        self._run = Run.create_empty(identity.RUN_ID)
        self._changed = threading.Condition()
        self._pushed = 0
        self._outbox: list[Message] = []
        self._replies: dict[str, Message] = {}
        self._requests: list[Request] = []
        self._together: _Together | None = None
        self._is_closed = False
        self.is_finished = False
        self.error: BaseException | None = None

    # what the ServerApp calls

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content=content, message_type=message_type, dst_node_id=dst_node_id, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> list[int]:
        """All nodes: a message to one that is away gets an error as its reply."""
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        pushed = list(messages)
        for message in pushed:
            if message.metadata.dst_node_id not in self._nodes:
                raise ValueError(f"a message to node {message.metadata.dst_node_id}, which is not in the fleet")
        with self._changed:
            ids = []
            for message in pushed:
                self._pushed += 1
                ids.append(f"message-{self._pushed}")
                identity.name(message, ids[-1])
            self._outbox += pushed
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies that have arrived; where none has, device time goes on to the first that does."""
        return self._wait(list(message_ids), Request([], everything=False))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        pushed = list(messages)
        with self._changed:
            ids = self.push_messages(pushed)
            together = self._together
        if together is None:
            return self._wait(ids, Request([], timeout_s=timeout)) if ids else []
        together.request.timeout_s = min((message.metadata.ttl for message in pushed), default=None)
        return self._wait(ids, together.request)

    @contextmanager
    def together(self, calls: int) -> Iterator[None]:
        """Take the next calls of `send_and_receive`, one by each of so many threads, for one."""
        self._together = _Together(calls)
        try:
            yield
        finally:
            self._together = None

    def _wait(self, ids: list[str], request: Request) -> list[Message]:
        with self._changed:
            request.ids += ids
            together = self._together
            if together is not None and request is together.request:
                together.calls -= 1
            if together is None or together.calls == 0:
                self._requests.append(request)
                self._changed.notify_all()
            while not request.due:
                if self._is_closed:
                    raise Stopped
                self._changed.wait()
            return [self._replies.pop(each) for each in ids if each in self._replies]

    # what the engine calls

    def listen(self, tick: Callable[[], None]) -> tuple[list[Request], list[Message]]:
        """Wait until the ServerApp waits or has ended; return its requests, and its new messages by node."""
        while True:
            with self._changed:
                if self._requests or self.is_finished:
                    new, self._outbox = self._outbox, []
                    return list(self._requests), sorted(new, key=lambda m: self._nodes.index(m.metadata.dst_node_id))
                self._changed.wait(LOOK_S)
            tick()

    def reply(self, message_id: str, reply: Message) -> None:
        with self._changed:
            self._replies[message_id] = reply

    def has_reply(self, ids: Iterable[str]) -> bool:
        """Whether there is a reply to any of these messages that the ServerApp has not read."""
        with self._changed:
            return any(each in self._replies for each in ids)

    def release(self, requests: Iterable[Request]) -> None:
        """Let the ServerApp go on with the replies that are there."""
        with self._changed:
            for request in requests:
                request.due = True
                self._requests.remove(request)
            self._changed.notify_all()

    def finish(self, error: BaseException | None = None) -> None:
        """The ServerApp has ended, by this error if there is one."""
        with self._changed:
            self.is_finished, self.error = True, error
            self._changed.notify_all()

    def close(self) -> None:
        """Let no call wait any longer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
