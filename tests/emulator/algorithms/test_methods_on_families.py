"""Every method on the families that it is meant for, and refused on those that it cannot use."""

from __future__ import annotations

from typing import Any

import pytest
from algorithm_harness import SGD, Bed, equal, run

from fleetbed.emulator.bases.features import cut_shapes
from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Training

CIFAR = InputSpec((3, 32, 32), 10)
SHORT = Training(batch=4, max_steps=1, optimizer=SGD)
VIT = {"width": 24, "heads": 2, "patch": 8}


def bed(name: str, variants: list[str], options: dict[str, Any] | None = None, spec: InputSpec = CIFAR) -> Bed:
    return Bed(family(name, options), variants, samples=4, spec=spec, training=SHORT, public=8)


def test_the_features_have_the_shapes_of_the_papers() -> None:
    assert cut_shapes(family("resnet-stage"), "resnet26", CIFAR) == ((64, 8, 8), (512,))
    assert cut_shapes(family("vit-layer"), "vit8", InputSpec((3, 224, 224), 10)) == ((197, 384), (384,))
    assert cut_shapes(family("fedin-v1"), "A", CIFAR) == ((64, 32, 32), (1024,))


CASES = [
    ("heteroavg", {}, "resnet-width", ["resnet26-eighth", "resnet26-half"], {"base_width": 8}),
    ("heteroprox", {}, "vit-layer", ["vit8", "vit12"], VIT),
    ("fedin", {"batch": 4}, "resnet-stage", ["resnet10", "resnet18"], {"base_width": 8}),
    ("fedin", {"batch": 4}, "vit-layer", ["vit8", "vit9"], VIT),
    ("fedin", {"version": "v1", "batch": 2}, "fedin-v1", ["E", "A"], {}),
    ("scaffold", {}, "resnet-width", ["resnet26-eighth", "resnet26-half"], {"base_width": 8}),
    ("scaffold", {}, "vit-layer", ["vit8", "vit9"], VIT),
    ("fednova", {}, "resnet-width", ["resnet26-eighth", "resnet26-half"], {"base_width": 8}),
    ("fednova", {}, "vit-layer", ["vit8", "vit9"], VIT),
    ("moon", {}, "resnet-width", ["resnet26-eighth", "resnet26-half"], {"base_width": 8}),
    ("moon", {}, "vit-layer", ["vit8", "vit9"], VIT),
    ("inco", {}, "resnet-width", ["resnet26-eighth", "resnet26-half"], {"base_width": 8}),
    ("inco", {"base": "heteroprox"}, "vit-layer", ["vit8", "vit12"], VIT),
    ("heterofl", {}, "resnet-width", ["resnet26-eighth", "resnet26-half"], {"base_width": 8}),
    ("heterofl", {"statistics": "averaged"}, "resnet-grid", ["resnet18-quarter", "resnet10-half"], {"base_width": 8}),
    ("fedrolex", {}, "resnet-width", ["resnet26-eighth", "resnet26-half"], {"base_width": 8}),
    ("fedrolex", {"clip": 1.0}, "resnet-grid", ["resnet18-quarter", "resnet10-half"], {"base_width": 8}),
    ("inclusivefl", {}, "resnet-stage", ["resnet10", "resnet18"], {"base_width": 8}),
    (
        "inclusivefl",
        {"own": "stages", "own_classifier": True},
        "resnet-stage",
        ["resnet10", "resnet18"],
        {"base_width": 8},
    ),
    ("inclusivefl", {}, "resnet-grid", ["resnet14-quarter", "resnet26-quarter"], {"base_width": 8}),
    ("inclusivefl", {}, "vit-layer", ["vit8", "vit12"], VIT),
    *(
        ("inco", {"base": base}, "resnet-width", ["resnet26-eighth", "resnet26-half"], {"base_width": 8})
        for base in ("heterofl", "fedrolex")
    ),
    ("inco", {"base": "inclusivefl"}, "vit-layer", ["vit8", "vit12"], VIT),
    ("scalefl", {"gamma": 0.5, "start": 0.0}, "resnet-exit", ["level1", "level4"], {"base_width": 4}),
    ("scalefl", {}, "resnet-depth", ["depth2", "depth3"], {"base_width": 4}),
    ("depthfl", {"alpha": 0.1}, "resnet-depth", ["depth1", "depth4"], {"base_width": 4}),
    ("depthfl", {"alpha": 0.1}, "resnet-exit", ["level1", "level2"], {"base_width": 4}),
    ("heterofl", {}, "resnet-exit", ["level2", "level3"], {"base_width": 4}),
    ("fedepth", {}, "resnet-segment", ["resnet26-in-12", "resnet26-in-2"], {"base_width": 4}),
    ("fedhe", {"batch": 4, "steps": 1}, "fedhe-cnn", ["model8", "model0"], {}),
    ("private", {}, "fedhe-cnn", ["model8", "model6"], {}),
    ("fedavg", {}, "fedhenn-cnn", ["conv1-fc1", "conv2-fc3"], {}),
    ("fedper", {}, "resnet-width", ["resnet26-eighth", "resnet26-half"], {"base_width": 8}),
    ("fedrep", {"head_epochs": 1}, "resnet-stage", ["resnet10", "resnet18"], {"base_width": 8}),
    ("fedrep", {"head_epochs": 1}, "vit-layer", ["vit8", "vit9"], VIT),
    ("inco", {"base": "fedrep", "base_params": {"head_epochs": 1}}, "vit-layer", ["vit8", "vit9"], VIT),
    ("lgfedavg", {}, "fedin-v1", ["E", "A"], {}),
    ("fedfomo", {}, "resnet-width", ["resnet26-eighth", "resnet26-half"], {"base_width": 8}),
    ("fedfomo", {}, "vit-layer", ["vit8", "vit9"], VIT),
    ("fedfomo", {}, "fedhe-cnn", ["model8", "model0"], {}),
    ("fedselect", {"every": 1}, "resnet-width", ["resnet26-eighth", "resnet26-half"], {"base_width": 8}),
    ("fedselect", {"every": 1}, "vit-layer", ["vit8", "vit9"], VIT),
    ("feddpa", {}, "resnet-stage", ["resnet10", "resnet18"], {"base_width": 8}),
    ("feddpa", {"share_personal": False}, "vit-layer", ["vit8", "vit9"], VIT),
    ("inco", {"base": "feddpa"}, "resnet-stage", ["resnet10", "resnet18"], {"base_width": 8}),
    ("fedproto", {}, "resnet-stage", ["resnet10", "resnet18"], {"base_width": 8}),
    ("fedproto", {"predictor": "prototype"}, "fedhenn-cnn", ["conv3-fc3", "conv2-fc3"], {}),
    ("fedmd", {"public": 6}, "fedhe-cnn", ["model8", "model0"], {}),
    ("fedgen", {"server_steps": 2}, "resnet-stage", ["resnet10", "resnet18"], {"base_width": 8}),
    ("fedgen", {"server_steps": 2, "aggregation": "ends"}, "fedin-v1", ["E", "A"], {}),
    ("inco", {"base": "fedgen", "base_params": {"server_steps": 2}}, "vit-layer", ["vit8", "vit12"], VIT),
    ("fedet", {"public": 6, "server_steps": 2}, "resnet-stage", ["resnet10", "resnet18"], {"base_width": 8}),
    ("fedet", {"public": 6, "server_steps": 2, "aggregation": "same-architecture"}, "vit-layer", ["vit8", "vit9"], VIT),
    ("fedtgp", {"server_epochs": 2}, "resnet-stage", ["resnet10", "resnet18"], {"base_width": 8}),
    ("fedgkt", {"server_epochs": 1}, "resnet-stage", ["resnet10", "resnet18"], {"base_width": 8}),
    ("fedgkt", {"server_epochs": 1}, "vit-layer", ["vit8", "vit9"], VIT),
    ("fd", {"batch": 4, "steps": 1}, "fedhe-cnn", ["model8", "model0"], {}),
    ("fedhenn", {"rad": 6}, "fedhenn-cnn", ["conv1-fc1", "conv3-fc3"], {}),
    ("fedhenn_homo", {"rad": 6}, "fedhenn-cnn", ["conv2-fc3", "conv2-fc3"], {}),
]


