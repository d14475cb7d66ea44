"""Mistral 3's images: Pixtral's tower with 2D RoPE over patches of any grid, and a projector that merges blocks of patches."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.models.config import Keys
from auraflux.vision.processor import check_shape
from auraflux.vision.settings import ImageSettings
from auraflux.vision.span import PreparedImage
from auraflux.vision.towers.layers import Linear, Loader, activation, attention, normalized, read_heads, rotate_half
from auraflux.weights.fields import EPS, LAYER_COUNT, NAME, THETA, TOKEN, WIDTH, Fields
from auraflux.weights.formats.untrusted import FLAG, integer

NORM_EPS = 1e-5
SIDE, EDGE = integer(1, 256), integer(1, 1 << 16)
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
PREFIXES = {
    "vision_tower.": "tower.",
    "vision_encoder.": "tower.",
    "multi_modal_projector.": "projector.",
}


@dataclass(frozen=True)
class RowProcessor:
    """Images of any shape within a square; a token ends each row.

    patch         pixels of a patch's side
    merge         patches of a block's side; a block becomes one embedding
    edge          most pixels of a side
    break_token   ends a row
    end_token     ends the last row
    """

    placeholder: int
    patch: int
    merge: int
    edge: int
    break_token: int
    end_token: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def prepare(self, image: Any) -> PreparedImage:
        check_shape(*image.size)
        rows, columns = self.size(image.height, image.width)
        unit = self.patch * self.merge
        # 3: bicubic
        return PreparedImage(np.asarray(image.resize((columns * unit, rows * unit), resample=3)), (rows, columns))

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of blocks that an image is resized to."""
        shrink, unit = max(height / self.edge, width / self.edge), self.patch * self.merge
        if shrink > 1:
            height, width = math.floor(height / shrink), math.floor(width / shrink)
        return max(1, -(-height // unit)), max(1, -(-width // unit))

    def tokens(self, image: PreparedImage) -> tuple[list[int], int, int, int]:
        rows, columns = image.grid
        made = ([self.placeholder] * columns + [self.break_token]) * rows
        return [*made[:-1], self.end_token], 0, len(made), columns + 1

    def spaced(self, prompt: str) -> str:
        return prompt

    def limited(self, pixels: int) -> "RowProcessor":
        return replace(self, edge=min(self.edge, math.isqrt(pixels)))


@dataclass(frozen=True)
class TowerConfig:
    """The sizes of a tower and its projector."""

    depth: int
    hidden: int
    inner: int
    heads: int
    patch: int
    merge: int
    output: int
    theta: float
    eps: float
    activation: str
    projector_activation: str
    bias: bool

    @classmethod
    def read(cls, keys: Keys, vision: Fields, hidden: int) -> "TowerConfig":
        width, heads = read_heads(vision, "num_attention_heads")
        vision.only("num_channels", 3)
        keys.outer.only("vision_feature_layer", -1)
        for fields, key in ((vision, "hidden_act"), (keys.outer, "projector_hidden_act")):
            fields.only(key, "gelu", "silu", "gelu_pytorch_tanh")
        rope = vision.section("rope_parameters")
        return cls(
            depth=vision.read("num_hidden_layers", LAYER_COUNT),
            hidden=width,
            inner=vision.read("intermediate_size", WIDTH),
            heads=heads,
            patch=vision.read("patch_size", SIDE),
            merge=keys.outer.get("spatial_merge_size", SIDE, 2),
            output=hidden,
            theta=rope.get("rope_theta", THETA, vision.get("rope_theta", THETA, 10000.0)),
            eps=keys.section("text_config").get("rms_norm_eps", EPS, NORM_EPS),
            activation=vision.get("hidden_act", NAME, "gelu"),
            projector_activation=keys.outer.get("projector_hidden_act", NAME, "gelu"),
            bias=keys.outer.get("multimodal_projector_bias", FLAG, False),
        )


def processor(keys: Keys, vision: Fields, settings: ImageSettings, token_id: Callable[[str], int | None]) -> RowProcessor:
    """Return how images are resized."""
    ends = [token_id(name) for name in ("[IMG_BREAK]", "[IMG_END]")]
    if ends[0] is None or ends[1] is None:
        raise FormatError("the vocabulary has no [IMG_BREAK] and [IMG_END].")
    outer = keys.outer
    token = outer.get("image_token_index", TOKEN, None)
    return RowProcessor(
        placeholder=outer.read("image_token_id", TOKEN) if token is None else token,
        patch=vision.read("patch_size", SIDE),
        merge=outer.get("spatial_merge_size", SIDE, 2),
        edge=settings.fields.section("size").get("longest_edge", EDGE, vision.get("image_size", EDGE, 1540)),
        break_token=ends[0],
        end_token=ends[1],
        mean=settings.mean(MEAN),
        std=settings.std(STD),
    )


def rename(name: str) -> str | None:
    """Return a tower's name of a checkpoint's tensor; None for other tensors."""
    name = name.removeprefix("model.")
    for prefix, ours in PREFIXES.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix).removeprefix("vision_model.")
    return None


class Block:
    """A layer of the tower."""

    def __init__(self, load: Loader, name: str, config: TowerConfig):
        width, inner, self.heads = config.hidden, config.inner, config.heads
        self.norms = [load.rms_norm(f"{name}.{norm}", width, NORM_EPS) for norm in ("attention_norm", "ffn_norm")]
        self.q, self.k, self.v, self.out = (
            load.linear(f"{name}.attention.{part}_proj", width, width, bias=False) for part in ("q", "k", "v", "o")
        )
        self.gate, self.up = (
            load.linear(f"{name}.feed_forward.{part}_proj", inner, width, bias=False) for part in ("gate", "up")
        )
        self.down = load.linear(f"{name}.feed_forward.down_proj", width, inner, bias=False)
        self.activation = activation(config.activation)

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Run the layer over the patches of one image: [N, H]."""
        h = self.norms[0](x)
        q, k, v = (part(h).view(len(x), self.heads, -1) for part in (self.q, self.k, self.v))
        x = x + self.out(attention(rotate_half(q, *angles), rotate_half(k, *angles), v))
        h = self.norms[1](x)
        return x + self.down(self.activation(self.gate(h)) * self.up(h))


class Tower:
    """The tower with its projector."""

    def __init__(self, load: Loader, config: TowerConfig, processor: RowProcessor):
        self.config, self.processor, self.dtype = config, processor, load.dtype
        width, out = config.hidden, config.output
        self.patches = Linear(load.patch_weight("tower.patch_conv.weight", width, config.patch), None)
        self.first_norm = load.rms_norm("tower.ln_pre", width, NORM_EPS)
        self.blocks = [Block(load, f"tower.transformer.layers.{number}", config) for number in range(config.depth)]
        self.last_norm = load.rms_norm("projector.norm", width, config.eps)
        self.merging = load.linear("projector.patch_merger.merging_layer", width, width * config.merge**2, bias=False)
        self.up, self.down = (
            load.linear(f"projector.linear_{n}", out, size, config.bias) for n, size in ((1, width), (2, out))
        )
        self.activation = activation(config.projector_activation)
        self.nbytes = load.nbytes

    def patchify(self, image: PreparedImage) -> Tensor:
        """Return the patches of an image, row by row: [N, 3 * patch * patch] float32."""
        rows, columns = (side * self.config.merge for side in image.grid)
        pixels = normalized(image.pixels, self.processor.mean, self.processor.std, self.patches.weight.device)
        cut = pixels.view(3, rows, self.config.patch, columns, self.config.patch)
        return cut.permute(1, 3, 0, 2, 4).reshape(rows * columns, -1)

    def run(self, image: PreparedImage) -> Iterator[Tensor]:
        config, device = self.config, self.patches.weight.device
        x = self.first_norm(self.patches(self.patchify(image).to(device, self.dtype)))
        angles = self._angles(image.grid[0] * config.merge, image.grid[1] * config.merge, device)
        for block in self.blocks:
            x = block(x, angles)
            yield x
        yield self.project(x, image.grid)

    def project(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Merge blocks of patches, the channels of a block before its places, and project them: [N, H]."""
        rows, columns, merge = *grid, self.config.merge
        blocks = self.last_norm(x).view(rows, merge, columns, merge, -1).permute(0, 2, 4, 1, 3).reshape(rows * columns, -1)
        return self.down(self.activation(self.up(self.merging(blocks))))

    def _angles(self, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of each patch, [N, 1, D/2]: every other frequency turns by rows, the others by columns."""
        width = self.config.hidden // self.config.heads
        frequencies = 1.0 / (self.config.theta ** (torch.arange(0, width, 2, dtype=torch.float, device=device) / width))
        row, column = (each.flatten().float().to(device)[:, None] for each in torch.meshgrid(
            torch.arange(rows), torch.arange(columns), indexing="ij"))  # fmt: skip
        turned = torch.cat([row * frequencies[0::2], column * frequencies[1::2]], -1).unsqueeze(1)
        return turned.cos(), turned.sin()
