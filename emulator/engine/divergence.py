"""Reports training that diverges, once, and ends the run if `training.on_divergence` is stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fleetbed.emulator.records.records import Records
from fleetbed.profiles.errors import FleetbedError
from fleetbed.profiles.experiment import Training


class Divergence:
    def __init__(
        self, training: Training, records: Records, say: Callable[[str], None], host_s: Callable[[], float]
    ) -> None:
        self._stop = training.on_divergence == "stop"
        self._records = records
        self._say = say
        self._host_s = host_s

    def of_client(self, text: str, device_s: float) -> None:
        """Report that a client's result is not finite, so that it is not merged."""
        self._note("client-diverged", f"{text}; results like this are not merged", device_s)

    def of_model(self, text: str, device_s: float) -> None:
        """Report that the server's model, or the loss of an evaluated model, is not finite."""
        self._note("model-diverged", text, device_s)

    def _note(self, kind: Literal["client-diverged", "model-diverged"], text: str, device_s: float) -> None:
        # the records know, because a resumed run must not report it again
        said = self._records.rows(f"SELECT count(*) FROM notices WHERE kind = '{kind}'")[0][0]
        sentence = f"training diverged: {text}"
        if not said:
            self._records.notice(kind, sentence, self._host_s(), device_s)
        if self._stop:
            raise FleetbedError(
                f"{sentence}. The run ends because training.on_divergence is stop; start a new one with a lower "
                f"training.optimizer.lr, or with training.on_divergence=continue"
            )
        if not said:
            self._say(sentence)
