"""FedHeNN for clients of one architecture: FedAvg whose clients align their representations with the global model's.

Makhija et al., "Architecture Agnostic Federated Learning for Neural Networks", ICML 2022, Algorithm 1. Unlike FedAvg
the server also sends a representation alignment dataset (RAD) X of L unlabelled samples, new in every round, and a
client minimises, with K the gram of the features that the received global model gives to X,

    L = CE(f(x), y) + eta_t (1 - CKA(K, K_i(X))),        eta_t = eta_0 sqrt(t)

Weights are averaged as in FedAvg, which it is in round 0, and always if eta is 0. Each client keeps its model as it is
after its local training: that is the personalised model of the paper, the average is its "Global".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec.structs import replace as replace_fields

from fleetbed.emulator.algorithm import ROUND_POLICIES, Arrival, Client, Context, Job, Merged, Needs, Reply, Target
from fleetbed.emulator.algorithms import _alignment
from fleetbed.emulator.algorithms._averaging import Averaging, Weighting
from fleetbed.emulator.algorithms._local import MODEL, Step, own_targets
from fleetbed.emulator.bundle import Bundle, prefixed
from fleetbed.models.base import Net, Tensors
from fleetbed.models.work import Work
from fleetbed.profiles.errors import BadInput

RAD = "rad/x"


class Params(_alignment.Alignment, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Alignment`, and:"""

    weighting: Weighting = "samples"  # samples: by their number of samples (paper); clients: all the same (code)


class Method(Averaging):
    params: Params

    def __init__(self, params: Params, context: Context) -> None:
        super().__init__(params, context)
        self.weighting = params.weighting

    @property
    def needs(self) -> Needs:
        return Needs(
            policies=ROUND_POLICIES | {"buffered"},
            policies_why="eta grows with the number of merges, which under async is that of single results.",
            public_samples=self.params.rad,
            local_evaluation=True,
        )

    def check(self) -> None:
        _alignment.check_rad(self.context, self.params)
        if len(self.context.variants) > 1:
            raise BadInput(
                f"fedhenn_homo needs clients of one variant, but {', '.join(self.context.variants)} are in use: "
                f"set the algorithm's variant to one of them, or choose fedhenn, which takes any."
            )

    def setup(self) -> Bundle:
        state = super().setup()
        return Bundle(state.tensors, {**state.values, "round": 0})

    def send(self, state: Bundle, client: Client, stage: str, task: int) -> Bundle:
        weights = super().send(state, client, stage, task)
        if not self.aligned(state):
            return weights
        return Bundle({**weights.tensors, RAD: state.tensors[RAD]}, {"eta": self.eta(state)})

    def work(self, state: Bundle, client: Client, stage: str) -> Work:
        del stage
        aligned = self.aligned(state)
        work = _alignment.work(self.context, client, self.params, aligned=aligned)
        # the reference: the global model's features on the RAD
        return replace_fields(work, once=(_alignment.rad_pass(self.params), *work.once)) if aligned else work

    def heaviest(self, state: Bundle, client: Client) -> Work:
        del state
        return _alignment.heaviest(self.context, client, self.params)

    def local_step(self, job: Job, model: Net, start: Tensors) -> Step:
        rad = job.message.tensors.get(RAD)
        if rad is None:
            return super().local_step(job, model, start)
        reference = _alignment.gram_of(model, rad, self.params)  # the model is still the global one
        eta = job.message.values["eta"]
        assert isinstance(eta, float)
        return _alignment.step(job, model, eta, rad, reference, self.params)

    def client(self, job: Job, stage: str) -> Reply:
        reply = super().client(job, stage)
        return replace(reply, keep=Bundle(prefixed(MODEL, reply.message.tensors)))

    def merge(self, state: Bundle, arrivals: Sequence[Arrival], stage: str, version: int) -> Merged:
        merged = super().merge(state, arrivals, stage, version)
        following = _alignment.round_of(state) + 1
        rad = _alignment.draw_rad(self.context, self.params, following)
        after = Bundle({**merged.state.tensors, RAD: rad}, {**merged.state.values, "round": following})
        return replace(merged, state=after)

    def targets(self, state: Bundle) -> list[Target]:
        return [replace(target, name="global") for target in super().targets(state)] + own_targets(
            self.context, local=True
        )

    def eta(self, state: Bundle) -> float:
        return self.params.strength(_alignment.round_of(state))

    def aligned(self, state: Bundle) -> bool:
        return RAD in state.tensors and self.eta(state) > 0
