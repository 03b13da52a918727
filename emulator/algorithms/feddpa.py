"""FedDPA: entries that matter to a client's own data are its own; two phases train them and the rest.

Yang, Huang and Ye, "Dynamic Personalized Federated Learning with Adaptive Differential Privacy", NeurIPS 2023. Unlike
HeteroAvg a client keeps its model v, and finds out by the Fisher information at v which entries are its own:

    F = mean_i (gradient of log p(y_i | x_i))^2 over single samples, in each tensor scaled to [0, 1]
    u = (F > threshold);   w <- v where u, else the received r
    phase 1   only u moves:      CE + (lambda1 / 2) sum_l ||w_l - r_l||
    phase 2   the rest moves:    CE + (lambda2 / 2) | sum_l ||w_l - r_l|| - bound |
    server    w <- w + the mean change, by samples;  with `clip` each change is cut to the norm `bound`, and noise of
              deviation `noise` * bound / sqrt(K) is added to it (K: clients of the fleet)

Each phase has the epochs of `training` and an optimiser of its own. A phase that nothing would move in is skipped: with
a threshold from 1 on it is HeteroAvg by samples, if lambda2 is 0; with one below 0 each client trains alone. A tensor
whose F is the same everywhere counts as F = 0. F is estimated on `fisher_samples` of the client's samples: each is a
backward pass of its own, so that the released code, which takes all, is by far the costliest part of it.

As in the released code clients send all of their entries. With `share_personal: false` u travels along, as bits, and
keeps them out of the mean, as the paper has it. Clipping and noise are off by default. A client's first model v is what
it received. Evaluated is each client's model as its last training left it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Annotated

import torch
from msgspec import Meta
from msgspec.structs import replace as replace_fields
from torch import Tensor

from fleetbed.emulator.bases.averaging import Means, Weighting, trained_shapes, weights_of
from fleetbed.emulator.bases.masks import (
    Masks,
    MovingEntries,
    OwnEntries,
    combined,
    inverted,
    is_any,
    share_of,
)
from fleetbed.emulator.method.algorithm import Arrival, Assignment, Context, Job, Reply
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.description import Description
from fleetbed.emulator.method.local_training import cross_entropy_step, keep_model, own_tensors, train
from fleetbed.emulator.randomness import torch_rng
from fleetbed.models.base import Net, Tensors, label_loss
from fleetbed.models.work import Pass, Phase, Work
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.types import NonNegative, Positive

ABOUT = Description(
    paper="Yang et al., NeurIPS 2023, layer-wise",
    down="P + b",
    up="P + b (share_personal false: and a bit for each parameter)",
    client="its model",
    server="as heteroavg",
)


class Params(Means, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Means`, and:"""

    threshold: Annotated[float, Meta(ge=-1, le=1)] = 0.4  # of the scaled F, above which an entry is the client's own
    lambda1: NonNegative = 0.1  # weight of the distance to the received model while the own entries move
    lambda2: NonNegative = 0.05  # weight of the distance's difference from `bound` while the others move
    bound: Positive = 0.5  # that difference's aim, and the norm to which changes are clipped
    clip: bool = False  # cut each change to the norm `bound`
    noise: NonNegative = 0.0  # the noise multiplier; needs `clip`
    share_personal: bool = True  # average the clients' own entries too; false: the paper
    #: samples that F is estimated on; None: all of a client's, as the released code
    fisher_samples: Annotated[int, Meta(ge=1, le=1_000_000_000)] | None = 128


