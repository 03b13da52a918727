"""FedAvg: weighted averaging among clients of the same architecture only.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
With several variants in use it is one FedAvg per variant, independent of the others (FedIN, 2024, Eq. 21;
"FedAvg" in InCo's Table 5): a variant of which nobody took part keeps its weights. With a fixed variant
it is the AllSmall or AllLarge of the papers.
"""

from __future__ import annotations

from fleetbed.emulator.bases.averaging import Averaging, Means
from fleetbed.emulator.method.description import Description

ABOUT = Description(
    paper="McMahan et al., AISTATS 2017",
    down="P + b",
    up="P + b",
    client="nothing",
    server="one model per variant",
)


class Params(Means, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Means`; clients count by their samples (Eq. 21) unless `weighting` is clients (Eq. 20)."""


class Method(Averaging):
    params: Params
    apart = True
    weighting = "samples"
