"""The base of methods that average weights: each client trains a slice, the server takes the mean delta.

Layer-wise aggregation, for every tensor l over the clients that hold it:

    delta_l = sum_k weight_k * omega_k * (w_k,l after - w_k,l sent) / sum_k omega_k,    w_l <- w_l + delta_l

omega_k is 1 or the client's number of samples, weight_k what the policy gives a stale result (1 in
rounds). A tensor that nobody held stays the very same tensor. Batch norm's running statistics are
averaged the same way, its integer counter becomes the maximum. In families that are cut by width the sums
run over elements, not tensors. `delta_scale` multiplies all of delta, whatever the method. With `delta_noise` each
client's change arrives with Gaussian noise, whose deviation is that many times the tensor's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal, Protocol

import torch
from msgspec import Struct
from torch import Tensor

from fleetbed.emulator.bases.means import Share, after_mean, elements_held
from fleetbed.emulator.method.algorithm import (
    Algorithm,
    Arrival,
    Assignment,
    Context,
    Expected,
    Job,
    Merged,
    Needs,
    Reply,
    Target,
    like,
)
from fleetbed.emulator.method.bundle import Bundle, Value, prefixed
from fleetbed.emulator.method.local_training import (
    MODEL,
    Step,
    cross_entropy_step,
    own_targets,
    own_tensors,
    train,
)
from fleetbed.emulator.method.schedule import batch_of, steps_of
from fleetbed.emulator.randomness import torch_rng
from fleetbed.models.base import Family, Index, InputSpec, Net, Section, Tensors, gather
from fleetbed.models.work import Work
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.types import NonNegative, Positive

Weighting = Literal["clients", "samples"]
Aggregation = Literal["layerwise", "same-architecture", "ends"]
ALL_SECTIONS: frozenset[Section] = frozenset({"extractor", "intermediate", "classifier"})
ENDS: frozenset[Section] = frozenset({"extractor", "classifier"})
#: so many indices are kept: with windows that move there is one for each shift
MOST_INDICES = 64


class Means(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of every method that averages weights."""

    #: clients: all count the same; samples: by their number of samples; None: as the method has it
    weighting: Weighting | None = None
    delta_scale: Positive = 1.0  # the mean delta is multiplied by it; the released ViT code has 1/epochs
    delta_noise: NonNegative = 0.0  # on each arriving change of a trained tensor, in standard deviations of the change
    #: layerwise: over all that hold a tensor; same-architecture: over those of one variant; ends: layerwise, of
    #: extractor and classifier only; None: as the method has it
    aggregation: Aggregation | None = None


class AddOn(Protocol):
    """A change of the mean delta of a method that averages weights, such as InCo."""

    def check(self) -> None:
        """Raise BadInput if it does not fit the method, the family or the variants."""
        ...

    def adjust(self, before: Tensors, moved: Tensors) -> dict[str, float]:
        """Change `moved`, the weights that the mean delta made of `before`; returns metrics."""
        ...


