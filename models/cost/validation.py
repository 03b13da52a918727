"""Compares predicted training times with published ones, point by point and by device."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from fleetbed.models.cost.operations import Operations, compute_seconds
from fleetbed.models.cost.points import LeftOut, Point, Points
from fleetbed.models.cost.rate_fit import FEWEST_MODELS, Errors, errors, fit_rates
from fleetbed.models.cost.timm_step import step_work
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.rates import rates_of, rates_provenance
from fleetbed.profiles.types import Device, ProvenanceKind, Rates


class Compared(Struct, frozen=True, kw_only=True):
    """One point. `unseen_s` is the prediction of rates fitted without this model, if the device's rates were fitted."""

    point: Point
    predicted_s: float
    unseen_s: float | None

    @property
    def error(self) -> float:
        return self.predicted_s / self.point.seconds - 1

    @property
    def unseen_error(self) -> float | None:
        return None if self.unseen_s is None else self.unseen_s / self.point.seconds - 1


class DeviceResult(Struct, frozen=True, kw_only=True):
    """Errors on one device. `rates_from` is the origin of the rates; `best_fit` are the rates of these points alone."""

    device: str
    rates_from: tuple[ProvenanceKind, ...]
    errors: Errors
    unseen: Errors | None
    best_fit: Rates | None


class Validation(Struct, frozen=True, kw_only=True):
    compared: list[Compared]
    devices: list[DeviceResult]
    left_out: list[LeftOut]
    unknown_operators: dict[str, list[str]]  # by operator: the models that use it


def validate_points(points: Points) -> Validation:
    """Compare every point whose model can be counted; skip the others, each with a reason."""
    works: dict[int, Operations] = {}
    left_out = list(points.left_out)
    unknown: dict[str, list[str]] = {}
    for point in points.used:
        try:
            found = step_work(point.model, point.shape, point.batch)
        except BadInput as reason:
            left_out.append(LeftOut(point.row, str(reason)))
            continue
        works[point.row] = found.work
        for operator in found.unknown:
            unknown.setdefault(operator, []).append(point.model)
    used = [point for point in points.used if point.row in works]
    if not used:
        first = min(left_out, key=lambda each: each.row)
        raise BadInput(f"{points.file}: no row of this file can be used; row {first.row}: {first.reason}.")
    compared: list[Compared] = []
    results: list[DeviceResult] = []
    for name in sorted({point.device for point in used}):
        own = [point for point in used if point.device == name]
        device = points.devices[name]
        kinds = tuple(dict.fromkeys(entry.kind for entry in rates_provenance(device)))
        unseen = dict(_unseen(device, own, works)) if "fitted" in kinds else {}
        rows = [
            Compared(
                point=point,
                predicted_s=compute_seconds(device, works[point.row]),
                unseen_s=unseen.get(point.row),
            )
            for point in own
        ]
        compared += rows
        results.append(
            DeviceResult(
                device=name,
                rates_from=kinds,
                errors=_errors([(row.predicted_s, row.point) for row in rows]),
                unseen=_errors([(s, row.point) for row in rows if (s := row.unseen_s) is not None]) if unseen else None,
                best_fit=_fit(device, own, works),
            )
        )
    left_out.sort(key=lambda each: each.row)
    return Validation(compared=compared, devices=results, left_out=left_out, unknown_operators=unknown)


def _unseen(device: Device, own: list[Point], works: dict[int, Operations]) -> Iterator[tuple[int, float]]:
    """Predict each model with rates fitted to all other models (leave one out)."""
    for model in {point.model for point in own}:
        rates = _fit(device, [point for point in own if point.model != model], works)
        if rates is None:
            return
        fitted = replace(device, rates=rates)
        yield from ((p.row, compute_seconds(fitted, works[p.row])) for p in own if p.model == model)


def _fit(device: Device, own: list[Point], works: dict[int, Operations]) -> Rates | None:
    if len({point.model for point in own}) < FEWEST_MODELS:
        return None
    seconds = [point.seconds / device.train_scale for point in own]
    return fit_rates([works[point.row] for point in own], seconds, rates_of(device).call_us)


def _errors(pairs: list[tuple[float, Point]]) -> Errors:
    return errors([predicted for predicted, _ in pairs], [point.seconds for _, point in pairs])
