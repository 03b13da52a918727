"""Makes a ServerApp's requests the rounds of the engine: every request opens one, and its replies are one merge."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from fleetbed.emulator.engine.task import Task
from fleetbed.emulator.method.algorithm import Arrival, Assignment, Merged, Needs, ServerHalf, Target
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.timeline.policies import NOTHING, Decision, Rounds
from fleetbed.emulator.wire.codec import WireError
from fleetbed.flower import identity
from fleetbed.flower.client import ClientAppRaised
from fleetbed.flower.grid import FleetGrid, Request
from fleetbed.flower.packing import EXAMPLES, numbers, pack, unpack
from fleetbed.models.work import ServerWork, Work

STAGES = ("train", "evaluate", "query")
ERRORS = {
    "oom": ErrorCode.CLIENT_APP_CRASHED,
    "crash": ErrorCode.CLIENT_APP_CRASHED,
    "hang": ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    "late": ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    "offline": ErrorCode.NODE_UNAVAILABLE,
}


class Exchange:
    """The messages between a ServerApp and the clients: those that wait, those under way, and what is answered."""

    def __init__(self, grid: FleetGrid, nodes: Sequence[int], tick: Callable[[], None]) -> None:
        self._grid = grid
        self._clients = {node: client for client, node in enumerate(nodes)}
        self._tick = tick
        self._waiting: dict[int, deque[Message]] = {client: deque() for client in self._clients.values()}
        self._sent: dict[int, Message] = {}  # by task
        self._busy: dict[int, int] = {}  # the task of each client that has one
        self._open: dict[str, int] = {}  # client by message without an answer
        self._contents: dict[int, RecordDict] = {}  # of replies that are not merged yet, by task
        self.requests: list[Request] = []

    @property
    def is_finished(self) -> bool:
        return self._grid.is_finished

    def listen(self) -> list[Message]:
        """Let the ServerApp go on with the replies that are due; return its next messages, when it waits again."""
        while True:
            self._grid.release(request for request in self.requests if self.is_due(request))
            self.requests, new = self._grid.listen(self._tick)
            if self._grid.error is not None:
                raise self._grid.error
            for message in new:
                client = self._clients[message.metadata.dst_node_id]
                self._waiting[client].append(message)
                self._open[message.metadata.message_id] = client
            if self.is_finished or not any(self.is_due(request) for request in self.requests):
                return new

    def is_due(self, request: Request) -> bool:
        """Whether what the ServerApp waits for is there, or cannot come any more."""
        is_open = any(each in self._open for each in request.ids)
        return request.due or not is_open or (not request.everything and self._grid.has_reply(request.ids))

    def ready(self) -> tuple[int, ...]:
        """The clients that have a message to get and nothing to do."""
        return tuple(client for client, queue in self._waiting.items() if queue and client not in self._busy)

    def send(self, task: int, client: int) -> Message:
        message = self._sent[task] = self._waiting[client].popleft()
        self._busy[client] = task
        return message

    def hold(self, task: int, content: RecordDict) -> None:
        self._contents[task] = content

    def content(self, task: int) -> RecordDict:
        return self._contents.pop(task)

    def ended(self, task: Task) -> None:
        """Make the reply of a task that has ended: what it returned, or the error that Flower has for its outcome."""
        message = self._sent.pop(task.number, None) or self._waiting[task.client].popleft()
        self._busy.pop(task.client, None)
        told = message.metadata
        self._open.pop(told.message_id, None)
        identity.name(message, told.message_id)
        if task.outcome == "ok":
            self._grid.reply(told.message_id, Message(self._contents[task.number], reply_to=message))
            return
        self._contents.pop(task.number, None)
        expires = any(request.expires for request in self.requests if told.message_id in request.ids)
        if task.outcome != "late" or expires:
            self._grid.reply(told.message_id, Message(_error(task), reply_to=message))

    def late(self, opened: int) -> tuple[int, ...]:
        """End the requests of this opening, whose time is up; return the clients that have not answered them."""
        found: set[int] = set()
        for request in self.requests:
            if request.opened == opened:
                found |= {self._open[each] for each in request.ids if each in self._open}
                request.due = True
        return tuple(sorted(found))

    def drop_unsent(self) -> None:
        """Forget messages of requests that have ended before they could be sent."""
        for request in self.requests:
            if request.due:
                for queue in self._waiting.values():
                    for message in [each for each in queue if each.metadata.message_id in request.ids]:
                        queue.remove(message)
                        self._open.pop(message.metadata.message_id)


def _error(task: Task) -> Error:
    raised = task.detail.startswith(f"{ClientAppRaised.__name__}: ")
    code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION if raised else ERRORS.get(task.outcome, ErrorCode.UNKNOWN)
    return Error(code=code, reason=f"{task.outcome}: {task.detail}")


class ServerAppRounds(Rounds):
    """The policy of a run whose ServerApp decides who is asked, and what it waits for."""

    exchange: Any = None

    def is_over(self, rounds: int) -> bool:
        finished: bool = self.exchange.is_finished
        return finished

    def open(self, idle: Sequence[int], away: Sequence[int] = ()) -> Decision:
        exchange: Exchange = self.exchange
        new = exchange.listen()
        if exchange.is_finished:
            self.round += 1
            return NOTHING
        self.opened += 1
        fresh = [request for request in exchange.requests if request.opened < 0]
        for request in fresh:
            request.opened = self.opened
        if new:
            stage = _stage(new[0].metadata.message_type)
            self.stage = STAGES.index(stage)
            self.round = max(self.round, 1, _round(new[0]) or self.round + (stage == "train"))
        limits = [request.timeout_s for request in fresh if request.timeout_s is not None]
        return Decision(invite=exchange.ready(), timer_s=min(limits, default=None))

    def on_client_available(self, idle: Sequence[int], away: Sequence[int]) -> Decision:
        return NOTHING

    def ended(self, task: int, client: int, *, ok: bool, idle: Sequence[int], diverged: bool = False) -> Decision:
        if ok:
            self.arrived.append(task)
        exchange: Exchange = self.exchange
        if any(exchange.is_due(request) for request in exchange.requests):
            merge, self.arrived = tuple(self.arrived), []
            return Decision(merge=merge)
        return Decision(invite=(client,) if client in exchange.ready() else ())

    def timer(self, opened: int) -> Decision:
        late = self.exchange.late(opened)
        self.exchange.drop_unsent()
        if not any(request.due for request in self.exchange.requests):
            return NOTHING  # it was answered in time
        merge, self.arrived = tuple(self.arrived), []
        return Decision(merge=merge, abandon=late)


def _stage(message_type: str) -> str:
    kind = message_type.split(".")[0]
    return kind if kind in STAGES else "query"  # those of earlier versions ask for parameters or properties


def _round(message: Message) -> int | None:
    """The round that a message is of, where its strategy says so: new ones in the config, legacy ones as the group."""
    for config in message.content.config_records.values():
        if isinstance(found := config.get("server-round"), int):
            return found
    group = message.metadata.group_id
    return int(group) if group.isdecimal() else None


class FlowerMethod(ServerHalf):
    """What a Flower app is to the engine: messages as they come, and merges that the ServerApp makes by itself."""

    def __init__(self, exchange: Exchange, evaluated: Callable[[str, int, dict[str, float]], None]) -> None:
        self.exchange = exchange
        self._evaluated = evaluated  # called with what the clients measured: who, round, metrics

    @property
    def needs(self) -> Needs:
        return Needs(stages=STAGES)

    def setup(self) -> Bundle:
        return Bundle()

    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        message = self.exchange.send(assignment.task, assignment.client.number)
        return pack(message.content, message)

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        return Work()  # opaque

    def objection(self, assignment: Assignment, message: Bundle) -> str | None:
        try:
            content, _ = unpack(message)
        except WireError as error:
            return str(error)
        self.exchange.hold(assignment.task, content)
        return None

    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        """Hand the replies over; the figures of the merge are means over clients, weighted as Flower does."""
        # by client: in the order of arrival, which is measured, sums would differ in their last digits
        ordered = sorted(arrivals, key=lambda arrival: arrival.client.number)
        found = [numbers(self.exchange.content(arrival.assignment.task)) for arrival in ordered]
        metrics = mean_of(found)
        assignment = arrivals[0].assignment
        if assignment.stage == "evaluate":
            samples = sum(each.get(EXAMPLES, 1.0) for each in found)
            self._evaluated("clients", assignment.round, {**metrics, EXAMPLES: samples})
        return Merged(state=state, metrics=metrics)

    def server_work(self, state: Bundle, arrivals: Sequence[Arrival]) -> ServerWork:
        return ServerWork()  # what a ServerApp does is not metered

    def targets(self, state: Bundle) -> list[Target]:
        return []


def mean_of(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each figure that all clients report, weighted by their examples; of the examples, the sum."""
    common = [name for name in found[0] if all(name in each for each in found)]
    weights = [each.get(EXAMPLES, 1.0) for each in found]
    if not sum(weights):
        weights = [1.0] * len(found)
    means = {
        name: sum(w * each[name] for w, each in zip(weights, found, strict=True)) / sum(weights) for name in common
    }
    return {**means, EXAMPLES: sum(each[EXAMPLES] for each in found)} if EXAMPLES in common else means
