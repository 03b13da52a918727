"""Predicted cost against figures calculated by hand for small models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from fleetbed.models.base import Family, InputSpec, Net
from fleetbed.models.cost.predict import Cost, cost, forward_flops
from fleetbed.models.cost.rehearsal import PROCESS_BYTES, TENSOR_BYTES
from fleetbed.models.families import lookup
from fleetbed.models.work import Pass, Phase, Work
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Optimizer

PLAIN = Optimizer(momentum=0.0)
MOMENTUM = Optimizer()
ADAM = Optimizer(name="adam")
PIXELS = InputSpec((3, 10, 10), 2)
TEXT = InputSpec((6,), 2, vocabulary=30)


class Dense(Net):
    """Four dense layers of 100x100 without bias, tanh between them, and a last one of 100x2."""

    extractor_parts = frozenset({"first"})
    classifier_parts = frozenset({"last"})

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(100, 100, bias=False)
        self.middle = nn.ModuleList(nn.Linear(100, 100, bias=False) for _ in range(3))
        self.last = nn.Linear(100, 2, bias=False)

    def extract(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x.flatten(1)))

    def intermediate(self, s: Tensor) -> Tensor:
        for layer in self.middle:
            s = torch.tanh(layer(s))
        return s

    def classify(self, f: Tensor) -> Tensor:
        logits: Tensor = self.last(f)
        return logits

    def stages(self, x: Tensor) -> dict[str, Tensor]:
        return {"first": self.extract(x)}


class Conv(Dense):
    """A 3x3 convolution to 8 channels and a dense layer, both with bias; the middle has no parameters."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.first = nn.Conv2d(3, 8, 3, padding=1)  # type: ignore[assignment]
        self.middle = nn.ModuleList()
        self.last = nn.Linear(800, 2)

    def extract(self, x: Tensor) -> Tensor:
        s: Tensor = self.first(x)
        return s

    def intermediate(self, s: Tensor) -> Tensor:
        return s.flatten(1)


class Small(Family):
    name = "small"
    shared = False
    variants = ("dense", "conv")

    def make(self, variant: str, spec: InputSpec) -> Net:
        return Dense() if variant == "dense" else Conv()


FAMILY = Small(None)
SQUARE = InputSpec((1, 10, 10), 2)
LAYER = 100 * 100 * 4  # bytes of one square layer
DENSE = 4 * LAYER + 200 * 4


def dense(work: Work, optimizer: Optimizer = PLAIN) -> Cost:
    return cost(FAMILY, "dense", SQUARE, work, optimizer)


def test_an_untrained_model_costs_itself_and_the_held_tensors() -> None:
    found = dense(Work(held_models=2, held_values=7))
    assert found.parameters == 40_200
    assert found.state_bytes == DENSE
    process = PROCESS_BYTES + 5 * TENSOR_BYTES
    assert found.memory == {"process": process, "held": 2 * DENSE + 28, "model": DENSE}
    assert found.memory_bytes == process + 3 * DENSE + 28
    assert found.flops == 0


@pytest.mark.parametrize(
    ("optimizer", "kept"),
    [(ADAM, 2), (Optimizer(name="adam", weight_decay=0.1), 2), (Optimizer(weight_decay=0.1), 1)],
)
def test_an_optimiser_costs_its_state_and_updates_in_place(optimizer: Optimizer, kept: int) -> None:
    found = dense(Work(steps=3, batch=2), optimizer).memory
    assert found["optimizer"] == kept * DENSE
    assert "workspace" not in found


def test_state_of_the_optimizer() -> None:
    work = Work(steps=1, batch=2)
    kept = [dense(work, each).memory.get("optimizer", 0) for each in (PLAIN, MOMENTUM, ADAM)]
    assert kept == [0, DENSE, 2 * DENSE]


def test_activations_are_those_that_the_backward_pass_needs() -> None:
    """The inputs of the five layers, of which the first is the batch; and a few tensors of one layer on the way."""
    batch, row = 4096, 100 * 4
    found = dense(Work(steps=1, batch=batch))
    assert found.memory["batch"] == batch * row
    saved = 4 * batch * row
    assert saved <= found.memory["activations"] <= saved + 3 * batch * row


