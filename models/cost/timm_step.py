"""Counts the work of one training step of any timm model, by its name, on tensors without data."""

from __future__ import annotations

from functools import cache, lru_cache
from importlib.metadata import version
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from fleetbed.models.cost.cache import cached
from fleetbed.models.cost.operations import Operations, OperatorCount, update_work
from fleetbed.models.families import vision  # noqa: F401  makes torchvision importable, which timm imports
from fleetbed.profiles.errors import BadInput, nearest

# isort: split
import timm
from timm.layers.config import set_fused_attn, use_fused_attn

#: short names that published tables use
SHORT_NAMES = {
    **{f"vit_{size}": f"vit_{size}_patch16_224" for size in ("tiny", "small", "base")},
    **{f"deit_{size}": f"deit_{size}_patch16_224" for size in ("tiny", "small", "base")},
    **{f"swin_{size}": f"swin_{size}_patch4_window7_224" for size in ("tiny", "small", "base")},
    "mlpmixer_b16": "mixer_b16_224",
    "maxvit_tiny": "maxvit_tiny_tf_224",
}
CLASSES = 1000  # of ImageNet, which published timings train on
#: errors of a model that cannot be built, or cannot use such images
_FAILURES = (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, LookupError, ImportError)


class StepWork(Struct, frozen=True):
    work: Operations
    unknown: tuple[str, ...]


@lru_cache(maxsize=1024)
def step_work(name: str, shape: tuple[int, ...], batch: int) -> StepWork:
    """Count forward, backward and a plain SGD update of a batch, with all parameters trained."""
    full = timm_name(name)
    about = ["timm step", version("timm"), full, shape, batch]
    return cached(about, StepWork, lambda: _count(full, shape, batch))


def timm_name(name: str) -> str:
    """Return timm's name of a model."""
    full = SHORT_NAMES.get(name, name)
    if full.partition(".")[0] not in _known():
        raise nearest(name, _known() | set(SHORT_NAMES), "model of timm", "model")
    return full


def count_step(net: nn.Module, shape: tuple[int, ...], batch: int) -> StepWork:
    """Count a training step of an image classifier, whatever device its parameters are on."""
    with FakeTensorMode(allow_non_fake_inputs=True), OperatorCount() as count:
        held = net._apply(lambda t: torch.empty(t.shape, dtype=t.dtype)).train()
        count.total = Operations()
        out = held(torch.empty(batch, *shape))
        F.cross_entropy(out, torch.empty(batch, dtype=torch.int64)).backward()
    parameters = sum(p.numel() for p in held.parameters() if p.requires_grad)
    return StepWork(count.total + update_work(parameters, kept_copies=0), tuple(sorted(count.unknown)))


def _count(name: str, shape: tuple[int, ...], batch: int) -> StepWork:
    # the published timings come from software without fused attention
    fused = use_fused_attn()
    set_fused_attn(False)
    try:
        return count_step(_outline(name, shape), shape, batch)
    except _FAILURES as error:
        what = " ".join(str(error).split())[:200]
        raise BadInput(f"the model {name} cannot train on images of {'x'.join(map(str, shape))}: {what}") from error
    finally:
        set_fused_attn(fused)


def _outline(name: str, shape: tuple[int, ...]) -> Any:
    """Build the model without storage. Models for a fixed image size take that size as an argument."""
    channels, *size = shape
    with torch.device("meta"):
        try:
            return timm.create_model(name, num_classes=CLASSES, in_chans=channels, img_size=tuple(size))
        except TypeError:
            return timm.create_model(name, num_classes=CLASSES, in_chans=channels)


@cache
def _known() -> frozenset[str]:
    return frozenset(timm.list_models())
