"""Models with early exits, and models that are trained in segments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fleetbed.models.base import InputSpec, Net
from fleetbed.models.families.lookup import family

torch.set_num_threads(1)
CIFAR = InputSpec((3, 32, 32), 10)
SMALL = InputSpec((3, 16, 16), 4)


def parameters(name: str, variant: str, **options: object) -> int:
    return sum(p.numel() for p in family(name, options).outline(variant, CIFAR).parameters())


def reached(net: Net, logits: Tensor) -> set[str]:
    """The parameters that the gradient of these logits reaches."""
    net.zero_grad()
    F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1]).backward()
    return {name for name, p in net.named_parameters() if p.grad is not None}


# ScaleFL's levels


@pytest.mark.parametrize(
    ("level", "conv", "fc"),
    [
        ("level1", 1_825_213, 959_032),
        ("level2", 3_270_648, 1_538_286),
        ("level3", 10_491_150, 4_514_574),
        ("level4", 28_085_608, 17_462_632),
    ],
)
def test_the_sizes_of_the_levels(level: str, conv: int, fc: int) -> None:
    assert parameters("resnet-exit", level) == conv
    assert parameters("resnet-exit", level, exit="fc") == fc


def test_the_widths_of_the_levels_are_rounded_down() -> None:
    levels = family("resnet-exit")
    widths = [levels.widths(level) for level in levels.variants]  # type: ignore[attr-defined]
    assert widths == [(44, 89, 179, 358)] * 2 + [(48, 96, 192, 384), (64, 128, 256, 512)]
    odd = family("resnet-exit", {"base_width": 90})
    assert odd.widths("level1")[0] == 63  # type: ignore[attr-defined]


def test_a_level_ends_behind_the_block_of_its_exit() -> None:
    levels = family("resnet-exit", {"base_width": 4})
    last = {"level1": "layer3.0", "level2": "layer3.1", "level3": "layer4.0", "level4": "layer4.2"}
    for number, (level, block) in enumerate(last.items(), 1):
        names = list(levels.outline(level, SMALL).state_dict())
        blocks = dict.fromkeys(
            name.rsplit(".conv", 1)[0] for name in names if name.startswith("layer") and "conv" in name
        )
        assert list(blocks)[-1] == block
        assert {name.split(".")[0] for name in names if name.startswith("exit")} == {
            f"exit{n}" for n in range(1, number + 1)
        }


def test_the_window_of_an_exit_is_that_of_its_stage() -> None:
    levels = family("resnet-exit", {"base_width": 20})  # 14, 28, 56, 112 channels of 20, 40, 80, 160 in the first level
    index = levels.index("level1", SMALL)
    assert [rows.tolist() for rows in index["exit1.body.0.0.weight"][:2]] == [list(range(56))] * 2
    assert index["exit1.body.2.1.running_var"][0].tolist() == list(range(56))
    assert (index["exit1.fc.weight"][0], index["exit1.fc.bias"]) == (None, (None,))
    assert index["exit1.fc.weight"][1].tolist() == list(range(56))
    assert index["exit1.body.0.1.num_batches_tracked"] == ()


# DepthFL's depths


def separable(inputs: int, outputs: int) -> int:
    """Two depthwise 3x3 kernels, two 1x1 ones, two norms."""
    return 2 * 9 * inputs + inputs * inputs + inputs * outputs + 2 * inputs + 2 * outputs


def test_the_sizes_of_the_depths() -> None:
    """The stages of ResNet18, and for each early exit a mask, halvings up to 512 channels, and a linear layer."""
    widths = (64, 128, 256, 512)
    stages = [
        147_968,  # 4 kernels of 64x64x9, 4 norms
        525_568,  # 64x128x9 and 3 of 128x128x9, a 1x1 shortcut, 5 norms
        2_099_712,
        8_393_728,
    ]
    exits = [
        separable(w, w) + 2 * w + sum(separable(a, 2 * a) for a in widths[s:-1]) + 5130
        for s, w in enumerate(widths[:-1])
    ]
    exits.append(5130)
    for depth in (1, 2, 3, 4):
        for stem, kernel in (("3x3", 27), ("7x7", 147)):
            wanted = 64 * kernel + 128 + sum(stages[:depth]) + sum(exits[:depth])
            assert parameters("resnet-depth", f"depth{depth}", stem=stem) == wanted


def test_a_mask_weighs_maps_of_any_size_between_0_and_1() -> None:
    net = family("resnet-depth", {"base_width": 4}).build("depth1", SMALL).eval()
    attention = net.exit1.body[0]
    for size in (1, 5, 8):
        maps = torch.rand(2, 4, size, size)
        weighed = attention(maps).detach() / maps
        assert weighed.shape == maps.shape
        assert float(weighed.min()) >= 0.5  # the sigmoid of what left a ReLU
        assert float(weighed.max()) < 1


# exits


@pytest.mark.parametrize("name", ["resnet-exit", "resnet-depth"])
def test_a_variant_has_the_exits_of_the_smaller_ones_and_its_own_is_its_output(name: str) -> None:
    nets = family(name, {"base_width": 4})
    x = torch.randn(3, 3, 16, 16)
    for number, variant in enumerate(nets.variants, 1):
        net = nets.build(variant, SMALL).eval()
        exits = net.exits(x)
        assert [logits.shape for logits in exits] == [(3, 4)] * number
        assert torch.equal(exits[-1], net(x))
        for n in range(1, number + 1):
            names = reached(net, net.exits(x)[n - 1])
            assert {each.split(".")[0] for each in names if each.startswith("exit")} == {f"exit{n}"}


def test_an_exit_learns_from_no_deeper_block() -> None:
    net = family("resnet-exit", {"base_width": 4}).build("level4", SMALL)
    first = reached(net, net.exits(torch.randn(4, 3, 16, 16))[0])
    assert {name.rsplit(".conv", 1)[0] for name in first if ".conv2" in name} == {
        *(f"layer{stage}.{block}" for stage in (1, 2) for block in (0, 1, 2)),
        "layer3.0",
    }


def test_a_model_without_early_exits_has_one() -> None:
    net = family("resnet-stage", {"base_width": 4}).build("resnet10", SMALL).eval()
    x = torch.randn(2, 3, 16, 16)
    (only,) = net.exits(x)
    assert torch.equal(only, net(x))
    assert torch.equal(net.segment(1, x), net(x))


# segments

SEGMENTS = family("resnet-segment", {"base_width": 4})


def test_all_variants_have_the_same_tensors() -> None:
    whole = family("resnet-stage").outline("resnet26", CIFAR).state_dict()
    nets = family("resnet-segment")
    assert [nets.outline(v, CIFAR).segments for v in nets.variants] == [12, 6, 3, 2, 1]
    for variant in nets.variants:
        own = nets.outline(variant, CIFAR).state_dict()
        assert {n: t.shape for n, t in own.items()} == {n: t.shape for n, t in whole.items()}
        assert all(rows is None for parts in nets.index(variant, CIFAR).values() for rows in parts)
        assert nets.part_of("resnet26-in-1", variant)


@pytest.mark.parametrize("variant", SEGMENTS.variants)
def test_the_segments_are_trained_apart_and_together_are_the_model(variant: str) -> None:
    net, x = SEGMENTS.build(variant, SMALL), torch.randn(4, 3, 16, 16)
    parts = [reached(net, net.segment(number, x)) for number in range(1, net.segments + 1)]
    assert set().union(*parts) == {name for name, _ in net.named_parameters()}
    head = {"fc.weight", "fc.bias"}
    assert all(head <= part for part in parts)
    assert sum(len(part - head) for part in parts) == len(list(net.parameters())) - 2  # no tensor twice
    assert {"conv1.weight", "bn1.weight"} <= parts[0]
    assert torch.equal(net.eval().segment(net.segments, x), net(x))


def test_the_short_cut_has_zeros_on_both_sides() -> None:
    """The first 2 blocks of 12 have 4 of 32 channels: 14 zeros before and behind."""
    net, x = SEGMENTS.build("resnet26-in-6", SMALL).eval(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        features = net.layer1[1](net.layer1[0](net.extract(x))).mean((2, 3))
        wanted = features @ net.fc.weight[:, 14:18].T + net.fc.bias
        torch.testing.assert_close(net.segment(1, x), wanted)
