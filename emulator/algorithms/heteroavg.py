"""HeteroAvg: layer-wise averaging of the weights of unequal models.

FedIN (2024), Eq. 19, and InCo (Chan et al., ICLR 2024), Algorithm 1 line 4; after McMahan et al.,
"Communication- Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017. Clients train
different variants of one family, which share tensors by name. Unlike FedAvg, which needs one
architecture, each tensor is averaged over those clients of the round that hold it; one that nobody held
stays as it was. With one variant in use it is FedAvg.
"""

from __future__ import annotations

from fleetbed.emulator.bases.averaging import Averaging, Means
from fleetbed.emulator.method.description import Description

ABOUT = Description(
    paper="Chan et al., FedIN, TMLR 2024, Eq. 19",
    down="P + b",
    up="P + b",
    client="nothing",
    server="one model, of which each variant is a part",
)


class Params(Means, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Means`; clients count the same (Eq. 19) unless `weighting` is samples."""


class Method(Averaging):
    params: Params