def test_activations_grow_with_the_batch_and_with_nothing_else() -> None:
    sizes = [dense(Work(steps=1, batch=batch)).memory_bytes for batch in (1000, 2000, 3000)]
    assert sizes[1] - sizes[0] == pytest.approx(sizes[2] - sizes[1], abs=4)
    assert dense(Work(steps=1, batch=1000), ADAM).memory_bytes - sizes[0] == 2 * DENSE
    assert dense(Work(steps=500, batch=1000)).memory_bytes == sizes[0]


def test_a_lone_sample_is_shown_twice() -> None:
    assert dense(Work(steps=1, batch=1)).memory_bytes == dense(Work(steps=1, batch=2)).memory_bytes
    family, spec = lookup.family("resnet-stage", {"base_width": 4}), InputSpec((1, 8, 8), 2)
    assert cost(family, "resnet10", spec, Work(steps=1, batch=1), MOMENTUM).memory_bytes > PROCESS_BYTES


def test_flops_of_dense_layers() -> None:
    """Forward, gradients of weights, gradients of inputs except the data's own: two FLOPs a multiply-add."""
    square, last = 2 * 100 * 100, 2 * 100 * 2
    assert forward_flops(FAMILY, "dense", SQUARE) == 4 * square + last
    step = 8 * (3 * (4 * square + last) - square)
    assert dense(Work(steps=1, batch=8)).flops == step
    found = dense(Work(steps=7, batch=8, parameter_passes=2, flops=5.0))
    assert found.flops == 7 * (step + 2 * 2 * 40_200 + 5)
    earlier = dense(Work(earlier=(Phase(steps=3, batch=8, flops=2.0),), steps=7, batch=8))
    assert earlier.flops == 10 * step + 6


def test_flops_of_a_convolution() -> None:
    convolution, last = 2 * (3 * 3 * 3) * 8 * 10 * 10, 2 * 800 * 2
    assert forward_flops(FAMILY, "conv", PIXELS) == convolution + last
    found = cost(FAMILY, "conv", PIXELS, Work(steps=2, batch=5), MOMENTUM)
    assert found.flops == 2 * 5 * (2 * convolution + 3 * last)


def test_passes_of_a_part() -> None:
    square, last = 2 * 100 * 100, 2 * 100 * 2
    alone = dense(Work(steps=1, batch=8))
    middle = dense(Work(steps=1, batch=8, each_step=(Pass("train", "intermediate", 4),)))
    assert middle.flops - alone.flops == 4 * (3 * 3 * square - square)  # no gradient of what came from elsewhere
    features = dense(Work(steps=3, batch=8, each_step=(Pass("forward", "features", 2),)))
    assert features.flops - 3 * alone.flops == 3 * 2 * 4 * square
    whole = dense(Work(batch=8, once=(Pass("forward", "all", 100),)))
    assert whole.flops == 100 * (4 * square + last)


def test_a_part_without_parameters_can_be_trained() -> None:
    work = Work(steps=1, batch=2, each_step=(Pass("train", "intermediate", 2),))
    assert (
        cost(FAMILY, "conv", PIXELS, work, PLAIN).flops
        == cost(FAMILY, "conv", PIXELS, Work(steps=1, batch=2), PLAIN).flops
    )


def test_memory_of_further_passes() -> None:
    """Forward passes go through in slices of a batch, passes that train need all of their samples at once."""
    few, many = (dense(Work(batch=64, once=(Pass("forward", "features", count),))) for count in (64, 10_000))
    assert few.memory == many.memory
    alone = dense(Work(steps=1, batch=64))
    large = dense(Work(steps=1, batch=64, each_step=(Pass("train", "features", 4096),)))
    assert large.memory_bytes > alone.memory_bytes + 4 * 4096 * 400
    # the features that an intermediate pass reads are the method's own, which says what it holds
    middle = dense(Work(steps=1, batch=64, each_step=(Pass("train", "intermediate", 4096),)))
    assert "batch" not in middle.memory
    assert 3 * 4096 * 400 < middle.memory["activations"] < large.memory["activations"]


def test_constants_of_a_model_are_memory_but_no_message() -> None:
    """The frozen embedding of the text model is in every process and on no wire."""
    family = lookup.family("lstm")
    found = cost(family, "lstm1", TEXT, Work(held_models=1), MOMENTUM)
    assert found.parameters == 221_472
    assert found.state_bytes == 4 * 221_472
    assert found.memory["model"] - found.memory["held"] == 4 * 30 * 300


