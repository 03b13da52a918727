"""The training software that a device runs, and the memory that it needs before any model is loaded.

The figure is the resident memory of the process without code mapped from files, which the kernel can drop under
pressure. A device selects one of these as its `runtime`; `memory.runtime_mib` replaces the figure if it was measured on
the device.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

RuntimeName = Literal["pytorch", "pytorch-lean", "pytorch-cuda", "mnn-like", "compiled"]


class Runtime(Struct, frozen=True, kw_only=True):
    memory_mib: float
    kind: Literal["measured", "derived", "assumed"]
    source: str
    note: str


RUNTIMES: dict[RuntimeName, Runtime] = {
    "pytorch": Runtime(
        memory_mib=215,
        kind="measured",
        source="PyTorch 2.13.0, CPU build, x86-64, one thread",
        note="Anonymous memory after a training step with torch.optim.SGD. No figure of an ARM build was found.",
    ),
    "pytorch-lean": Runtime(
        memory_mib=147,
        kind="measured",
        source="PyTorch 2.13.0, CPU build, x86-64, one thread",
        note="As pytorch, with an update written by hand: making an optimiser of torch.optim imports 821 modules.",
    ),
    "pytorch-cuda": Runtime(
        memory_mib=1024,
        kind="assumed",
        source="",
        note="A CUDA context with PyTorch's libraries, in the memory that CPU and GPU share. No source; an estimate.",
    ),
    "mnn-like": Runtime(
        memory_mib=36,
        kind="derived",
        source="mit-han-lab/tiny-training@7bf8e05 figures/mem_comparison.png",
        note="MNN's peak of 41.5 MB less the 5.7 MB that the same training needs without a runtime: an upper bound, "
        "because it includes poorer memory planning. Stands for native engines with an interpreter (MNN, NNTrainer).",
    ),
    "compiled": Runtime(
        memory_mib=2,
        kind="assumed",
        source="pytorch/executorch issue 17651 (0.05 MB for the core, at inference)",
        note="Training compiled ahead of time (Tiny Training Engine, ExecuTorch): 0.05 MB was measured for the core; "
        "the rest is for the C library and the kernels.",
    ),
}
