"""Models of a user's own: by file or entry point, shared by name, refused in one sentence."""

# ruff: noqa: E501  a mistake and its sentence are on one line

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from fleetbed.models.base import InputSpec, gather
from fleetbed.models.cost.predict import cost
from fleetbed.models.families.lookup import family, outside_names
from fleetbed.models.families.own import Uncut
from fleetbed.models.work import Work
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Optimizer

SPEC = InputSpec((3, 20), 4)
PLAIN = """
from torch import nn
VARIANTS = ("small", "large")
def build(variant, spec):
    width = 4 if variant == "small" else 8
    return nn.Sequential(nn.Flatten(), nn.Linear(60, width), nn.ReLU(), nn.Linear(width, spec.classes))
"""


def written(folder: Path, text: str) -> str:
    path = folder / "my_net.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_a_plain_module_keeps_the_names_of_its_tensors(tmp_path: Path) -> None:
    own = family(written(tmp_path, PLAIN))
    assert (own.name, own.variants, own.shared) == ("my_net", ("small", "large"), True)
    own.check_input(SPEC)
    net = own.build("small", SPEC)
    assert isinstance(net, Uncut)
    assert list(net.state_dict()) == ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert [name for name, _ in net.named_parameters()] == list(net.state_dict())
    assert net.eval().plain.training is False
    assert {tensor.device.type for tensor in own.outline("large", SPEC).state_dict().values()} == {"meta"}
    assert not own.has_cuts(SPEC)


def test_a_smaller_tensor_is_the_leading_part_of_the_larger_one(tmp_path: Path) -> None:
    own = family(written(tmp_path, PLAIN))
    assert own.by_width(SPEC)
    full = dict(own.build("large", SPEC).state_dict())
    part = gather(full, own.index("small", SPEC))
    assert torch.equal(part["1.weight"], full["1.weight"][:4])
    assert torch.equal(part["3.weight"], full["3.weight"][:, :4])
    assert part["3.bias"] is full["3.bias"]
    own.load("small", SPEC, part)
    with pytest.raises(BadInput, match=r"my_net\.py has variants that hold the first channels .* moves the window"):
        own.index("small", SPEC, shift=1)


def test_a_loaded_model_computes_what_the_module_computes(tmp_path: Path) -> None:
    own = family(written(tmp_path, PLAIN))
    built = own.build("large", SPEC)
    loaded = own.load("large", SPEC, {name: tensor.clone() for name, tensor in built.state_dict().items()})
    x = torch.randn(5, *SPEC.shape)
    assert torch.equal(loaded(x), built(x))
    loaded(x).sum().backward()
    assert all(p.grad is not None for p in loaded.parameters())
    assert all(p.grad is None for p in own.empty("large", SPEC).parameters())


def test_attributes_named_like_the_methods_of_a_net_are_the_users(tmp_path: Path) -> None:
    text = """
    from torch import nn
    VARIANTS = ("only",)
    class Theirs(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.features, self.classify = nn.Flatten(), nn.Linear(60, classes)
        def forward(self, x):
            return self.classify(self.features(x))
    def build(variant, spec):
        return Theirs(spec.classes)
    """
    own = family(written(tmp_path, text))
    assert own.build("only", SPEC)(torch.zeros(2, 3, 20)).shape == (2, 4)
    assert not own.shared


def test_the_cost_of_a_plain_module_is_that_of_its_layers(tmp_path: Path) -> None:
    own = family(written(tmp_path, PLAIN))
    found = cost(own, "large", SPEC, Work(steps=1, batch=10), Optimizer())
    assert found.parameters == 60 * 8 + 8 + 8 * 4 + 4
    # forward, gradient of the weights, gradient of the input where there is one before it
    assert found.flops == 2 * 10 * (2 * 60 * 8 + 3 * 8 * 4)


def test_constants_are_the_same_in_every_model_and_do_not_travel(tmp_path: Path) -> None:
    text = """
    import torch
    from torch import nn
    VARIANTS = ("only",)
    class Noisy(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.register_buffer("noise", torch.randn(60), persistent=False)
            self.fc = nn.Linear(60, classes)
        def forward(self, x):
            return self.fc(x.flatten(1) * self.noise)
    def build(variant, spec):
        return Noisy(spec.classes)
    """
    one, other = (family(written(tmp_path, text)).empty("only", SPEC) for _ in range(2))
    assert torch.equal(one.get_buffer("noise"), other.get_buffer("noise"))
    assert one.get_buffer("noise").std() > 0.1
    assert list(one.state_dict()) == ["fc.weight", "fc.bias"]


def test_options_reach_build_and_unknown_ones_are_named(tmp_path: Path) -> None:
    text = """
    from torch import nn
    from fleetbed.models.base import Options as Base
    VARIANTS = ("only",)
    class Options(Base, frozen=True, kw_only=True):
        width: int = 3
    def build(variant, spec, options):
        return nn.Sequential(nn.Flatten(), nn.Linear(60, options.width), nn.Linear(options.width, spec.classes))
    """
    path = written(tmp_path, text)
    assert family(path, {"width": 7}).outline("only", SPEC).state_dict()["1.weight"].shape == (7, 60)
    with pytest.raises(BadInput, match=r"model\.options.*depth"):
        family(path, {"depth": 7})


def test_a_family_of_ones_own_comes_by_file_too(tmp_path: Path) -> None:
    text = """
    from fleetbed.models.families.resnet import ResNetStage
    class FAMILY(ResNetStage):
        name = "mine"
    """
    assert family(written(tmp_path, text), {"base_width": 4}).name == "mine"


