"""Writes run folders as the engine would, through Records, without running anything.

Everything follows from the arguments: the same call writes the same rows. The figures are
plausible, not measured.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fleetbed.emulator.records.records import Records
from fleetbed.emulator.records.tables import TABLES
from fleetbed.profiles.experiment import (
    AlgorithmChoice,
    Data,
    Evaluation,
    Experiment,
    Model,
    Policy,
    RunConfig,
    TimingChoice,
)

CLASSES = 10
HOST = {"cpu": "Synthetic CPU @ 2.60GHz", "cores": 2, "memory_bytes": 25_000_000_000, "kernel": "6.1.0"}
NARROW = {"base_width": 8, "stem": "3x3"}


@dataclass(frozen=True)
class Kind:
    device: str
    title: str
    link: str
    rate_gflops: float
    cap_mib: int
    variant: str
    up_mbit_s: float
    load_w: float | None = 5.0


@dataclass(frozen=True)
class Variant:
    step_gflop: float  # one training step of 16 samples
    megabytes: float  # the state, one way
    memory_mib: int
    bonus: float  # how much higher than the smallest variant it ends


KINDS = (
    Kind("pi-zero-2w", "Raspberry Pi Zero 2 W", "wifi-4", 4.0, 200, "resnet10", 8, 2.9),
    Kind("pi-3b", "Raspberry Pi 3 Model B", "wifi-4", 5.3, 520, "resnet14", 16, 5.1),
    Kind("phone-2018", "Phone of 2018, mid range", "lte", 11.0, 800, "resnet18", 10, None),
    Kind("pi-4b", "Raspberry Pi 4 Model B", "wifi-5", 13.5, 1400, "resnet22", 40, 6.4),
    Kind("jetson-nano", "Jetson Nano 4 GB", "ethernet-1g", 120.0, 2300, "resnet26", 400, 9.5),
)
VARIANTS = {
    "resnet10": Variant(1.74, 19.6, 130, 0.00),
    "resnet14": Variant(2.65, 43.2, 255, 0.02),
    "resnet18": Variant(3.55, 44.7, 300, 0.03),
    "resnet22": Variant(4.46, 68.3, 420, 0.045),
    "resnet26": Variant(5.37, 69.8, 470, 0.05),
}
#: final accuracy, rounds to get most of the way, share of the weights that travels
METHODS = {
    "fedavg": (0.60, 14.0, 1.0),
    "fedprox": (0.66, 13.0, 1.0),
    "inco": (0.69, 12.0, 1.0),
    "fedin": (0.74, 9.0, 1.02),
    "fedhe": (0.52, 20.0, 0.001),
}


def write_study(
    folder: Path,
    methods: Sequence[str] = ("fedavg", "fedin"),
    seeds: Sequence[int] = (1, 2, 3),
    **options: Any,
) -> Path:
    """Runs of all methods and seeds in one folder; `options` are those of `write_run`."""
    for method in methods:
        for seed in seeds:
            write_run(folder, method, seed, methods=methods, seeds=seeds, **options)
    return folder


def write_run(
    study: Path,
    method: str = "fedavg",
    seed: int = 1,
    *,
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    clients: int = 10,
    rounds: int = 12,
    policy: Policy | None = None,
    targets: tuple[float, ...] = (0.5,),
    data: str = "fashion-mini",
    title: str = "Synthetic fleet",
    status: str = "done",
    stop_after: int | None = None,
    unfit: bool = True,
    with_failures: bool = True,
) -> Path:
    """One run folder below `study`. `stop_after` ends it after so many rounds, as a kill would."""
    policy = policy or Policy()
    config = RunConfig(
        experiment=Experiment(
            title=title,
            fleet="synthetic",
            data=Data(name=data),
            model=Model(family="resnet-stage", options=NARROW),
            algorithms=tuple(AlgorithmChoice(name=m) for m in methods or (method,)),
            seeds=tuple(seeds or (seed,)),
            policies=(policy,),
            timing=TimingChoice(source="enforced", time_scale=1.5),
            rounds=rounds,
            evaluation=Evaluation(targets=targets),
        ),
        algorithm=AlgorithmChoice(name=method),
        policy=policy,
        seed=seed,
    )
    folder = study / config.name
    folder.mkdir(parents=True)
    records = Records(folder / "run.sqlite")
    writer = _Writer(config, clients, unfit, with_failures)
    records.set_meta(**_meta(config, status))
    write_tables(records, {"clients": writer.client_rows(), "caps": writer.cap_rows()})
    simulate = writer.asynchronous if policy.kind in ("async", "buffered") else writer.in_rounds
    for tables in simulate(stop_after or rounds):
        write_tables(records, tables)
    records.close()
    indices = [list(range(k * 100, k * 100 + 100)) for k in range(clients)]
    (folder / "partition.json").write_text(json.dumps({"train": indices, "test": indices, "public": []}))
    return folder


def write_tables(records: Records, tables: dict[str, list[dict[str, Any]]]) -> None:
    """Write rows that are given as mappings from column to value."""
    types = {row.table: row for row in TABLES}
    records.write(types[name](**row) for name, rows in tables.items() for row in rows)


def _meta(config: RunConfig, status: str) -> dict[str, Any]:
    return {
        "fleetbed_version": "0.1.0",
        "config": config,
        "status": status,
        "error": "client 003 sent a message that is too large" if status == "failed" else None,
        "host": HOST,
        "versions": {"torch": "2.13.0", "numpy": "2.4.6"},
        "timing": {
            "source": "enforced",
            "time_scale": 1.5,
            "host_alone_gflops": 180.0,
            "host_busy_gflops": 120.0,
        },
        "fingerprint": "synthetic",
        "calibration": {"id": "c0ffee"},
        "command": f"fleetbed run synthetic --seed {config.seed}",
        "started": "2025-01-02T03:04:05+00:00",
        "ended": "2025-01-02T03:24:05+00:00" if status == "done" else None,
        "host_can": [
            {"knob": "cpu", "status": "enforced", "backend": "pacing + cgroup v1 quota", "note": ""},
            {"knob": "memory", "status": "enforced", "backend": "cgroup v1", "note": ""},
            {
                "knob": "link",
                "status": "modelled",
                "backend": "timeline",
                "note": "not slept through",
            },
            {"knob": "gpu-compute", "status": "unavailable", "backend": "none", "note": "no CUDA device"},
        ],
        "verify": [
            {"knob": "cpu", "asked": 0.25, "got": 0.2507, "error": 0.0028},
            {"knob": "memory", "asked": 268435456, "got": 268435456, "error": 0.0},
        ],
        "degraded": False,
    }


class _Writer:
    def __init__(self, config: RunConfig, clients: int, unfit: bool, with_failures: bool) -> None:
        self.config = config
        self.rng = np.random.default_rng([config.seed, len(config.algorithm.name), ord(config.algorithm.name[-1])])
        self.kinds = [KINDS[k * len(KINDS) // clients] for k in range(clients)]
        self.unfit = {clients - 1} if unfit else set()
        self.failures = with_failures
        self.final, self.pace, self.share = METHODS[config.algorithm.name]
        self.samples = self.rng.integers(120, 420, clients)
        self.task = 0

    def client_rows(self) -> list[dict[str, Any]]:
        rows = []
        for k, kind in enumerate(self.kinds):
            variant = VARIANTS[kind.variant]
            fits = k not in self.unfit
            labels = self.rng.multinomial(int(self.samples[k]), self.rng.dirichlet([0.5] * CLASSES))
            rows.append(
                {
                    "client": k,
                    "name": f"{k:03d}",
                    "device": kind.device,
                    "device_title": kind.title,
                    "link": kind.link,
                    "variant": kind.variant if fits else None,
                    "reason": self.reason(kind, fits),
                    "memory_predicted_bytes": variant.memory_mib << 20 if fits else None,
                    "memory_cap_bytes": kind.cap_mib << 20,
                    "rate_gflops": kind.rate_gflops,
                    "slowdown": 180 / kind.rate_gflops,
                    "load_w": kind.load_w,
                    "idle_w": None if kind.load_w is None else kind.load_w / 3,
                    "samples": int(self.samples[k]),
                    "test_samples": 50,
                    "label_counts": json.dumps(labels.tolist()),
                }
            )
        return rows

    def reason(self, kind: Kind, fits: bool) -> str:
        if not fits:
            return f"resnet10 needs {VARIANTS['resnet10'].memory_mib} MiB and 64 MiB are free"
        names = [*VARIANTS, None]
        larger = names[names.index(kind.variant) + 1]
        return f"{larger} needs more than the {kind.cap_mib} MiB that are free" if larger else "it is the largest"

    def cap_rows(self) -> list[dict[str, Any]]:
        rows = []
        for k, kind in enumerate(self.kinds):
            knobs = (
                ("cpu", "enforced", "pacing", kind.rate_gflops, kind.rate_gflops * 1.002, "GFLOPS"),
                ("memory", "enforced", "cgroup-v1", kind.cap_mib << 20, kind.cap_mib << 20, "B"),
                ("link", "modelled", "timeline", kind.up_mbit_s, None, "Mbit/s"),
            )
            for knob, status, backend, asked, got, unit in knobs:
                row = {"client": k, "knob": knob, "status": status, "backend": backend, "unit": unit}
                rows.append({**row, "asked": asked, "got": got, "note": ""})
        return rows

    def one_task(self, k: int, round_: int, base: int, start: float) -> dict[str, Any]:
        """A task from dispatch to upload, or to where it failed."""
        kind, variant = self.kinds[k], VARIANTS[self.kinds[k].variant]
        steps = max(1, int(self.samples[k]) // 16)
        size = int(variant.megabytes * 1e6 * self.share) + 440
        plan = steps * variant.step_gflop / (kind.rate_gflops * 0.22)
        overrun = 1 + abs(self.rng.normal(0, 0.01))
        downloaded = start + size * 8 / (kind.up_mbit_s * 2e6) + self.rng.uniform(0.01, 0.08)
        begun = downloaded
        ended = begun + plan * overrun
        uploaded = ended + size * 8 / (kind.up_mbit_s * 1e6) + self.rng.uniform(0.01, 0.2)
        outcome = "ok"
        if self.failures:
            draw = self.rng.random()
            risk = 0.03 if kind.device == "pi-zero-2w" else 0.004
            outcome = "oom" if draw < risk else "crash" if draw < 2 * risk else "offline" if draw < 3 * risk else "ok"
        if outcome in ("oom", "crash"):
            ended, uploaded = begun + plan * 0.3, None
        if outcome == "offline":
            downloaded = begun = ended = uploaded = None
        failed = outcome != "ok"
        active = (ended or start) - start
        self.task += 1
        peak = int((variant.memory_mib << 20) * self.rng.uniform(0.88, 0.99))
        return {
            "task": self.task,
            "client": k,
            "round": round_,
            "stage": "train",
            "variant": kind.variant,
            "outcome": outcome,
            "detail": {"oom": "killed at its memory cap", "crash": "exit code -11"}.get(outcome, ""),
            "base_version": base,
            "merged_version": None,
            "staleness": None,
            "dispatched_s": start,
            "downloaded_s": downloaded,
            "compute_start_s": begun,
            "compute_end_s": ended,
            "uploaded_s": uploaded,
            "ended_s": None,
            "waited_s": None,
            "host_queued_s": start * 1.5,
            "host_start_s": None if begun is None else begun * 1.5,
            "host_end_s": None if ended is None else ended * 1.5,
            "plan_s": plan,
            "time_scale": 1.5,
            "measured_s": None if failed else plan * overrun,
            "overrun": None if failed else overrun,
            "cpu_s": None if begun is None else (ended - begun) * kind.rate_gflops / 180,
            "throttled_s": None if begun is None else (ended - begun) * 0.01,
            "peak_bytes": None if begun is None else (kind.cap_mib << 20 if outcome == "oom" else peak),
            "anon_bytes": None if begun is None else int(peak * 0.9),
            "cap_bytes": kind.cap_mib << 20,
            "gpu_peak_bytes": None,
            "gpu_w": None,
            "plan_flops": None,
            "flops": steps * variant.step_gflop * 1e9,
            "bytes_down": size,
            "bytes_up": None if uploaded is None else size,
            "joules": None if kind.load_w is None else kind.load_w * active,
            "steps": None if failed else steps,
            "samples": None if failed else steps * 16,
            "loss": None if failed else float(2.3 * np.exp(-round_ / 20) + self.rng.uniform(0, 0.1)),
        }

    def in_rounds(self, rounds: int) -> Any:
        policy, now = self.config.policy, 0.0
        yield {"evaluations": self.evaluations(0, 0, 0.0)}
        for r in range(1, rounds + 1):
            tasks = [self.one_task(k, r, r - 1, now) for k in range(len(self.kinds)) if k not in self.unfit]
            latest = now + policy.deadline_s if policy.deadline_s else float("inf")
            for task in tasks:
                if task["outcome"] != "ok":
                    continue
                if task["uploaded_s"] > latest:
                    task["outcome"] = "late"
                else:
                    task.update(merged_version=r, staleness=0)
            counted = [t for t in tasks if t["merged_version"] is not None]
            ends = [t["uploaded_s"] or t["compute_end_s"] or now for t in tasks if t["outcome"] != "late"]
            waited = latest if any(t["outcome"] == "late" for t in tasks) else max(ends)
            merge = self.merge_row(r, r, now, waited + 0.05, len(counted))
            now = waited + 0.05
            yield {
                "tasks": tasks,
                "rounds": [merge],
                "evaluations": self.evaluations(r, r, now),
                "metrics": self.metrics(r),
                "notices": [
                    {
                        "host_s": now * 1.5,
                        "device_s": now,
                        "kind": t["outcome"],
                        "text": f"client {t['client']:03d}",
                    }
                    for t in tasks
                    if t["outcome"] == "oom"
                ],
            }

    def asynchronous(self, rounds: int) -> Any:
        """Each client starts anew when its result has arrived; every arrival is a merge."""
        active = [k for k in range(len(self.kinds)) if k not in self.unfit]
        yield {"evaluations": self.evaluations(0, 0, 0.0)}
        flying = [self.one_task(k, 1, 0, 0.0) for k in active]
        heap = [(t["uploaded_s"] or t["dispatched_s"] + t["plan_s"], t["task"], t) for t in flying]
        heapq.heapify(heap)
        version, last = 0, 0.0
        while version < rounds * len(active):
            now, _, task = heapq.heappop(heap)
            tables: dict[str, list[dict[str, Any]]] = {"tasks": [task]}
            if task["outcome"] == "ok":
                version += 1
                task.update(merged_version=version, staleness=version - 1 - task["base_version"])
                round_ = 1 + (version - 1) // len(active)
                tables["rounds"] = [self.merge_row(version, round_, last, now, 1)]
                last = now
                if version % len(active) == 0:
                    tables["evaluations"] = self.evaluations(version, round_, now)
                    tables["metrics"] = self.metrics(version)
            yield tables
            new = self.one_task(task["client"], 1 + version // len(active), version, now)
            heapq.heappush(heap, (new["uploaded_s"] or now + new["plan_s"], new["task"], new))

    def merge_row(self, version: int, round_: int, start: float, end: float, merged: int) -> dict[str, Any]:
        times = {
            "device_start_s": start,
            "device_end_s": end,
            "host_start_s": start * 1.5,
            "host_end_s": end * 1.5,
        }
        return {
            "version": version,
            "round": round_,
            "stage": "train",
            "server_s": 0.05,
            "merged": merged,
            **times,
        }

    def evaluations(self, version: int, round_: int, device_s: float) -> list[dict[str, Any]]:
        used = {self.kinds[k].variant for k in range(len(self.kinds)) if k not in self.unfit}
        shape = 1 - np.exp(-round_ / self.pace)
        rows = []
        for name in sorted(used):
            mean = 0.1 + (self.final - 0.1 + VARIANTS[name].bonus) * shape
            accuracy = float(np.clip(mean + self.rng.normal(0, 0.008), 0.05, 0.99))
            row = {"version": version, "round": round_, "device_s": device_s, "target": name, "variant": name}
            result = {"samples": 2000, "accuracy": accuracy, "loss": float(2.3 * (1 - accuracy))}
            rows.append({**row, "client": None, "local": 0, **result})
        return rows

    def metrics(self, version: int) -> list[dict[str, Any]]:
        if self.config.algorithm.name != "inco":
            return []
        theta, beta = self.rng.uniform(0.2, 1.2), self.rng.normal(0.01, 0.01)
        return [
            {"version": version, "task": None, "name": f"{name}/layer{stage}", "value": float(value / stage)}
            for stage in (1, 2, 3, 4)
            for name, value in (("theta", theta), ("beta", beta))
        ]
