"""Rebuilds the final models of a run, and selects data to examine them with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fleetbed.analysis.figures.changes import load_kept
from fleetbed.analysis.tables.runs import Run
from fleetbed.emulator.data import Dataset, open_dataset, prepare_dataset
from fleetbed.models.base import Family, Net, gather
from fleetbed.models.families.lookup import family
from fleetbed.models.plug_ins import check_unchanged
from fleetbed.profiles.errors import BadInput

MOST_MODELS = 24  # more cannot be distinguished in a figure


@dataclass(frozen=True)
class FinalModel:
    """`name` is that of the target; `client` is the owner of a personal model, None for a global one."""

    name: str
    variant: str
    client: int | None
    net: Net


def dataset_of(run: Run) -> Dataset:
    return open_dataset(prepare_dataset(run.config.experiment.data))


def family_of(run: Run) -> Family:
    model = run.config.model
    check_unchanged(run.about.files or {})
    return family(model.family, model.options).narrow(model.variants)


def final_models(run: Run, dataset: Dataset, most: int = MOST_MODELS) -> list[FinalModel]:
    """Return the final models, ordered and in evaluation mode; an even selection if there are more than `most`."""
    paths = sorted(path for path in (run.folder / "models").glob("*.safetensors") if path.is_file())
    if not paths:
        why = "they were removed" if run.finished else "the run did not finish"
        raise BadInput(f"{run.folder}: it has no final models, because {why}; choose a complete run.")
    if len(paths) > most:
        paths = [paths[place] for place in np.linspace(0, len(paths) - 1, most).round().astype(int)]
    models = family_of(run)
    found = [_load(path, models, dataset) for path in paths]
    order = {variant: place for place, variant in enumerate(models.variants)}
    return sorted(found, key=lambda model: (-1 if model.client is None else model.client, order[model.variant]))


class _Values(Struct):
    """The values that a run stores next to a model's tensors."""

    variant: str
    client: int | None = None


def _load(path: Path, models: Family, dataset: Dataset) -> FinalModel:
    """Load the model in a file; refuse one that is damaged, not of the family, or diverged."""
    try:
        with safe_open(path, framework="pt") as file:
            about = msgspec.json.decode((file.metadata() or {}).get("values", ""), type=_Values)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, msgspec.MsgspecError) as error:
        raise _not_intact(path, error) from error
    return FinalModel(path.stem, about.variant, about.client, _net(path, about.variant, tensors, models, dataset))


def _net(path: Path, variant: str, tensors: dict[str, Tensor], models: Family, dataset: Dataset) -> Net:
    if variant not in models.variants:
        raise _not_intact(path, f"its variant {variant} is not one of {', '.join(models.variants)}")
    try:
        net = models.load(variant, dataset.spec, tensors, "its file")
    except BadInput as error:
        raise _not_intact(path, error) from error
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise BadInput(f"{path}: the model diverged, so its values are not finite; choose a run that did not diverge.")
    return net.eval()


def _not_intact(path: Path, why: object) -> BadInput:
    return BadInput(f"{path}: not an intact model of this run ({why}); copy the run again.")


class _Sent(Struct):
    """The values that a run stores next to the models of clients."""

    clients: list[int]
    variants: list[str]


def client_models(run: Run, dataset: Dataset, path: Path, most: int = MOST_MODELS) -> list[FinalModel]:
    """Return the models that clients sent for a merge, in the order of their numbers, or an even selection of them."""
    kept, models = load_kept(path), family_of(run)
    sent = msgspec.convert(kept.values, _Sent)
    order = sorted(range(len(sent.clients)), key=sent.clients.__getitem__)
    places = np.linspace(0, len(order) - 1, min(len(order), most)).round().astype(int)
    return [
        FinalModel(
            f"{sent.clients[number]:03d}",
            sent.variants[number],
            sent.clients[number],
            _net(path, sent.variants[number], kept.under(f"{number}/"), models, dataset),
        )
        for number in (order[place] for place in places)
    ]


def test_samples(dataset: Dataset, count: int) -> tuple[Tensor, Tensor]:
    """Return evenly spaced samples of the test set: the same for every model and method on the same data."""
    total = len(dataset.y_test)
    return dataset.batch("test", np.linspace(0, total - 1, min(count, total)).round().astype(np.int64))


def initial_tensors(run: Run, dataset: Dataset, model: FinalModel) -> dict[str, Tensor]:
    """Return the initial tensors of the model.

    Methods that share tensors across variants cut them out of the largest one; the others initialise each variant by
    itself. The run does not record which, but the final model shows it: it is far nearer to its own start.
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
    """Return, by stage, one [samples, values] matrix per model, for the stages that all models have."""
    by_model = [{name: values.flatten(1) for name, values in model.net.stages(x).items()} for model in models]
    common = [name for name in by_model[0] if all(name in stages for stages in by_model)]
    return {name: [stages[name] for stages in by_model] for name in common}
