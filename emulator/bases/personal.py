"""What FedPer, FedRep and LG-FedAvg share: a part of the model is averaged, the rest is each client's own."""

from __future__ import annotations

from dataclasses import replace

from fleetbed.emulator.bases.averaging import ALL_SECTIONS, Averaging
from fleetbed.emulator.method.algorithm import Client, Needs, Target
from fleetbed.emulator.method.bundle import Bundle, prefixed
from fleetbed.emulator.method.local_training import MODEL, on_both_test_sets


class Personal(Averaging):
    """Evaluates what the server averaged together with what each client kept; `sections` says which is which."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, reported="personal-own")

    def targets(self, state: Bundle) -> list[Target]:
        return on_both_test_sets(super().targets(state))


class PersonalHead(Personal):
    """The representation (all but the classifier) is averaged, the head stays with the client."""

    sections = ALL_SECTIONS - {"classifier"}

    def step_down(self, kept: Bundle, client: Client) -> Bundle | None:
        """The head, where the smaller variant has one of the same shape."""
        net, saved = self.context.family.outline(client.variant, self.context.spec), kept.under(MODEL)
        head = {name: t for name, t in net.state_dict().items() if not self.travels(net, name)}
        if any(name not in saved or saved[name].shape != t.shape for name, t in head.items()):
            return None
        return Bundle(prefixed(MODEL, {name: saved[name] for name in head}))
