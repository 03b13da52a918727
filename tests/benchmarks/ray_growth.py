"""How a fleet over Ray grows with its nodes: simulated from costs that are measured here.

    python tests/benchmarks/ray_growth.py costs COSTS.json      # measures, with Ray on this machine: a minute
    python tests/benchmarks/ray_growth.py simulate COSTS.json [--measured ROUNDS.json] [--plot PNG]

`costs` carries out a few rounds of the setting of `round_cost.py`, with the 19.7 MB of ResNet10 and with a model of
width 8 (0.3 MB), and measures the CPU seconds of the head's one thread for each task: to send it, to take its answer,
to merge it, for its records and checkpoints; how long a task takes on a core of a node; and how long the head takes to
list the idle ones of 100,000 clients, which it does whenever a task ends.

`simulate` plays the scheduler with these costs: the head does one thing at a time; a node has one core and gets one
order ahead while more orders wait than there are cores; messages share the head's link, on which a model goes to each
node once a round and comes back from each task. Nodes do nothing while the head merges. A thousand of 100,000 clients
take part in a round. The link is assumed, not measured: 10 Gbit/s unless `--gbit` says otherwise.
`--measured` adds what `ray_rounds.py --keep` found.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import shutil
import sqlite3
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from round_setting import write_experiment

T = TypeVar("T")
CLIENTS, PER_ROUND = 100_000, 1000
NODES = (1, 2, 4, 8, 16, 32, 64, 100)
WIDTHS = {"ResNet10, 19.7 MB": 64, "ResNet10 of width 8, 0.3 MB": 8}
ROUNDS = 4


def measure(width: int) -> dict[str, float]:
    """The costs of one model: CPU seconds of the head's thread a task, seconds of a task on a core, bytes."""
    from fleetbed.emulator.engine.dispatch import Dispatcher
    from fleetbed.emulator.engine.engine import Engine
    from fleetbed.emulator.engine.observer import Observer
    from fleetbed.emulator.engine.server import Server
    from fleetbed.emulator.records.records import Records
    from fleetbed.emulator.remote.fleet import RayFleet
    from fleetbed.emulator.resume.checkpoint import Checkpoints
    from fleetbed.emulator.run import run
    from fleetbed.profiles.experiment import runs
    from fleetbed.profiles.resolve import load_experiment

    spent: Counter[str] = Counter()
    inside: list[str] = []  # the measured calls under way: each is charged only for what it does itself

    def charge(kind: type, method: str, name: str) -> None:
        original: Callable[..., Any] = getattr(kind, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            inside.append(name)
            try:
                return original(*args, **kwargs)
            finally:
                inside.pop()
                taken = time.thread_time() - start
                spent[name] += taken
                if inside:
                    spent[inside[-1]] -= taken

        setattr(kind, method, timed)

    charge(Dispatcher, "dispatch", "send")
    charge(RayFleet, "_send", "send")
    charge(RayFleet, "_on_answer", "answer")
    charge(Engine, "_computed", "answer")
    charge(Engine, "_uploaded", "answer")
    charge(Server, "finish", "merge")
    charge(Records, "write", "records")
    charge(Checkpoints, "save", "checkpoint")
    folder = Path(tempfile.mkdtemp())
    try:
        path = write_experiment(folder, samples=96, rounds=ROUNDS, source="modelled")
        sets = ("processes=ray", f"model.options={{base_width: {width}}}")
        (config,) = runs(load_experiment(str(path), (folder,), sets))
        run.start(config, folder / "run", search=(folder,), command="", observer=Observer())
        with sqlite3.connect(folder / "run" / "run.sqlite") as db:
            tasks, task_s, bytes_up = db.execute(
                "SELECT count(*), avg(seconds), avg(bytes_up) FROM "
                "(SELECT host_end_s - host_start_s AS seconds, bytes_up FROM tasks WHERE round > 1)"
            ).fetchone()
            (all_tasks,) = db.execute("SELECT count(*) FROM tasks").fetchone()
    finally:
        shutil.rmtree(folder)
    assert tasks
    per_task = {f"{name}_s": spent[name] / all_tasks for name in ("send", "answer", "merge", "records", "checkpoint")}
    return {**per_task, "list_s": list_s(), "task_s": task_s, "bytes": bytes_up}


def list_s() -> float:
    """Seconds in which the head lists the idle ones of all clients of the fleet."""
    from fleetbed.emulator.engine.participant import ClientProgress
    from fleetbed.emulator.engine.roster import Roster

    roster = Roster.__new__(Roster)
    away = SimpleNamespace(away=frozenset())
    clients = {number: ClientProgress("resnet10") for number in range(CLIENTS)}
    roster._progress = SimpleNamespace(tasks={}, clients=clients, availability=away)
    start = time.thread_time()
    assert len(roster.idle()) == CLIENTS
    return time.thread_time() - start


def play(costs: dict[str, float], nodes: int, tasks: int, link_bytes_s: float) -> dict[str, float]:
    """One round: its seconds, and the seconds for which the head's thread and the head's link were busy."""
    message_s = costs["bytes"] / link_bytes_s
    head_free = link_free = head_busy = link_busy = 0.0
    free_at = [0.0] * nodes  # when the core of a node has done what it has
    has_model = [False] * nodes
    room = Counter(dict.fromkeys(range(nodes), 2))
    waiting = tasks
    events: list[tuple[float, int]] = []  # answers that have come in, by time and node
    send_s, answer_s = costs["send_s"], costs["answer_s"] + costs["records_s"] + costs["list_s"]
    ready = deque(range(nodes))
    ready.extend(range(nodes))  # the second time around: one order ahead

    def send(node: int) -> None:
        nonlocal head_free, head_busy, link_free, link_busy, waiting
        waiting -= 1
        room[node] -= 1
        head_free += send_s
        head_busy += send_s
        arrives = head_free
        if not has_model[node]:
            has_model[node] = True
            arrives = link_free = max(link_free, head_free) + message_s
            link_busy += message_s
        free_at[node] = max(free_at[node], arrives) + costs["task_s"]
        heapq.heappush(events, (free_at[node], node))

    while waiting and ready and (len(ready) > nodes or waiting > nodes):
        send(ready.popleft())
    while events:
        done, node = heapq.heappop(events)
        link_free = max(link_free, done) + message_s
        link_busy += message_s
        head_free = max(head_free, link_free) + answer_s
        head_busy += answer_s
        room[node] += 1
        if waiting:
            send(node)
    merge_s = tasks * (costs["merge_s"] + costs["checkpoint_s"])
    return {
        "round_s": head_free + merge_s,
        "head_s": head_busy + merge_s,
        "link_s": link_busy,
        "merge_s": merge_s,
        "listing_s": tasks * costs["list_s"],
    }


def simulate(
    costs: dict[str, dict[str, float]], link_bytes_s: float, measured: list[dict[str, Any]], plot: Path | None
) -> None:
    played = {model: [play(each, nodes, PER_ROUND, link_bytes_s) for nodes in NODES] for model, each in costs.items()}
    for model, each in costs.items():
        times = {key.removesuffix("_s"): 1000 * value for key, value in each.items() if key != "bytes"}
        print(f"{model}: {', '.join(f'{key} {value:.2f} ms' for key, value in times.items())}")
    heads = (
        "nodes",
        "model",
        "round s",
        "times faster than 1 node",
        "head busy",
        "head's link busy",
        "merging",
        "listing",
    )
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for model, rounds in played.items():
        for nodes, one in zip(NODES, rounds, strict=True):
            shares = " | ".join(
                f"{one[key] / one['round_s']:.0%}" for key in ("head_s", "link_s", "merge_s", "listing_s")
            )
            faster = rounds[0]["round_s"] / one["round_s"]
            print(f"| {nodes} | {model} | {one['round_s']:.1f} | {faster:.1f} | {shares} |")
    if plot is not None:
        _draw(played, measured, plot)


def _draw(played: dict[str, list[dict[str, float]]], measured: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from fleetbed.analysis.figures.style import COLOURS, GREY, MARKERS, RC

    with matplotlib.rc_context(RC):
        figure, axes = pyplot.subplots(figsize=(6.4, 3.8))
        axes.plot(NODES, NODES, color=GREY, linestyle=":", label="as many times as nodes")
        for (model, rounds), colour, marker in zip(played.items(), COLOURS, MARKERS, strict=False):
            faster = [rounds[0]["round_s"] / one["round_s"] for one in rounds]
            axes.plot(NODES, faster, color=colour, marker=marker, label=f"simulated: {model}")
        if measured:
            cores = os.cpu_count() or 1
            counts = [nodes for nodes in sorted({each["nodes"] for each in measured}) if nodes <= cores]
            quickest = [min(min(each["ray"]["round_s"]) for each in measured if each["nodes"] == n) for n in counts]
            faster = [quickest[0] / seconds for seconds in quickest]
            axes.plot(counts, faster, "P", color=COLOURS[5], markersize=7, label="measured: ResNet10, 19.7 MB")
        axes.set(xscale="log", yscale="log", xlabel="nodes with one core each", ylabel="times faster than one node")
        axes.set_xticks(NODES, [str(nodes) for nodes in NODES])
        axes.set_yticks(NODES, [str(nodes) for nodes in NODES])
        axes.minorticks_off()
        axes.legend()
        figure.savefig(path)
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["costs", "simulate"])
    parser.add_argument("costs", type=Path)
    parser.add_argument("--gbit", type=float, default=10, help="of the head's link a second")
    parser.add_argument("--clients", type=int, default=CLIENTS, help="of the fleet")
    parser.add_argument("--measured", type=Path)
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    if asked.do == "costs":
        found = {}
        for model, width in WIDTHS.items():
            # each in a process of its own, because it changes classes
            pid = os.fork()
            if not pid:
                part = asked.costs.with_suffix(".part")
                part.write_text(json.dumps(measure(width)))
                os._exit(0)
            os.waitpid(pid, 0)
            found[model] = json.loads(asked.costs.with_suffix(".part").read_text())
            asked.costs.with_suffix(".part").unlink()
        asked.costs.write_text(json.dumps(found, indent=1))
        return
    measured = json.loads(asked.measured.read_text()) if asked.measured else []
    costs = json.loads(asked.costs.read_text())
    for each in costs.values():
        each["list_s"] *= asked.clients / CLIENTS  # it looks at one after another
    simulate(costs, asked.gbit * 1e9 / 8, measured, asked.plot)


if __name__ == "__main__":
    main()
