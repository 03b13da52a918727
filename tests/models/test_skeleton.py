"""A model made from a skeleton is the model that its constructor and `load_state_dict` would have given."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fleetbed.models.base import InputSpec, Net
from fleetbed.models.families import family, names
from fleetbed.models.skeleton import skeleton

torch.set_num_threads(1)

SMALL = {
    "resnet-stage": {"base_width": 4},
    "resnet-width": {"base_width": 16},
    "resnet-grid": {"base_width": 4, "stem": "3x3"},
    "vit-layer": {"patch": 16, "width": 24, "heads": 3},
    "fedhenn-cnn": {"filters": (6, 5, 4), "hidden": (9, 8)},
    "lstm": {"embedding": 11, "hidden": 6},
}
SPECS = {
    "fedhe-cnn": InputSpec((1, 12, 12), 5),
    "fedin-v1": InputSpec((1, 6, 6), 5),
    "lstm": InputSpec((7,), 3, vocabulary=40),
}
IMAGES = InputSpec((3, 32, 32), 5)


def step(net: Net, spec: InputSpec) -> dict[str, torch.Tensor]:
    """The state after one step on a fixed batch."""
    torch.manual_seed(5)
    x = torch.randint(spec.vocabulary, (4, *spec.shape)) if spec.vocabulary else torch.randn(4, *spec.shape)
    F.cross_entropy(net.train()(x), torch.arange(4) % spec.classes).backward()
    with torch.no_grad():
        for p in net.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad
    return dict(net.state_dict())


@pytest.mark.parametrize("name", names())
def test_it_trains_like_the_model_that_was_built(name: str) -> None:
    chosen, spec = family(name, SMALL.get(name)), SPECS.get(name, IMAGES)
    variant = chosen.variants[0]
    torch.manual_seed(1)
    built = chosen.build(variant, spec)
    tensors = {key: tensor.clone() for key, tensor in built.state_dict().items()}
    first = skeleton(chosen, variant, spec).on({key: tensor.clone() for key, tensor in tensors.items()})
    trained = step(first, spec)
    again = skeleton(chosen, variant, spec).on(tensors)  # the first one has left no trace
    assert step(built, spec).keys() == trained.keys()
    for key, tensor in step(again, spec).items():
        torch.testing.assert_close(tensor, trained[key], rtol=0, atol=0)
        torch.testing.assert_close(tensor, built.state_dict()[key], rtol=0, atol=0)
    assert [(key, p.requires_grad) for key, p in first.named_parameters()] == [
        (key, p.requires_grad) for key, p in built.named_parameters()
    ]


def test_it_stands_on_the_tensors_themselves_and_what_is_hooked_to_it_stays_with_it() -> None:
    chosen = family("resnet-stage", SMALL["resnet-stage"])
    tensors = dict(chosen.build("resnet10", IMAGES).state_dict())
    first, second = (skeleton(chosen, "resnet10", IMAGES).on(tensors) for _ in range(2))
    assert first.state_dict()["fc.weight"].data_ptr() == tensors["fc.weight"].data_ptr()
    called = []
    first.get_submodule("fc").register_forward_hook(lambda *_: called.append(1))
    first.eval()
    second(torch.randn(2, 3, 32, 32))
    assert not called
    assert second.training


@pytest.mark.parametrize("change", [{"fc.bias": torch.zeros(6)}, {"other": torch.zeros(1)}])
def test_other_tensors_are_refused_by_name(change: dict[str, torch.Tensor]) -> None:
    chosen = family("resnet-stage", SMALL["resnet-stage"])
    tensors = {**chosen.build("resnet10", IMAGES).state_dict(), **change}
    with pytest.raises(ValueError, match=f"{next(iter(change))}$"):
        skeleton(chosen, "resnet10", IMAGES).on(tensors)
