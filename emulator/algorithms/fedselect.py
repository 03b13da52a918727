"""FedSelect: each client gradually chooses which of its weights are its own; the others are averaged.

Tamirisa et al., "FedSelect: Personalized Federated Learning with Customized Selection of Parameters for Fine-Tuning",
CVPR 2024. Unlike HeteroAvg a client has a mask m, at first all 0. It begins with its own weights where m is 1 and the
received ones where m is 0, and trains both in turn:

    `alternations` times: one epoch in which only the entries with m = 1 move, one in which only those with m = 0 do
    in every `every`-th of its turns, in each weight tensor of which no more than `limit` is its own: of the entries
        with m = 0 the share `rate` that moved furthest since the last such turn gets m = 1
    server: w <- w + the mean change of an entry over the clients that hold it with m = 0; where there is none, w stays

The client sends its weights and m. Biases are always shared. Batch norm's running statistics stay with the client.
Evaluated is each client's model as its last training left it, as in the released code. While m is 0 everywhere there
is no first epoch, and it is HeteroAvg with `alternations` epochs; with `rate: 0` that never changes.

Each side has an optimiser of its own. In one for both, momentum or Adam would move what is to stand still. A client
that steps down to a smaller variant begins anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from msgspec import Meta
from msgspec.structs import replace
from torch import Tensor

from fleetbed.emulator.bases.averaging import Means, weights_of
from fleetbed.emulator.bases.masks import (
    MASK,
    Masks,
    MovingEntries,
    OwnEntries,
    combined,
    inverted,
    is_any,
    packed,
    share_of,
    unpacked,
)
from fleetbed.emulator.method.algorithm import Arrival, Assignment, Client, Job, Reply
from fleetbed.emulator.method.bundle import Bundle, prefixed
from fleetbed.emulator.method.description import Description
from fleetbed.emulator.method.local_training import (
    Step,
    cross_entropy_step,
    keep_model,
    kept_models,
    own_tensors,
    train,
)
from fleetbed.emulator.method.optimizers import Stepper
from fleetbed.emulator.method.schedule import steps_of
from fleetbed.models.base import Net, Tensors
from fleetbed.models.work import Work

SNAPSHOT = "snapshot/"
TURNS = "turns"
Share = Annotated[float, Meta(ge=0, le=1)]

ABOUT = Description(
    paper="Tamirisa et al., CVPR 2024, layer-wise",
    down="P",
    up="P, and a bit for each weight",
    client="its model, its weights at the last selection, its mask",
    server="as heteroavg without statistics, and how often each client took part",
)


class Params(Means, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Means`, and: (epochs are these, and `training.max_steps` does not end them)"""

    rate: Share = 0.25  # share of a tensor's common entries that become the client's own in a selection
    limit: Share = 0.8  # a tensor of which more than this is the client's own loses no further entries
    every: Annotated[int, Meta(ge=1, le=1_000_000)] = 3  # a client selects in every so many of its turns
    #: epochs of each side in a turn, taken in turns; None: the epochs of `training`
    alternations: Annotated[int, Meta(ge=1, le=100_000)] | None = None


