"""The interface of every model and every family of models."""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn import functional as F

from fleetbed.profiles.errors import BadInput, nearest

Tensors = dict[str, Tensor]
Section = Literal["extractor", "intermediate", "classifier"]
Reads = Literal["images", "text", "values"]
Index = tuple[Tensor | None, ...]  # per dimension: the rows of the full tensor that a variant has; None means all


class InputSpec(Struct, frozen=True):
    """The input and the labels of a model.

    A sample is an image (channels, height, width), a text (tokens,) with its vocabulary, or values of any other shape.
    Its label is one of `classes`, or `targets` numbers; then there are no classes.
    """

    shape: tuple[int, ...]
    classes: int
    vocabulary: int = 0
    targets: int = 0

    @property
    def outputs(self) -> int:
        """The number of values that a model returns for each sample."""
        return self.classes or self.targets

    @property
    def kind(self) -> Reads:
        """The kind of a sample."""
        if self.vocabulary:
            return "text"
        return "images" if len(self.shape) == 3 else "values"


def input_dtype(spec: InputSpec) -> torch.dtype:
    """Return the type of the input: word numbers, or values."""
    return torch.int64 if spec.vocabulary else torch.float32


def label_loss(out: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """Return the loss of a model's output: cross-entropy for classes, squared error for numbers."""
    if y.is_floating_point():
        return F.mse_loss(out, y, reduction=reduction)
    return F.cross_entropy(out, y, reduction=reduction)


def any_labels(spec: InputSpec, samples: int) -> Tensor:
    """Return labels of the right form, for a pass whose result does not matter."""
    return torch.zeros(samples, spec.targets) if spec.targets else torch.zeros(samples, dtype=torch.int64)


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a family; a family with options derives its own type."""


class Net(nn.Module, ABC):
    """A model with its cut points: logits = classify(intermediate(extract(x)))."""

    #: the top-level names of the first and of the last section; everything between them is intermediate
    extractor_parts: frozenset[str]
    classifier_parts: frozenset[str]
    #: the number of segments that are trained one after the other (`segment`)
    segments: int = 1

    @abstractmethod
    def extract(self, x: Tensor) -> Tensor:
        """Run the shallow part, up to the first cut (FedIN's s_in)."""

    @abstractmethod
    def intermediate(self, s: Tensor) -> Tensor:
        """Run from the first cut to the features that the classifier reads (FedIN's s_out), shape [batch, d]."""

    @abstractmethod
    def classify(self, f: Tensor) -> Tensor:
        """Run the last layer; return the logits before the softmax."""

    def stages(self, x: Tensor) -> dict[str, Tensor]:
        """Return the activations after each stage, by name, from shallow to deep (for CKA per stage)."""
        s = self.extract(x)
        return {"extractor": s, "features": self.intermediate(s)}

    def exits(self, x: Tensor) -> list[Tensor]:
        """Return the logits of every exit, from shallow to deep; `forward` is the last of them.

        A model without early exits has one.
        """
        return [self(x)]

    def segment(self, number: int, x: Tensor) -> Tensor:
        """Return the logits of the model up to segment `number`, from 1, under a short cut to the classifier.

        Gradients reach only this segment and the classifier. A model with one segment is trained as a whole.
        """
        del number
        logits: Tensor = self(x)
        return logits

    def initialise(self) -> None:
        """Fill every parameter and buffer, drawing from torch's global generator."""
        for module in self.modules():
            self.initialise_module(module)

    def initialise_module(self, module: nn.Module) -> None:
        """Initialise a layer as torch does; a model that does it differently overrides this method."""
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()

    def fill_constants(self) -> None:
        """Fill the buffers that are not part of the state, because they are never sent or loaded."""

    def section(self, name: str) -> Section:
        """Return the section that the parameter or buffer `name` belongs to."""
        part = name.split(".", 1)[0]
        if part in self.extractor_parts:
            return "extractor"
        return "classifier" if part in self.classifier_parts else "intermediate"

    def features(self, x: Tensor) -> Tensor:
        return self.intermediate(self.extract(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x))


class Family(ABC):
    """A handful of variants of one model, from the smallest to the largest."""

    name: ClassVar[str]
    #: whether variants share tensors by name with the largest one, so that weights can be averaged across them
    shared: ClassVar[bool]
    #: whether models have exits before the last one (`Net.exits`)
    has_exits: ClassVar[bool] = False
    #: a pattern for the beginning of the names of a block's tensors, with the stage as its group; "": no blocks
    block_names: ClassVar[str] = ""
    reads: ClassVar[Reads] = "images"
    options_type: ClassVar[type[Options]] = Options
    variants: tuple[str, ...]

    def __init__(self, options: Any) -> None:
        self.options = options
        self._tensors: dict[tuple[str, InputSpec], Tensors] = {}
        self._narrowed: dict[tuple[str, ...], Family] = {}

    @property
    def smallest_image(self) -> int:
        """The least height and width of an image."""
        return 1

    @abstractmethod
    def make(self, variant: str, spec: InputSpec) -> Net:
        """Construct the model, uninitialised; callers use `build` or `empty`."""

    def build(self, variant: str, spec: InputSpec) -> Net:
        """Return a new model, initialised from torch's global generator (seed it first)."""
        net = self.empty(variant, spec)
        net.initialise()
        return net

    def load(self, variant: str, spec: InputSpec, tensors: Tensors, source: str = "the checkpoint") -> Net:
        """Return a model that uses these same tensors: training it changes them. BadInput names wrong tensors."""
        net = self.empty(variant, spec)
        _check_tensors(net.state_dict(), tensors, source)
        net.load_state_dict(tensors, assign=True)
        return net

    def empty(self, variant: str, spec: InputSpec) -> Net:
        """Return a model whose tensors have arbitrary values.

        Initialising values that are then replaced would take longer than everything else.
        """
        net = self.outline(variant, spec)
        # same as `to_empty`, which would also import sympy: a third of a second in every client
        net._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))  # type: ignore[no-untyped-call]
        net.fill_constants()
        return net

    def outline(self, variant: str, spec: InputSpec) -> Net:
        """Return a model without memory (on the meta device): names and shapes only."""
        self.check_variant(variant)
        self.check_input(spec)
        with torch.device("meta"):
            return self.make(variant, spec)

    def tensors(self, variant: str, spec: InputSpec) -> Tensors:
        """Return the tensors of a variant without memory: their names, shapes and types. Do not change them."""
        key = variant, spec
        if key not in self._tensors:
            self._tensors[key] = self.outline(variant, spec).state_dict()
        return self._tensors[key]

    def index(self, variant: str, spec: InputSpec, shift: int = 0) -> dict[str, Index]:
        """Return the part of each tensor of the largest variant that this variant has.

        `shift` moves the channel windows of width families (FedRolex); depth families ignore it. If variants share no
        tensors (`shared` is false), the result describes the variant itself.
        """
        del shift
        return {name: (None,) * tensor.ndim for name, tensor in self.tensors(variant, spec).items()}

    def by_width(self, spec: InputSpec) -> bool:
        """Return whether a variant holds only some of the channels of a layer."""
        indices = (self.index(variant, spec).values() for variant in self.variants)
        return any(rows is not None for index in indices for parts in index for rows in parts)

    def has_cuts(self, spec: InputSpec) -> bool:
        """Return whether the models have cut points: an extractor, an intermediate part and a classifier."""
        del spec
        return True

    def cross_layers(self, names: Iterable[str]) -> dict[str, str]:
        """Return, for InCo, the layers among `names` that use a cross-layer gradient, each with its base layer."""
        del names
        return {}

    def blocks(self, names: Iterable[str]) -> list[list[str]]:
        """Return the blocks of each stage, from shallow to deep, each as the prefix of its tensors' names."""
        stages: dict[str, dict[str, None]] = {}  # unlike sets they keep the order
        for name in names:
            match = re.match(self.block_names, name) if self.block_names else None
            if match:
                stages.setdefault(match[1], {})[match[0]] = None
        return [list(blocks) for blocks in stages.values()]

    def narrow(self, variants: tuple[str, ...]) -> Family:
        """Return the family with only these variants, in the family's order; with all if `variants` is empty."""
        if variants in self._narrowed:
            return self._narrowed[variants]
        for variant in variants:
            self.check_variant(variant)
        narrowed = copy.copy(self)
        narrowed._narrowed = {}
        narrowed.variants = tuple(v for v in self.variants if v in variants or not variants)
        largest = narrowed.variants[-1]
        for variant in narrowed.variants:
            if self.shared and not self.part_of(variant, largest):
                raise BadInput(
                    f"model.variants: {variant} of {self.name} is not a part of {largest}, the largest one "
                    f"listed, so the server's model would not contain its weights: add a variant that contains both."
                )
        self._narrowed[variants] = narrowed
        return narrowed

    def part_of(self, variant: str, whole: str) -> bool:
        """Return whether every tensor of `variant` is a part of one of `whole`."""
        return self.variants.index(variant) <= self.variants.index(whole)

    def check_variant(self, variant: str) -> None:
        if variant not in self.variants:
            raise nearest(variant, self.variants, "variant", f"the model family {self.name}")

    def check_input(self, spec: InputSpec) -> None:
        """Raise BadInput if a model of this family cannot use such data."""
        if spec.classes < 2 and not spec.targets:
            raise BadInput(f"{self.name} needs data with at least 2 classes, but this has {spec.classes}.")
        found = spec.kind
        if found != self.reads:
            raise BadInput(
                f"{self.name} needs {self.reads}, but the data is {found} (shape {spec.shape}): "
                f"choose another model.family, or write your own (docs/writing-a-model.md)."
            )
        smallest = self.smallest_image
        if found == "images" and min(spec.shape[1:]) < smallest:
            raise BadInput(
                f"{self.name} needs images of at least {smallest}x{smallest}, but these are "
                f"{spec.shape[1]}x{spec.shape[2]}: set data.image_size to {smallest} or more."
            )


