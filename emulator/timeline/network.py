"""Transfers on the timeline: bytes over rates, with the server's link shared among simultaneous transfers.

A pipe is one direction of the server's link. The transfers in it share its capacity max-min fairly, each limited by
its own client's link; latency, jitter and loss are drawn once per transfer. Nothing here takes real time.
"""

from __future__ import annotations

import math

from msgspec import Struct

from fleetbed.emulator.randomness import numpy_rng
from fleetbed.profiles.types import Link

SEGMENT_BYTES = 1460  # TCP payload of an Ethernet frame


class Transfer(Struct):
    task: int
    client: int
    remaining_bits: float
    limit_bit_s: float  # the client's own link in this direction
    delay_s: float  # latency, jitter and stalls, spent after the last bit has left
    rate_bit_s: float = 0.0
    total_bits: float = 0.0  # its size when it started

    @property
    def passed(self) -> float:
        """The part of the transfer that has passed, from 0 to 1."""
        return 1.0 - self.remaining_bits / self.total_bits if self.total_bits else 1.0


class Pipe(Struct):
    """One direction of the server's link. State is plain data, so a checkpoint can hold it."""

    capacity_bit_s: float
    clock_s: float = 0.0
    transfers: list[Transfer] = []

    def start(self, now_s: float, transfer: Transfer) -> None:
        self._advance(now_s)
        transfer.total_bits = transfer.remaining_bits
        self.transfers.append(transfer)
        self._share()

    def next_s(self) -> float:
        """The time at which the next transfer will have sent its last bit; infinity if there is none."""
        return min((self._end_s(t) for t in self.transfers), default=math.inf)

    def finish(self) -> Transfer:
        """Remove and return the transfer that ends next (ties by client and task, never by arrival)."""
        done = min(self.transfers, key=lambda t: (self._end_s(t), t.client, t.task))
        self._advance(self._end_s(done))
        self.transfers.remove(done)
        self._share()
        return done

    def limit(self, now_s: float, task: int, limit_bit_s: float) -> None:
        """Change the rate of a client's own link."""
        self._advance(now_s)
        for transfer in self.transfers:
            if transfer.task == task:
                transfer.limit_bit_s = limit_bit_s
        self._share()

    def drop(self, now_s: float, task: int) -> Transfer:
        """Cut a transfer off; returns it as it was at that moment."""
        self._advance(now_s)
        (cut,) = [t for t in self.transfers if t.task == task]
        self.transfers.remove(cut)
        self._share()
        return cut

    def _end_s(self, transfer: Transfer) -> float:
        if transfer.rate_bit_s == 0.0:
            return math.inf  # its link is down until its rate changes
        return self.clock_s + transfer.remaining_bits / transfer.rate_bit_s

    def _advance(self, now_s: float) -> None:
        elapsed = now_s - self.clock_s
        for transfer in self.transfers:
            transfer.remaining_bits = max(0.0, transfer.remaining_bits - transfer.rate_bit_s * elapsed)
        self.clock_s = now_s

    def _share(self) -> None:
        """The rates by max-min fairness: the slowest links are filled first, and the others share the rest."""
        left = self.capacity_bit_s
        ordered = sorted(self.transfers, key=lambda t: (t.limit_bit_s, t.client, t.task))
        for position, transfer in enumerate(ordered):
            transfer.rate_bit_s = min(transfer.limit_bit_s, left / (len(ordered) - position))
            left -= transfer.rate_bit_s


def transfer(link: Link, *, up: bool, size_bytes: int, server: Link, seed: int, client: int, task: int) -> Transfer:
    """A transfer with its randomness drawn: keyed by client, task and direction.

    Half a round trip of each end and the jitter of the client's link delay it. Lost segments are sent again;
    selective repeat recovers a burst per round trip, so n losses stall it for log2(1 + n) round trips.
    """
    rng = numpy_rng(seed, client, task, "up" if up else "down")
    jitter_s = abs(rng.normal(0.0, link.jitter_ms / 1e3)) if link.jitter_ms else 0.0
    segments = math.ceil(size_bytes / SEGMENT_BYTES)
    lost = int(rng.binomial(segments, link.loss)) if link.loss else 0
    rtt_s = (link.rtt_ms + server.rtt_ms) / 1e3
    return Transfer(
        task=task,
        client=client,
        remaining_bits=8.0 * (size_bytes + lost * SEGMENT_BYTES),
        limit_bit_s=1e6 * (link.up_mbit_s if up else link.down_mbit_s),
        delay_s=rtt_s / 2 + jitter_s + rtt_s * math.log2(1 + lost),
    )


def transfer_s(link: Link, server: Link, size_bytes: int, *, up: bool) -> float:
    """The duration of a transfer that is alone, without jitter and loss."""
    limit_mbit_s = min(link.up_mbit_s, server.down_mbit_s) if up else min(link.down_mbit_s, server.up_mbit_s)
    return 8.0 * size_bytes / (limit_mbit_s * 1e6) + (link.rtt_ms + server.rtt_ms) / 2e3
