"""What a Flower app reports about itself, in the records: its metrics, and from them the accuracy of the run."""

from __future__ import annotations

import re

from fleetbed.emulator.engine.evaluation import Evaluations
from fleetbed.emulator.records.records import Records
from fleetbed.emulator.records.tables import EvaluationRow, MetricRow
from fleetbed.flower.client import LOSSES
from fleetbed.flower.packing import EXAMPLES

ACCURACY = re.compile(r"(^|[-_ .])acc(uracy)?$", re.IGNORECASE)


class Reported:
    """Holds what was reported until it is recorded: the ServerApp reports in a thread of its own."""

    def __init__(self, records: Records, title: str) -> None:
        self._records = records
        self._title = title
        self._on_server = False  # the ServerApp evaluates by itself, so that its figures are the run's accuracy
        self._waiting: list[tuple[int, float, str, int, dict[str, float]]] = []

    def note(self, version: int, device_s: float, who: str, round_: int, metrics: dict[str, float]) -> None:
        self._waiting.append((version, device_s, who, round_, metrics))

    def write(self, evaluations: Evaluations) -> None:
        """Record what was reported: by the server all of it, and the accuracy, where there is one, as the run's."""
        waiting, self._waiting = self._waiting, []
        self._on_server |= any(who == "server" for _, _, who, _, _ in waiting)
        for version, device_s, who, round_, metrics in waiting:
            if who == "server":
                self._records.write(
                    MetricRow(version, None, f"server {name}", value) for name, value in metrics.items()
                )
            found = accuracy_and_loss(metrics)
            if found is None or (who == "clients" and self._on_server):
                continue
            evaluations.add(
                EvaluationRow(
                    version=version,
                    round=round_,
                    device_s=device_s,
                    target=who,
                    variant=self._title,
                    client=None,
                    local=0,
                    samples=max(1, int(metrics.get(EXAMPLES, 1))),
                    accuracy=found[0],
                    loss=found[1],
                )
            )


def accuracy_and_loss(metrics: dict[str, float]) -> tuple[float, float] | None:
    """What an app calls its accuracy and its loss; None unless it reports both."""
    accuracy = next((value for name, value in metrics.items() if ACCURACY.search(name) and 0 <= value <= 1), None)
    loss = next((value for name, value in metrics.items() if name in LOSSES or name.lower().endswith("loss")), None)
    return None if accuracy is None or loss is None else (accuracy, loss)
