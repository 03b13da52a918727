"""The channel windows of width families, against HeteroFL's and FedRolex's definitions and by hand."""

from __future__ import annotations

import pytest
import torch

from fleetbed.models.base import InputSpec, gather
from fleetbed.models.families.lookup import family
from fleetbed.models.families.vision import torchvision

torch.set_num_threads(1)

SPEC = InputSpec((3, 8, 8), 4)


def test_resnet18_is_torchvisions() -> None:
    torch.manual_seed(0)
    theirs = torchvision.models.resnet18(num_classes=10).eval()
    ours = family("resnet-stage").empty("resnet18", InputSpec((3, 32, 32), 10)).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(ours(x), theirs(x))


def test_blocks_may_start_as_their_shortcut() -> None:
    """What torchvision zeroes under this option, we zero, and nothing else."""
    theirs = torchvision.models.resnet18(num_classes=10, zero_init_residual=True).state_dict()
    ours = family("resnet-stage", {"zero_init_residual": True}).build("resnet18", InputSpec((3, 32, 32), 10))
    zero = {name for name, tensor in ours.named_parameters() if not tensor.any()}
    assert zero == {name for name in theirs if name.endswith(("weight", "bias")) and not theirs[name].any()}
    assert "layer4.1.bn2.weight" in zero


def test_the_static_window_is_the_first_channels() -> None:
    width = family("resnet-width", {"base_width": 8})
    full = width.build("resnet26-full", SPEC).state_dict()
    half = gather(full, width.index("resnet26-half", SPEC))
    by_hand = {
        "conv1.weight": full["conv1.weight"][:4],
        "bn1.running_var": full["bn1.running_var"][:4],
        "layer1.2.conv1.weight": full["layer1.2.conv1.weight"][:4, :4],
        "layer2.0.conv1.weight": full["layer2.0.conv1.weight"][:8, :4],
        "layer2.0.downsample.0.weight": full["layer2.0.downsample.0.weight"][:8, :4],
        "layer2.0.conv2.weight": full["layer2.0.conv2.weight"][:8, :8],
        "layer2.1.conv1.weight": full["layer2.1.conv1.weight"][:8, :8],
        "layer4.0.downsample.1.bias": full["layer4.0.downsample.1.bias"][:32],
        "fc.weight": full["fc.weight"][:, :32],
        "fc.bias": full["fc.bias"],
    }
    for name, expected in by_hand.items():
        assert torch.equal(half[name], expected), name


def test_the_rolling_window_starts_at_the_shift_and_wraps_around() -> None:
    width = family("resnet-width", {"base_width": 8})
    index = width.index("resnet26-half", SPEC, shift=14)
    first, second = [6, 7, 0, 1], [14, 15, 0, 1, 2, 3, 4, 5]  # 14 mod 8 of 8 channels, 14 mod 16 of 16
    assert index["conv1.weight"][0].tolist() == first
    assert index["bn1.running_mean"][0].tolist() == first
    assert [rows.tolist() for rows in index["layer1.1.conv2.weight"][:2]] == [first, first]
    assert [rows.tolist() for rows in index["layer2.0.conv1.weight"][:2]] == [second, first]
    assert [rows.tolist() for rows in index["layer2.0.downsample.0.weight"][:2]] == [second, first]
    assert [rows.tolist() for rows in index["layer2.1.conv1.weight"][:2]] == [second, second]
    assert index["layer2.0.bn1.weight"][0].tolist() == second
    assert index["conv1.weight"][1:] == (None, None, None)
    assert index["bn1.num_batches_tracked"] == ()
    assert (index["fc.weight"][0], index["fc.bias"]) == (None, (None,))


@pytest.mark.parametrize(("variant", "held"), [("resnet26-sixteenth", 2), ("resnet26-half", 16)])
def test_a_rolling_window_covers_each_channel_equally(variant: str, held: int) -> None:
    """In c rounds each of the c channels is held r*c times; 32 rounds are two turns of 16 channels, one of 32."""
    width = family("resnet-width", {"base_width": 16})
    first, second = torch.zeros(16), torch.zeros(32)
    for shift in range(32):
        index = width.index(variant, SPEC, shift)
        first[index["layer1.0.bn1.weight"][0]] += 1
        second[index["layer2.0.bn1.weight"][0]] += 1
    assert first.tolist() == [held] * 16
    assert second.tolist() == [held] * 32


def test_widths_are_rounded_up() -> None:
    width = family("resnet-width", {"base_width": 10})
    tensors = width.outline("resnet26-quarter", SPEC).state_dict()
    assert [tensors[f"layer{s}.0.bn1.weight"].numel() for s in (1, 2, 3, 4)] == [3, 5, 10, 20]


def test_a_narrowed_family_is_cut_out_of_its_own_largest_variant() -> None:
    width = family("resnet-width", {"base_width": 16}).narrow(("resnet26-half", "resnet26-eighth"))
    assert width.variants == ("resnet26-eighth", "resnet26-half")
    index = width.index("resnet26-eighth", SPEC, shift=7)
    assert index["conv1.weight"][0].tolist() == [7, 0]  # two of the eight channels of half of 16
    assert all(rows is None for parts in width.index("resnet26-half", SPEC, 7).values() for rows in parts)


def test_the_grid_cuts_both_ways() -> None:
    grid = family("resnet-grid", {"base_width": 8})
    full = grid.build("resnet26-full", SPEC).state_dict()
    part = gather(full, grid.index("resnet14-quarter", SPEC))
    assert {name.rsplit(".conv1")[0] for name in part if name.endswith("conv1.weight") and "layer" in name} == {
        "layer1.0",
        "layer2.0",
        "layer3.0",
        "layer3.1",
        "layer4.0",
        "layer4.1",
    }
    assert torch.equal(part["layer4.1.conv2.weight"], full["layer4.1.conv2.weight"][:16, :16])


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("resnet10", []),
        ("resnet14", ["layer3.1", "layer4.1"]),
        (
            "resnet26",
            [f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (1, 2)],
        ),
    ],
)
def test_cross_layers_are_the_later_blocks(variant: str, expected: list[str]) -> None:
    stage = family("resnet-stage", {"base_width": 4})
    tensors = stage.outline(variant, SPEC).state_dict()
    found = stage.cross_layers(tensors)
    wanted = [f"{block}.{conv}.weight" for block in expected for conv in ("conv1", "conv2")]
    assert sorted(found) == sorted(wanted)
    for name, base in found.items():
        assert base == f"{name[:6]}.0.conv2.weight"
        assert tensors[base].shape == tensors[name].shape


def test_the_largest_resnet_has_sixteen_cross_layers() -> None:
    stage = family("resnet-stage")
    assert len(stage.cross_layers(stage.outline("resnet26", SPEC).state_dict())) == 16
