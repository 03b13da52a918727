"""How fast are updates merged? The layer-wise mean of ten clients' models against reading what they sent once.

    python tests/benchmarks/merge_speed.py [--clients 10] [--repetitions 7]

The updates are ResNets at 3x32x32 as they arrive from the wire: checked frames, viewed as tensors. `reading once` is
`sum()` of every tensor that arrived, one after the other: nothing that looks at all values can be quicker. `copying` is
`copy_` of each into memory that is there already. `merge` is the method's own, from arrivals to the new state. Merging,
reading and copying take turns, with one thread and a heap that is kept, as in the broker; `of reading` is the median of
the ratios within a turn, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from fleetbed.emulator.algorithms import load_method
from fleetbed.emulator.machine import heap
from fleetbed.emulator.method.algorithm import Algorithm, Arrival, Assignment, Client, Context
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.wire import codec
from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.profiles.experiment import AlgorithmChoice, Optimizer, Training

SPEC = InputSpec((3, 32, 32), 10)
CASES = {
    "fedavg, all ResNet26": ("fedavg", "resnet-stage", ("resnet26",)),
    "heteroavg, all ResNet26": ("heteroavg", "resnet-stage", ("resnet26",)),
    "heteroavg, ResNet10 to 26 by depth": ("heteroavg", "resnet-stage", ()),
    "heteroavg, ResNets by width": ("heteroavg", "resnet-width", ()),
}


def make(name: str, family_name: str, variants: Sequence[str], clients: int) -> Algorithm:
    """The method for clients that hold these variants in turn, the largest first."""
    model = family(family_name, {})
    held = (variants or model.variants)[::-1]
    members = tuple(Client(number, held[number % len(held)], 100) for number in range(clients))
    training = Training(batch=16, epochs=1, optimizer=Optimizer(lr=0.1))
    return load_method(
        AlgorithmChoice(name=name),
        Context(seed=1, spec=SPEC, family=model, clients=members, training=training, rounds=1),
    )


def arrive(method: Algorithm, state: Bundle) -> list[Arrival]:
    """What every client sends, through the wire; each has changed every value a little."""
    found = []
    for client in method.context.clients:
        sent = method.send(state, Assignment(client=client, task=0))
        changed = {n: t + 0.01 * torch.rand(t.shape) if t.is_floating_point() else t for n, t in sent.tensors.items()}
        frames = [bytearray(frame) for frame in codec.pack(Bundle(changed))]
        found.append(Arrival(assignment=Assignment(client=client), sent=sent, message=codec.unpack(frames)))
    return found


def seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def measure(name: str, method: Algorithm, repetitions: int) -> list[str]:
    state = method.setup()
    arrivals = arrive(method, state)
    tensors = [tensor for arrival in arrivals for tensor in arrival.message.tensors.values()]
    buffers = [torch.zeros_like(tensor) for tensor in tensors]

    def read() -> None:
        for tensor in tensors:
            tensor.sum()

    def copy() -> None:
        for target, tensor in zip(buffers, tensors, strict=True):
            target.copy_(tensor)

    def merge() -> None:
        method.merge(state, arrivals)

    for act in (merge, read, copy):  # not timed: memory and code are touched for the first time
        act()
    turns = [[seconds(act) for act in (merge, read, copy)] for _ in range(repetitions)]
    merging, reading, copying = zip(*turns, strict=True)
    ratios = [m / r for m, r in zip(merging, reading, strict=True)]
    return [
        name,
        f"{sum(tensor.numel() for tensor in tensors) / 1e6:.1f} M",
        *(f"{statistics.median(times):.3f}" for times in (merging, reading, copying)),
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"{statistics.median(merging) / statistics.median(copying):.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    heap.keep()
    head = ["updates", "values", "merge s", "reading once s", "copying s", "of reading", "of copying"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for name, (method, family_name, variants) in CASES.items():
        row = measure(name, make(method, family_name, variants, args.clients), args.repetitions)
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