def test_a_family_comes_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_nets.py").write_text(PLAIN)
    info = tmp_path / "their_nets-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-nets\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fleetbed.families]\ntheirs = their_nets\nresnet-stage = their_nets\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "theirs" in outside_names()
    assert family("theirs").variants == ("small", "large")
    assert family("resnet-stage").variants[0] == "resnet10"  # nobody takes the name of a shipped family
    with pytest.raises(BadInput, match=r"there is no model family 'their'; did you mean theirs\?"):
        family("their")


NET = "from torch import nn\nimport torch\nVARIANTS = ('small', 'large')\n"
WRONG = {
    "raises": ("x = 1\nraise RuntimeError('no licence')", r"my_net\.py cannot be imported: RuntimeError: no licence \(.*, line 2\)"),
    "no-build": ("VARIANTS = ('a',)", r"has no build: a model file defines build\(variant, spec\)"),
    "no-variants": ("def build(v, s): pass", r"has no VARIANTS that can be used \(None\)"),
    "twice": ("VARIANTS = ('a', 'a')\ndef build(v, s): pass", r"a tuple of different names"),
    "no-module": (NET + "def build(v, s): return 3", r"build\('small', spec\) returns int, but a torch module is needed"),
    "build-raises": (NET + "def build(v, s):\n    return nn.Linear(s.nothing, 2)", r"cannot build small .*AttributeError.* line 5\)"),
    "no-args": (NET + "def build():\n    pass", r"cannot build small .*TypeError"),
    "forward-raises": (NET + "def build(v, s): return nn.Linear(7, s.classes)", r"small cannot read data of shape \(3, 20\): RuntimeError"),
    "shape": (NET + "def build(v, s): return nn.Sequential(nn.Flatten(), nn.Linear(60, 5))", r"returns shape \(2, 5\) for 2 samples .* \(2, 4\) is needed"),
    "no-tensor": (NET + "class N(nn.Linear):\n def forward(self, x): return 1, 2\ndef build(v, s): return N(2, 2)", r"returns tuple for 2 samples"),
    "none-shared": (
        NET + "from collections import OrderedDict as D\n"
        "def build(v, s): return nn.Sequential(D([('flat', nn.Flatten()), (v, nn.Linear(60, s.classes))]))",
        r"small and large share no tensor: small\.weight and large\.weight are the first of each; .* SHARED = False",
    ),
    "one-more": (
        NET + "def build(v, s): return nn.Sequential(nn.Flatten(), nn.Linear(60, s.classes, bias=v == 'small'))",
        r"small has the tensor 1\.bias, which large has not",
    ),
    "larger": (
        NET + "def build(v, s):\n w = 9 if v == 'small' else 8\n"
        " return nn.Sequential(nn.Flatten(), nn.Linear(60, w), nn.Linear(w, s.classes))",
        r"1\.weight has the shape \(9, 60\) in small and \(8, 60\) in large",
    ),
    "tied": (
        NET + "def build(v, s):\n n = nn.Sequential(nn.Flatten(), nn.Linear(60, 60), nn.Linear(60, 60), nn.Linear(60, 4))\n"
        " n[2].weight = n[1].weight\n return n",
        r"1\.weight and 2\.weight of small are one tensor",
    ),
    "unknown-tensor": (
        NET + "def build(v, s):\n n = nn.Sequential(nn.Flatten(), nn.Linear(60, 4))\n n[1].scale = torch.ones(3)\n return n",
        r"self\.scale of Linear .*register_buffer",
    ),
    "untrained": (NET + "def build(v, s): return nn.Sequential(nn.Flatten(), nn.Softmax(1))", "has no parameter that can be trained"),
    "lazy": (
        NET + "import warnings\ndef build(v, s):\n with warnings.catch_warnings():\n  warnings.simplefilter('ignore')\n"
        "  return nn.Sequential(nn.Flatten(), nn.LazyLinear(4))",
        r"1\.weight of small is lazy",
    ),
    "family": ("FAMILY = 3", r"has a FAMILY that is no subclass"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_sentence(tmp_path: Path, name: str) -> None:
    text, says = WRONG[name]
    with pytest.raises(BadInput, match=says) as caught:
        family(written(tmp_path, text)).check_input(SPEC)
    assert str(caught.value).startswith(f"model.family: {tmp_path}/my_net.py ")
    assert "\n" not in str(caught.value)


def test_variants_that_share_nothing_are_allowed_on_request(tmp_path: Path) -> None:
    own = family(written(tmp_path, WRONG["none-shared"][0] + "\nSHARED = False"))
    own.check_input(SPEC)
    assert not own.shared


def test_a_loss_that_is_not_finite_at_once_is_refused(tmp_path: Path) -> None:
    text = NET + "class N(nn.Linear):\n def forward(self, x): return super().forward(x.flatten(1)) / 0\n"
    own = family(written(tmp_path, text + "def build(v, s): return N(60, s.classes)"))
    own.check_input(SPEC)
    with pytest.raises(BadInput, match=r"the loss of small on the first 8 training samples is nan before any training"):
        own.check_start(torch.randn(8, *SPEC.shape), torch.zeros(8, dtype=torch.int64), SPEC)


def test_a_changed_file_is_loaded_anew(tmp_path: Path) -> None:
    assert family(written(tmp_path, PLAIN)).variants == ("small", "large")
    assert family(written(tmp_path, PLAIN.replace("large", "huge"))).variants == ("small", "huge")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"model\.family: .*nowhere\.py does not exist"):
        family(str(tmp_path / "nowhere.py"))
