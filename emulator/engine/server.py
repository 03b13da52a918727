"""The server of a run: holds the replies, merges them, one merge after the other, and has the new model evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from fleetbed.emulator.engine.divergence import Divergence
from fleetbed.emulator.engine.evaluation import Evaluations, Moment
from fleetbed.emulator.engine.layout import Surroundings
from fleetbed.emulator.engine.prepared import Prepared
from fleetbed.emulator.engine.progress import Progress
from fleetbed.emulator.engine.replies import Flaw, flaw_in
from fleetbed.emulator.engine.task import Task, assignment_of, task_row
from fleetbed.emulator.method.algorithm import Arrival
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.processes.executor import Executor
from fleetbed.emulator.records.kept_merges import KeptMerges
from fleetbed.emulator.records.records import Records, finite
from fleetbed.emulator.records.tables import MetricRow, RoundRow
from fleetbed.emulator.timeline.events import Event, Kind
from fleetbed.emulator.timeline.plan import server_seconds
from fleetbed.emulator.wire.messages import Trained


class Received(NamedTuple):
    """A reply, and why it will not be merged, if so."""

    message: Bundle
    flaw: Flaw | None


class Server:
    def __init__(
        self,
        layout: Surroundings,
        prepared: Prepared,
        evaluations: Evaluations,
        records: Records,
        progress: Progress,
        divergence: Divergence,
        kept_merges: KeptMerges,
        executor: Executor,
        host_s: Callable[[], float],
    ) -> None:
        self._device = layout.server
        self._cost_of = prepared.timing.cost_of
        self._experiment = layout.config.experiment
        self._method = prepared.method
        self._participants = prepared.participants
        self._evaluations = evaluations
        self._records = records
        self._progress = progress
        self._divergence = divergence
        self._kept_merges = kept_merges
        self._executor = executor
        self._host_s = host_s
        self._replies: dict[int, Received] = {}  # by task, from when they were computed until they are merged

    def receive(self, task: Task, answer: Trained, message: Bundle) -> None:
        """Hold the reply of a task, and check it against what the method declares."""
        client, sent = self._participants[task.client].client, self._progress.sent[task.number]
        flaw = flaw_in(self._method, task, client, sent, answer, message)
        self._replies[task.number] = Received(message, flaw)

    def flaw(self, task: Task) -> Flaw | None:
        """Return why the reply of a task will not be merged; None if it will be."""
        return self._replies[task.number].flaw

    def forget(self, task: Task) -> None:
        self._replies.pop(task.number, None)

    def queue(self, numbers: tuple[int, ...]) -> None:
        """Merge the results of these tasks after those that are being merged."""
        p = self._progress
        p.merging.append(numbers)
        if len(p.merging) == 1:
            self._start()

    def _start(self) -> None:
        """Start the merge at the head of the queue; it takes device time on the server's own device."""
        p = self._progress
        tasks = [p.tasks[number] for number in p.merging[0]]
        seconds = 0.0
        if tasks:
            work = self._method.server_work(p.state, self._arrivals(tasks))
            seconds = server_seconds(self._device, work, self._cost_of)
        p.timeline.add(Event(p.timeline.now_s + seconds, Kind.SERVER_DONE))

    def finish(self) -> list[Task]:
        """Finish the merge under way, which makes a new version unless it is empty; returns the tasks in it."""
        p = self._progress
        tasks = [p.tasks[number] for number in p.merging.pop(0)]
        if not tasks:
            return []
        arrivals = self._arrivals(tasks)
        merge = partial(self._method.merge, p.state, arrivals)
        result = self._executor.meanwhile(merge) if self._method.needs.long_merges else merge()
        before, p.state = p.state.tensors, result.state
        p.version += 1
        for task in tasks:
            task.merged_version, task.staleness = p.version, p.version - 1 - task.base_version
            p.clients[task.client].kept = task.keep or task.kept
        self._kept_merges.keep(p.version, p.policy.round, before, p.state.tensors, arrivals)
        self._write(tasks, result.metrics)
        # all replies were finite, but sums and products of them may overflow
        changed = Bundle({name: t for name, t in p.state.tensors.items() if before.get(name) is not t})
        if (name := changed.first_not_finite()) is not None:
            text = f"merge {p.version}, in round {p.policy.round}, made {name} of the server's state not finite"
            self._divergence.of_model(text, p.timeline.now_s)
        return tasks

    def start_next(self) -> None:
        """Start the next merge, if one is waiting."""
        if self._progress.merging:
            self._start()

    def _arrivals(self, tasks: Sequence[Task]) -> list[Arrival]:
        p = self._progress
        found = []
        for task in tasks:
            staleness = p.version - task.base_version
            found.append(
                Arrival(
                    assignment=assignment_of(task, self._participants[task.client].client),
                    sent=p.sent[task.number],
                    message=self._replies[task.number].message,
                    staleness=staleness,
                    weight=p.policy.weight(staleness),
                )
            )
        return found

    def _write(self, tasks: Sequence[Task], metrics: dict[str, float]) -> None:
        p = self._progress
        now_s = p.timeline.now_s
        merge = RoundRow(
            version=p.version,
            round=p.policy.round,
            stage=tasks[0].stage,
            device_start_s=p.round_start_s,
            device_end_s=now_s,
            server_s=now_s - max(t.uploaded_s or now_s for t in tasks),
            host_start_s=p.round_host_s,
            host_end_s=self._host_s(),
            merged=len(tasks),
        )
        self._records.write(
            [
                *(task_row(task, self._participants[task.client].spec.device) for task in tasks),
                merge,
                *(MetricRow(p.version, None, name, finite(value)) for name, value in metrics.items()),
                *(MetricRow(p.version, task.number, *metric) for task in tasks for metric in task.metrics.items()),
            ]
        )

    # evaluation

    def evaluate(self, finished_round: int) -> None:
        """Have the state evaluated if the experiment asks for it after this round, or after one that ended with it."""
        experiment, p = self._experiment, self._progress
        every = experiment.evaluation.every
        last = min(max(finished_round, p.policy.round - 1), experiment.rounds)  # a merge may end several of a stream
        if last // every > (finished_round - 1) // every or p.policy.round > experiment.rounds:
            p.evaluated = Moment(p.version, last, p.timeline.now_s)
            self._submit_evaluation(p.evaluated)

    def evaluate_last(self) -> None:
        """Have the final state evaluated, dated by the merge that made it, unless that has been done."""
        p = self._progress
        if p.evaluated is None or p.evaluated.version != p.version:
            query = f"SELECT version, round, device_end_s FROM rounds WHERE version = {p.version}"
            (row,) = self._records.rows(query)
            p.evaluated = Moment(*row)
            self._submit_evaluation(p.evaluated)

    def evaluate_again(self) -> None:
        """Repeat, after a checkpoint, the evaluation of this version if there was one."""
        p = self._progress
        if p.evaluated is not None and p.evaluated.version == p.version:
            self._submit_evaluation(p.evaluated)

    def _submit_evaluation(self, when: Moment) -> None:
        kept = {number: client.kept for number, client in self._progress.clients.items()}
        self._evaluations.submit(self._method.targets(self._progress.state), kept, when)