#: the first case of each method; the others are slow
FIRST = {case[0]: number for number, case in reversed(list(enumerate(CASES)))}


@pytest.mark.parametrize(
    ("method", "params", "name", "variants", "options"),
    [pytest.param(*case, marks=[] if FIRST[case[0]] == n else [pytest.mark.slow]) for n, case in enumerate(CASES)],
)
def test_two_rounds_move_every_model(
    method: str, params: dict[str, Any], name: str, variants: list[str], options: dict[str, Any]
) -> None:
    here = bed(name, variants, options)
    made = here.method(method, **params)
    so_far = run(here, made, 2)  # the harness checks the contract, and that everything stays finite
    for target in made.targets(so_far.state):
        own = so_far.kept[target.client].under(target.prefix) if target.client is not None else {}
        assert not equal({**own, **(target.tensors or {})}, here.context.initial(target.variant))


def test_inco_crosses_the_norms_of_a_vit() -> None:
    here = bed("vit-layer", ["vit8", "vit9"], VIT)
    metrics = run(here, here.method("inco")).merged[0].metrics
    layers = {name.removeprefix("theta/") for name in metrics if name.startswith("theta/")}
    assert layers == {f"blocks.{i}.norm2" for i in range(9)}


@pytest.mark.parametrize(
    "method",
    [
        *("fedhenn", "fedhe", "heteroavg", "fedin", "scaffold", "fednova", "moon"),
        *("fd", "fedrep", "lgfedavg", "fedproto", "fedfomo", "fedselect", "feddpa"),
        *("fedtgp", "fedgkt", "fedmd", "fedgen", "fedet"),
    ],
)
def test_text(method: str) -> None:
    small = {"embedding": 8, "hidden": 6, "dense": 4}
    here = bed("lstm", ["lstm1", "lstm2"], small, InputSpec((6,), 2, vocabulary=50))
    few = {"fedhenn": {"rad": 6}, "fedmd": {"public": 6}, "fedet": {"public": 6, "server_steps": 2}}
    params = {**few, "fedhe": {"batch": 4}}.get(method, {})
    made = here.method(method, **params)
    assert run(here, made, 2).task == 4 * len(made.needs.stages)


