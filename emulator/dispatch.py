"""How a task begins: what the client is sent, what it will do and how long that takes, and the order to the host."""

from __future__ import annotations

from bisect import bisect_left
from functools import partial

from msgspec.structs import replace

from fleetbed.emulator import host, pacing, wire
from fleetbed.emulator.dilation import Dilation
from fleetbed.emulator.executor import Executor, Order, Outcome
from fleetbed.emulator.layout import Layout
from fleetbed.emulator.messages import Train, Trained
from fleetbed.emulator.network import transfer, transfer_s
from fleetbed.emulator.participant import Participant
from fleetbed.emulator.planner import Plan
from fleetbed.emulator.preparation import Prepared
from fleetbed.emulator.progress import Progress
from fleetbed.emulator.task import Task
from fleetbed.emulator.timeline import Event, Kind
from fleetbed.models.work import Work

#: host seconds without an answer, beyond 20 times what was expected, after which a client counts as hung
HANG_S = 120.0


class Dispatcher:
    def __init__(self, layout: Layout, prepared: Prepared, executor: Executor, progress: Progress) -> None:
        self._layout = layout
        self._policy = layout.config.policy
        self._participants = prepared.participants
        self._method = prepared.method
        self._planner = prepared.planner
        self._dilation = prepared.dilation
        self._load_of = prepared.load_of
        self._recorded = None if prepared.recording is None else prepared.recording.flops
        self._largest_share = max(who.share for who in prepared.participants.values())
        self._executor = executor
        self._progress = progress
        self._held: list[tuple[Task, list[wire.Buffer]]] = []  # paced, and not handed over yet

    def dispatch(self, client: int, host_s: float) -> Task:
        """A new task for a client who is there: it downloads from now on, and the host may begin unless it is paced."""
        p, who = self._progress, self._participants[client]
        stage = self._method.needs.stages[p.policy.stage]
        message = self._method.send(p.state, who.client, stage, p.next_task)
        frames = wire.pack(message)
        size_bytes = wire.size_of(frames)
        work = self._method.work(p.state, who.client, stage)
        plan, most_steps = self._plan(who, work, size_bytes)
        task = self._new(who, stage, host_s)
        task.plan_s, task.step_s, task.flops, task.most_steps = plan.total_s, plan.step_s, plan.flops, most_steps
        task.bytes_down = size_bytes
        p.tasks[task.number] = task
        p.sent[task.number] = message
        self.transfer(Kind.DOWNLOADED, task, size_bytes)
        if self._dilation is None:
            self.submit(task, frames)
        else:
            self._held.append((task, frames))
        return task

    def hand_over(self) -> None:
        """Have the host begin with paced tasks dispatched together, as many on a core as suits all under way."""
        if not self._held or self._dilation is None:
            return
        spread = self._dilation.spread(self._dilation.of(self._spread()))
        for task, frames in self._held:
            task.spread = spread
            self.submit(task, frames)
        self._held.clear()

    def _spread(self) -> float:
        if self._layout.config.experiment.processes == "inline":  # one after the other
            return 1.0
        under_way = [task for task in self._progress.tasks.values() if task.compute_end_s is None]
        return pacing.spread([(self._load_of(task.client), task.plan_s) for task in under_way], host.cores())

    def miss(self, client: int, host_s: float) -> Task:
        """A task for a client who is away: nothing is sent and nothing done."""
        p = self._progress
        return self._new(self._participants[client], self._method.needs.stages[p.policy.stage], host_s)

    def submit(self, task: Task, frames: list[wire.Buffer]) -> None:
        who = self._participants[task.client]
        dilation = self._dilation
        expected_s = task.flops / 1e9 if dilation is None else task.plan_s * dilation.of(task.spread)
        self._executor.submit(
            Order(
                header=Train(
                    task=task.number,
                    client=task.client,
                    variant=task.variant,
                    stage=task.stage,
                    kept=task.kept,
                    most_steps=task.most_steps,
                ),
                worker=who.worker,
                frames=frames,
                load=self._load_of(task.client) / task.spread,
                start_s=task.dispatched_s,
                expected_s=expected_s,
                limit_s=HANG_S + 20.0 * expected_s,
                pace=None if dilation is None else partial(self._pace, task, dilation),
            )
        )

    def _pace(self, task: Task, dilation: Dilation) -> tuple[float, float]:
        """That of a task which begins now, after all that the host is done with, wherever that is in device time."""
        for number, outcome in self._executor.outcomes.items():
            if (done := self._progress.tasks.get(number)) is not None:
                self.learn(done, outcome)
        task.dilation = dilation.of(task.spread)
        return task.step_s * task.dilation, task.plan_s * task.dilation

    def learn(self, task: Task, outcome: Outcome) -> None:
        """Have the pace of the next tasks follow from how this one went, if it was paced."""
        answer = outcome.answer
        if self._dilation is None or not isinstance(answer, Trained) or answer.gpu_peak_bytes is not None:
            return
        if task.dilation is None or not task.plan_s or task.learned_from:
            return
        task.learned_from = True
        planned_s = task.plan_s * task.dilation
        self._dilation.note(
            dilation=task.dilation,
            spread=task.spread,
            load=answer.cpu_s / planned_s * self._largest_share / self._participants[task.client].share,
            overrun=answer.seconds / planned_s,
        )

    def transfer(self, kind: Kind, task: Task, size_bytes: int) -> None:
        """Put a transfer of a task on the timeline, over the client's link as it is now."""
        p = self._progress
        started = transfer(
            self._participants[task.client].spec.link,
            up=kind is Kind.UPLOADED,
            size_bytes=size_bytes,
            server=self._layout.server_link,
            seed=self._layout.config.seed,
            client=task.client,
            task=task.number,
        )
        if self._layout.rates is not None:
            started.limit_bit_s, lasts_s = self._layout.rates.at(task.client, p.timeline.now_s)
            p.timeline.add(Event(p.timeline.now_s + lasts_s, Kind.RATE, task.client, task.number))
        p.timeline.send(kind, started)

    def change_rate(self, event: Event) -> None:
        """The trace of a client's link has come to its next line."""
        assert self._layout.rates is not None  # or there would be no such event
        rate, lasts_s = self._layout.rates.at(event.client, event.time_s)
        if self._progress.timeline.limit(event.task, rate):
            self._progress.timeline.add(Event(event.time_s + lasts_s, Kind.RATE, event.client, event.task))

    def _new(self, who: Participant, stage: str, host_s: float) -> Task:
        p = self._progress
        task = Task(
            number=p.next_task,
            client=who.spec.number,
            variant=who.client.variant,
            round=p.policy.round,
            stage=stage,
            base_version=p.version,
            kept=who.kept,
            cap_bytes=who.cap_bytes,
            dispatched_s=p.timeline.now_s,
            host_queued_s=host_s,
        )
        p.next_task += 1
        return task

    def _plan(self, who: Participant, work: Work, size_bytes: int) -> tuple[Plan, int | None]:
        """The plan, and how many steps it allows where the policy asks for partial work."""
        device, variant, number = who.spec.device, who.client.variant, self._progress.next_task
        plan = self._planner.plan(device, variant, work, number)
        deadline_s = self._policy.deadline_s
        if not (self._policy.partial and deadline_s and plan.step_s):
            return plan, None
        if self._recorded is None:
            steps = self._steps_in_time(who, work, plan, size_bytes, deadline_s)
        else:  # as many as then: durations say nothing of the steps that did not fit

            def flops_of(steps: int) -> float:
                return self._planner.plan(device, variant, replace(work, steps=steps), number).flops

            steps = 1 + bisect_left(range(1, work.steps), self._recorded[number], key=flops_of)
        if steps >= work.steps:
            return plan, None
        return self._planner.plan(device, variant, replace(work, steps=steps), number), steps

    def _steps_in_time(self, who: Participant, work: Work, plan: Plan, size_bytes: int, deadline_s: float) -> int:
        """The steps that fit the deadline by plan, at least one, if the answer is as large as the question."""
        now_s = self._progress.timeline.now_s
        beside_s = plan.total_s - work.steps * plan.step_s + self._transfer_s(who, size_bytes, now_s, up=False)

        def is_late(steps: int) -> bool:
            compute_end_s = beside_s + steps * plan.step_s
            return compute_end_s + self._transfer_s(who, size_bytes, now_s + compute_end_s, up=True) > deadline_s

        # who begins to upload later is not done sooner
        return max(1, bisect_left(range(1, work.steps + 1), True, key=is_late))

    def _transfer_s(self, who: Participant, size_bytes: int, start_s: float, *, up: bool) -> float:
        """How long a transfer takes that is alone, over the client's link as its trace will have it."""
        link, server, rates = who.spec.link, self._layout.server_link, self._layout.rates
        if rates is None:
            return transfer_s(link, server, size_bytes, up=up)
        most_bit_s = 1e6 * (server.down_mbit_s if up else server.up_mbit_s)
        bits_s = rates.seconds(who.spec.number, start_s, 8.0 * size_bytes, most_bit_s)
        return bits_s + transfer_s(link, server, 0, up=up)
