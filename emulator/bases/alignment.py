"""FedHeNN's alignment of representations: grams, CKA, and the term that it adds to a local step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod, sqrt
from typing import Annotated, Literal

import torch
from msgspec import Meta, Struct
from msgspec.structs import replace
from torch import Tensor

from fleetbed.emulator.bases.features import cut_shapes
from fleetbed.emulator.method.algorithm import Client, Context, Job, Spec, like
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.local_training import Step, batch_norms, foreign_batch
from fleetbed.emulator.method.optimizers import Stepper
from fleetbed.emulator.method.schedule import batch_of, steps_of
from fleetbed.emulator.randomness import derive
from fleetbed.models.base import Family, InputSpec, Net, Tensors, input_dtype, label_loss
from fleetbed.models.work import Pass, ServerWork, Work
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.types import Count, NonNegative, Positive

Kernel = Literal["linear", "rbf"]
#: samples of the RAD that go through a model at once where no gradient is needed
FORWARD_BATCH = 64
TINY = 1e-30
Samples = Annotated[int, Meta(ge=1, le=20_000)]  # a gram has the square of it


class Alignment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters that both settings have."""

    eta: NonNegative = 0.01  # strength of the alignment, eta_0
    schedule: Literal["sqrt", "constant"] = "sqrt"  # eta_t = eta_0 sqrt(t), or eta_0; round 0 has none either way
    rad: Samples = 1000  # L, samples in the representation alignment dataset; the paper has 5000, the code 1000
    rad_every: Literal["step", "epoch"] = "step"  # align at every mini-batch (the code) or once an epoch (the paper)
    rad_batch: Samples | None = None  # align on so many random samples of the RAD at a time; None: on all
    kernel: Kernel = "linear"  # of the grams
    sigma: Positive = 0.5  # rbf: the bandwidth, as a fraction of the median distance between representations
    statistics: Literal["batch", "running"] = "batch"  # by which batch norm makes the representations of both grams
    last_epochs: Count | None = None  # epochs of the last round, instead of the experiment's; the code has 10

    def strength(self, round_: int) -> float:
        if self.schedule == "sqrt":
            return self.eta * sqrt(round_)
        return self.eta if round_ else 0.0


def gram(a: Tensor, params: Alignment) -> Tensor:
    """K(p, q) of the representations a [L, d]."""
    inner = a @ a.T
    if params.kernel == "linear":
        return inner
    squares = inner.diagonal()
    distance2 = (squares[:, None] + squares[None, :] - 2 * inner).clamp_min(0)
    apart = ~torch.eye(len(a), dtype=torch.bool, device=a.device)
    median2 = distance2.detach()[apart].median() if len(a) > 1 else torch.zeros((), device=a.device)
    return torch.exp(-distance2 / (2 * params.sigma**2 * median2.where(median2 > 0, 1.0)))


def centred(k: Tensor) -> Tensor:
    """H K H with H = I - 11^T/L."""
    return k - k.mean(0, keepdim=True) - k.mean(1, keepdim=True) + k.mean()


def cka(k: Tensor, other: Tensor) -> Tensor:
    """Centred kernel alignment of two grams, from 0 to 1."""
    a, b = centred(k), centred(other)
    return (a * b).sum() / (_norm(a, k) * _norm(b, other))


def _norm(middle: Tensor, k: Tensor) -> Tensor:
    """The norm of a centred gram, kept off 0: representations that are all alike leave rounding errors alone."""
    square = (middle * middle).sum()
    rounding = (8 * torch.finfo(k.dtype).eps) ** 2 * (k * k).sum().detach()
    return torch.maximum(square, rounding + TINY).sqrt()


def representations(model: Net, x: Tensor, params: Alignment) -> Tensor:
    """What both grams of a distance are made of, in the same way, or it would not be 0 for the same model.

    Dropout is off; batch norm uses the batch's statistics or its running ones, and does not learn from the RAD.
    """
    was_training = model.training
    model.eval()
    with foreign_batch(model, params.statistics == "batch"):
        features = model.features(x)
    model.train(was_training)
    return features


@torch.no_grad()
def gram_of(model: Net, rad: Tensor, params: Alignment, *, normalise: bool = False) -> Tensor:
    """The gram of a model as it is; `normalise` divides by the norm of the centred one."""
    k = gram(torch.cat([representations(model, part, params) for part in _parts(model, rad, params)]), params)
    return k / centred(k).norm().clamp_min(TINY) if normalise else k


