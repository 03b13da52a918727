"""Properties of every model of every family."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from fleetbed.models.base import Family, InputSpec, Net, gather, scatter_add
from fleetbed.models.families.lookup import family, family_names

torch.set_num_threads(1)

IMAGES = InputSpec((3, 32, 32), 5)
TEXT = InputSpec((7,), 3, vocabulary=40)
SMALL = {  # options that make training a model of any family a matter of milliseconds
    "resnet-stage": {"base_width": 8},
    "resnet-width": {"base_width": 16},
    "resnet-grid": {"base_width": 8, "stem": "3x3"},
    "resnet-exit": {"base_width": 4},
    "resnet-depth": {"base_width": 4},
    "resnet-segment": {"base_width": 4},
    "vit-layer": {"patch": 16, "width": 24, "heads": 3},
    "fedhenn-cnn": {"filters": (6, 5, 4), "hidden": (9, 8)},
    "conv1d": {"width": 6},
    "lstm": {"embedding": 11, "hidden": 6},
}
SPECS = {
    "resnet-grid": InputSpec((3, 8, 8), 5),
    "fedhe-cnn": InputSpec((1, 12, 12), 5),
    "fedin-v1": InputSpec((1, 6, 6), 5),
    "conv1d": InputSpec((3, 20), 5),
    "lstm": TEXT,
}


@cache
def small(name: str) -> Family:
    return family(name, SMALL.get(name))


def spec_of(name: str) -> InputSpec:
    return SPECS.get(name, IMAGES)


def inputs(spec: InputSpec, count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    if spec.vocabulary:
        return torch.randint(spec.vocabulary, (count, *spec.shape), generator=generator)
    return torch.randn(count, *spec.shape, generator=generator)


def randomise(net: Net) -> None:
    """Give every float tensor of the state a value of its own, running statistics too (variances
    positive)."""
    generator = torch.Generator().manual_seed(9)
    for tensor in net.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.4 + 0.05)


@cache
def stages_of_the_largest(name: str) -> frozenset[str]:
    net = small(name).build(small(name).variants[-1], spec_of(name)).eval()
    return frozenset(net.stages(inputs(spec_of(name))))


VARIANTS = [(name, variant) for name in family_names() for variant in small(name).variants]
ENDS = [(name, variant) for name in family_names() for variant in (small(name).variants[0], small(name).variants[-1])]
SHARED = [(name, variant) for name, variant in VARIANTS if small(name).shared]


def test_the_families() -> None:
    assert family_names() == (
        "resnet-stage",
        "resnet-width",
        "resnet-grid",
        "resnet-exit",
        "resnet-depth",
        "resnet-segment",
        "vit-layer",
        "fedhe-cnn",
        "fedhenn-cnn",
        "fedin-v1",
        "conv1d",
        "lstm",
    )
    assert [name for name in family_names() if not small(name).shared] == ["fedhe-cnn", "fedhenn-cnn"]
    assert all(small(name).name == name for name in family_names())


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_a_model_is_the_composition_of_its_sections(name: str, variant: str) -> None:
    spec = spec_of(name)
    net = small(name).build(variant, spec).eval()
    x = inputs(spec)
    features = net.intermediate(net.extract(x))
    assert features.ndim == 2
    assert torch.equal(net.features(x), features)
    assert torch.equal(net(x), net.classify(features))
    assert net(x).shape == (2, spec.classes)


@pytest.mark.parametrize(("name", "variant"), ENDS)
@torch.no_grad()
def test_a_section_has_the_tensors_of_its_part_of_the_forward_pass(name: str, variant: str) -> None:
    """Poison one tensor at a time: only the pass through its own section may show it."""
    spec = spec_of(name)
    net = small(name).build(variant, spec).eval()
    x = inputs(spec)
    first = net.extract(x)
    features = net.intermediate(first)
    for tensor_name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        if not tensor.is_floating_point():
            continue
        before = tensor.clone()
        tensor.fill_(float("nan"))
        outputs = {
            "extractor": net.extract(x),
            "intermediate": net.intermediate(first),
            "classifier": net.classify(features),
        }
        tensor.copy_(before)
        broken = [part for part, output in outputs.items() if output.isnan().any()]
        is_early = tensor_name.startswith("exit") and not tensor_name.startswith(f"exit{len(net.exits(x))}.")
        assert broken == ([] if is_early else [net.section(tensor_name)]), tensor_name


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_stages_go_from_the_extractor_to_the_last_map(name: str, variant: str) -> None:
    spec = spec_of(name)
    net = small(name).build(variant, spec).eval()
    x = inputs(spec)
    reached = net.stages(x)
    assert torch.equal(next(iter(reached.values())), net.extract(x))
    assert all(len(activation) == len(x) for activation in reached.values())
    if small(name).shared:  # stages of two variants are compared by name
        assert set(reached) <= stages_of_the_largest(name)


@pytest.mark.parametrize(
    ("name", "variant", "stages"),
    [
        ("resnet-stage", "resnet14", ["stem", "layer1", "layer2", "layer3", "layer4"]),
        ("vit-layer", "vit8", ["embedding", *(f"blocks.{number}" for number in range(8))]),
        ("fedhe-cnn", "model9", ["conv1", "conv2", "conv3"]),
        ("fedhenn-cnn", "conv2-fc3", ["conv1", "conv2", "fc1", "fc2"]),
        ("fedin-v1", "A", ["stage1", "stage2", "stage3", "stage4"]),
        ("lstm", "lstm2", ["embedding", "lstm"]),
    ],
)
def test_stage_names(name: str, variant: str, stages: list[str]) -> None:
    spec = spec_of(name)
    net = small(name).build(variant, spec).eval()
    reached = net.stages(inputs(spec))
    assert list(reached) == stages
    if name.startswith("resnet"):
        assert torch.equal(reached["layer4"].mean((2, 3)), net.features(inputs(spec)))


@pytest.mark.parametrize(("name", "variant"), ENDS)
def test_building_is_deterministic_under_a_seed(name: str, variant: str) -> None:
    def built(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return dict(small(name).build(variant, spec_of(name)).state_dict())

    first, again, other = built(1), built(1), built(2)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    assert all(torch.isfinite(tensor).all() for tensor in first.values())


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_a_model_with_loaded_weights_is_the_model(name: str, variant: str) -> None:
    spec = spec_of(name)
    built = small(name).build(variant, spec)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    empty = small(name).load(variant, spec, dict(built.state_dict()))
    assert torch.equal(torch.rand(1), expected)  # making it draws nothing
    x = inputs(spec)
    assert torch.equal(empty.eval()(x), built.eval()(x))
    assert all(p.requires_grad == q.requires_grad for p, q in zip(empty.parameters(), built.parameters(), strict=True))


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_a_training_step_reaches_every_parameter(name: str, variant: str) -> None:
    spec = spec_of(name)
    torch.manual_seed(0)
    net = small(name).build(variant, spec)
    for logits in net.exits(inputs(spec)):
        nn.functional.cross_entropy(logits, torch.tensor([0, 1])).backward(retain_graph=True)
    for tensor_name, parameter in net.named_parameters():
        assert parameter.grad is not None, tensor_name
        assert torch.isfinite(parameter.grad).all(), tensor_name


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_gather_gives_a_loadable_part_and_scatter_puts_it_back(name: str, variant: str) -> None:
    part_of, spec = small(name), spec_of(name)
    whole = part_of.variants[-1] if part_of.shared else variant
    full = dict(part_of.build(whole, spec).state_dict())
    index = part_of.index(variant, spec, shift=3)
    part = gather(full, index)
    part_of.load(variant, spec, part)

    marks = {key: torch.zeros_like(tensor) for key, tensor in full.items()}
    scatter_add(marks, {key: torch.ones_like(tensor) for key, tensor in part.items()}, index)
    back = {key: torch.zeros_like(tensor) for key, tensor in full.items()}
    scatter_add(back, part, index)
    for key, tensor in full.items():
        assert set(marks[key].unique().tolist()) <= {0, 1}
        assert torch.equal(back[key], tensor * marks[key])
        held = part[key].numel() if key in part else 0
        assert int(marks[key].sum()) == held


@pytest.mark.parametrize(("name", "variant"), [pair for pair in SHARED if pair[0] != "lstm"])
def test_a_part_equals_the_whole_with_the_rest_at_zero(name: str, variant: str) -> None:
    """A channel whose filter, scale and offset are 0 is 0, and a residual block of such channels changes
    nothing; so the largest model with only the part's tensors in place must give the part's own output."""
    families, spec = small(name), spec_of(name)
    whole = families.empty(families.variants[-1], spec)
    randomise(whole)
    index = families.index(variant, spec, shift=5)
    part = families.load(variant, spec, gather(whole.state_dict(), index))

    masked = {key: torch.zeros_like(tensor) for key, tensor in whole.state_dict().items()}
    scatter_add(masked, gather(whole.state_dict(), index), index)
    whole = families.load(families.variants[-1], spec, masked)
    x = inputs(spec, 3)
    for training in (False, True):  # by running statistics, and by those of the batch
        # the first exits of the whole are those of the part
        for own, other in zip(part.train(training).exits(x), whole.train(training).exits(x), strict=False):
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in family_names() if not small(name).shared])
def test_the_index_of_an_unshared_variant_is_all_of_itself(name: str) -> None:
    for variant in small(name).variants:
        index = small(name).index(variant, spec_of(name))
        assert set(index) == set(small(name).outline(variant, spec_of(name)).state_dict())
        assert all(rows is None for parts in index.values() for rows in parts)
