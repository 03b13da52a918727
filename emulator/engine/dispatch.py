"""Dispatches tasks: asks the method for message and work, plans the duration, and gives the order to the host."""

from __future__ import annotations

from bisect import bisect_left

from fleetbed.emulator.engine.layout import Surroundings
from fleetbed.emulator.engine.participant import Participant
from fleetbed.emulator.engine.prepared import Prepared
from fleetbed.emulator.engine.progress import Progress
from fleetbed.emulator.engine.task import Task
from fleetbed.emulator.method.algorithm import Assignment
from fleetbed.emulator.processes.executor import Executor, Order
from fleetbed.emulator.timeline.events import Event, Kind
from fleetbed.emulator.timeline.network import transfer, transfer_s
from fleetbed.emulator.timeline.plan import Pace, Plan
from fleetbed.emulator.wire import codec
from fleetbed.emulator.wire.messages import Train
from fleetbed.models.work import Work

#: a client counts as hung after this many host seconds plus 20 times the expected ones
HANG_S = 120.0


class Dispatcher:
    def __init__(self, layout: Surroundings, prepared: Prepared, executor: Executor, progress: Progress) -> None:
        self._layout = layout
        self._policy = layout.config.policy
        self._participants = prepared.participants
        self._method = prepared.method
        self._timing = prepared.timing
        self._executor = executor
        self._progress = progress

    def dispatch(self, client: int, host_s: float) -> Task:
        """Start a task of an available client: its download begins now, and the host may begin to compute."""
        p, who = self._progress, self._participants[client]
        stage = self._method.needs.stages[p.policy.stage]
        assignment = Assignment(client=who.client, task=p.next_task, stage=stage, round=p.policy.round)
        message = self._method.send(p.state, assignment)
        frames = codec.pack(message)
        size_bytes = codec.size_of(frames)
        work = self._method.work(p.state, assignment)
        plan, work, most_steps = self._plan(who, work, size_bytes)
        on_host = self._timing.on_host(plan, who.client.variant, work)
        task = self._new(who, stage, host_s)
        task.plan_s, task.paces, task.flops, task.most_steps = plan.total_s, plan.paces, plan.flops, most_steps
        task.declared_steps, task.declared_samples = work.all_steps, work.all_samples
        task.load, task.expected_s, task.time_scale = on_host.load, on_host.expected_s, on_host.time_scale
        task.hang_s = on_host.hang_s
        task.bytes_down = size_bytes
        if client in p.free_since:
            task.waited_s = task.dispatched_s - p.free_since[client]
        p.tasks[task.number] = task
        p.sent[task.number] = message
        self.transfer(Kind.DOWNLOADED, task, size_bytes)
        self.submit(task, frames)
        return task

    def miss(self, client: int, host_s: float) -> Task:
        """Make the task of a client that was invited while it is away: nothing is sent or done."""
        p = self._progress
        return self._new(self._participants[client], self._method.needs.stages[p.policy.stage], host_s)

    def submit(self, task: Task, frames: list[codec.Buffer]) -> None:
        who = self._participants[task.client]
        scale = task.time_scale or 0.0
        self._executor.submit(
            Order(
                header=Train(
                    task=task.number,
                    client=task.client,
                    variant=task.variant,
                    stage=task.stage,
                    kept=task.kept,
                    round=task.round,
                    most_steps=task.most_steps,
                    paces=tuple(Pace(pace.steps, pace.step_s * scale) for pace in task.paces) if scale else (),
                    pace_total_s=task.plan_s * scale,
                ),
                worker=who.worker,
                frames=frames,
                load=task.load,
                start_s=task.dispatched_s,
                expected_s=task.expected_s,
                limit_s=HANG_S + 20.0 * task.expected_s if task.hang_s is None else task.hang_s,
            )
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
        """Change the rate of a client's link to the next line of its trace."""
        assert self._layout.rates is not None  # otherwise there would be no such event
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
            kept=who.progress.kept,
            cap_bytes=who.cap_bytes,
            dispatched_s=p.timeline.now_s,
            host_queued_s=host_s,
        )
        p.next_task += 1
        return task

    def _plan(self, who: Participant, work: Work, size_bytes: int) -> tuple[Plan, Work, int | None]:
        """The plan, the work, and the number of steps that it is cut to if the policy accepts partial work."""
        device, variant, number = who.spec.device, who.client.variant, self._progress.next_task
        plan = self._timing.plan(device, variant, work, number)
        deadline_s = self._policy.deadline_s
        if not (self._policy.partial and deadline_s and plan.paces):
            return plan, work, None
        steps = self._timing.steps(
            device,
            variant,
            work,
            number,
            lambda: self._steps_in_time(who, work, plan, size_bytes, deadline_s),
        )
        if steps >= work.all_steps:
            return plan, work, None
        cut = work.cut(steps)
        return self._timing.plan(device, variant, cut, number), cut, steps

    def _steps_in_time(self, who: Participant, work: Work, plan: Plan, size_bytes: int, deadline_s: float) -> int:
        """The steps, at least one, that fit the deadline by plan, assuming the upload is as large as declared."""
        now_s = self._progress.timeline.now_s
        up_bytes = size_bytes if work.bytes_up is None else work.bytes_up
        beside_s = plan.total_s - plan.steps_s + self._transfer_s(who, size_bytes, now_s, up=False)

        def is_late(steps: int) -> bool:
            compute_end_s = beside_s + plan.first_s(steps)
            return compute_end_s + self._transfer_s(who, up_bytes, now_s + compute_end_s, up=True) > deadline_s

        # an upload that begins later does not end sooner
        return max(1, bisect_left(range(1, work.all_steps + 1), True, key=is_late))

    def _transfer_s(self, who: Participant, size_bytes: int, start_s: float, *, up: bool) -> float:
        """The duration of a transfer that is alone, over the client's link as its trace will have it."""
        link, server, rates = who.spec.link, self._layout.server_link, self._layout.rates
        if rates is None:
            return transfer_s(link, server, size_bytes, up=up)
        most_bit_s = 1e6 * (server.down_mbit_s if up else server.up_mbit_s)
        bits_s = rates.seconds(who.spec.number, start_s, 8.0 * size_bytes, most_bit_s)
        return bits_s + transfer_s(link, server, 0, up=up)