def _parts(model: Net, rad: Tensor, params: Alignment) -> list[Tensor]:
    """Where batch norm makes a sample's representation depend on the others, as many at once as in a step."""
    if params.statistics == "batch" and batch_norms(model):
        return [*rad.tensor_split(max(1, len(rad) // (params.rad_batch or params.rad)))]
    return [*rad.split(FORWARD_BATCH)]


def at_once(context: Context, variant: str, params: Alignment) -> int:
    """How many samples of the RAD go through a model together where no gradient is needed."""
    model = context.family.outline(variant, context.spec)
    return max(map(len, _parts(model, torch.empty(params.rad, device="meta"), params)))


def model_specs(family: Family, variant: str, spec: InputSpec) -> dict[str, Spec]:
    """The tensors of a variant, as a client sends them."""
    return like(family.tensors(variant, spec))


def loaded(context: Context, variant: str, tensors: Tensors) -> Net:
    """A model that stands on these tensors, to look at and not to train."""
    return context.family.load(variant, context.spec, tensors, f"{variant} at the server")


def draw_rad(context: Context, params: Alignment, round_: int) -> Tensor:
    assert context.public is not None  # check_rad
    return context.public.draw(params.rad, derive(context.seed, round_, "rad"))


def check_rad(context: Context, params: Alignment) -> None:
    pool = 0 if context.public is None else len(context.public)
    if pool < params.rad:
        raise BadInput(
            f"params.rad is {params.rad}, but the server's pool data.public has {pool} samples: "
            f"set data.public to {params.rad} or more, or params.rad to {pool} or less."
        )
    if params.rad_batch is not None and params.rad_batch > params.rad:
        raise BadInput(f"params.rad_batch is {params.rad_batch}, but the RAD has params.rad = {params.rad} samples.")


def step(job: Job, model: Net, eta: float, rad: Tensor, reference: Tensor, params: Alignment) -> Step:
    """L = CE(batch) + eta (1 - CKA(reference, gram of the RAD)); the reference is a constant."""
    rng = job.generator("rad")
    epoch = max(1, job.client.samples // batch_of(job.client.samples, job.context.training.batch))
    done = 0

    def one_step(optimizer: Stepper, x: Tensor, y: Tensor) -> Tensor:
        nonlocal done
        optimizer.zero_grad()
        loss = label_loss(model(x), y)
        loss.backward()
        if params.rad_every == "step" or done % epoch == 0:
            rows = torch.randperm(len(rad), generator=rng)[: params.rad_batch] if params.rad_batch else slice(None)
            features = representations(model, rad[rows].to(x.device), params)
            wanted = reference[rows][:, rows].to(x.device)
            (eta * (1 - cka(wanted, gram(features, params)))).backward()
        optimizer.step()
        done += 1
        return loss.detach()

    return one_step


def work(context: Context, client: Client, params: Alignment, *, aligned: bool, epochs: int | None = None) -> Work:
    """The work of a local training, with the RAD's passes where it is `aligned`."""
    training = context.training
    if epochs is not None:
        training = replace(training, epochs=epochs, max_steps=None)
    batch = batch_of(client.samples, training.batch)
    plain = Work(steps=steps_of(client.samples, training), batch=batch, held_models=1)
    if not aligned:
        return plain
    rows = params.rad_batch or params.rad
    each = Pass("train", "features", rows)
    received = params.rad * prod(context.spec.shape) + params.rad**2
    # of the rows in use: both grams, both centred, their products and gradients
    plain = replace(plain, held_values=received + 6 * rows**2)
    if params.rad_every == "step":
        return replace(plain, each_step=(each,))
    epochs = -(-plain.steps // (client.samples // batch))
    return replace(plain, once=(each,) * epochs)


def heaviest(context: Context, client: Client, params: Alignment) -> Work:
    """As if every step were aligned: a single one needs the same memory."""
    every = replace(params, rad_every="step")
    lengths = {None, params.last_epochs}
    works = [work(context, client, every, aligned=params.eta > 0, epochs=epochs) for epochs in lengths]
    return max(works, key=lambda each: each.steps)


def rad_bytes(context: Context, params: Alignment) -> int:
    """The size of the RAD on the wire."""
    return params.rad * prod(context.spec.shape) * input_dtype(context.spec).itemsize


def rad_pass(params: Alignment) -> Pass:
    """The RAD through a model as it is."""
    return Pass("forward", "features", params.rad)


def gram_work(context: Context, variants: Sequence[str], params: Alignment) -> ServerWork:
    """The work of the features of these models on the RAD, and of their grams."""
    forward = Work(batch=FORWARD_BATCH, once=(rad_pass(params),))
    widths = [prod(cut_shapes(context.family, variant, context.spec)[1]) for variant in variants]
    return ServerWork(models=tuple((variant, forward) for variant in variants), flops=2.0 * sum(widths) * params.rad**2)


def mean_gram(grams: Iterable[Tensor]) -> tuple[Tensors, dict[str, float]]:
    """The mean of the finite ones as `gram`, if there is any, and how many were refused as a metric."""
    finite, refused = 0, 0
    total: Tensor | None = None
    for k in grams:
        if not torch.isfinite(k).all():
            refused += 1
            continue
        total = k if total is None else total + k
        finite += 1
    return ({} if total is None else {"gram": total / finite}), {"grams_refused": float(refused)}


def round_of(state: Bundle) -> int:
    """t, which counts the merges of trained models."""
    return state.value("round", int)


def epochs_in(context: Context, params: Alignment, state: Bundle) -> int | None:
    """The epochs of the round that follows, where they are not the experiment's."""
    return params.last_epochs if round_of(state) == context.rounds - 1 else None


def epochs_of(message: Bundle) -> int | None:
    """The epochs that a client is told to train, where they are not the experiment's."""
    return message.value("epochs", int) if "epochs" in message.values else None
