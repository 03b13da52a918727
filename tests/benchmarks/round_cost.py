"""What a round costs beside the training in it: fleetbed against bare processes and against Flower.

    python tests/benchmarks/round_cost.py [--samples 96 16] [--rounds 10] [--repetitions 3] [--flower DIR]

A hundred clients, ten a round, ResNet10 at 3x32x32, FedAvg, SGD, batch 16, one thread per process, on all cores.

bare      as many processes as cores, which stay; each loads the same weights into its one model and trains, client by
          client, by a loop written by hand with torch's fused SGD; no message, no merge, no record, no checkpoint
fleetbed  `fleetbed run` with a process per client, the caps on memory, records, and a checkpoint after every round; a
          round is from the end of the one before to its own end, so the first is left out, but not those in which a
          client trains for the first time and takes new memory. `ten` is the same with ten clients in all, so that
          every client of a counted round has trained before
Flower    its simulation on Ray, one CPU per client; from the start of a round to that of the next, the first left out.
          Twice: with clients as its tutorial for PyTorch writes them (a model, a DataLoader and an optimiser for every
          message), and tuned (the code of the bare processes, which keeps data and model)

They take turns in each repetition; the table has medians and ranges over the repetitions. With --flower Flower is
installed into that folder, unless it is there, and borrows torch and the model from this environment.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from round_setting import PER_ROUND, bare, spread, write_experiment

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.absolute())}
Figures = dict[str, list[float]]
STYLES = ("tutorial", "tuned")  # of Flower's clients


def ours(experiment: Path, folder: Path) -> tuple[float, float]:
    """Mean seconds of a round, and seconds of the whole command."""
    out = folder / "out"
    command = Path(sys.executable).with_name("fleetbed")
    start = time.perf_counter()
    _run([command, "run", experiment, "--profiles", folder, "--out", out])
    whole_s = time.perf_counter() - start
    (records,) = out.rglob("run.sqlite")
    with sqlite3.connect(records) as db:
        ends = [end for (end,) in db.execute("SELECT host_end_s FROM rounds ORDER BY version")]
    shutil.rmtree(out)
    return (ends[-1] - ends[0]) / (len(ends) - 1), whole_s


def flower(python: Path, data: Path, samples: int, rounds: int, style: str) -> tuple[float, float]:
    """Mean seconds of a round, and seconds of the whole command."""
    start = time.perf_counter()
    said = _run([python, "-c", "import flower_rounds; flower_rounds.main()", data, str(samples), str(rounds), style])
    whole_s = time.perf_counter() - start
    return statistics.mean(json.loads(said.splitlines()[-1])[1:]), whole_s


def install_flower(folder: Path) -> Path | None:
    """The Python of an environment with Flower, made if it is not there; None, with a sentence, if that fails."""
    python = folder / "bin" / "python"
    if not python.exists():
        try:
            _run([sys.executable, "-m", "venv", folder])
            _run([python, "-m", "pip", "install", "--quiet", "flwr[simulation]"])
        except subprocess.CalledProcessError as error:
            print(f"Flower could not be installed and is left out: {error.stderr.strip()[-500:]}", file=sys.stderr)
            return None
        inside = _run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
        borrowed = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (Path(inside) / "zz_borrowed.pth").write_text(borrowed)
    about = (
        "import flwr, ray, torch; print(f'Flower {flwr.__version__}, Ray {ray.__version__}, torch {torch.__version__}')"
    )
    print(_run([python, "-c", about]).strip(), end="\n\n")
    return python


def _run(command: Sequence[str | Path]) -> str:
    """What it printed; what went wrong is shown, for the commands' own words are the best there are."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, env=ENVIRONMENT).stdout
    except subprocess.CalledProcessError as error:
        print(error.stderr, file=sys.stderr)
        raise


def measure(samples: int, asked: argparse.Namespace, python: Path | None, folder: Path) -> Figures:
    experiment = write_experiment(folder, samples=samples, rounds=asked.rounds, source=asked.source)
    data = folder / f"noise-100x{samples}.npz"
    ten = write_experiment(folder, samples=samples, rounds=asked.rounds, source=asked.source, clients=PER_ROUND)
    whose = ("ours", "ten", *STYLES)
    figures: Figures = {"bare": [], **{f"{who}{what}": [] for who in whose for what in ("", " whole")}}

    def note(who: str, found: tuple[float, float]) -> None:
        figures[who].append(found[0])
        figures[f"{who} whole"].append(found[1])

    for _ in range(asked.repetitions):
        figures["bare"].append(statistics.mean(bare(data, samples, asked.rounds, len(os.sched_getaffinity(0)))))
        note("ours", ours(experiment, folder))
        note("ten", ours(ten, folder))
        if python is not None:
            for style in STYLES:
                note(style, flower(python, data, samples, asked.rounds, style))
    return figures


def kept(file: Path | None, samples: int, figures: Figures) -> Figures:
    """These figures after those of earlier runs in the file, which has them all afterwards."""
    if file is None:
        return figures
    before = json.loads(file.read_text()) if file.exists() else {}
    earlier = before.get(str(samples), {})
    before[str(samples)] = {key: [*earlier.get(key, []), *values] for key, values in figures.items()}
    file.write_text(json.dumps(before))
    return dict(before[str(samples)])


def row(samples: int, figures: Figures) -> str:
    def over(one: str, other: str) -> str:
        pairs = zip(figures[one], figures[other], strict=False)
        ratios = [a / b for a, b in pairs]
        return spread(ratios) if ratios else "-"

    def seconds(key: str) -> str:
        return spread(figures[key]) if figures[key] else "-"

    cells = [
        *(seconds(key) for key in ("bare", "ours", "ten", *STYLES)),
        *(over(key, "bare") for key in ("ours", "ten", *STYLES)),
        *(over(style, "ours") for style in STYLES),
        *(seconds(f"{key} whole") for key in ("ours", *STYLES)),
        *(over(f"{style} whole", "ours whole") for style in STYLES),
    ]
    return f"| {samples} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[96, 16], help="samples per client")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--source", default="modelled", choices=["modelled", "replay"], help="timing.source")
    parser.add_argument("--flower", type=Path, metavar="DIR", help="Flower's environment, made if it is not there")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="add to the repetitions in this file, print them all")
    asked = parser.parse_args()
    python = install_flower(asked.flower.absolute()) if asked.flower is not None else None
    everybody = ["fleetbed", *(f"Flower {style}" for style in STYLES)]
    rounds = ["fleetbed", "fleetbed ten", *everybody[1:]]
    heads = ["samples", "bare s/round", *(f"{who} s/round" for who in rounds)]
    heads += [f"{who}/bare" for who in rounds] + [f"{who}/fleetbed" for who in everybody[1:]]
    heads += [f"{who} whole s" for who in everybody] + [f"{who}/fleetbed whole" for who in everybody[1:]]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    with tempfile.TemporaryDirectory() as name:
        for samples in asked.samples:
            figures = kept(asked.keep, samples, measure(samples, asked, python, Path(name)))
            print(row(samples, figures), flush=True)


if __name__ == "__main__":
    main()