CHECKED = {
    "resnet-stage": InputSpec((3, 32, 32), 10),
    "resnet-width": InputSpec((3, 32, 32), 10),
    "resnet-exit": InputSpec((3, 32, 32), 10),
    "resnet-depth": InputSpec((3, 32, 32), 10),
    "resnet-segment": InputSpec((3, 32, 32), 10),
    "vit-layer": InputSpec((3, 32, 32), 10),
    "fedhe-cnn": InputSpec((3, 32, 32), 10),
    "fedhenn-cnn": InputSpec((3, 32, 32), 10),
    "fedin-v1": InputSpec((3, 16, 16), 10),
    "lstm": TEXT,
}


@pytest.mark.parametrize("name", CHECKED)
def test_both_counters_agree_on_a_forward_pass(name: str) -> None:
    """fvcore traces it, torch's counter sees its operators: two ways to the same figure."""
    family, spec = lookup.family(name), CHECKED[name]
    variant = family.variants[0]
    found = cost(family, variant, spec, Work(batch=4, once=(Pass("forward", "all", 4),)), MOMENTUM)
    assert found.flops == 4 * forward_flops(family, variant, spec) > 0


def test_the_published_multiply_adds() -> None:
    """ResNet18 and ResNet26 of the papers: 37.02 and 55.89 million at 32x32."""
    family, spec = lookup.family("resnet-stage"), CHECKED["resnet-stage"]
    assert [round(forward_flops(family, v, spec) / 2e6, 2) for v in ("resnet18", "resnet26")] == [37.02, 55.89]


def test_nothing_is_drawn_from_torchs_generator() -> None:
    """A run that asks for a cost goes on with the same random numbers as one that does not."""
    before = torch.get_rng_state()
    family, spec = lookup.family("fedhe-cnn"), CHECKED["fedhe-cnn"]
    cost(family, "model8", spec, Work(steps=1, batch=3), MOMENTUM)  # it has dropout
    forward_flops(family, "model8", spec)
    assert torch.equal(before, torch.get_rng_state())


def test_unknown_variants_and_unsuitable_data_are_refused() -> None:
    family = lookup.family("resnet-stage")
    with pytest.raises(BadInput, match="resnet12"):
        cost(family, "resnet12", InputSpec((3, 32, 32), 10), Work(), MOMENTUM)
    with pytest.raises(BadInput, match="at least 2 classes"):
        cost(family, "resnet10", InputSpec((3, 32, 32), 1), Work(), MOMENTUM)


HEAD = Phase(steps=5, batch=8, trains="classifier", each_step=(Pass("forward", "features", 8),))


def test_flops_of_two_phases_add_up() -> None:
    """A head on frozen features: forward through all layers, gradients of the last one's weights alone."""
    square, last = 2 * 100 * 100, 2 * 100 * 2
    head_step, step = 8 * (4 * square + 2 * last), 4 * (3 * (4 * square + last) - square)
    found = dense(Work(earlier=(HEAD,), steps=3, batch=4))
    assert [each.flop for each in found.steps] == [head_step, step]
    assert found.flops == 5 * head_step + 3 * step
    assert found.operations.flop == found.flops
    assert dense(Work(earlier=(HEAD,), batch=4)).flops == 5 * head_step  # the last phase has no steps
    passes = dense(Work(earlier=(replace(HEAD, parameter_passes=2),), steps=3, batch=4, parameter_passes=1))
    assert passes.flops - found.flops == 2 * (5 * 2 + 3) * 40_200


def test_the_largest_phase_decides_the_memory() -> None:
    head, everything = Work(earlier=(HEAD,), batch=64), Work(steps=3, batch=64)
    for optimizer, copies in ((PLAIN, 0), (MOMENTUM, 1), (ADAM, 2)):
        assert dense(head, optimizer).memory.get("optimizer", 0) == copies * 200 * 4  # of the last layer alone
        both = dense(Work(earlier=(HEAD,), steps=3, batch=64), optimizer)
        assert both.memory.get("optimizer", 0) == copies * DENSE
        assert both.memory_bytes == dense(everything, optimizer).memory_bytes
    assert dense(head).memory_bytes < dense(everything).memory_bytes
    large = replace(HEAD, batch=4096, each_step=(Pass("forward", "features", 4096),))
    assert dense(Work(earlier=(large,), steps=3, batch=4)).memory_bytes > dense(Work(steps=3, batch=4)).memory_bytes