class Method(OwnEntries):
    params: Params
    buffers = False

    def may_be_own(self, variant: str) -> dict[str, torch.Size]:
        return {name: shape for name, shape in super().may_be_own(variant).items() if "weight" in name}

    @property
    def alternations(self) -> int:
        return self.params.alternations or self.context.training.epochs

    def epoch_steps(self, client: Client) -> int:
        return steps_of(client.samples, replace(self.context.training, epochs=1, max_steps=None))

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        turns = state.values.get(turns_of(assignment.client), 0)
        assert isinstance(turns, int)
        return self._work(super().work(state, assignment), assignment.client, turns >= self.params.every)

    def heaviest(self, state: Bundle, client: Client) -> Work:
        return self._work(super().work(state, Assignment(client=client)), client, has_selected=True)

    def _work(self, plain: Work, client: Client, has_selected: bool) -> Work:
        both = has_selected and self.params.rate > 0
        optimizer_copies = kept_models(self.context.training.optimizer) - 1
        masked = sum(shape.numel() for shape in self.may_be_own(client.variant).values())
        assert plain.bytes_up is not None
        return replace(
            plain,
            steps=self.alternations * self.epoch_steps(client) * (1 + both),
            # what was received, the kept model, the snapshot, and the optimiser of the other side
            held_models=3 + optimizer_copies * both,
            held_values=masked // 4 * (1 + both),  # a byte for each entry of a mask, and of its inverse
            parameter_passes=1 if both else 0,
            bytes_up=plain.bytes_up + self.mask_bytes(client.variant),
        )

    # the client's half

    def client(self, job: Job) -> Reply:
        received, own, masks = weights_of(job.message), own_tensors(job), self.masks(job)
        model = job.model({**own, **combined(masks, own, received)})
        metrics = self._train(job, model, masks)
        turns = 1 if job.kept is None else 1 + job.kept.value(TURNS, int)
        # in its first turn nothing is its own yet, so that it started from what it received
        snapshot = {name: received[name] for name in masks} if job.kept is None else job.kept.under(SNAPSHOT)
        if turns % self.params.every == 0:
            weights = {name: p.detach() for name, p in model.named_parameters() if name in masks}
            masks = {name: self.selected(mask, weights[name], snapshot[name]) for name, mask in masks.items()}
            snapshot = weights
        kept = {**keep_model(model).tensors, **prefixed(SNAPSHOT, snapshot), **packed(masks)}
        metrics["own_share"] = share_of(masks)
        return Reply(message=self.message(job, model, masks), keep=Bundle(kept, {TURNS: turns}), metrics=metrics)

    def _train(self, job: Job, model: Net, masks: Masks) -> dict[str, float]:
        both = is_any(masks)
        step, optimizer = self.alternating(job, model, masks) if both else (cross_entropy_step(model), None)
        metrics = train(job, model, step, optimizer=optimizer, epochs=self.alternations * (1 + both))
        model.zero_grad()  # a selection needs memory too
        return metrics

    def masks(self, job: Job) -> Masks:
        """The client's masks as its last turn left them, on the device that it trains on."""
        shapes = self.may_be_own(job.client.variant)
        bits: Tensors = {} if job.kept is None else job.kept.under(MASK)
        masks = {n: unpacked(bits[n], s) if bits else torch.zeros(s, dtype=torch.bool) for n, s in shapes.items()}
        return {name: mask.to(job.message.tensors[name].device) for name, mask in masks.items()}

    def alternating(self, job: Job, model: Net, masks: Masks) -> tuple[Step, Stepper]:
        """A step that moves one side in one epoch and the other in the next, and the optimiser of the first."""
        own = MovingEntries(job, model, masks, others=False)
        common = MovingEntries(job, model, inverted(masks), others=True)
        step, epoch = cross_entropy_step(model), self.epoch_steps(job.client)

        def one(_: Stepper, x: Tensor, y: Tensor) -> Tensor:
            return step(common if job.steps // epoch % 2 else own, x, y)

        return one, own

    def selected(self, mask: Tensor, weights: Tensor, snapshot: Tensor) -> Tensor:
        """The mask with those common entries that moved furthest."""
        if float(mask.float().mean()) > self.params.limit:
            return mask
        moved = (weights - snapshot.to(weights.device)).abs().masked_fill(mask, -1.0).flatten()
        count = round(self.params.rate * int((~mask).sum()))
        chosen = mask.flatten().clone()
        chosen[moved.topk(count).indices] = True
        return chosen.reshape(mask.shape)

    # the server's half

    def remember(self, state: Bundle, arrivals: Sequence[Arrival]) -> Bundle:
        """Count the turns of each client, which say whether it has entries of its own by now."""
        values = dict(state.values)
        for a in arrivals:
            before = values.get(turns_of(a.client), 0)
            assert isinstance(before, int)
            values[turns_of(a.client)] = before + 1
        return Bundle(state.tensors, values)


def turns_of(client: Client) -> str:
    """Where the server counts a client's turns; with another variant it begins anew."""
    return f"{TURNS}/{client.number}/{client.variant}"
