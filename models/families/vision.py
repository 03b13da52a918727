"""Imports torchvision so that its models work on every build of torch.

The wheels of torchvision on the package index are built for CUDA. With a CPU-only torch their compiled operators cannot
be loaded, and the import fails with `operator torchvision::nms does not exist`, although the models need none of them.
Declaring the operators that the import looks up is then enough. Import torchvision from here, and this module before
timm, which imports torchvision itself.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch

_MISSING = "operator torchvision::nms does not exist"


def _import_torchvision() -> ModuleType:
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if _MISSING not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]  # modules that the failed import left behind
    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("torchvision")


torchvision = _import_torchvision()
