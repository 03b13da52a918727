"""Fits rates by class to measured training times, and evaluates how well rates predict them.

The fit is linear with coefficients of at least 0, and minimises relative errors, so that a model of 4 s counts as much
as one of 70 s. The cost of a call is not fitted: it is negligible in the published steps, which are long.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from fleetbed.models.cost.operations import Operations
from fleetbed.profiles.types import Rates

#: fewer models than this do not determine five rates
FEWEST_MODELS = 8
#: the rate of a class that none of the models uses: so fast that it adds nothing
_UNUSED = 1e9
Floats = NDArray[np.float64]


class Errors(Struct, frozen=True, kw_only=True):
    """Errors of predicted times relative to the measured ones; `rank` is Spearman's correlation."""

    points: int
    median: float
    p90: float
    worst: float
    rank: float | None


def fit_rates(works: Sequence[Operations], seconds: Sequence[float], call_us: float) -> Rates:
    """Return the rates that predict these times best."""
    from scipy.optimize import nnls

    measured = np.array(seconds)
    amounts = np.array([_amounts(work) for work in works])
    calls_s = np.array([work.calls for work in works]) * call_us / 1e6
    scale = np.maximum(amounts.max(axis=0), 1e-12)  # so that the solver gets values of similar size
    found, _ = nnls(amounts / scale / measured[:, None], (measured - calls_s) / measured)
    per_unit_s = found / scale
    rates = [float(f"{1 / s:.4g}") if s > 0 else _UNUSED for s in per_unit_s]
    return Rates(
        conv_1x1_gflops=rates[0],
        conv_gflops=rates[1],
        depthwise_gflops=rates[2],
        matmul_gflops=rates[3],
        memory_gb_s=rates[4],
        call_us=call_us,
    )


def errors(predicted: Sequence[float], measured: Sequence[float]) -> Errors:
    relative = np.abs(np.array(predicted) / np.array(measured) - 1)
    return Errors(
        points=len(relative),
        median=float(np.median(relative)),
        p90=float(np.quantile(relative, 0.9)),
        worst=float(relative.max()),
        rank=_rank_correlation(np.array(predicted), np.array(measured)),
    )


def _amounts(work: Operations) -> list[float]:
    """Return the amounts in units of 10^9, in the order of the rates."""
    amounts = (work.conv_1x1_flop, work.conv_flop, work.depthwise_flop, work.matmul_flop, work.memory_bytes)
    return [amount / 1e9 for amount in amounts]


def _rank_correlation(left: Floats, right: Floats) -> float | None:
    """Return Spearman's correlation; None if it is undefined, with fewer than three points or all equal."""
    from scipy.stats import rankdata

    ranks = np.array([rankdata(left), rankdata(right)])
    if ranks.shape[1] < 3 or np.any(ranks.std(axis=1) == 0):
        return None
    return float(np.corrcoef(ranks)[0, 1])