def gather(full: Mapping[str, Tensor], index: Mapping[str, Index]) -> Tensors:
    """Cut a variant's tensors out of the full ones. A tensor that is used as a whole is not copied."""
    return {name: _take(full[name], parts) for name, parts in index.items()}


def _take(tensor: Tensor, parts: Index) -> Tensor:
    for dim, rows in enumerate(parts):
        if rows is not None:
            tensor = tensor.index_select(dim, rows)
    return tensor


def scatter_add(into: Tensors, part: Mapping[str, Tensor], index: Mapping[str, Index]) -> None:
    """Add a variant's tensors, in place, to the matching parts of the full ones."""
    for name, parts in index.items():
        full, piece = into[name], part[name].to(into[name].dtype)
        window = _window(full, parts)
        if window is not None:
            window += piece
            continue
        # Trailing whole dimensions (a convolution's kernel) are left out of the grid, which would otherwise be larger
        # than the tensor. No row occurs twice, so that reading, adding and writing back equals accumulating.
        leading = max(dim + 1 for dim, rows in enumerate(parts) if rows is not None)
        rows = (torch.arange(full.shape[d]) if (r := parts[d]) is None else r for d in range(leading))
        grid = torch.meshgrid(*rows, indexing="ij")
        full.index_put_(grid, full[grid] + piece)


def _window(full: Tensor, parts: Index) -> Tensor | None:
    """Return the part as a view of the full tensor; None if its rows are not consecutive."""
    for dim, rows in enumerate(parts):
        if rows is None:
            continue
        array = rows.numpy()
        if not array.size or (array[1:] - array[:-1] != 1).any():
            return None
        full = full.narrow(dim, int(array[0]), array.size)
    return full


def _check_tensors(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise BadInput with the names of tensors that are missing, unknown or of another shape."""
    problems = [
        *(f"{name} is missing" for name in own if name not in tensors),
        *(f"{name} is unknown to the model" for name in tensors if name not in own),
        *(
            f"{name} is {_shape(tensor)} and should be {_shape(own[name])}"
            for name, tensor in tensors.items()
            if name in own and tensor.shape != own[name].shape
        ),
    ]
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise BadInput(
            f"{source} does not match the model: {'; '.join(problems[:5])}{more}; "
            f"load it into the family, variant, options and classes that it was saved from."
        )


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a scalar"
