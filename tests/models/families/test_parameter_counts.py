"""Every size that the papers state or that follows from their layer tables, counted on the models
themselves."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family

CIFAR = InputSpec((3, 32, 32), 10)
MNIST = InputSpec((1, 28, 28), 10)
TWEETS = InputSpec((25,), 2, vocabulary=500)


def parameters(name: str, variant: str, spec: InputSpec, **options: object) -> int:
    return sum(p.numel() for p in family(name, options).outline(variant, spec).parameters())


def keras_total(variant: str, spec: InputSpec) -> int:
    """Keras counts the running mean and variance of batch norm as (non-trainable) parameters."""
    net = family("fedhe-cnn").outline(variant, spec)
    running = [b for name, b in net.named_buffers() if name.endswith(("running_mean", "running_var"))]
    return sum(t.numel() for t in (*net.parameters(), *running))


RESNET_STAGE = {
    "resnet10": (4_910_922, 18.14),
    "resnet14": (10_812_234, 27.58),
    "resnet18": (11_181_642, 37.02),
    "resnet22": (17_082_954, 46.45),
    "resnet26": (17_452_362, 55.89),
}


@pytest.mark.parametrize("variant", RESNET_STAGE)
def test_resnet_stage(variant: str) -> None:
    expected, millions_of_macs = RESNET_STAGE[variant]
    assert parameters("resnet-stage", variant, CIFAR) == expected

    net = family("resnet-stage").outline(variant, CIFAR).eval()
    with FlopCounterMode(display=False) as counter:
        net(torch.empty(1, 3, 32, 32, device="meta"))
    assert round(counter.get_total_flops() / 2 / 1e6, 2) == millions_of_macs


def test_resnet_stage_mean_is_the_overhead_that_the_papers_report() -> None:
    sizes = [parameters("resnet-stage", variant, CIFAR) for variant in RESNET_STAGE]
    assert round(sum(sizes) / len(sizes) / 1e6, 3) == 12.288


def test_a_3x3_stem_has_fewer_parameters_and_many_more_macs() -> None:
    assert round(parameters("resnet-stage", "resnet26", CIFAR, stem="3x3") / 1e6, 3) == 17.445
    net = family("resnet-stage", {"stem": "3x3"}).outline("resnet26", CIFAR).eval()
    with FlopCounterMode(display=False) as counter:
        net(torch.empty(1, 3, 32, 32, device="meta"))
    assert round(counter.get_total_flops() / 2 / 1e6) == 857


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("resnet26-sixteenth", 69_822),
        ("resnet26-eighth", 275_762),
        ("resnet26-quarter", 1_096_026),
        ("resnet26-half", 4_370_090),
        ("resnet26-full", 17_452_362),
    ],
)
def test_resnet_width(variant: str, expected: int) -> None:
    assert parameters("resnet-width", variant, CIFAR) == expected


def test_resnet_grid_is_ordered_by_parameters_and_by_flops() -> None:
    grid = family("resnet-grid")
    sizes, flops = [], []
    for variant in grid.variants:
        net = grid.outline(variant, CIFAR).eval()
        sizes.append(sum(p.numel() for p in net.parameters()))
        with FlopCounterMode(display=False) as counter:
            net(torch.empty(1, 3, 32, 32, device="meta"))
        flops.append(counter.get_total_flops())
    assert len(sizes) == 15
    assert sizes == sorted(set(sizes))
    assert flops == sorted(set(flops))
    assert (sizes[0], sizes[-1]) == (310_746, 17_452_362)


@pytest.mark.parametrize("layers", [8, 9, 10, 11, 12])
def test_vit_layer(layers: int) -> None:
    spec = InputSpec((3, 224, 224), 10)
    assert parameters("vit-layer", f"vit{layers}", spec) == 14_571_658 + (layers - 8) * 1_774_464


def test_vit_small_is_21_669_514() -> None:
    assert parameters("vit-layer", "vit12", InputSpec((3, 224, 224), 10)) == 21_669_514


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("model0", 876_288),
        ("model1", 1_312_384),
        ("model2", 1_748_480),
        ("model3", 1_175_296),
        ("model4", 2_342_400),
        ("model5", 354_688),
        ("model6", 274_880),
        ("model7", 570_048),
        ("model8", 229_888),
        ("model9", 309_696),
    ],
)
def test_fedhe_cnn_on_cifar_as_keras_counts(variant: str, expected: int) -> None:
    assert keras_total(variant, CIFAR) == expected


def test_fedhe_model_9_on_mnist_as_keras_counts() -> None:
    assert keras_total("model9", MNIST) == 307_392
    # the paper's figure counts the dense kernel, 3x3x192 inputs and 10 outputs, twice
    assert keras_total("model9", MNIST) + 3 * 3 * 192 * 10 == 324_672


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("conv1-fc1", 130_314),
        ("conv1-fc2", 1_511_474),
        ("conv2-fc2", 300_658),
        ("conv2-fc3", 307_842),
        ("conv3-fc3", 160_450),
    ],
)
def test_fedhenn_cnn(variant: str, expected: int) -> None:
    assert parameters("fedhenn-cnn", variant, CIFAR) == expected


def test_fedhenn_network_for_cifar_100() -> None:
    spec = InputSpec((3, 32, 32), 100)
    options = {"filters": (64, 128, 64), "hidden": (256, 128)}
    assert parameters("fedhenn-cnn", "conv2-fc3", spec, **options) == 1_075_044


@pytest.mark.parametrize(
    ("variant", "expected"),
    [("A", 6_255_306), ("B", 4_942_026), ("C", 5_598_666), ("D", 6_090_826), ("E", 4_777_546)],
)
def test_fedin_v1(variant: str, expected: int) -> None:
    assert parameters("fedin-v1", variant, CIFAR) == expected


def test_fedin_v1_extractor_and_classifier_are_small() -> None:
    net = family("fedin-v1").outline("A", CIFAR)
    sizes = {"extractor": 0, "intermediate": 0, "classifier": 0}
    for name, parameter in net.named_parameters():
        sizes[net.section(name)] += parameter.numel()
    assert (sizes["extractor"], sizes["classifier"]) == (1_856, 10_250)


@pytest.mark.parametrize(("variant", "expected"), [("lstm1", 221_472), ("lstm2", 353_568)])
def test_lstm_without_its_frozen_embedding(variant: str, expected: int) -> None:
    assert parameters("lstm", variant, TWEETS) == expected


@pytest.mark.parametrize(
    ("name", "variant", "image", "s_in", "s_out"),
    [
        ("resnet-stage", "resnet10", 32, (64, 8, 8), (512,)),
        ("resnet-stage", "resnet26", 32, (64, 8, 8), (512,)),
        ("resnet-width", "resnet26-half", 32, (32, 8, 8), (256,)),
        ("vit-layer", "vit8", 224, (197, 384), (384,)),
        ("fedin-v1", "E", 32, (64, 32, 32), (1024,)),
        ("fedhe-cnn", "model9", 32, (128, 32, 32), (3 * 3 * 192,)),
        ("fedhe-cnn", "model0", 28, (128, 28, 28), (13 * 13 * 256,)),
        ("fedhenn-cnn", "conv1-fc1", 32, (64, 14, 14), (12_544,)),
        ("fedhenn-cnn", "conv2-fc3", 32, (64, 14, 14), (64,)),
    ],
)
def test_cut_points(name: str, variant: str, image: int, s_in: tuple[int, ...], s_out: tuple[int, ...]) -> None:
    net = family(name).outline(variant, InputSpec((3, image, image), 10))
    first = net.extract(torch.empty(2, 3, image, image, device="meta"))
    features = net.intermediate(first)
    assert (first.shape, features.shape) == ((2, *s_in), (2, *s_out))
    assert net.classify(features).shape == (2, 10)
