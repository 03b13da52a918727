"""HeteroProx: HeteroAvg with a proximal term in the local loss.

Li et al., "Federated Optimization in Heterogeneous Networks" (FedProx), MLSys 2020, with the layer-wise
aggregation of FedIN (2024, Eq. 19) and InCo (ICLR 2024). Unlike HeteroAvg a client minimises

    CE(f(x; w), y) + (mu/2) ||w - w_received||^2          (trainable tensors only)

FedIN and InCo state mu/2 = 0.05. With mu = 0 it is HeteroAvg.
"""

from __future__ import annotations

from fleetbed.emulator.bases.averaging import Means
from fleetbed.emulator.bases.proximal import Proximal
from fleetbed.emulator.method.algorithm import Context
from fleetbed.emulator.method.description import Description
from fleetbed.profiles.types import NonNegative

ABOUT = Description(
    paper="Li et al., FedProx, MLSys 2020, layer-wise",
    down="P + b",
    up="P + b",
    client="nothing",
    server="as heteroavg",
)


class Params(Means, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Means`, and:"""

    mu: NonNegative = 0.1  # strength of the pull; its half is the factor of the squared distance


class Method(Proximal):
    params: Params

    def __init__(self, params: Params, context: Context) -> None:
        super().__init__(params, context)
        self.mu = params.mu
