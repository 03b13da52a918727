"""FedPer: the base layers are averaged, the head of each client is its own.

Arivazhagan et al., "Federated Learning with Personalization Layers", 2019. A model is a representation w_r and a head
w_h. Unlike FedAvg only w_r travels. A client trains both together, from the server's w_r and the head that it kept (at
first the initial one), and sends w_r back:

    client  (w_r, w_h) <- local training from (w_r received, w_h kept)
    server  w_r <- the mean over the clients that hold it

With the head among what travels it would be HeteroAvg. The paper's personal layers may be more than one; here they are
the classifier.
"""

from __future__ import annotations

from fleetbed.emulator.bases.averaging import Means
from fleetbed.emulator.bases.personal import PersonalHead
from fleetbed.emulator.method.description import Description

ABOUT = Description(
    paper="Arivazhagan et al., 2019",
    down="P + b of all but the head",
    up="P + b of all but the head",
    client="its head",
    server="one representation, of which each variant's is a part",
)


class Params(Means, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Means`; clients count the same unless `weighting` is samples."""


class Method(PersonalHead):
    params: Params