def test_what_a_method_cannot_use_is_refused() -> None:
    averaging = ("heteroavg", "heteroprox", "fedin", "inco", "scaffold", "fednova", "moon")
    for method in (*averaging, "fedper", "fedrep", "lgfedavg", "fedselect", "feddpa"):
        with pytest.raises(BadInput, match="fedhe-cnn"):
            bed("fedhe-cnn", ["model8", "model0"]).method(method).check()
    for name, variants in (("resnet-stage", ["resnet10"]), ("vit-layer", ["vit8"]), ("fedhe-cnn", ["model8"])):
        for method in ("heterofl", "fedrolex"):
            with pytest.raises(
                BadInput, match=f"{name}, whose .* not cut by width.*choose resnet-width or resnet-grid"
            ):
                bed(name, variants).method(method).check()
    for name, variants in (
        ("fedhe-cnn", ["model8"]),
        ("fedin-v1", ["E", "A"]),
        ("resnet-width", ["resnet26-half", "resnet26-full"]),
    ):
        with pytest.raises(BadInput, match=f"{name}, but inclusivefl .*resnet-stage, resnet-grid or vit-layer"):
            bed(name, variants).method("inclusivefl").check()
    with pytest.raises(BadInput, match=r"resnet-width.*two cuts"):
        bed("resnet-width", ["resnet26-half", "resnet26-full"]).method("fedin").check()
    with pytest.raises(BadInput, match="lstm, but inco knows no cross-layer"):
        Bed(family("lstm"), ["lstm1"], spec=InputSpec((6,), 2, vocabulary=50)).method("inco").check()
