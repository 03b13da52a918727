"""HeteroProx: HeteroAvg with a proximal term in the local loss.

Li et al., "Federated Optimization in Heterogeneous Networks" (FedProx), MLSys 2020, with the layer-wise
aggregation of FedIN (2024, Eq. 19) and InCo (ICLR 2024). Unlike HeteroAvg a client minimises

    CE(f(x; w), y) + (mu/2) ||w - w_received||^2          (trainable tensors only)

FedIN and InCo state mu/2 = 0.05. With mu = 0 it is HeteroAvg.
"""

from __future__ import annotations

from msgspec import Struct

from fleetbed.emulator.algorithm import Context
from fleetbed.emulator.algorithms._averaging import Weighting
from fleetbed.emulator.algorithms._proximal import Proximal
from fleetbed.profiles.types import NonNegative


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mu: NonNegative = 0.1  # strength of the pull; its half is the factor of the squared distance
    weighting: Weighting = "clients"  # clients: all count the same; samples: by their number of samples


class Method(Proximal):
    params: Params

    def __init__(self, params: Params, context: Context) -> None:
        super().__init__(params, context)
        self.weighting = params.weighting
        self.mu = params.mu
