"""The engine: one loop over the timeline that serves every policy and every method.

It pops events in the order of device time. A compute event whose host work is not done blocks the loop; one that
overran its plan is put back at its real end. `downloaded` starts the computation, `computed` starts the upload, and
`uploaded` hands the result to the policy. A task is sent a snapshot taken when it is dispatched, so computing never
waits for a merge.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from fleetbed.emulator.engine.dispatch import Dispatcher
from fleetbed.emulator.engine.divergence import Divergence
from fleetbed.emulator.engine.evaluation import Evaluations
from fleetbed.emulator.engine.layout import Surroundings
from fleetbed.emulator.engine.prepared import Prepared
from fleetbed.emulator.engine.progress import Progress
from fleetbed.emulator.engine.roster import Roster
from fleetbed.emulator.engine.server import Server
from fleetbed.emulator.engine.task import Task, task_row
from fleetbed.emulator.processes.executor import Executor, Outcome
from fleetbed.emulator.records.kept_merges import KeptMerges
from fleetbed.emulator.records.records import Records
from fleetbed.emulator.timeline.events import Event, Kind
from fleetbed.emulator.timeline.policies import Decision
from fleetbed.emulator.wire import codec
from fleetbed.emulator.wire.messages import Trained
from fleetbed.profiles.errors import FleetbedError

#: a run ends when this many tasks per client have failed in a row
MOST_FAILED_IN_A_ROW = 20


class Engine:
    def __init__(
        self,
        *,
        layout: Surroundings,
        folder: Path,
        prepared: Prepared,
        executor: Executor,
        records: Records,
        progress: Progress,
        checkpoint: Callable[[Progress], None],
        tick: Callable[[], None],
        started_s: float,
        say: Callable[[str], None] = lambda _: None,
        ended: Callable[[Task], None] = lambda _: None,
    ) -> None:
        """`ended` is called with every task that has ended, before the policy decides what follows from it."""
        self.config = layout.config
        self.participants = prepared.participants
        self.executor = executor
        self.started_s = started_s
        self.progress = progress
        self.last_arrival: int | None = None  # the client whose result came last, for observers
        self._timing = prepared.timing
        self._divergence = Divergence(layout.config.experiment.training, records, say, self._host_s)
        batch = layout.config.experiment.evaluation.batch
        self.evaluations = Evaluations(executor, records, batch, self._divergence.of_model)
        self._roster = Roster(prepared, progress, folder)
        self._dispatcher = Dispatcher(layout, prepared, executor, progress)
        kept = KeptMerges(folder, layout.config.experiment.evaluation)
        self._server = Server(
            layout, prepared, self.evaluations, records, progress, self._divergence, kept, executor, self._host_s
        )
        self._records = records
        self._checkpoint = checkpoint
        self._tick = tick
        self._ended = ended
        self._overrun: dict[int, Outcome] = {}  # of tasks whose compute event was put back, by number

    # the loop

    def run(self) -> None:
        """Run from where the progress stands to the end of the experiment."""
        p = self.progress
        if p.policy.round == 0:
            self._checkpoint(p)
            self._server.evaluate(0)
            self._open()
        else:
            self._resume()
        while not self._over() and (event := p.timeline.pop()) is not None:
            self._handle(event)
            self._tick()
        if not self._over():
            raise FleetbedError("nothing is left to wait for: no client can take part any more")
        for task in list(p.tasks.values()):
            self._give_up(task, "the run ended")
        self._server.evaluate_last()
        self.evaluations.collect(wait=True)

    def _resume(self) -> None:
        """Continue after a checkpoint: the tasks in flight are carried out again, because no results are stored."""
        p = self.progress
        self._server.evaluate_again()
        for task in p.tasks.values():
            self._dispatcher.submit(task, codec.pack(p.sent[task.number]))
        for task in p.tasks.values():
            if task.compute_end_s is not None:
                self._receive_again(task, self.executor.wait(task.number))
            if task.outcome:  # its row was taken back together with those that will happen again
                self._write(task)

    def _receive_again(self, task: Task, outcome: Outcome) -> None:
        """Receive the reply of a task that was computed before the checkpoint; it must be as good as it was then."""
        problem = "" if outcome.kind == "ok" else outcome.detail
        if not problem:
            try:
                self._receive(task, outcome)
            except codec.WireError as error:
                problem = str(error)
        if not problem and task.outcome == "ok" and (flaw := self._server.flaw(task)) is not None:
            problem = flaw.detail
        if problem:
            raise FleetbedError(
                f"task {task.number} succeeded before and failed now: {problem}; if the host caused this, fix it and "
                f"resume again, nothing that was merged is lost"
            )

    def _over(self) -> bool:
        experiment, p = self.config.experiment, self.progress
        limit_s = experiment.device_time_limit_s
        return p.policy.is_over(experiment.rounds) or (limit_s is not None and p.timeline.now_s >= limit_s)

    def _handle(self, event: Event) -> None:
        p = self.progress
        if event.kind is Kind.SERVER_DONE:
            self._server_done()
            return
        if event.kind is Kind.TIMER:
            self._carry_out(p.policy.timer(event.task))
            return
        if event.kind in (Kind.CAME, Kind.LEFT):
            self._availability_changed(event)
            return
        if event.kind is Kind.RATE:
            self._dispatcher.change_rate(event)
            return
        task = p.tasks[event.task]
        if event.kind is Kind.DOWNLOADED:
            task.downloaded_s = task.compute_start_s = event.time_s
            p.timeline.add(Event(event.time_s + task.plan_s, Kind.COMPUTED, task.client, task.number))
            for follows in p.availability.starts(task.client, task.number, event.time_s, task.plan_s):
                p.timeline.add(follows)
        elif event.kind is Kind.COMPUTED:
            self._computed(task)
        elif event.kind is Kind.UPLOADED:
            self._uploaded(task)

    def _availability_changed(self, event: Event) -> None:
        p = self.progress
        for follows in p.availability.changed(event):
            p.timeline.add(follows)
        if self._roster.is_away(event.client):
            for task in self._under_way(event.client):
                self._stop(task)
                self._end(task, "offline", "it left before its result had arrived")
        else:
            p.free_since[event.client] = event.time_s
            self._carry_out(p.policy.on_client_available(self._roster.idle(), self._roster.away()))

    # the life of a task

    def _invite(self, client: int) -> None:
        if self._roster.is_away(client):
            self._end(self._dispatcher.miss(client, self._host_s()), "offline", "it was away when it was invited")
        else:
            self._dispatcher.dispatch(client, self._host_s())

    def _computed(self, task: Task) -> None:
        outcome = self._overrun.get(task.number) or self.executor.wait(task.number)
        if outcome.kind == "host":
            name = self.participants[task.client].spec.name
            raise FleetbedError(
                f"this host could not carry out task {task.number} of client {name}: {outcome.detail}; fix that and "
                f"continue with --resume, nothing that was merged is lost"
            )
        kind, detail = self._timing.failure(task.number) or (outcome.kind, outcome.detail)
        task.host_start_s = self._since_start(outcome.host_start_s)
        task.host_end_s = self._since_start(outcome.host_end_s)
        now_s = self.progress.timeline.now_s
        if kind != "ok":
            self._stop_computing(task)
            self._end(task, kind, detail)
            return
        assert isinstance(outcome.answer, Trained)
        measured_s = self._timing.measured_s(task, outcome.answer)
        if measured_s is not None and task.compute_start_s is not None:
            if task.number not in self._overrun:  # else it was learned from when it was put back
                self._timing.learn(task, outcome.answer)
            if measured_s > (task.measured_s or 0.0):  # else it was carried out again after a resumption
                task.measured_s = measured_s
                task.overrun = measured_s / task.plan_s if task.plan_s else None
            if task.compute_start_s + measured_s > now_s:  # it overran its plan: put it back at its real end
                self._overrun[task.number] = outcome
                end_s = task.compute_start_s + measured_s
                self.progress.timeline.add(Event(end_s, Kind.COMPUTED, task.client, task.number))
                return
        self._overrun.pop(task.number, None)
        self._stop_computing(task)
        task.take(outcome.answer)
        try:
            self._receive(task, outcome)
        except codec.WireError as error:
            self._end(task, "refused", f"sent an invalid message: {error}")
            return
        task.bytes_up = codec.size_of(outcome.frames)
        self._dispatcher.transfer(Kind.UPLOADED, task, task.bytes_up)

    def _receive(self, task: Task, outcome: Outcome) -> None:
        assert isinstance(outcome.answer, Trained)
        self._server.receive(task, outcome.answer, codec.unpack(outcome.frames))

    def _stop_computing(self, task: Task) -> None:
        now_s = self.progress.timeline.now_s
        assert task.compute_start_s is not None
        task.compute_end_s = now_s
        self.progress.availability.worked(task.client, now_s, now_s - task.compute_start_s)

    def _uploaded(self, task: Task) -> None:
        task.uploaded_s = self.progress.timeline.now_s
        self.last_arrival = task.client
        self._end(task, *(self._server.flaw(task) or ("ok", "")))

    def _end(self, task: Task, outcome: str, detail: str) -> None:
        """Give a task its one outcome; the policy decides what follows from it."""
        task.outcome, task.detail = outcome, detail
        if task.ended_s is None:
            self._finish(task)
        self._write(task)
        self._ended(task)
        diverged = outcome == "diverged"
        if outcome != "ok":
            self._forget(task)
            if not diverged:  # a result that diverged is a result too
                self._count_failed()
        if outcome == "oom":
            self._step_down(task, detail)
        if diverged:
            who = self.participants[task.client].spec
            text = f"client {who.name} ({who.kind}) in round {task.round}: {detail}"
            self._divergence.of_client(text, self.progress.timeline.now_s)
        if outcome == "ok":
            assert task.ended_s is not None
            self.progress.policy.on_result(task.client, task.ended_s - task.dispatched_s, task.loss)
        decision = self.progress.policy.ended(
            task.number, task.client, ok=outcome == "ok", idle=self._roster.idle(), diverged=diverged
        )
        self._carry_out(decision)

    def _step_down(self, task: Task, detail: str) -> None:
        p = self.progress
        kind, text = self._roster.step_down(task, detail)
        self._records.notice(kind, text, self._host_s(), p.timeline.now_s)
        if not p.clients[task.client].fit and not p.merging:  # else it is checked after the merge, the last one maybe
            self._roster.check_enough()

    def _give_up(self, task: Task, why: str) -> None:
        """End a task whose result is not needed any more."""
        if not task.outcome:
            self._stop(task)
            task.outcome, task.detail = "late", why
            self._write(task)
            self._ended(task)
            self._count_failed()
        self._forget(task)

    def _stop(self, task: Task) -> None:
        """Cut a task off, on the host and on the timeline. What it has used until now counts."""
        p = self.progress
        self.executor.cancel(task.number)
        task.cut(p.timeline.forget(task.number))
        self._finish(task)
        if task.compute_start_s is not None and task.compute_end_s is None:
            p.availability.worked(task.client, p.timeline.now_s, task.compute_s)

    def _finish(self, task: Task) -> None:
        task.ended_s = self.progress.free_since[task.client] = self.progress.timeline.now_s

    def _count_failed(self) -> None:
        self.progress.failed_in_a_row += 1
        if self.progress.failed_in_a_row > MOST_FAILED_IN_A_ROW * len(self.participants):
            raise FleetbedError(
                f"{self.progress.failed_in_a_row} tasks failed in a row; the records say why, by outcome and detail"
            )

    def _forget(self, task: Task) -> None:
        self._server.forget(task)
        for table in (self.progress.tasks, self.progress.sent, self._overrun):
            table.pop(task.number, None)

    # rounds and merges

    def _open(self) -> None:
        p = self.progress
        p.round_start_s, p.round_host_s = p.timeline.now_s, self._host_s()
        decision = p.policy.open(self._roster.idle(), self._roster.away())
        if not self._over():
            self._roster.check_enough()
            self._carry_out(decision)

    def _under_way(self, client: int) -> list[Task]:
        return [task for task in self.progress.tasks.values() if task.client == client and not task.outcome]

    def _carry_out(self, decision: Decision) -> None:
        p = self.progress
        for client in decision.abandon:
            for task in self._under_way(client):
                self._give_up(task, "the round was closed before it arrived")
        for client in decision.invite:
            self._invite(client)
        if decision.timer_s is not None:
            p.timeline.add(Event(p.timeline.now_s + decision.timer_s, Kind.TIMER, task=p.policy.opened))
        if decision.merge is not None:
            self._server.queue(decision.merge)

    def _server_done(self) -> None:
        p = self.progress
        merged = self._server.finish()
        for task in merged:
            self._forget(task)
        if merged:
            p.failed_in_a_row = 0
        p.policy.merged(len(merged))
        finished_round = p.policy.round
        self._server.start_next()
        self._open()
        if merged and p.policy.round != finished_round:
            self._server.evaluate(finished_round)
        if merged and p.version % self.config.experiment.checkpoint_every == 0:
            self.evaluations.collect(wait=True, before=p.version)
            self._checkpoint(p)

    # clocks and rows

    def _write(self, task: Task) -> None:
        self._records.write([task_row(task, self.participants[task.client].spec.device)])

    def _host_s(self) -> float:
        return time.monotonic() - self.started_s

    def _since_start(self, moment_s: float | None) -> float | None:
        return None if moment_s is None else moment_s - self.started_s
