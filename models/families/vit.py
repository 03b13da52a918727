"""ViT-S cut by depth, from timm's parts and with timm's tensor names, so that its pre-trained weights can be loaded.

A variant has the first blocks of twelve. At 224x224, patch 16 and 10 classes that is 14,571,658 parameters with eight
blocks, and 1,774,464 more with each further block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fleetbed.models.base import Family, InputSpec, Net, Options
from fleetbed.models.families import vision  # noqa: F401 - timm must find torchvision imported its way
from fleetbed.profiles.errors import BadInput, HostCannot
from fleetbed.profiles.experiment import Width

# isort: split
import timm
from timm.layers.norm import LayerNorm
from timm.layers.patch_embed import PatchEmbed
from timm.models.vision_transformer import Block

PRETRAINED = "vit_small_patch16_224"
LAYERS = {f"vit{layers}": layers for layers in range(8, 13)}


class VitOptions(Options, frozen=True, kw_only=True):
    """`patch` is the side of a patch; the image size is that of the data (`data.image_size`). `width` is that of the
    tokens, divided among `heads`: small runs need less than ViT-S has. `pretrained` starts from timm's ImageNet
    weights, except the head; they are downloaded once."""

    patch: Width = 16
    width: Width = 384
    heads: Width = 6
    pretrained: bool = False


class Vit(Net):
    """timm's vision transformer with the cuts after the embedding and after the final norm of the class
    token."""

    extractor_parts = frozenset({"patch_embed", "cls_token", "pos_embed"})
    classifier_parts = frozenset({"head"})

    def __init__(self, layers: int, options: VitOptions, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        width = options.width
        channels, *image = shape
        self.patch_embed = PatchEmbed((image[0], image[1]), options.patch, channels, width)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + self.patch_embed.num_patches, width))
        self.blocks = nn.Sequential(*(Block(width, options.heads, qkv_bias=True) for _ in range(layers)))
        self.norm = LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def initialise(self) -> None:
        super().initialise()
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.normal_(self.cls_token, std=1e-6)

    def initialise_module(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        else:
            super().initialise_module(module)

    def extract(self, x: Tensor) -> Tensor:
        patches = self.patch_embed(x)
        first = self.cls_token.expand(len(x), -1, -1)
        return torch.cat((first, patches), dim=1) + self.pos_embed

    def intermediate(self, s: Tensor) -> Tensor:
        tokens: Tensor = self.norm(self.blocks(s))
        return tokens[:, 0]

    def classify(self, f: Tensor) -> Tensor:
        logits: Tensor = self.head(f)
        return logits

    def stages(self, x: Tensor) -> dict[str, Tensor]:
        tokens = self.extract(x)
        reached = {"embedding": tokens}
        for number, block in enumerate(self.blocks):
            tokens = reached[f"blocks.{number}"] = block(tokens)
        return reached


class VitFamily(Family):
    """The first eight to twelve blocks."""

    name = "vit-layer"
    shared = True
    options_type = VitOptions
    options: VitOptions
    block_names = r"(blocks)\.\d+\."
    variants = tuple(LAYERS)

    def __init__(self, options: VitOptions) -> None:
        super().__init__(options)
        if options.width % options.heads:
            raise BadInput(
                f"model.options of {self.name}: a width of {options.width} cannot be divided among "
                f"{options.heads} heads: choose a multiple of the number of heads."
            )
        default = VitOptions()
        for option in ("patch", "width", "heads"):
            wanted = getattr(default, option)
            if options.pretrained and getattr(options, option) != wanted:
                raise BadInput(
                    f"model.options of {self.name}: the pre-trained weights need {option} {wanted}, but it is "
                    f"{getattr(options, option)}: remove it, or set pretrained to false."
                )

    @property
    def smallest_image(self) -> int:
        return self.options.patch

    def check_input(self, spec: InputSpec) -> None:
        super().check_input(spec)
        patch = self.options.patch
        _, height, width = spec.shape
        if height % patch or width % patch:
            raise BadInput(
                f"{self.name} needs images whose sides are multiples of the patch of {patch}, but these are "
                f"{height}x{width}: change data.image_size or model.options.patch."
            )

    def make(self, variant: str, spec: InputSpec) -> Net:
        return Vit(LAYERS[variant], self.options, spec.shape, spec.outputs)

    def build(self, variant: str, spec: InputSpec) -> Net:
        net = super().build(variant, spec)
        if self.options.pretrained:
            own = net.state_dict()
            found = _pretrained(spec)
            net = self.load(variant, spec, {name: found.get(name, tensor) for name, tensor in own.items()}, PRETRAINED)
        return net

    def cross_layers(self, names: Iterable[str]) -> dict[str, str]:
        known = dict.fromkeys(names)  # unlike a set it keeps their order
        pairs = {name: name.replace("norm2", "norm1") for name in known}
        return {
            name: base
            for name, base in pairs.items()
            if base in known and re.fullmatch(r"blocks\.\d+\.norm2\.weight", name)
        }


def _pretrained(spec: InputSpec) -> dict[str, Tensor]:
    """Load timm's weights without the head, with the position embedding resized to the image."""
    try:
        model = timm.create_model(
            PRETRAINED, pretrained=True, in_chans=spec.shape[0], img_size=spec.shape[1:], num_classes=0
        )
    except OSError as error:
        raise HostCannot(
            f"model.options.pretrained: the weights of {PRETRAINED} are not in the cache of the Hugging Face "
            f"hub and cannot be downloaded from this host ({type(error).__name__}): run it once on a host that "
            f"can reach huggingface.co and copy its cache, or set pretrained to false."
        ) from error
    tensors: dict[str, Tensor] = model.state_dict()
    return tensors
