"""Details of the small networks: Keras's pooling, LeCun's initialisation, the frozen embedding."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family

torch.set_num_threads(1)

TEXT = InputSpec((6,), 2, vocabulary=30)


def test_same_padding_of_average_pooling_is_kerass() -> None:
    """Keras pads at the right and below, and leaves the padding out of the mean."""
    net = family("fedhe-cnn").build("model8", InputSpec((1, 12, 12), 10))
    stage = net.get_submodule("conv1")
    assert isinstance(stage, nn.Sequential)
    pooled = stage[-2:](torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]))
    assert pooled.tolist() == [[[[2.5, 3.0], [3.5, 4.0]]]]


def test_fedin_v1_halves_the_map_in_its_last_two_stages() -> None:
    net = family("fedin-v1").outline("C", InputSpec((3, 32, 32), 10))
    maps = net.stages(torch.empty(2, 3, 32, 32, device="meta"))
    assert [tuple(each.shape[1:]) for each in maps.values()] == [
        (64, 32, 32),
        (256, 32, 32),
        (512, 16, 16),
        (1024, 8, 8),
    ]


@pytest.mark.parametrize(("tensor", "inputs"), [("conv2.0.weight", 128 * 2 * 2), ("fc.weight", 192 * 3 * 3)])
def test_fedhe_weights_are_lecun_normal(tensor: str, inputs: int) -> None:
    torch.manual_seed(0)
    weight = family("fedhe-cnn").build("model9", InputSpec((3, 32, 32), 10)).state_dict()[tensor]
    deviation = (1 / inputs) ** 0.5
    assert float(weight.std()) == pytest.approx(deviation, rel=0.03)
    assert float(weight.abs().max()) <= 2 * deviation / 0.8796 + 1e-6


def test_the_embedding_is_frozen_the_same_for_all_and_stays_at_home() -> None:
    torch.manual_seed(1)
    one = family("lstm").build("lstm1", TEXT)
    torch.manual_seed(2)
    two = family("lstm").empty("lstm2", TEXT)
    words = torch.arange(30).reshape(5, 6)
    assert torch.equal(one.extract(words), two.extract(words))
    assert one.extract(words).std() == pytest.approx(1, rel=0.05)
    assert "embedding" not in one.state_dict()
    assert "embedding" not in dict(one.named_parameters())
    assert dict(one.named_buffers())["embedding"].shape == (30, 300)


def test_an_empty_model_imports_nothing() -> None:
    """A client makes its model after the fork: what is imported there is paid for by each of them."""
    script = (
        "import sys, torch.utils._device\n"
        "from fleetbed.models.base import InputSpec\n"
        "from fleetbed.models.families.lookup import family\n"
        "chosen, before = family('lstm'), set(sys.modules)\n"
        "chosen.empty('lstm2', InputSpec((6,), 2, vocabulary=30))\n"
        "print(sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_features_are_the_last_hidden_state() -> None:
    net = family("lstm").build("lstm2", TEXT)
    words = torch.arange(30).reshape(5, 6)
    lstm = net.get_submodule("lstm")
    outputs, _ = lstm(net.extract(words))
    torch.testing.assert_close(net.features(words), outputs[:, -1])


def test_one_lstm_layer_is_the_lower_of_two() -> None:
    lstm = family("lstm")
    one, two = (lstm.outline(variant, TEXT).state_dict() for variant in ("lstm1", "lstm2"))
    assert all(two[name].shape == tensor.shape for name, tensor in one.items())
    assert set(two) - set(one) == {f"lstm.{kind}_l1" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
