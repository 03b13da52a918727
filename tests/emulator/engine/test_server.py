"""The server with a method whose merge can be worked out by hand: the mean of what arrived, weighted by the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from handmade_tasks import make_task

from fleetbed.emulator.engine.divergence import Divergence
from fleetbed.emulator.engine.evaluation import Evaluations
from fleetbed.emulator.engine.layout import Layout, lay_out
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.engine.participant import ClientProgress
from fleetbed.emulator.engine.progress import Progress
from fleetbed.emulator.engine.server import Server
from fleetbed.emulator.engine.task import Task
from fleetbed.emulator.engine.timing import Modelled, TrainingCosts
from fleetbed.emulator.method.algorithm import (
    Algorithm,
    Arrival,
    Assignment,
    Expected,
    Job,
    Merged,
    Needs,
    Reply,
    Spec,
    Target,
)
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.processes.executor import Order, Outcome
from fleetbed.emulator.records.kept_merges import KeptMerges
from fleetbed.emulator.records.records import Records
from fleetbed.emulator.run.preparation import prepare_variants
from fleetbed.emulator.timeline.availability import Always
from fleetbed.emulator.timeline.events import Event, Kind, Timeline
from fleetbed.emulator.timeline.making_policies import make_policy
from fleetbed.emulator.timeline.network import Pipe
from fleetbed.emulator.wire.messages import Evaluated, Trained
from fleetbed.models.cost.operations import Operations, compute_seconds
from fleetbed.models.cost.predict import cost
from fleetbed.models.work import ServerWork, Work
from fleetbed.profiles.errors import FleetbedError
from fleetbed.profiles.experiment import runs
from fleetbed.profiles.resolve import load_experiment

pytestmark = pytest.mark.usefixtures("own_cache")
FLOPS = 3e9  # of the server's work for each arrival, for which its device takes 1.5 s


class Mean(Algorithm):
    """Its state is one number."""

    def setup(self) -> Bundle:
        return Bundle({"w": torch.zeros(1)})

    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        return state

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        return Work(steps=1, batch=1)

    def client(self, job: Job) -> Reply:
        raise NotImplementedError

    def expects(self, assignment: Assignment, sent: Bundle) -> Expected:
        return Expected(tensors={"w": Spec(torch.float32, (1,))})

    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        total = torch.stack([a.weight * a.message.tensors["w"] for a in arrivals]).mean(0)
        return Merged(state=Bundle({"w": total}), metrics={"arrived": float(len(arrivals))})

    def server_work(self, state: Bundle, arrivals: Sequence[Arrival]) -> ServerWork:
        return ServerWork(flops=FLOPS * len(arrivals))

    def targets(self, state: Bundle) -> list[Target]:
        return [Target(name="the one", variant="resnet10", tensors=dict(state.tensors))]


class Services:
    """An executor that has every model's accuracy as 0.5."""

    def __init__(self) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.loss = 1.0
        self.meanwhiles = 0

    def submit(self, order: Order) -> None:
        answer = Evaluated(task=order.task, samples=10, accuracy=0.5, loss=self.loss)
        self.outcomes[order.task] = Outcome(kind="ok", answer=answer)

    def wait(self, task: int) -> Outcome:
        return self.outcomes.pop(task)

    def cancel(self, task: int) -> None: ...

    def meanwhile(self, work: Callable[[], Any]) -> Any:
        self.meanwhiles += 1
        return work()

    def close(self) -> None: ...


@dataclass
class ServerBed:
    server: Server
    progress: Progress
    records: Records
    evaluations: Evaluations
    services: Services
    said: list[str]

    def arrive(self, client: int, value: float, **changes: Any) -> Task:
        """Have the reply of a new task of this client at the server."""
        p = self.progress
        now_s = p.timeline.now_s
        task = make_task(
            number=p.next_task,
            client=client,
            round=p.policy.round,
            base_version=p.version,
            **{"dispatched_s": now_s, "uploaded_s": now_s, "ended_s": now_s, "outcome": "ok", **changes},
        )
        p.next_task += 1
        p.tasks[task.number], p.sent[task.number] = task, p.state
        self.server.receive(task, trained(task.number), Bundle({"w": torch.tensor([value])}))
        return task

    def merge(self, *tasks: Task) -> list[Task]:
        self.server.queue(tuple(task.number for task in tasks))
        return self.finish()

    def finish(self) -> list[Task]:
        event = self.progress.timeline.pop()
        assert event is not None
        assert event.kind is Kind.SERVER_DONE
        return self.server.finish()

    @property
    def value(self) -> float:
        return float(self.progress.state.tensors["w"])


def trained(number: int, **changes: Any) -> Trained:
    made = Trained(
        task=number,
        keep=None,
        metrics={},
        steps=0,
        samples=0,
        seconds=0.0,
        cpu_s=0.0,
        throttled_s=None,
        peak_bytes=None,
        anon_bytes=None,
    )
    return msgspec.structs.replace(made, **changes)


