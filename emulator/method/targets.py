"""The tensors of what is evaluated."""

from __future__ import annotations

from torch import Tensor

from fleetbed.emulator.method.algorithm import Context, Target
from fleetbed.emulator.method.bundle import Bundle


def target_tensors(target: Target, context: Context, kept: Bundle | None) -> dict[str, Tensor]:
    """Over the variant's initial tensors what the client kept, over them the target's own."""
    tensors = {**(kept.under(target.prefix) if kept is not None else {}), **(target.tensors or {})}
    if tensors.keys() >= context.family.index(target.variant, context.spec).keys():
        return tensors  # nothing of the initial ones would be left, so they are not made
    return {**context.initial(target.variant), **tensors}
