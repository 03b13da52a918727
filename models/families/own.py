"""Families of a user's own: a file, or an entry point in the group `fleetbed.families`, with VARIANTS and `build`.

`build(variant, spec)` returns a torch module, initialised as its author likes. A module that derives from `Net` has cut
points; a plain one is trained and averaged as a whole. The tensors of a variant relate to those of the next larger one
by name: one of equal shape is the same tensor, one that is smaller in some dimension is the leading window of it.

A module is built once for each variant, and copied for every task: unlike fleetbed's own models it may fill constants
while it is built, so it cannot be built without memory.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import pairwise
from math import isfinite
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from fleetbed.models.base import Family, Index, InputSpec, Net, Options, input_dtype, label_loss
from fleetbed.models.plug_ins import PlugIn, blamed, strict
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.explain import explain

SAMPLES = 2  # in the batch that a new model is tried with


class Uncut(Net):
    """A plain torch module as a model without cut points. Its tensors keep their names."""

    extractor_parts = classifier_parts = frozenset()
    plain: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # the same tables: as a child of this one, all of its tensors would have another name
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self.__dict__["plain"] = module

    def train(self, mode: bool = True) -> Uncut:
        self.plain.train(mode)
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.plain(x)
        return out

    def extract(self, x: Tensor) -> Tensor:
        raise self._no_cuts()

    def intermediate(self, s: Tensor) -> Tensor:
        raise self._no_cuts()

    def classify(self, f: Tensor) -> Tensor:
        raise self._no_cuts()

    def _no_cuts(self) -> BadInput:
        name = type(self.plain).__name__
        return BadInput(f"model.family: {name} has no cut points; derive it from fleetbed.models.base.Net.")


def own_family(found: PlugIn, options: Mapping[str, Any]) -> Family:
    """The family that a plug-in defines: by VARIANTS and `build`, or by FAMILY, a subclass of `Family`."""
    kind = found.content if isinstance(found.content, type) else found.get("FAMILY")
    if kind is not None:
        if not (isinstance(kind, type) and issubclass(kind, Family)):
            raise BadInput(f"{found.source} has a FAMILY that is no subclass of fleetbed.models.base.Family.")
        chosen = _options(found, kind.options_type, options)
        with blamed(found.source, "cannot make its FAMILY"):
            return kind(chosen)
    variants, build = found.get("VARIANTS"), found.get("build")
    if not callable(build):
        raise BadInput(
            f"{found.source} has no build: a model file defines build(variant, spec), which returns a torch module, "
            f"and VARIANTS, the names of its variants from the smallest to the largest."
        )
    names = tuple(variants) if isinstance(variants, (tuple, list)) else ()
    if not names or not all(isinstance(name, str) and name for name in names) or len({*names}) < len(names):
        raise BadInput(
            f"{found.source} has no VARIANTS that can be used ({variants!r:.100}): it must be a tuple of different "
            f'names from the smallest variant to the largest, such as ("small", "large").'
        )
    return OwnFamily(found, names, _options(found, found.get("Options"), options))


def _options(found: PlugIn, kind: Any, given: Mapping[str, Any]) -> Any:
    kind = kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else Options
    kind = strict(kind)
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        raise explain(error, dict(given), kind, f"the model family {found.title}", "model.options") from error


class OwnFamily(Family):
    """The variants that a plug-in builds."""

    def __init__(self, found: PlugIn, variants: tuple[str, ...], options: Any) -> None:
        super().__init__(options)
        self.name = found.title  # type: ignore[misc]
        self.shared = found.get("SHARED") is not False and len(variants) > 1  # type: ignore[misc]
        self.variants = variants
        self._found = found
        self._templates: dict[tuple[str, InputSpec], Net] = {}
        self._fitting: set[tuple[tuple[str, ...], InputSpec]] = set()

    def make(self, variant: str, spec: InputSpec) -> Net:
        build = self._found.get("build")
        more = (self.options,) if self._found.get("Options") is not None else ()
        with blamed(self._found.source, f"cannot build {variant} for data of shape {spec.shape}"):
            module = build(variant, spec, *more)
        if not isinstance(module, nn.Module):
            raise self._wrong(f"build({variant!r}, spec) returns {type(module).__name__}, but a torch module is needed")
        return module if isinstance(module, Net) else Uncut(module)

    def build(self, variant: str, spec: InputSpec) -> Net:
        self._template(variant, spec)  # checks it
        return self.make(variant, spec)

    def empty(self, variant: str, spec: InputSpec) -> Net:
        return copy.deepcopy(self._template(variant, spec))

    def outline(self, variant: str, spec: InputSpec) -> Net:
        return self.empty(variant, spec).to("meta")

    def index(self, variant: str, spec: InputSpec, shift: int = 0) -> dict[str, Index]:
        own, full = self._shapes(variant, spec), self._shapes(self.variants[-1] if self.shared else variant, spec)
        if shift:
            raise BadInput(
                f"{self._found.source} has variants that hold the first channels of a layer, but this method moves the "
                f"window: choose heterofl, or define a FAMILY whose `index` says which channels move together."
            )
        return {
            name: tuple(
                None if size == whole else torch.arange(size) for size, whole in zip(shape, full[name], strict=True)
            )
            for name, shape in own.items()
        }

    def has_cuts(self, spec: InputSpec) -> bool:
        return all(not isinstance(self._template(variant, spec), Uncut) for variant in self.variants)

    def check_start(self, x: Tensor, y: Tensor, spec: InputSpec) -> None:
        """Refuse a variant whose loss on these samples is not finite before it has been trained."""
        for variant in self.variants:
            with blamed(self._found.source, f"cannot be used: {variant} cannot be trained"), torch.no_grad():
                loss = float(label_loss(self.empty(variant, spec).train()(x), y))
            if not isfinite(loss):
                raise self._wrong(
                    f"the loss of {variant} on the first {len(x)} training samples is {loss:g} before any training; "
                    f"check how its weights are initialised, and what forward divides by or takes the logarithm of"
                )

    def check_input(self, spec: InputSpec) -> None:
        """Build every variant, and try it; compare its tensors with those of the next larger one."""
        if (self.variants, spec) in self._fitting:
            return
        for variant in self.variants:
            self._template(variant, spec)
        for smaller, larger in pairwise(self.variants) if self.shared else ():
            self._check_part(smaller, larger, spec)
        self._fitting.add((self.variants, spec))

    def _check_part(self, smaller: str, larger: str, spec: InputSpec) -> None:
        part, whole = self._shapes(smaller, spec), self._shapes(larger, spec)
        otherwise = "or set SHARED = False if the variants are to share no weights (for fedavg, fedhe, fd and others)"
        if not part.keys() & whole.keys():
            raise self._wrong(
                f"{smaller} and {larger} share no tensor: {next(iter(part))} and {next(iter(whole))} are the first of "
                f"each; give layers that are the same in both the same name, {otherwise}"
            )
        for name, shape in part.items():
            if name not in whole:
                raise self._wrong(f"{smaller} has the tensor {name}, which {larger} has not; rename it, {otherwise}")
            if len(shape) != len(whole[name]) or any(a > b for a, b in zip(shape, whole[name], strict=True)):
                raise self._wrong(
                    f"the tensor {name} has the shape {shape} in {smaller} and {whole[name]} in {larger}, but it must "
                    f"be the same or a leading part of it; change a layer, {otherwise}"
                )

    def _shapes(self, variant: str, spec: InputSpec) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._template(variant, spec).state_dict().items()}

    def _template(self, variant: str, spec: InputSpec) -> Net:
        """The model that others are copied from; made and checked once."""
        key = (variant, spec)
        if key not in self._templates:
            self.check_variant(variant)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # constants that a module draws are the same in every process
                net = self.make(variant, spec)
            self._check_tensors(variant, net)
            self._check_output(variant, net, spec)
            self._templates[key] = net
        return self._templates[key]

    def _check_tensors(self, variant: str, net: Net) -> None:
        seen: dict[int, str] = {}
        for name, tensor in net.state_dict(keep_vars=True).items():
            if nn.parameter.is_lazy(tensor):
                raise self._wrong(
                    f"{name} of {variant} is lazy; give the layer its sizes, which follow from spec.shape"
                )
            if "/" in name:
                raise self._wrong(f"the tensor {name} of {variant} has a slash in its name; rename it")
            if id(tensor) in seen:
                raise self._wrong(
                    f"{seen[id(tensor)]} and {name} of {variant} are one tensor, but tensors travel by name; "
                    f"call one module twice in forward instead"
                )
            seen[id(tensor)] = name
        if not any(parameter.requires_grad for parameter in net.parameters()):
            raise self._wrong(f"{variant} has no parameter that can be trained")
        for module in net.modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    raise self._wrong(
                        f"{variant} has a tensor in self.{name} of {type(module).__name__} that torch does not know "
                        f"about; use self.register_buffer({name!r}, ...)"
                    )

    def _check_output(self, variant: str, net: Net, spec: InputSpec) -> None:
        x = torch.zeros(SAMPLES, *spec.shape, dtype=input_dtype(spec))
        with (
            blamed(self._found.source, f"cannot be used: {variant} cannot read data of shape {spec.shape}"),
            torch.no_grad(),
        ):
            out = copy.deepcopy(net).eval()(x)
        wanted = (SAMPLES, spec.outputs)
        if not isinstance(out, Tensor) or tuple(out.shape) != wanted:
            found = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            columns = f"{spec.targets} numbers" if spec.targets else f"the score of each of the {spec.classes} classes"
            raise self._wrong(
                f"{variant} returns {found} for {SAMPLES} samples of shape {spec.shape}, but {wanted} is needed: one "
                f"row for each sample with {columns}"
            )

    def _wrong(self, what: str) -> BadInput:
        return BadInput(f"{self._found.source} cannot be used: {what}.")