def test_the_steps_of_a_phase_change_no_step() -> None:
    few, many = (dense(Work(earlier=(replace(HEAD, steps=n),), steps=n, batch=4)) for n in (1, 90))
    assert (few.steps, few.memory) == (many.steps, many.memory)
    assert many.flops == pytest.approx(90 * few.flops)


# exits and segments


def test_a_step_through_all_exits_counts_each() -> None:
    """Level 2 has exits of 3 kernels at 11 channels: forward, and gradients of inputs and weights."""
    nets, spec = lookup.family("resnet-exit", {"base_width": 16}), InputSpec((3, 32, 32), 10)
    last, both = (cost(nets, "level2", spec, Work(steps=1, batch=4, trains=part), PLAIN) for part in ("all", "exits"))
    width, places = 44, 2 * 2  # 0.7 of 64 channels in maps of 2x2
    more = 3 * 2 * 4 * (3 * places * 9 * width * width + 10 * width)
    assert both.flops - last.flops == more
    assert both.operations.flop == both.flops
    assert both.memory["gradients"] > last.memory["gradients"]
    # an optimiser keeps nothing for an exit that gets no gradient
    early = sum(p.numel() for n, p in nets.outline("level2", spec).named_parameters() if n.startswith("exit1."))
    kept = [cost(nets, "level2", spec, Work(steps=1, batch=4, trains=part), ADAM) for part in ("exits", "all")]
    assert kept[0].memory["optimizer"] - kept[1].memory["optimizer"] == 8 * early


@pytest.mark.parametrize("name", ["resnet-stage", "resnet-exit", "resnet-depth"])
def test_a_smallest_variant_has_one_exit(name: str) -> None:
    family, spec = lookup.family(name), CHECKED["resnet-stage"]
    found = [cost(family, family.variants[0], spec, Work(steps=2, batch=4, trains=p), ADAM) for p in ("all", "exits")]
    assert found[0] == found[1]


def test_the_memory_of_segments_is_that_of_the_largest() -> None:
    """Gradients and optimiser state are those of the blocks that are trained together, and of the classifier."""
    nets, spec = lookup.family("resnet-segment"), CHECKED["resnet-stage"]
    shapes = {name: p.numel() for name, p in nets.outline("resnet26-in-1", spec).named_parameters()}
    last = {6: ("layer4.1.", "layer4.2."), 2: ("layer3.", "layer4.")}
    peaks = []
    for segments, names in last.items():
        work = Work(steps=3, batch=4, held_models=1).through_parts(range(1, segments + 1))
        found = cost(nets, f"resnet26-in-{segments}", spec, work, ADAM)
        assert found.memory["optimizer"] == 8 * sum(n for k, n in shapes.items() if k.startswith((*names, "fc.")))
        assert len(found.steps) == segments
        peaks.append(found.memory_bytes)
    whole = cost(nets, "resnet26-in-1", spec, Work(steps=3, batch=4, held_models=1), ADAM)
    assert [*peaks, whole.memory_bytes] == sorted({*peaks, whole.memory_bytes})


def test_a_segment_goes_forward_through_the_frozen_ones_and_back_through_its_own() -> None:
    nets, spec = lookup.family("resnet-segment", {"base_width": 8}), InputSpec((3, 32, 32), 10)
    whole = cost(nets, "resnet26-in-1", spec, Work(steps=1, batch=4), PLAIN).flops
    work = Work(steps=1, batch=4).through_parts((1, 2))
    first, second = (step.flop for step in cost(nets, "resnet26-in-2", spec, work, PLAIN).steps)
    forward = cost(nets, "resnet26-in-1", spec, Work(batch=4, once=(Pass("forward", "all", 4),)), PLAIN).flops
    head = 3 * 2 * 4 * 64 * 10  # of the classifier, which is trained in both
    below = forward - (second + first - whole - head)
    assert first + second < whole + forward
    assert 0 < below < forward


def test_costs_of_our_own_families_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    family = lookup.family("resnet-stage", {"base_width": 5})
    cost(family, "resnet10", CHECKED["resnet-stage"], Work(steps=1, batch=3), PLAIN)
    assert len(list((tmp_path / "fleetbed" / "costs").glob("*.json"))) == 1