class Averaging(Algorithm):
    """The base. A method changes the local step, the mean delta, or what is done with it."""

    #: a model for each variant instead of one that all variants are parts of
    apart: bool = False
    weighting: Weighting = "clients"
    delta_scale: float = 1.0
    delta_noise: float = 0.0
    #: what travels; where it is not all, the rest of each client's model is its own
    sections: frozenset[Section] = ALL_SECTIONS
    #: whether batch norm's running statistics travel
    buffers: bool = True
    add_on: AddOn | None = None

    def __init__(self, params: object, context: Context) -> None:
        super().__init__(params, context)
        if isinstance(params, Means):
            self.weighting = params.weighting or self.weighting
            self.delta_scale, self.delta_noise = params.delta_scale, params.delta_noise
            if params.aggregation is not None:
                self.apart = params.aggregation == "same-architecture"
                self.sections = ENDS if params.aggregation == "ends" else self.sections
        self._index: dict[tuple[str, str, int], dict[str, Index]] = {}
        self._cuts: tuple[Bundle, dict[tuple[str, int], Tensors]] = (Bundle({}), {})  # of one state
        self._weight_bytes: dict[str, int] = {}  # by variant

    @property
    def needs(self) -> Needs:
        return Needs(
            shared_tensors=not self.apart,
            cuts=self.is_partial,
            initial_on_client=self.is_partial or not self.buffers,
        )

    @property
    def is_partial(self) -> bool:
        """Whether a part of each client's model stays with the client."""
        return self.sections != ALL_SECTIONS

    def check(self) -> None:
        family, variants = self.context.family, self.context.variants
        if not self.apart and not family.shared and len(variants) > 1:
            raise BadInput(
                f"model.family is {family.name}, whose variants share no tensors, but this method averages "
                f"weights across variants ({', '.join(variants)}): choose another family, or fedavg, "
                f"which averages each variant by itself."
            )
        if self.add_on is not None:
            self.add_on.check()

    # the server's half: what is sent

    def setup(self) -> Bundle:
        context = self.context.with_initial()
        if self.apart:
            return Bundle(
                {self.place(v, n): t for v in context.variants for n, t in self._own_start(context, v).items()}
            )
        # the family's largest, also where only smaller ones are in use: whatever a client may step down to is a part
        whole = context.variants[0] if len(context.variants) == 1 else context.family.variants[-1]
        return Bundle(gather(context.initial(whole), self.index(whole, whole)), {"whole": whole})

    def send(self, state: Bundle, assignment: Assignment) -> Bundle:
        shift = self.shift(assignment)
        values: dict[str, Value] = {"shift": shift} if shift else {}
        return Bundle(self.cut(state, assignment.client.variant, shift), values)

    def shift(self, assignment: Assignment) -> int:
        """Return by how much the channel windows of a width family are moved for this task."""
        return 0

    def work(self, state: Bundle, assignment: Assignment) -> Work:
        client, training = assignment.client, self.context.training
        size = self.weight_bytes(client.variant)
        return Work(
            steps=steps_of(client.samples, training),
            batch=batch_of(client.samples, training.batch),
            held_models=1,  # what was received
            bytes_down=size,
            bytes_up=size,
        )

    # the client's half

    def client(self, job: Job) -> Reply:
        start = weights_of(job.message)
        if self.is_partial or not self.buffers:
            start = {**own_tensors(job), **start}
        model = job.model(start)
        return self.reply(job, model, start, self.train(job, model, start))

    def train(self, job: Job, model: Net, start: Tensors) -> dict[str, float]:
        """Train the client's model; returns metrics."""
        return train(job, model, self.local_step(job, model, start), epochs=self.epochs(job))

    def reply(self, job: Job, model: Net, start: Tensors, metrics: dict[str, float]) -> Reply:
        """Return the reply: the trained weights that travel, what goes with them, and what the client keeps."""
        extras = self.extras(job, model, start)
        tensors = {name: t for name, t in model.state_dict().items() if name in job.message.tensors}
        message = Bundle({**tensors, **extras.tensors}, extras.values)
        return Reply(message=message, keep=self.kept(job, model, start), metrics=metrics)

    def epochs(self, job: Job) -> int | None:
        """Return the epochs of a task if they differ from the experiment's; `work` declares them."""
        return None

    def local_step(self, job: Job, model: Net, start: Tensors) -> Step:
        """Return the step of a client on a mini-batch; `start` is the model before the first one."""
        return cross_entropy_step(model)

    def extras(self, job: Job, model: Net, start: Tensors) -> Bundle:
        """What a client sends besides its weights. A slash in a tensor's name tells it from them.

        `expects` declares it.
        """
        return Bundle()

    def kept(self, job: Job, model: Net, start: Tensors) -> Bundle | None:
        """Return what a client keeps: the part of its model that does not travel."""
        if not self.is_partial:
            return None
        own = {name: t for name, t in model.state_dict().items() if name not in job.message.tensors}
        return Bundle(prefixed(MODEL, own))

    def expects(self, assignment: Assignment, sent: Bundle) -> Expected | None:
        """Declare the reply: the weights that were sent, trained."""
        return Expected(tensors=like(weights_of(sent)))

    # the server's half: what is made of the results

    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        if self.apart:
            state = self._with_new_variants(state, arrivals)
        if self.delta_noise:
            arrivals = [self._with_noise(arrival) for arrival in arrivals]
        before = state.tensors
        held = self._held(state, self.incoming(state, arrivals))
        moved = {name: after_mean(before[name], parts) for name, parts in held.items()}
        if self.delta_scale != 1:
            for name, tensor in moved.items():
                if tensor.is_floating_point():
                    torch.lerp(before[name], tensor, self.delta_scale, out=tensor)
        metrics: dict[str, float] = {}
        if self.add_on is not None:
            metrics = self.add_on.adjust(before, moved)
            for name, parts in held.items():  # whatever it does, what nobody held stays
                if (elements := elements_held(before[name], parts)) is not None:
                    moved[name] = torch.where(elements, moved[name], before[name])
        for name, tensor in moved.items():
            if name.endswith("running_var"):
                tensor.clamp_(min=0)
        merged = Bundle({**before, **moved}, state.values)
        return Merged(state=self.remember(merged, arrivals), metrics={**metrics, **self.metrics(state, arrivals)})

    def _with_noise(self, arrival: Arrival) -> Arrival:
        tensors, sent = dict(arrival.message.tensors), arrival.sent.tensors
        rng = torch_rng(self.context.seed, arrival.assignment.task, "delta noise")
        for name in trained_shapes(self.context.family, arrival.client.variant, self.context.spec):
            if name in tensors:
                width = self.delta_noise * (tensors[name] - sent[name]).std(unbiased=False)
                tensors[name] = tensors[name] + width * torch.randn(tensors[name].shape, generator=rng)
        return replace(arrival, message=Bundle(tensors, arrival.message.values))

    def foresee(self, state: Bundle, arrivals: Sequence[Arrival]) -> Bundle:
        """Return the state after a merge without moving the weights, whose sizes stay the same."""
        return self.remember(self._with_new_variants(state, arrivals) if self.apart else state, arrivals)

    def incoming(self, state: Bundle, arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
        """Return the arrivals to average; a method may change their weights."""
        return arrivals

    def omega(self, arrival: Arrival) -> float:
        """Return the weight of a client in the mean."""
        return float(arrival.client.samples) if self.weighting == "samples" else 1.0

    def factors(self, name: str, holders: Sequence[Arrival]) -> Sequence[float]:
        """Return the factors of each holder's change of a tensor, in addition to the policy's weight and `omega`."""
        return [1.0] * len(holders)

    def mask(self, arrival: Arrival, name: str) -> Tensor | None:
        """Return the elements of an arrival's tensor that count, as ones and zeros that broadcast to it; None: all."""
        return None

    def remember(self, state: Bundle, arrivals: Sequence[Arrival]) -> Bundle:
        """Return the state after its weights have moved, with what else the method keeps in it."""
        return state

    def metrics(self, state: Bundle, arrivals: Sequence[Arrival]) -> dict[str, float]:
        """Return the metrics of a merge; `state` is the one before it."""
        return {}

    def _with_new_variants(self, state: Bundle, arrivals: Sequence[Arrival]) -> Bundle:
        """A client may have stepped down to a variant that nobody had: what it was sent begins that model."""
        tensors = dict(state.tensors)
        for a in arrivals:
            variant = a.client.variant
            for name in self.index(variant, variant):
                tensors.setdefault(self.prefix(variant) + name, a.sent.tensors[name])
        return Bundle(tensors, state.values)

    def _held(self, state: Bundle, arrivals: Sequence[Arrival]) -> dict[str, list[Share]]:
        """Return what arrived for every tensor that a client held, by its name in the state."""
        held: dict[str, list[tuple[Arrival, str, Index]]] = {}
        for a in arrivals:
            variant, shift = a.client.variant, self.shift_of(a.sent)
            for name, rows in self.index(variant, self.whole(state, variant), shift).items():
                held.setdefault(self.place(variant, name), []).append((a, name, rows))
        parts: dict[str, list[Share]] = {}
        for place, those in held.items():
            factors = self.factors(those[0][1], [a for a, _, _ in those])  # all call it by the same name
            parts[place] = [
                Share(
                    a.message.tensors[name],
                    a.sent.tensors[name],
                    self.omega(a),
                    a.weight * self.omega(a) * factor,
                    rows,
                    self.mask(a, name),
                )
                for (a, name, rows), factor in zip(those, factors, strict=True)
            ]
        return parts

    def targets(self, state: Bundle) -> list[Target]:
        if self.is_partial:
            own = own_targets(self.context)
            return [replace(target, tensors=self.cut(state, target.variant)) for target in own]
        return [self.target(state, variant) for variant in self.context.variants]

    def target(self, state: Bundle, variant: str, shift: int = 0) -> Target:
        """Return a variant to evaluate; running statistics that do not travel are estimated first."""
        return Target(
            name=variant, variant=variant, tensors=self.cut(state, variant, shift), recalibrate=not self.buffers
        )

    # which part of the server's weights a variant holds

    def cut(self, state: Bundle, variant: str, shift: int = 0) -> Tensors:
        """The tensors of a variant: the same ones for all its clients, so that they are cut, sent and merged as one."""
        if self.apart:
            return state.under(self.prefix(variant)) or self._own_start(self.context, variant)
        if self._cuts[0] is not state:
            self._cuts = (state, {})
        cuts = self._cuts[1]
        if (variant, shift) not in cuts:
            index = self.index(variant, self.whole(state, variant), shift)
            full = {name: state.tensors[self.place(variant, name)] for name in index}
            cuts[variant, shift] = gather(full, index)
        return dict(cuts[variant, shift])

    def _own_start(self, context: Context, variant: str) -> Tensors:
        """Return the initial tensors of a variant's own model, of those that travel."""
        return gather(context.initial(variant), self.index(variant, variant))

    def prefix(self, variant: str) -> str:
        """Return the prefix of the names of the variant's tensors in the state."""
        return f"{variant}/" if self.apart else ""

    def place(self, variant: str, name: str) -> str:
        """Return the name in the state of a tensor of the variant."""
        return self.prefix(variant) + name

    def whole(self, state: Bundle, variant: str) -> str:
        """Return the variant whose tensors the state holds in full."""
        return variant if self.apart else state.value("whole", str)

    def shift_of(self, sent: Bundle) -> int:
        """Return the shift of the windows that were sent."""
        return sent.value("shift", int) if "shift" in sent.values else 0

    def index(self, variant: str, whole: str, shift: int = 0) -> dict[str, Index]:
        """Return the part of each tensor of `whole` that the variant holds, of those that travel."""
        key = (variant, whole, shift)
        if key not in self._index:
            if len(self._index) >= MOST_INDICES:
                del self._index[next(iter(self._index))]  # the oldest
            family = self.context.family.narrow((variant, whole))
            net = family.outline(variant, self.context.spec)
            index = family.index(variant, self.context.spec, shift)
            self._index[key] = {name: rows for name, rows in index.items() if self.travels(net, name)}
        return self._index[key]

    def travels(self, net: Net, name: str) -> bool:
        """Return whether a tensor of the model is sent at all."""
        return net.section(name) in self.sections and (self.buffers or is_parameter(net, name))

    def weight_bytes(self, variant: str) -> int:
        """Return the size of the variant's weights on the wire; computed once, because every task asks for it."""
        if variant not in self._weight_bytes:
            net = self.context.family.outline(variant, self.context.spec)
            sent = (t for name, t in net.state_dict().items() if self.travels(net, name))
            self._weight_bytes[variant] = sum(t.numel() * t.element_size() for t in sent)
        return self._weight_bytes[variant]


def weights_of(message: Bundle) -> Tensors:
    """Return the weights in a message, without what goes with them."""
    return {name: tensor for name, tensor in message.tensors.items() if "/" not in name}


def is_parameter(net: Net, name: str) -> bool:
    """Return whether a tensor of the model is a parameter, not a buffer."""
    module, _, own = name.rpartition(".")
    return own in net.get_submodule(module)._parameters


@lru_cache(maxsize=256)
def trained_shapes(family: Family, variant: str, spec: InputSpec) -> dict[str, torch.Size]:
    """Return the shapes of the tensors that training changes by gradients, by name: parameters, no buffers."""
    return {name: p.shape for name, p in family.outline(variant, spec).named_parameters() if p.requires_grad}
