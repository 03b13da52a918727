"""LG-FedAvg: each client has a representation of its own, and the head is averaged.

Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations", 2020. A model is
a local representation w_r and a global head w_h. Unlike FedAvg only w_h travels, and unlike FedPer it is the head that
is shared and not what is below it. A client trains both together, from the w_r that it kept (at first the initial one)
and the server's w_h, and sends w_h back:

    client  (w_r, w_h) <- local training from (w_r kept, w_h received)
    server  w_h <- the mean over the clients

Batch norm's statistics are part of w_r and stay. A client that steps down to a smaller variant begins with that one's
initial w_r. The paper starts from models that FedAvg has trained together; here all start from the initial one.
"""

from __future__ import annotations

from fleetbed.emulator.bases.averaging import Means
from fleetbed.emulator.bases.personal import Personal
from fleetbed.emulator.method.description import Description
from fleetbed.models.base import Section

ABOUT = Description(
    paper="Liang et al., 2020",
    down="P of the head",
    up="P of the head",
    client="its model without the head",
    server="one head",
)


class Params(Means, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Means`; clients count the same unless `weighting` is samples."""


class Method(Personal):
    params: Params
    sections: frozenset[Section] = frozenset({"classifier"})
