"""The weight of the live page, and how soon it shows what a run has recorded.

    python tests/benchmarks/live_page.py --clients 100 --rounds 100

Writes synthetic records, serves them as `fleetbed watch` does, and times GET requests on loopback: the first page, a
question whether there is anything new, and the answer after something was recorded.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "analysis"))

from synthetic_runs import write_run

from fleetbed.analysis.page.serving import LiveServer
from fleetbed.analysis.page.watching import Watched


def get(url: str) -> tuple[float, bytes]:
    began_s = time.perf_counter()
    with urllib.request.urlopen(url, timeout=120) as answer:
        content: bytes = answer.read()
    return time.perf_counter() - began_s, content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=100)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        run = write_run(Path(made), clients=asked.clients, rounds=asked.rounds)
        with LiveServer(Watched([Path(made)])) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            first_s, page = get(server.url)
            asked_s, answer = get(f"{server.url}state?known=1")
            with closing(sqlite3.connect(run / "run.sqlite", isolation_level=None)) as db:
                db.execute("INSERT INTO notices VALUES (0, 0, 'benchmark', 'something new')")
            began_s = time.perf_counter()
            stamp = json.loads(answer)["stamp"]
            while True:
                took_s, content = get(f"{server.url}state?known={stamp}")
                if json.loads(content)["stamp"] != stamp:
                    break
                time.sleep(0.05)
            shown_s = time.perf_counter() - began_s
            server.shutdown()
    print(f"{asked.clients} clients x {asked.rounds} rounds")
    print(f"page: {len(page) / 2**20:.2f} MiB, served {first_s:.2f} s after the first request")
    print(f"nothing new: {len(answer) / 2**10:.1f} KiB in {1000 * asked_s:.1f} ms")
    print(f"an update: {len(content) / 2**20:.2f} MiB in {took_s:.2f} s, at most {shown_s:.1f} s after it was recorded")


if __name__ == "__main__":
    main()
