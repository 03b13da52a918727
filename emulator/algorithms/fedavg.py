"""FedAvg: weighted averaging among clients of the same architecture only.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
With several variants in use it is one FedAvg per variant, independent of the others (FedIN, 2024, Eq. 21;
"FedAvg" in InCo's Table 5): a variant of which nobody took part keeps its weights. With a fixed variant
it is the AllSmall or AllLarge of the papers.
"""

from __future__ import annotations

from msgspec import Struct

from fleetbed.emulator.algorithm import Context
from fleetbed.emulator.algorithms._averaging import Averaging, Weighting


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    weighting: Weighting = "samples"  # samples: by their number (Eq. 21); clients: all count the same (Eq. 20)


class Method(Averaging):
    params: Params
    apart = True

    def __init__(self, params: Params, context: Context) -> None:
        super().__init__(params, context)
        self.weighting = params.weighting
