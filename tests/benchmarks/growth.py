"""How time and memory grow with clients, model size and rounds: figures, fitted exponents and a plot.

    python tests/benchmarks/growth.py clients model rounds --out growth

A tenth of the fleet takes part in a round; the model is varied by its width, with ten clients a round. An exponent is
the slope of the logarithms: over all points, and between the last two, where fixed costs weigh least. 1 is linear.
What was measured is kept in the folder, so that the three can be measured one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fleet_runs import MIB, Asked, Running, print_markdown, smaps

CLIENTS = (10, 30, 100, 300, 1000)
WIDTHS = (8, 16, 32, 64)
ROUNDS = 200
START, ROUND, TOTAL = "first task s", "round s", "all rounds s"
BROKER, REST, LARGEST = "broker RSS MiB", "USS of all clients MiB", "largest client MiB"
AXES = {"clients": "clients", "model": "parameters", "rounds": "rounds"}
Point = dict[str, float]


def against_clients(clients: int) -> Point:
    return {"clients": clients, **measure(Asked(clients=clients, part=max(1, clients // 10), rounds=7))}


def against_model(width: int) -> Point:
    from fleetbed.models.base import InputSpec
    from fleetbed.models.families.lookup import family

    net = family("resnet-stage", {"base_width": width}).outline("resnet10", InputSpec((1, 28, 28), 10))
    found = measure(Asked(clients=20, part=10, rounds=12, base_width=width))
    return {"parameters": sum(p.numel() for p in net.parameters()), **found}


def measure(asked: Asked) -> Point:
    with tempfile.TemporaryDirectory() as name:
        run = Running(asked, Path(name))
        look = asked.rounds - 2
        run.wait_for_round(look)
        broker = smaps(run.process.pid)["Rss"] / MIB
        own: list[float] = []
        with contextlib.suppress(OSError):  # a small fleet's run may end meanwhile
            own = client_uss(run)
        run.wait()
        found = {START: run.first_task_s(), ROUND: run.round_s(look), BROKER: broker}
        return {**found, REST: sum(own) or math.nan, LARGEST: max(own, default=math.nan)}


def client_uss(run: Running) -> list[float]:
    return [smaps(process.pid)["Uss"] / MIB for process in run.clients()]


def against_rounds(rounds: int) -> list[Point]:
    """One run, looked at while it goes on."""
    with tempfile.TemporaryDirectory() as name:
        run = Running(Asked(clients=50, rounds=rounds + 10, source="modelled"), Path(name))
        memory = {}
        for number in (10, 20, 50, 100, 150, rounds):
            run.wait_for_round(number)
            memory[number] = smaps(run.process.pid)["Rss"] / MIB
        run.wait()
        with run.records() as db:
            ends = dict(db.execute("SELECT round, host_end_s FROM rounds"))
        return [{"rounds": n, TOTAL: ends[n] - ends[1], BROKER: memory[n]} for n in memory]


def exponents(points: Sequence[Point], x: str, y: str) -> tuple[float, float]:
    """Over all points, and between the last two."""
    logs = [(math.log(point[x]), math.log(point[y])) for point in points if not math.isnan(point[y])]  # it was missed
    xs, ys = zip(*logs, strict=True)
    slope = statistics.linear_regression(xs, ys).slope
    return slope, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])


def draw(found: dict[str, list[Point]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from fleetbed.analysis.figures.style import COLOURS, GREY, MARKERS, RC

    with pyplot.rc_context(RC):
        figure, panels = pyplot.subplots(2, len(found), figsize=(3.0 * len(found), 5.2), squeeze=False, sharex="col")
        for column, (what, points) in enumerate(found.items()):
            x = AXES[what]
            for row, unit in enumerate((" s", " MiB")):
                panel = panels[row][column]
                names = [name for name in points[0] if name.endswith(unit)]
                for number, name in enumerate(names):
                    style = {"color": COLOURS[number], "marker": MARKERS[number]}
                    panel.loglog([p[x] for p in points], [p[name] for p in points], label=name, **style)
                ends = [points[0][x], points[-1][x]]
                low = min(points[0][name] for name in names)
                panel.loglog(ends, [low, low * ends[1] / ends[0]], color=GREY, linestyle="dotted", label="linear")
                panel.set_ylabel("seconds" if unit == " s" else "MiB")
                panel.margins(y=0.3)
                panel.legend(loc="upper left")
            panels[1][column].set_xlabel(x)
            panels[0][column].set_title(f"against {x}")
        for suffix in ("png", "pdf"):
            figure.savefig(out / f"growth.{suffix}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=[*AXES, "draw"], help="what to measure; draw: only what is kept")
    parser.add_argument("--out", type=Path, default=Path("growth"))
    parser.add_argument("--most", type=int, default=CLIENTS[-1], help="leave out fleets that are larger")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    arguments.out.mkdir(exist_ok=True)
    for what in set(arguments.what) - {"draw"}:
        series = [series_of(what, arguments.most) for _ in range(arguments.repetitions)]
        (arguments.out / f"{what}.json").write_text(json.dumps(series))
    found = {}
    for what, x in AXES.items():
        path = arguments.out / f"{what}.json"
        if not path.exists():
            continue
        series = json.loads(path.read_text())
        middle = [
            {name: statistics.median(p[name] for p in same if not math.isnan(p[name])) for name in same[0]}
            for same in zip(*series, strict=True)
        ]
        found[what] = middle
        columns = [name for name in middle[0] if name != x]
        print(f"\nagainst {x}, median of {len(series)}")
        print_markdown([x, *columns], [[f"{p[x]:.0f}", *(f"{p[name]:.2f}" for name in columns)] for p in middle])
        slopes = {name: exponents(middle, x, name) for name in columns}
        per_repetition = {name: [exponents(one, x, name)[0] for one in series] for name in columns}
        print_markdown(
            ["grows as", "exponent", "of the repetitions", "between the last two"],
            [
                [name, f"{whole:.2f}", f"{min(each):.2f} to {max(each):.2f}", f"{last:.2f}"]
                for name, (whole, last) in slopes.items()
                for each in [per_repetition[name]]
            ],
        )
    draw(found, arguments.out)


def series_of(what: str, most: int) -> list[Point]:
    if what == "clients":
        return [against_clients(clients) for clients in CLIENTS if clients <= most]
    if what == "model":
        return [against_model(width) for width in WIDTHS]
    return against_rounds(ROUNDS)


if __name__ == "__main__":
    main()
