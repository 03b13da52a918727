"""Work by class of operation against counts made by hand, and against torch's own FLOP counter."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fleetbed.models.base import Family, InputSpec, Net
from fleetbed.models.cost import predict
from fleetbed.models.cost.operations import Operations, OperatorCount, compute_seconds, seconds_of, update_work
from fleetbed.models.cost.predict import cost
from fleetbed.models.cost.timm_step import count_step
from fleetbed.models.families.lookup import family
from fleetbed.models.work import Pass, Work
from fleetbed.profiles.experiment import Optimizer
from fleetbed.profiles.resolve import load_device
from fleetbed.profiles.types import Rates

RATES = Rates(
    conv_1x1_gflops=2.0, conv_gflops=4.0, depthwise_gflops=0.5, matmul_gflops=8.0, memory_gb_s=1.0, call_us=100.0
)


def counted(run: Callable[[], object]) -> OperatorCount:
    count = OperatorCount()
    with FakeTensorMode(), count:
        run()
    return count


@pytest.mark.parametrize(
    ("layer", "name", "flop"),
    [
        (lambda: nn.Conv2d(8, 6, 1, bias=False), "conv_1x1_flop", 2 * 2 * 100 * 8 * 6),
        (lambda: nn.Conv2d(8, 6, 3, padding=1, bias=False), "conv_flop", 2 * 2 * 100 * 8 * 6 * 9),
        (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False), "conv_flop", 2 * 2 * 100 * 4 * 8 * 9),
        (lambda: nn.Conv2d(8, 8, 1, groups=4, bias=False), "conv_flop", 2 * 2 * 100 * 2 * 8),
        (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), "depthwise_flop", 2 * 2 * 100 * 8 * 9),
        (lambda: nn.Conv2d(8, 16, 3, padding=1, groups=8, bias=False), "depthwise_flop", 2 * 2 * 100 * 16 * 9),
        (lambda: nn.ConvTranspose2d(8, 6, 2, stride=2, bias=False), "conv_flop", 2 * 2 * 100 * 8 * 6 * 4),
        (lambda: nn.ConvTranspose2d(8, 8, 2, stride=2, groups=8, bias=False), "depthwise_flop", 2 * 2 * 100 * 8 * 4),
    ],
)
@pytest.mark.parametrize("inner", [False, True])
def test_a_convolution_counts_as_much_for_each_gradient(
    layer: Callable[[], nn.Module], name: str, flop: float, inner: bool
) -> None:
    def step() -> None:
        layer()(torch.empty(2, 8, 10, 10, requires_grad=inner)).sum().backward()

    total = counted(step).total
    assert getattr(total, name) == flop * (3 if inner else 2)  # a first layer has no gradient of its input
    assert total.flop == getattr(total, name)


def test_linear_layers_attention_and_recurrent_layers_are_matrix_products() -> None:
    linear = counted(lambda: nn.functional.linear(torch.empty(3, 5), torch.empty(7, 5))).total
    assert linear == Operations(matmul_flop=2 * 3 * 5 * 7, calls=1)
    q = (2, 4, 6, 8)
    attention = counted(lambda: nn.functional.scaled_dot_product_attention(*(torch.empty(q) for _ in range(3)))).total
    assert attention.matmul_flop == 2 * 2 * (2 * 4 * 6 * 6 * 8)
    assert attention.memory_bytes >= 2 * 4 * (2 * 4 * 6 * 6)  # its softmax
    lstm = counted(lambda: nn.LSTM(5, 7, batch_first=True)(torch.empty(2, 3, 5))).total
    assert lstm.matmul_flop == 2 * 2 * 3 * (4 * 7 * (5 + 7))


def test_memory_bound_work_counts_bytes_read_and_written() -> None:
    x = (10, 10)
    assert counted(lambda: torch.empty(x) + torch.empty(x)).total == Operations(memory_bytes=1200, calls=1)
    assert counted(lambda: torch.empty(x).mul_(2)).total == Operations(memory_bytes=800, calls=1)
    assert counted(lambda: torch.empty(1, 10).expand(10, 10) + torch.empty(x)).total.memory_bytes == 40 + 800
    assert counted(lambda: torch.empty(x).t().reshape(5, 20).view(-1)).total.memory_bytes == 800  # one copy, two views

    def look_up() -> None:
        nn.functional.embedding(torch.empty(3, dtype=torch.int64), torch.empty(1000, 4))

    assert counted(look_up).total == Operations(memory_bytes=2 * 3 * 16, calls=1)  # not the whole table


def test_allocations_and_views_are_free() -> None:
    def nothing() -> None:
        torch.empty(10, 10).t().t().view(100).unsqueeze(0).detach().expand(3, 100)
        torch.empty_like(torch.empty(4, 2)).t_()

    assert counted(nothing).total == Operations()


def test_inference_mode_counts_the_same() -> None:
    def forward() -> None:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5))
        net(torch.empty(2, 3, 8, 8))

    def inference() -> None:
        with torch.inference_mode():
            forward()

    assert counted(inference).total.flop == counted(forward).total.flop > 0


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x).real.sort().values


def test_an_operator_that_no_class_knows_is_named_and_counts_as_memory_bound() -> None:
    count = counted(lambda: Odd()(torch.empty(4, 8)))
    assert count.unknown == {"aten._fft_r2c"}
    assert count.total.memory_bytes > 4 * 8 * 4
    assert count.total.flop == 0


@pytest.mark.parametrize("net", [lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))])
def test_any_module_is_counted(net: Callable[[], nn.Module]) -> None:
    made = net()
    made(torch.zeros(1, 3, 8, 8))  # the lazy layer
    found = count_step(made, (3, 8, 8), 2)
    conv = 2 * 2 * 36 * 8 * 27
    assert found.work.conv_flop == 2 * conv  # no gradient of the image
    assert found.unknown == ()
    assert found.work.memory_bytes > update_work(8 * 27 + 8 + 4 * 288 + 4, 0).memory_bytes


@pytest.mark.parametrize(
    ("name", "variant", "spec"),
    [
        ("resnet-stage", "resnet10", InputSpec((3, 32, 32), 10)),
        ("fedhe-cnn", "model2", InputSpec((1, 28, 28), 10)),
        ("vit-layer", "vit8", InputSpec((3, 32, 32), 10)),
        ("lstm", "lstm1", InputSpec((20,), 2, vocabulary=50)),
    ],
)
def test_the_flops_are_those_of_torchs_counter(name: str, variant: str, spec: InputSpec) -> None:
    """Ungrouped networks only: torch counts the backward pass of a grouped convolution too high."""
    from fleetbed.models.cost.flops import TRAINING_RULES, input_dtype

    chosen = family(name, {})
    found = cost(chosen, variant, spec, Work(steps=1, batch=4), Optimizer(momentum=0.0))
    flops = FlopCounterMode(display=False, custom_mapping=TRAINING_RULES)
    outline = chosen.outline(variant, spec)
    with FakeTensorMode(), flops:
        net = outline._apply(lambda t: torch.empty(t.shape, dtype=t.dtype)).train()  # type: ignore[no-untyped-call]
        x = torch.empty(4, *spec.shape, dtype=input_dtype(spec))
        nn.functional.cross_entropy(net(x), torch.empty(4, dtype=torch.int64)).backward()
    assert found.flops == flops.get_total_flops()
    assert found.operations.flop == found.flops


def test_our_families_use_no_operator_that_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fleetbed"):
        for name in ("resnet-grid", "fedhenn-cnn", "fedin-v1"):
            chosen = family(name, {})
            cost(chosen, chosen.variants[0], InputSpec((3, 32, 32), 10), Work(steps=1, batch=4), Optimizer())
    assert caplog.messages == []


class OddNet(Net):
    extractor_parts = frozenset({"first"})
    classifier_parts = frozenset({"last"})

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 8)
        self.last = nn.Linear(5, 2)

    def extract(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.first(x.flatten(1))).abs()

    def intermediate(self, s: Tensor) -> Tensor:
        return s

    def classify(self, f: Tensor) -> Tensor:
        out: Tensor = self.last(f)
        return out

    def stages(self, x: Tensor) -> dict[str, Tensor]:
        return {"first": self.extract(x)}


class OddFamily(Family):
    name = "odd"
    variants = ("one",)

    def make(self, variant: str, spec: InputSpec) -> Net:
        return OddNet()


def test_an_unknown_operator_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    predict._notice.cache_clear()
    with caplog.at_level(logging.WARNING, "fleetbed"):
        for steps in (1, 2, 3):
            cost(OddFamily({}), "one", InputSpec((3, 2, 2), 2), Work(steps=steps, batch=2), Optimizer())
    said = [message for message in caplog.messages if "_fft_r2c" in message]
    assert len(said) == 1
    assert "odd one uses the operator aten._fft_r2c" in said[0]
    assert "counted as memory-bound" in said[0]


def test_steps_extra_passes_the_optimiser_and_parameter_passes_add_up() -> None:
    chosen, spec = family("resnet-stage", {"base_width": 4}), InputSpec((3, 32, 32), 10)

    def found(optimizer: Optimizer | None = None, **work: object) -> predict.Cost:
        declared = Work(**{"steps": 1, "batch": 4, **work})  # type: ignore[arg-type]
        return cost(chosen, "resnet10", spec, declared, optimizer or Optimizer(momentum=0.0))

    one = found()
    assert one.operations == one.steps[0]
    assert found(steps=7).operations.memory_bytes == pytest.approx(7 * one.steps[0].memory_bytes)
    prox = found(parameter_passes=2)
    assert prox.steps[0].memory_bytes - one.steps[0].memory_bytes == 2 * 12 * one.parameters
    momentum, adam = found(Optimizer()), found(Optimizer(name="adam"))
    assert momentum.steps[0].memory_bytes - one.steps[0].memory_bytes == 8 * one.parameters
    assert adam.steps[0].memory_bytes - one.steps[0].memory_bytes == 16 * one.parameters
    extra = found(each_step=(Pass("forward", "all", 4),))
    assert one.steps[0].conv_flop < extra.steps[0].conv_flop < 1.5 * one.steps[0].conv_flop
    after = found(once=(Pass("forward", "all", 40),))
    assert after.steps[0] == one.steps[0]
    assert after.operations.conv_flop > 4 * one.operations.conv_flop / 3


amounts = st.floats(0, 1e15)


@settings(deadline=None)
@given(st.lists(amounts, min_size=6, max_size=6), st.lists(amounts, min_size=6, max_size=6), st.floats(0, 1e3))
def test_time_is_linear_in_the_work(a: list[float], b: list[float], factor: float) -> None:
    names = Operations.__struct_fields__
    left, right = (Operations(**dict(zip(names, each, strict=True))) for each in (a, b))
    together = seconds_of(RATES, left + factor * right)
    assert together == pytest.approx(seconds_of(RATES, left) + factor * seconds_of(RATES, right), rel=1e-9, abs=1e-12)


def test_seconds_by_hand_and_the_users_correction() -> None:
    work = Operations(
        conv_1x1_flop=2e9, conv_flop=4e9, depthwise_flop=0.5e9, matmul_flop=8e9, memory_bytes=1e9, calls=10_000
    )
    assert seconds_of(RATES, work) == pytest.approx(6.0)
    from msgspec.structs import replace

    device = replace(load_device("raspberry-pi-4b-8gb"), rates=RATES, train_scale=1.5)
    assert compute_seconds(device, work) == pytest.approx(9.0)