def layout_with(*sets: str) -> Layout:
    """The layout of eight clients and a server that takes 1.5 s for each arrival."""
    tiny = ("data.train_limit=400", "data.test_limit=100", "timing.source=modelled", "rounds=4")
    found = lay_out(runs(load_experiment("demo", sets=("algorithms=[{name: heteroavg}]", *tiny, *sets)))[0], ())
    server = msgspec.structs.replace(found.server, train_scale=1.0)
    seconds = compute_seconds(server, Operations(matmul_flop=FLOPS))
    return replace(found, server=msgspec.structs.replace(server, train_scale=1.5 / seconds))


Make = Callable[..., ServerBed]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with closing(Records(Path(":memory:"))) as records:

        def made(*sets: str) -> ServerBed:
            layout = layout_with(*sets)
            config = layout.config
            optimizer = config.experiment.training.optimizer
            timing = Modelled(TrainingCosts(layout.family, layout.dataset.spec, optimizer))
            clients = {number: ClientProgress("resnet10") for number in range(8)}
            prepared, _ = prepare_variants(layout, timing, None, clients, Observer())
            prepared = replace(prepared, method=Mean(None, prepared.method.context))
            progress = Progress(
                timeline=Timeline(down=Pipe(1e6), up=Pipe(1e6)),
                policy=make_policy(config.experiment, config.policy, 1, dict.fromkeys(clients, 1.0), 1),
                availability=Always(),
                clients=clients,
                state=prepared.method.setup(),
            )
            progress.policy.open(list(clients), [])
            said: list[str] = []
            divergence = Divergence(config.experiment.training, records, said.append, lambda: 0.0)
            services = Services()
            evaluations = Evaluations(services, records, 10, divergence.of_model)
            kept = KeptMerges(tmp_path, config.experiment.evaluation)
            server = Server(layout, prepared, evaluations, records, progress, divergence, kept, services, lambda: 0.0)
            return ServerBed(server, progress, records, evaluations, services, said)

        yield made


def test_a_merge_takes_the_time_of_its_work_and_makes_a_new_version(make: Make) -> None:
    bed = make()
    tasks = [bed.arrive(0, 1.0), bed.arrive(1, 5.0, keep="kept-1")]
    assert bed.merge(*tasks) == tasks
    assert bed.value == 3.0
    assert bed.progress.version == 1
    assert bed.progress.timeline.now_s == pytest.approx(3.0)
    assert [(task.merged_version, task.staleness) for task in tasks] == [(1, 0), (1, 0)]
    assert [bed.progress.clients[number].kept for number in (0, 1, 2)] == [None, "kept-1", None]
    assert bed.records.rows("SELECT version, merged FROM rounds") == [(1, 2)]
    assert bed.records.rows("SELECT version, name, value FROM metrics") == [(1, "arrived", 2.0)]
    assert bed.records.rows("SELECT task, merged_version FROM tasks ORDER BY task") == [(0, 1), (1, 1)]


class Training(Mean):
    """A merge that trains: 5 steps of a model, and other work."""

    STEPS = Work(steps=5, batch=4)

    @property
    def needs(self) -> Needs:
        return Needs(long_merges=True)

    def server_work(self, state: Bundle, arrivals: Sequence[Arrival]) -> ServerWork:
        return ServerWork(models=(("resnet10", self.STEPS),) * len(arrivals), flops=FLOPS)


def test_a_merge_that_trains_costs_its_passes_on_the_servers_device(make: Make) -> None:
    bed = make()
    context = bed.server._method.context
    bed.server._method = Training(None, context)
    tasks = [bed.arrive(0, 1.0), bed.arrive(1, 5.0)]
    bed.merge(*tasks)
    found = cost(context.family, "resnet10", context.spec, Training.STEPS, context.training.optimizer)
    wanted = 1.5 + 2 * compute_seconds(bed.server._device, found.operations)
    assert bed.progress.timeline.now_s == pytest.approx(wanted)
    assert bed.services.meanwhiles == 1  # so that the clients are served
    assert bed.value == 3.0


def test_merges_wait_for_each_other(make: Make) -> None:
    bed = make()
    first, second = bed.arrive(0, 1.0), bed.arrive(1, 5.0)
    bed.server.queue((first.number,))
    bed.server.queue((second.number,))
    assert len(bed.progress.timeline.events) == 1
    assert bed.finish() == [first]
    assert bed.value == 1.0
    assert bed.progress.timeline.events == []
    bed.server.start_next()
    assert bed.finish() == [second]
    assert bed.value == 5.0
    assert second.staleness == 1, "the model that it was sent had been replaced meanwhile"
    bed.server.start_next()
    assert bed.progress.timeline.pop() is None