class Method(OwnEntries):
    params: Params
    weighting: Weighting = "samples"

    def __init__(self, params: Params, context: Context) -> None:
        super().__init__(params, context)
        self.masks_travel = not params.share_personal

    def check(self) -> None:
        super().check()
        if self.params.noise and not self.params.clip:
            raise BadInput(
                f"params.noise is {self.params.noise:g} but params.clip is false: noise hides only changes of a "
                f"limited norm; set clip to true, or noise to 0."
            )

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        plain = super().work(state, assignment)
        samples = self.fisher_samples(assignment.client.samples)
        masked = sum(shape.numel() for shape in self.may_be_own(assignment.client.variant).values())
        assert plain.bytes_up is not None
        own = Phase(steps=plain.steps, batch=plain.batch, parameter_passes=2)
        # in each tensor whose F differs the largest scaled F is 1 and the least 0
        has_own, has_common = self.params.threshold < 1, self.params.threshold >= 0
        return replace_fields(
            plain,
            earlier=(own,) if has_own and has_common else (),
            parameter_passes=2 if has_own or self.params.lambda2 else 0,
            once=(Pass("train", "all", 1, samples),),
            held_models=3,  # what was received, what was kept, and what the model began with
            # the samples of F, and a byte for each entry of the mask and of its inverse
            held_values=samples * prod(self.context.spec.shape) + masked // 2,
            bytes_up=plain.bytes_up + self.mask_bytes(assignment.client.variant),
        )

    def fisher_samples(self, samples: int) -> int:
        return min(samples, self.params.fisher_samples or samples)

    # the client's half

    def client(self, job: Job) -> Reply:
        received = weights_of(job.message)
        model = job.model(received if job.kept is None else own_tensors(job))
        masks = self.own_entries(job, model)
        start = combined(masks, dict(model.state_dict()), received)
        model.load_state_dict(start)
        metrics: dict[str, float] = {}
        common = inverted(masks)
        if is_any(masks):
            step = cross_entropy_step(model, pull(model, received, self.params.lambda1))
            own = MovingEntries(job, model, masks, others=False)
            metrics |= train(job, model, step, optimizer=own, phase="own" if is_any(common) else "")
        if is_any(common):
            step = cross_entropy_step(model, pull(model, received, self.params.lambda2, self.params.bound))
            rest = MovingEntries(job, model, common, others=True) if is_any(masks) else None
            metrics |= train(job, model, step, optimizer=rest)
        metrics["own_share"] = share_of(masks)
        return Reply(message=self.message(job, model, masks), keep=keep_model(model), metrics=metrics)

    def own_entries(self, job: Job, model: Net) -> Masks:
        """Where the Fisher information at the model, as it is now, is above the threshold."""
        x, y = job.sample(self.fisher_samples(job.client.samples), "fisher")
        return {name: scaled(f) > self.params.threshold for name, f in fisher(model, x, y).items()}

    # the server's half

    def incoming(self, state: Bundle, arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
        if not self.params.clip:
            return arrivals
        messages = [Bundle({**a.message.tensors, **self.clipped(a)}, a.message.values) for a in arrivals]
        return [replace(a, message=message) for a, message in zip(arrivals, messages, strict=True)]

    def clipped(self, arrival: Arrival) -> Tensors:
        """The trained tensors of a result after its change was cut to `bound` and noise was added."""
        names = trained_shapes(self.context.family, arrival.client.variant, self.context.spec)
        changes = {name: arrival.message.tensors[name] - arrival.sent.tensors[name] for name in names}
        norm = float(torch.stack([change.norm() for change in changes.values()]).norm())
        deviation = self.params.bound * self.params.noise / len(self.context.clients) ** 0.5
        rng = torch_rng(self.context.seed, arrival.assignment.task, "noise")
        for change in changes.values():
            change.div_(max(1.0, norm / self.params.bound))
            if deviation:
                change.add_(torch.randn(change.shape, generator=rng), alpha=deviation)
        return {name: change.add_(arrival.sent.tensors[name]) for name, change in changes.items()}


def fisher(model: Net, x: Tensor, y: Tensor) -> Tensors:
    """The squared gradients of the log-likelihood of single samples, summed up; the model stays as it was."""
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    model.eval()
    for i in range(len(x)):
        model.zero_grad()
        label_loss(model(x[i : i + 1]), y[i : i + 1]).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                sums[name].addcmul_(p.grad, p.grad)
    model.zero_grad()
    model.train()
    return sums


def scaled(f: Tensor) -> Tensor:
    """F from 0 to 1, so that a factor such as the number of samples cancels; 0 where it is the same everywhere."""
    low, high = f.min(), f.max()
    return (f - low) / (high - low) if high > low else torch.zeros_like(f)


def pull(model: Net, anchor: Tensors, weight: float, bound: float = 0.0) -> Callable[[], None]:
    """Adds the gradient of (weight / 2) |sum over tensors of ||w - anchor|| - bound| to what is there."""
    if not weight:
        return lambda: None
    pairs = [(p, anchor[name].to(p.device)) for name, p in model.named_parameters() if p.requires_grad]

    @torch.no_grad()
    def regularise() -> None:
        norms = [float((p - start).norm()) for p, start in pairs]
        sign = 1.0 if sum(norms) > bound else -1.0 if sum(norms) < bound else 0.0
        for (p, start), norm in zip(pairs, norms, strict=True):
            if norm and p.grad is not None:
                p.grad.add_(p - start, alpha=sign * weight / 2 / norm)

    return regularise
