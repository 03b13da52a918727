"""Rows and models made by hand, for tests whose answer can be calculated by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from synthetic_runs import CLASSES, NARROW

from fleetbed.emulator.records.tables import EvaluationRow, TaskRow


def make_task(task: int, client: int, round_: int, times: Sequence[float | None], **changes: Any) -> TaskRow:
    """A task from its moments: dispatched, downloaded, compute start and end, uploaded."""
    dispatched, downloaded, begun, ended, uploaded = times
    assert dispatched is not None
    row: dict[str, Any] = dict.fromkeys(TaskRow.__struct_fields__)
    row.update(task=task, client=client, round=round_, stage="train", variant="resnet10", outcome="ok", detail="")
    row.update(dispatched_s=dispatched, downloaded_s=downloaded, compute_start_s=begun, compute_end_s=ended)
    row.update(uploaded_s=uploaded, base_version=round_ - 1, merged_version=round_, staleness=0)
    row.update(host_queued_s=0.0, plan_s=1.0, cap_bytes=100, flops=1e9, bytes_down=10, bytes_up=10)
    return TaskRow(**{**row, **changes})


def make_evaluation(version: int, device_s: float, accuracy: float, **changes: Any) -> EvaluationRow:
    row: dict[str, Any] = {"version": version, "round": version, "device_s": device_s, "accuracy": accuracy}
    plain = {"target": "resnet10", "variant": "resnet10", "client": None, "local": 0, "samples": 100, "loss": 1.0}
    return EvaluationRow(**{**plain, **row, **changes})


def write_models(folder: Path, variants: Sequence[str], seed: int = 1, moved: float = 0.01) -> None:
    """Final models as a run leaves them: the seeded first ones, each weight moved at random by about `moved`."""
    import torch
    from safetensors.torch import save_file

    from fleetbed.models.base import InputSpec, gather
    from fleetbed.models.families.lookup import family

    torch.manual_seed(seed)
    spec, models = InputSpec((1, 28, 28), CLASSES), family("resnet-stage", NARROW)
    whole = dict(models.build("resnet26", spec).state_dict())
    (folder / "models").mkdir()
    for variant in variants:
        tensors = {
            name: t + moved * torch.randn(t.shape) if name.endswith("weight") else t.clone()
            for name, t in gather(whole, models.index(variant, spec)).items()
        }
        about = {"values": json.dumps({"variant": variant, "client": None})}
        save_file(tensors, folder / "models" / f"{variant}.safetensors", metadata=about)
