"""Reconstructs inputs from features, with and without noise, and computes the noise that DP requires.

FedIN (TMLR), sections 4.3 and 5.5: a server that has the extractor starts from noise and changes it until its features
equal those that were sent, min over x' of MSE(f(x'; w_e), s_in). Clients may add noise of 0.8 of the features' own
standard deviation before they send them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fleetbed.analysis.figures.nets import dataset_of, final_models, test_samples
from fleetbed.analysis.tables.runs import Run
from fleetbed.emulator.data import Dataset
from fleetbed.models.base import Net
from fleetbed.profiles.errors import BadInput

LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Attack:
    """Images in [0, 1]; `ssim` has one value per image, 1 for a perfect copy."""

    noise: float  # in standard deviations of the features
    images: Tensor
    ssim: tuple[float, ...]
    lpips: tuple[float, ...] | None  # lower is more similar; None if it is not installed


def dp_sigma(clip: float, epsilon: float, delta: float) -> float:
    """Return the Gaussian noise that makes features of norm <= `clip` (epsilon, delta)-private (FedIN, appendix D).

    sigma = 2 C sqrt(2 ln(1.25/delta)) / epsilon. Dwork and Roth prove it for epsilon below 1; the appendix uses it
    at 10, where C = 0.1 and delta = 1e-6 give 0.106 (the paper prints 0.127).
    """
    for name, value, fits in (
        ("--clip", clip, clip > 0),
        ("--epsilon", epsilon, epsilon > 0),
        ("--delta", delta, 0 < delta < 1),
    ):
        if not fits:
            allowed = "a number between 0 and 1" if name == "--delta" else "a number above 0"
            raise BadInput(f"{name} is {value:g}, but it must be {allowed}.")
    return 2 * clip * sqrt(2 * log(1.25 / delta)) / epsilon


def reconstruct_images(run: Run, noises: Sequence[float], images: int, steps: int) -> tuple[Tensor, list[Attack]]:
    """Return test images, and their reconstruction by an attacker under each noise.

    The model is the smallest final one: its extractor is the same stem as that of the others, and fast.
    """
    dataset = dataset_of(run)
    if dataset.spec.vocabulary:
        raise BadInput(f"{run.folder}: its data are texts; only images can be reconstructed.")
    net = min(final_models(run, dataset), key=lambda model: sum(p.numel() for p in model.net.parameters())).net
    x, _ = test_samples(dataset, images)
    low, high = _range(dataset)
    original = _unit(x, low, high)
    attacks = []
    for noise in noises:
        rebuilt = _unit(_invert(net, x, noise, steps, run.config.seed), low, high)
        scores = ssim(original, rebuilt)
        attacks.append(Attack(noise, rebuilt, tuple(scores.tolist()), _lpips(original, rebuilt)))
    return original, attacks


def _invert(net: Net, x: Tensor, noise: float, steps: int, seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        features = net.extract(x)
        sent = features + noise * features.std() * torch.randn(features.shape, generator=source)
    guess = torch.randn(x.shape, generator=source).requires_grad_()
    optimizer = torch.optim.Adam([guess], lr=LEARNING_RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        # a sum over images, so that each is reconstructed by itself, whatever their number
        loss = (net.extract(guess) - sent).square().mean(dim=tuple(range(1, sent.ndim))).sum()
        loss.backward()
        optimizer.step()
    return guess.detach()


def _range(dataset: Dataset) -> tuple[Tensor, Tensor]:
    """Return the values of black and white after normalisation, per channel: the extremes of many images."""
    many, _ = test_samples(dataset, 500)
    return many.amin(dim=(0, 2, 3), keepdim=True), many.amax(dim=(0, 2, 3), keepdim=True)


def _unit(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return ((x - low) / (high - low).clamp_min(1e-12)).clamp(0, 1)


def ssim(first: Tensor, second: Tensor) -> Tensor:
    """Return the structural similarity of [n, channels, height, width] images in [0, 1], one value per image.

    Wang et al. 2004: a Gaussian window of 11 pixels and deviation 1.5, C1 = 0.01^2, C2 = 0.03^2, over the positions at
    which the window fits; a smaller image gets a smaller window.
    """
    channels = first.shape[1]
    size = min(11, *(side - (side + 1) % 2 for side in first.shape[2:]))
    place = torch.arange(size, dtype=torch.float64) - size // 2
    line = torch.exp(-(place**2) / (2 * 1.5**2))
    line /= line.sum()
    window = torch.outer(line, line).expand(channels, 1, size, size)

    def blurred(values: Tensor) -> Tensor:
        return functional.conv2d(values, window, groups=channels)

    x, y = first.double(), second.double()
    mean_x, mean_y = blurred(x), blurred(y)
    var_x, var_y = blurred(x * x) - mean_x**2, blurred(y * y) - mean_y**2
    covariance = blurred(x * y) - mean_x * mean_y
    c1, c2 = 0.01**2, 0.03**2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    structure = (2 * covariance + c2) / (var_x + var_y + c2)
    return (luminance * structure).mean(dim=(1, 2, 3))


def _lpips(first: Tensor, second: Tensor) -> tuple[float, ...] | None:
    """Return LPIPS, if its library and weights are installed; it needs 3 channels in [-1, 1]."""
    try:
        import lpips

        judge = lpips.LPIPS(net="alex", verbose=False)
    except (ImportError, OSError):
        return None  # OSError: its weights are not here and cannot be downloaded
    with torch.no_grad():
        found = judge(*(_large(images) for images in (first, second)))
    return tuple(float(value) for value in found.flatten())


def _large(images: Tensor) -> Tensor:
    coloured = images.expand(-1, 3, -1, -1).float()
    return functional.interpolate(coloured, size=(64, 64), mode="bilinear") * 2 - 1


def table(attacks: Sequence[Attack]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Return columns and rows: one row per noise and image."""
    rows: list[tuple[object, ...]] = [
        (attack.noise, number, score, None if attack.lpips is None else attack.lpips[number])
        for attack in attacks
        for number, score in enumerate(attack.ssim)
    ]
    return ("noise_sd", "image", "ssim", "lpips"), rows


def mean_ssim(attack: Attack) -> float:
    return float(np.mean(attack.ssim))