def test_an_empty_merge_takes_no_time_and_makes_no_version(make: Make) -> None:
    bed = make()
    assert bed.merge() == []
    assert (bed.progress.version, bed.progress.timeline.now_s) == (0, 0.0)
    assert bed.records.rows("SELECT count(*) FROM rounds") == [(0,)]


def test_the_policy_weighs_what_is_stale(make: Make) -> None:
    bed = make("policies=[{kind: async}]")
    late = bed.arrive(1, 8.0)
    bed.merge(bed.arrive(0, 8.0))
    fresh = bed.value
    bed.merge(late)
    assert late.staleness == 1
    weights = [bed.progress.policy.weight(staleness) for staleness in (0, 1)]
    assert (fresh, bed.value) == pytest.approx((8.0 * weights[0], 8.0 * weights[1]))
    assert weights[1] < weights[0]


def test_a_reply_is_checked_when_it_is_received_and_forgotten_on_request(make: Make) -> None:
    bed = make()
    assert bed.server.flaw(bed.arrive(0, 1.0)) is None
    diverged = bed.server.flaw(bed.arrive(1, float("nan")))
    assert diverged is not None
    assert diverged.outcome == "diverged"
    task = bed.arrive(2, 1.0)
    bed.server.receive(task, trained(task.number), Bundle({"v": torch.zeros(1)}))
    refused = bed.server.flaw(task)
    assert refused is not None
    assert refused.outcome == "refused"
    bed.server.forget(task)
    bed.server.forget(task)  # as often as one likes
    with pytest.raises(KeyError):
        bed.server.flaw(task)


def test_a_merge_that_overflows_is_noted_once(make: Make) -> None:
    bed = make("training.on_divergence=continue")
    for client in (0, 1):
        huge = [bed.arrive(client, 3e38), bed.arrive(client + 2, 3e38)]
        bed.merge(*huge)
        assert bed.value == float("inf")
    assert bed.records.rows("SELECT kind FROM notices") == [("model-diverged",)]
    assert len(bed.said) == 1
    assert "merge 1, in round 1, made w of the server's state not finite" in bed.said[0]


def test_a_merge_that_overflows_ends_a_run_that_is_to_stop(make: Make) -> None:
    bed = make("training.on_divergence=stop")
    with pytest.raises(FleetbedError, match="training diverged: merge 1"):
        bed.merge(bed.arrive(0, 3e38), bed.arrive(1, 3e38))


def evaluated(bed: ServerBed) -> list[tuple[int, int]]:
    bed.evaluations.collect(wait=True)
    return bed.records.rows("SELECT version, round FROM evaluations ORDER BY version")


def test_the_model_is_evaluated_every_so_many_rounds_and_at_the_end(make: Make) -> None:
    bed = make("evaluation.every=2", "rounds=5")
    bed.server.evaluate(0)
    for number in range(1, 6):
        bed.merge(bed.arrive(0, 1.0))
        bed.progress.policy.merged(1)
        bed.progress.policy.open(list(range(8)), [])
        bed.server.evaluate(number)
    assert evaluated(bed) == [(0, 0), (2, 2), (4, 4), (5, 5)]
    bed.server.evaluate_last()
    assert evaluated(bed) == [(0, 0), (2, 2), (4, 4), (5, 5)], "the last one has been evaluated"


def test_a_run_that_is_cut_short_has_its_last_model_evaluated(make: Make) -> None:
    bed = make("evaluation.every=3")
    bed.merge(bed.arrive(0, 1.0))
    bed.progress.timeline.add(Event(99.0, Kind.TIMER))
    bed.progress.timeline.pop()
    bed.server.evaluate_last()
    bed.evaluations.collect(wait=True)
    ((version, device_s),) = bed.records.rows("SELECT version, device_s FROM evaluations")
    assert (version, device_s) == (1, pytest.approx(1.5)), "dated by the merge that made it"


def test_an_evaluation_is_repeated_only_if_it_was_of_this_version(make: Make) -> None:
    bed = make()
    bed.server.evaluate_again()
    assert evaluated(bed) == []
    bed.server.evaluate(0)
    bed.evaluations.collect(wait=True)
    bed.server.evaluate_again()
    assert len(bed.services.outcomes) == 1
    bed.merge(bed.arrive(0, 1.0))
    bed.services.outcomes.clear()
    bed.server.evaluate_again()
    assert bed.services.outcomes == {}


def test_a_loss_that_is_not_finite_is_reported(make: Make) -> None:
    bed = make("training.on_divergence=continue")
    bed.services.loss = float("nan")
    bed.server.evaluate(0)
    bed.evaluations.collect(wait=True)
    assert bed.records.rows("SELECT accuracy, loss FROM evaluations") == [(0.5, None)]
    assert "the loss of the one after round 0 is nan" in bed.said[0]
