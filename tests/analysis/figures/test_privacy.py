"""Privacy: the calculator, the similarity score, and an attack that works until noise is added."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from handmade import write_models
from synthetic_runs import write_run

from fleetbed.analysis.figures.privacy import dp_sigma, mean_ssim, reconstruct_images, ssim, table
from fleetbed.analysis.figures.privacy_plot import reconstruction_figure
from fleetbed.analysis.tables.runs import open_run
from fleetbed.profiles.errors import BadInput

torch.set_num_threads(1)


def test_the_example_of_the_appendix_gives_0_106() -> None:
    assert dp_sigma(0.1, 10, 1e-6) == pytest.approx(0.106, abs=5e-4)


def test_sigma_follows_its_formula() -> None:
    assert dp_sigma(1, 1, 1.25 / np.e**2) == pytest.approx(4)  # ln(e^2) = 2, so 2 sqrt(4)
    assert dp_sigma(3, 2, 1e-5) == pytest.approx(1.5 * dp_sigma(1, 1, 1e-5))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0, 1, 0.1), "--clip is 0, but it must be a number above 0"),
        ((1, -1, 0.1), "--epsilon is -1, but it must be a number above 0"),
        ((1, 1, 1), "--delta is 1, but it must be a number between 0 and 1"),
        ((float("nan"), 1, 0.1), "--clip is nan"),
    ],
)
def test_impossible_budgets_are_refused(arguments: tuple[float, float, float], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        dp_sigma(*arguments)


def test_an_image_is_like_itself_and_less_like_a_noisy_copy() -> None:
    torch.manual_seed(0)
    images = torch.rand(3, 3, 28, 28)
    assert ssim(images, images).tolist() == pytest.approx([1, 1, 1])
    little = ssim(images, (images + 0.1 * torch.randn_like(images)).clamp(0, 1))
    much = ssim(images, (images + 0.5 * torch.randn_like(images)).clamp(0, 1))
    assert (much < little).all()
    assert (little < 0.99).all()


def test_flat_images_differ_in_luminance_alone() -> None:
    a, b, c1 = 0.3, 0.6, 0.01**2
    first, second = torch.full((1, 1, 16, 16), a), torch.full((1, 1, 16, 16), b)
    assert float(ssim(first, second)) == pytest.approx((2 * a * b + c1) / (a * a + b * b + c1), rel=1e-5)


def test_ssim_is_the_definition_on_one_window() -> None:
    rng = np.random.default_rng(3)
    x, y = rng.random((11, 11)), rng.random((11, 11))
    grid = np.arange(11) - 5
    weight = np.exp(-(grid[:, None] ** 2 + grid[None, :] ** 2) / (2 * 1.5**2))
    weight /= weight.sum()
    mx, my = (weight * x).sum(), (weight * y).sum()
    vx, vy, cov = (weight * (x - mx) ** 2).sum(), (weight * (y - my) ** 2).sum(), (weight * (x - mx) * (y - my)).sum()
    expected = (2 * mx * my + 1e-4) * (2 * cov + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4))
    found = ssim(torch.tensor(x)[None, None], torch.tensor(y)[None, None])
    assert float(found) == pytest.approx(expected)


def test_small_images_get_a_smaller_window() -> None:
    assert torch.isfinite(ssim(torch.rand(1, 1, 6, 8), torch.rand(1, 1, 6, 8))).all()


def test_features_give_images_away_unless_noise_is_added(tmp_path: Path) -> None:
    folder = write_run(tmp_path, rounds=1)
    write_models(folder, ("resnet10", "resnet26"))
    original, attacks = reconstruct_images(open_run(folder), [0.0, 0.8], images=4, steps=150)
    clear, noisy = attacks
    assert original.shape == clear.images.shape == (4, 1, 28, 28)
    assert mean_ssim(clear) > 0.9
    assert mean_ssim(noisy) < mean_ssim(clear) - 0.2
    columns, rows = table(attacks)
    assert columns[:3] == ("noise_sd", "image", "ssim")
    assert len(rows) == 8
    again = reconstruct_images(open_run(folder), [0.8], images=4, steps=150)[1][0]
    assert again.ssim == noisy.ssim
    assert len(reconstruction_figure(original, attacks).axes) == 12
