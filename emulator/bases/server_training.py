"""What methods share whose server trains networks: these live in its state, and randomness is keyed by the merge."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fleetbed.emulator.method.algorithm import ALL_POLICIES, Context
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.randomness import derive
from fleetbed.models.base import Net, Tensors
from fleetbed.profiles.experiment import PolicyKind

#: a single result would teach the server one client's data, and the next one make it forget that
ENSEMBLE_POLICIES: frozenset[PolicyKind] = ALL_POLICIES - {"async"}
ENSEMBLE_WHY = "its server trains on what many clients sent; from one client at a time it would forget the others."
#: counts the merges in a server's state
MERGES = "merges"


def merges_of(state: Bundle) -> int:
    return state.value(MERGES, int)


@contextmanager
def seeded(seed: int, *key: int | str) -> Iterator[None]:
    """Inside, torch's global stream, from which layers draw, starts from this key; afterwards it is as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive(seed, *key))
        yield


def server_net(context: Context, variant: str, tensors: Tensors) -> Net:
    """A network in training mode on copies of these tensors. Sections that they leave out must not be used."""
    net = context.family.empty(variant, context.spec)
    net.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, strict=False, assign=True)
    return net.train()


def section_names(context: Context, variant: str, *sections: str) -> list[str]:
    """The tensors of a variant that belong to these sections."""
    net = context.family.outline(variant, context.spec)
    return [name for name in net.state_dict() if net.section(name) in sections]
