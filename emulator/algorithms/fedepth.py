"""FeDepth: every client trains the whole model, segment by segment, so that it fits into little memory.

Zhang et al., "Memory-adaptive Depth-wise Heterogenous Federated Learning", 2023. Unlike methods that give small devices
small models, all clients hold and send the same one. A client goes through its J segments W_1 ... W_J, shallow to deep,
and trains each for the experiment's epochs together with the classifier phi, under a short cut without parameters:

    min over W_j, phi of CE(phi(short cut(W_j(W_{j-1}(... W_1(x))))), y)      W_1 ... W_{j-1} frozen, as just trained

The server takes the mean over clients, as FedAvg does. Peak memory is that of the largest segment: its activations,
gradients and optimiser state, beside the weights of the whole model. The price is time: J passes over the data.

J follows from the device's memory in the way in which a variant does for every method. The family `resnet-segment`
has the same model as variants in 12, 6, 3, 2 and 1 segments, ordered by memory. A client gets the largest that fits, so
the fewest segments; one that runs out of memory goes on with the next larger number. With J = 1 it is FedAvg.

Each segment has an optimiser and an order of the data of its own. Batch norm of the frozen segments runs as in
training, as in the released code. That code also lets the smallest devices skip blocks, and those with much memory
train a second model; neither is part of this.
"""

from __future__ import annotations

from functools import lru_cache, partial

from fleetbed.emulator.bases.averaging import Averaging, Means
from fleetbed.emulator.method.algorithm import Assignment, Job, Target
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.description import Description
from fleetbed.emulator.method.local_training import cross_entropy_step, train
from fleetbed.models.base import Family, InputSpec, Net, Tensors
from fleetbed.models.work import Work
from fleetbed.profiles.errors import BadInput

ABOUT = Description(
    paper="Zhang et al., 2023",
    down="P + b",
    up="P + b",
    client="nothing",
    server="one model",
)


class Params(Means, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Means`."""


class Method(Averaging):
    params: Params

    def check(self) -> None:
        super().check()
        family = self.context.family
        if all(segments_of(family, variant, self.context.spec) == 1 for variant in family.variants):
            raise BadInput(
                f"model.family is {family.name}, whose variants are trained as a whole, but fedepth trains a model "
                f"segment by segment: choose resnet-segment."
            )

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        segments = segments_of(self.context.family, assignment.client.variant, self.context.spec)
        return super().work(state, assignment).through_parts(range(1, segments + 1))

    def train(self, job: Job, model: Net, start: Tensors) -> dict[str, float]:
        """Train the segments in turn; the loss is that of the last one, which is the model's."""
        for number in range(1, model.segments):
            train(job, model, cross_entropy_step(partial(model.segment, number)), phase=f"segment-{number}")
        return train(job, model, cross_entropy_step(partial(model.segment, model.segments)))

    def targets(self, state: Bundle) -> list[Target]:
        """The model, which is the same for all variants."""
        return super().targets(state) if self.apart or self.is_partial else [self.target(state, self.whole(state, ""))]


@lru_cache(maxsize=256)
def segments_of(family: Family, variant: str, spec: InputSpec) -> int:
    """In how many segments the variant is trained."""
    return family.outline(variant, spec).segments
