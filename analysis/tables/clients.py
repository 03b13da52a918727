"""The resources that each client used in a run, and the medians of its kind of device."""

from __future__ import annotations

from collections import Counter
from math import isnan
from statistics import median

from msgspec import Struct

from fleetbed.analysis.tables.runs import Run
from fleetbed.analysis.tables.stragglers import round_costs
from fleetbed.emulator.method.series import TargetSeries
from fleetbed.emulator.records.tables import ClientRow, EvaluationRow, TaskRow
from fleetbed.profiles.errors import BadInput

OUTCOMES = ("ok", "late", "oom", "crash", "hang", "offline", "refused", "diverged")


class ClientResources(Struct, frozen=True, kw_only=True):
    """Sums over the run. Times are device seconds; `cpu_s` and `throttled_s` are the host's."""

    client: str
    device: str
    device_title: str
    rate_gflops: float
    link: str
    variant: str | None
    samples: int
    tasks: int
    merged: int
    ok: int
    late: int
    oom: int
    crash: int
    hang: int
    offline: int
    refused: int
    diverged: int
    last: int  # the number of rounds that waited for it
    device_s: float
    download_s: float
    wait_s: float | None  # available without a task, until its last one was dispatched
    compute_s: float
    upload_s: float
    cpu_s: float | None
    throttled_s: float | None
    peak_bytes: int | None
    cap_bytes: int
    predicted_bytes: int | None
    flops: float
    bytes_down: int
    bytes_up: int
    joules: float | None  # of its tasks: the profile's load watts while computing, its idle watts in transfers
    idle_joules: float | None  # the profile's idle watts over the rest of the run
    overrun: float | None  # the median over its tasks
    accuracy: (
        float | None
    )  # or the mean absolute error; in the series shown: of its own model, or of the global one of its variant
    reason: str


#: fields that are compared with the median of the same device kind
COMPARED = tuple(
    field
    for field in ClientResources.__struct_fields__
    if field not in ("client", "device", "device_title", "rate_gflops", "link", "variant", "cap_bytes", "reason")
)


def client_rows(run: Run, shown: TargetSeries) -> list[ClientResources]:
    tasks: dict[int, list[TaskRow]] = {client.client: [] for client in run.clients}
    for task in run.tasks:
        tasks[task.client].append(task)
    last = Counter(cost.last for cost in round_costs(run) if cost.without_last_s is not None)
    tested = [evaluation for evaluation in run.evaluations if evaluation.series == shown and evaluation.samples]
    final = [evaluation for evaluation in tested if evaluation.version == tested[-1].version]
    return [_row(client, tasks[client.client], last[client.client], final, run.device_s) for client in run.clients]


def _row(
    client: ClientRow, tasks: list[TaskRow], last: int, final: list[EvaluationRow], run_s: float
) -> ClientResources:
    outcomes = Counter(task.outcome for task in tasks)
    phases: Counter[str] = Counter()
    for task in tasks:
        phases.update(task.phases())
    known = {
        name: [value for task in tasks if (value := getattr(task, name)) is not None]
        for name in ("cpu_s", "throttled_s", "peak_bytes", "joules", "overrun", "waited_s")
    }
    return ClientResources(
        client=client.name,
        device=client.device,
        device_title=client.device_title,
        rate_gflops=client.rate_gflops,
        link=client.link,
        variant=client.variant,
        samples=client.samples,
        tasks=len(tasks),
        merged=sum(task.merged_version is not None for task in tasks),
        **{outcome: outcomes[outcome] for outcome in OUTCOMES},
        last=last,
        device_s=sum(task.end_s - task.dispatched_s for task in tasks),
        wait_s=sum(known["waited_s"]) if known["waited_s"] else None,
        **{f"{phase}_s": phases[phase] for phase in ("download", "compute", "upload")},
        cpu_s=sum(known["cpu_s"]) if known["cpu_s"] else None,
        throttled_s=sum(known["throttled_s"]) if known["throttled_s"] else None,
        peak_bytes=max(known["peak_bytes"], default=None),
        cap_bytes=client.memory_cap_bytes,
        predicted_bytes=client.memory_predicted_bytes,
        flops=sum(task.flops for task in tasks if task.compute_start_s is not None),
        bytes_down=sum(task.bytes_down for task in tasks),
        bytes_up=sum(task.bytes_up or 0 for task in tasks),
        joules=sum(known["joules"]) if known["joules"] else None,
        idle_joules=None if client.idle_w is None else client.idle_w * _idle_s(tasks, run_s),
        overrun=median(known["overrun"]) if known["overrun"] else None,
        accuracy=_accuracy(client, final),
        reason=client.reason,
    )


def _idle_s(tasks: list[TaskRow], run_s: float) -> float:
    """Return the device time of the run in which the client has no task."""
    return max(0.0, run_s - sum(task.end_s - task.dispatched_s for task in tasks))


def _accuracy(client: ClientRow, final: list[EvaluationRow]) -> float | None:
    for one in final:
        if one.client == client.client or (one.client is None and one.variant == client.variant):
            return None if isnan(one.score) else one.score
    return None


def kind_medians(rows: list[ClientResources]) -> dict[str, dict[str, float]]:
    """Return medians by device kind and column, over the clients that have a value there."""
    kinds: dict[str, list[ClientResources]] = {}
    for row in rows:
        kinds.setdefault(row.device, []).append(row)
    return {
        device: {
            column: median(values)
            for column in COMPARED
            if (values := [value for row in members if (value := getattr(row, column)) is not None])
        }
        for device, members in kinds.items()
    }


def find_client(run: Run, name: str) -> int:
    """Return the position of a client in the fleet, from "007" or "7"."""
    for position, client in enumerate(run.clients):
        if name in (client.name, str(client.client)):
            return position
    known = f"{run.clients[0].name} to {run.clients[-1].name}" if run.clients else "none"
    raise BadInput(f"--client {name}: there is no such client in {run.folder}; its clients are {known}.")
