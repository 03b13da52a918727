"""FedProx: FedAvg with a proximal term in the local loss.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020. Unlike FedAvg a client minimises

    CE(f(x; w), y) + (mu/2) ||w - w_received||^2          (trainable tensors only)

Weights are averaged within each variant, as in `fedavg`. FedIN and InCo state mu/2 = 0.05. With mu = 0 it
is FedAvg.
"""

from __future__ import annotations

from fleetbed.emulator.bases.averaging import Means
from fleetbed.emulator.bases.proximal import Proximal
from fleetbed.emulator.method.algorithm import Context
from fleetbed.emulator.method.description import Description
from fleetbed.profiles.types import NonNegative

ABOUT = Description(
    paper="Li et al., MLSys 2020",
    down="P + b",
    up="P + b",
    client="nothing",
    server="as fedavg",
)


class Params(Means, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Means`, and:"""

    mu: NonNegative = 0.1  # strength of the pull; its half is the factor of the squared distance


class Method(Proximal):
    params: Params
    apart = True
    weighting = "samples"

    def __init__(self, params: Params, context: Context) -> None:
        super().__init__(params, context)
        self.mu = params.mu
