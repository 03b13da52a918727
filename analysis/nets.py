"""The models that a run ended with, rebuilt, and data to look at them with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fleetbed.analysis.runs import Run
from fleetbed.emulator.data import Dataset, open_dataset, prepare
from fleetbed.models.base import Family, Net, gather
from fleetbed.models.families import family
from fleetbed.profiles.errors import BadInput

MOST_MODELS = 24  # more cannot be told apart in a figure


@dataclass(frozen=True)
class FinalModel:
    """`name` is that of the target; `client` is whose own it is, None for a global one."""

    name: str
    variant: str
    client: int | None
    net: Net


def dataset_of(run: Run) -> Dataset:
    return open_dataset(prepare(run.config.experiment.data))


def family_of(run: Run) -> Family:
    model = run.config.experiment.model
    return family(model.family, model.options).narrow(model.variants)


def final_models(run: Run, dataset: Dataset, most: int = MOST_MODELS) -> list[FinalModel]:
    """In the order of their names, in evaluation mode; evenly spaced ones where there are more than `most`."""
    paths = sorted((run.folder / "models").glob("*.safetensors"))
    if not paths:
        why = "they were removed" if run.finished else "the run did not finish"
        raise BadInput(f"{run.folder}: there are no final models in it, {why}; give a run that is whole.")
    if len(paths) > most:
        paths = [paths[place] for place in np.linspace(0, len(paths) - 1, most).round().astype(int)]
    models = family_of(run)
    found = []
    for path in paths:
        tensors, variant, client = _load(path)
        net = models.build(variant, dataset.spec)
        net.load_state_dict(tensors)
        found.append(FinalModel(path.stem, variant, client, net.eval()))
    order = {variant: place for place, variant in enumerate(models.variants)}
    return sorted(found, key=lambda model: (-1 if model.client is None else model.client, order[model.variant]))


def _load(path: Path) -> tuple[dict[str, Tensor], str, int | None]:
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("values", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path}: not a whole model ({error}); copy the run again.") from error
    if "variant" not in about:
        raise BadInput(f"{path}: it does not say which variant it is; it was not written by a run.")
    return tensors, about["variant"], about.get("client")


def test_samples(dataset: Dataset, count: int) -> tuple[Tensor, Tensor]:
    """Evenly spaced samples of the test set: the same for every model and every method on the same data."""
    total = len(dataset.y_test)
    return dataset.batch("test", np.linspace(0, total - 1, min(count, total)).round().astype(np.int64))


def initial_tensors(run: Run, dataset: Dataset, model: FinalModel) -> dict[str, Tensor]:
    """What the model started from.

    Methods that share tensors across variants cut them out of the largest one, the others start each variant by
    itself. The run does not say which; the final model does, it is far nearer to where it came from.
    """
    models = family_of(run)
    starts = [_seeded(models, model.variant, run, dataset)]
    if models.shared:
        largest = models.variants[-1]
        starts.append(gather(_seeded(models, largest, run, dataset), models.index(model.variant, dataset.spec)))
    final = model.net.state_dict()
    return min(starts, key=lambda start: _distance(final, start))


def _seeded(models: Family, variant: str, run: Run, dataset: Dataset) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.config.seed)
        return dict(models.build(variant, dataset.spec).state_dict())


def _distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    same = [name for name in one if one[name].shape == other[name].shape and one[name].is_floating_point()]
    return float(sum((one[name] - other[name]).square().sum() for name in same))


@torch.inference_mode()
def stage_activations(models: Sequence[FinalModel], x: Tensor) -> dict[str, list[Tensor]]:
    """By stage, one [samples, values] matrix per model; stages that not all of the models have are left out."""
    by_model = [{name: values.flatten(1) for name, values in model.net.stages(x).items()} for model in models]
    common = [name for name in by_model[0] if all(name in stages for stages in by_model)]
    return {name: [stages[name] for stages in by_model] for name in common}
