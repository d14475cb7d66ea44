"""Kimi K2.5's images: MoonViT, a tower with 2D RoPE over patches of any grid, and a projector that merges blocks of patches.

Checkpoints of the hub name layers and store queries and keys differently from those that transformers writes; both load.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from auraflux.errors import FormatError
from auraflux.models.config import Keys
from auraflux.vision.processor import check_shape
from auraflux.vision.settings import ImageSettings
from auraflux.vision.span import PreparedImage
from auraflux.vision.towers.layers import (
    ACTIVATIONS,
    LayerNorm,
    Linear,
    Loader,
    activation,
    attention,
    normalized,
    read_heads,
    rotate_half,
)
from auraflux.weights.fields import EPS, LAYER_COUNT, NAME, THETA, TOKEN, WIDTH, Fields
from auraflux.weights.formats.untrusted import integer, list_of

NORM_EPS = 1e-5
SIDE, PATCHES = integer(1, 1024), integer(1, 1 << 20)
MERGE = list_of(integer(1, 16), 2)
MEAN = (0.5, 0.5, 0.5)
# tensors of a layer as on the hub and as in transformers
TENSORS = {
    "norm0": "norm1",
    "norm1": "norm2",
    "mlp.fc0": "mlp.fc1",
    "mlp.fc1": "mlp.fc2",
    "wqkv": "attn.qkv",
    "attn.wqkv": "attn.qkv",
    "wo": "attn.proj",
    "attn.wo": "attn.proj",
}
OTHERS = {
    "patch_embed.pos_emb.weight": "patch_embed.pos_emb.position_embeddings",
    "projector.proj.0.": "projector.in_proj.",
    "projector.proj.2.": "projector.out_proj.",
}
HUB_LAYER = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True)
class PaddingProcessor:
    """Images of any shape, made smaller only above a limit, with black below and to the right up to whole blocks.

    patch         pixels of a patch's side
    merge         patches of a block's side; a block becomes one embedding
    most_patches  of an image
    most_side     patches of a side
    """

    placeholder: int
    patch: int
    merge: int
    most_patches: int
    most_side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def prepare(self, image: Any) -> PreparedImage:
        check_shape(*image.size)
        height, width = self.size(image.height, image.width)
        unit = self.patch * self.merge
        rows, columns = -(-height // unit), -(-width // unit)
        # 3: bicubic
        pixels = np.asarray(image.resize((width, height), resample=3))
        edges = (0, rows * unit - height), (0, columns * unit - width), (0, 0)
        return PreparedImage(np.pad(pixels, edges), (rows, columns))

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size that an image is resized to, without the padding."""
        patches = max(1, height // self.patch) * max(1, width // self.patch)
        most = self.most_side * self.patch
        scale = min(1.0, math.sqrt(self.most_patches / patches), most / height, most / width)
        return min(most, max(1, int(height * scale))), min(most, max(1, int(width * scale)))

    def tokens(self, image: PreparedImage) -> tuple[list[int], int, int, int]:
        count = image.grid[0] * image.grid[1]
        return [self.placeholder] * count, 0, count, image.grid[1]

    def spaced(self, prompt: str) -> str:
        return prompt

    def limited(self, pixels: int) -> "PaddingProcessor":
        most = max(pixels // self.patch**2, self.merge**2)
        return replace(self, most_patches=min(self.most_patches, most))


@dataclass(frozen=True)
class TowerConfig:
    """The sizes of a tower and its projector; `rows` and `columns` are those of the learned positions."""

    depth: int
    hidden: int
    inner: int
    heads: int
    patch: int
    merge: int
    output: int
    rows: int
    columns: int
    theta: float
    eps: float
    activation: str

    @classmethod
    def read(cls, keys: Keys, vision: Fields, hidden: int) -> "TowerConfig":
        # the hub's keys, then those of transformers
        sizes = "vt_" if "vt_hidden_size" in vision else ""
        places = "init_pos_emb" if "init_pos_emb_height" in vision else "pos_emb"
        width, heads = read_heads(vision, f"{sizes}num_attention_heads", f"{sizes}hidden_size")
        for key, value in (("merge_type", "sd2_tpool"), ("mm_projector_type", "patchmerger"), ("projector_hidden_act", "gelu")):
            vision.only(key, value)
        vision.only("pos_emb_type", "divided_fixed")
        vision.only("hidden_act", *ACTIVATIONS)
        return cls(
            depth=vision.read(f"{sizes}num_hidden_layers", LAYER_COUNT),
            hidden=width,
            inner=vision.read(f"{sizes}intermediate_size", WIDTH),
            heads=heads,
            patch=vision.get("patch_size", SIDE, 14),
            merge=_merge(vision),
            output=hidden,
            rows=vision.get(f"{places}_height", SIDE, 64),
            columns=vision.get(f"{places}_width", SIDE, 64),
            theta=vision.section("rope_parameters").get("rope_theta", THETA, 10000.0),
            eps=vision.get("projector_ln_eps", EPS, keys.outer.get("projection_layer_norm_eps", EPS, NORM_EPS)),
            activation=vision.get("hidden_act", NAME, "gelu_pytorch_tanh"),
        )


def _merge(vision: Fields) -> int:
    down, across = vision.get("merge_kernel_size", MERGE, [2, 2])
    if down != across:
        raise FormatError(f"{vision.title} has merge_kernel_size {[down, across]}; squares are supported.")
    return down


def processor(keys: Keys, vision: Fields, settings: ImageSettings, token_id: Callable[[str], int | None]) -> PaddingProcessor:
    """Return how images are resized."""
    found = settings.fields
    hub = found.section("media_proc_cfg")
    settings = ImageSettings(hub) if "media_proc_cfg" in found else settings
    token = keys.outer.get("media_placeholder_token_id", TOKEN, None)
    return PaddingProcessor(
        placeholder=keys.outer.read("image_token_id", TOKEN) if token is None else token,
        patch=vision.get("patch_size", SIDE, 14),
        merge=_merge(vision),
        most_patches=hub.get("in_patch_limit", PATCHES, found.get("max_patches", PATCHES, 16384)),
        most_side=hub.get("patch_limit_on_one_side", SIDE, found.section("size").get("max_height", SIDE, 512)),
        mean=settings.mean(MEAN),
        std=settings.std(MEAN),
    )


def rename(name: str) -> str | None:
    """Return a tower's name of a checkpoint's tensor; None for other tensors."""
    name = name.removeprefix("model.")
    if name.startswith("mm_projector."):
        name = "projector." + name.removeprefix("mm_projector.")
    elif name.startswith("vision_tower."):
        name = name.removeprefix("vision_tower.").removeprefix("encoder.")
    else:
        return None
    if found := HUB_LAYER.fullmatch(name):
        return f"layers.{found[1]}.{TENSORS.get(found[2], found[2])}.{found[3]}"
    for theirs, ours in OTHERS.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


class Block:
    """A layer of the tower."""

    def __init__(self, load: Loader, name: str, config: TowerConfig):
        width, self.heads = config.hidden, config.heads
        self.norms = [load.layer_norm(f"{name}.norm{number}", width, NORM_EPS) for number in (1, 2)]
        self.q, self.k, self.v = _queries_keys_values(load, f"{name}.attn", width, config.heads)
        self.out = load.linear(f"{name}.attn.proj", width, width)
        self.up = load.linear(f"{name}.mlp.fc1", config.inner, width)
        self.down = load.linear(f"{name}.mlp.fc2", width, config.inner)
        self.activation = activation(config.activation)

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Run the layer over the patches of one image: [N, H]."""
        h = self.norms[0](x)
        q, k, v = (part(h).view(len(x), self.heads, -1) for part in (self.q, self.k, self.v))
        x = x + self.out(attention(rotate_half(q, *angles), rotate_half(k, *angles), v))
        return x + self.down(self.activation(self.up(self.norms[1](x))))


def _queries_keys_values(load: Loader, name: str, width: int, heads: int) -> tuple[Linear, ...]:
    """Load the inputs of attention: apart, or as one matrix whose queries and keys have rotated pairs side by side."""
    if not load.weights.has(f"{name}.qkv.weight"):
        return tuple(load.linear(f"{name}.{part}_proj", width, width) for part in "qkv")
    whole = load.linear(f"{name}.qkv", 3 * width, width)
    parts = []
    for number, pair in enumerate(zip(whole.weight.chunk(3), whole.bias.chunk(3), strict=True)):  # type: ignore[union-attr]
        # pairs (2i, 2i + 1) of a head become (i, i + D/2)
        turned = [each.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2) if number < 2 else each for each in pair]
        parts.append(Linear(turned[0], turned[1]))
    return tuple(parts)


class Tower:
    """The tower with its projector."""

    def __init__(self, load: Loader, config: TowerConfig, processor: PaddingProcessor):
        self.config, self.processor, self.dtype = config, processor, load.dtype
        width = config.hidden
        weight = load.patch_weight("patch_embed.proj.weight", width, config.patch)
        self.patches = Linear(weight, load.tensor("patch_embed.proj.bias", width))
        self.places = load.tensor("patch_embed.pos_emb.position_embeddings", config.rows, config.columns, width)
        self.blocks = [Block(load, f"layers.{number}", config) for number in range(config.depth)]
        self.last_norm = load.layer_norm("final_layernorm", width, NORM_EPS)
        self.norm: LayerNorm = load.layer_norm("projector.pre_norm", width, config.eps)
        merged = width * config.merge**2
        self.up = load.linear("projector.in_proj", merged, merged)
        self.down = load.linear("projector.out_proj", config.output, merged)
        self.nbytes = load.nbytes

    def patchify(self, image: PreparedImage) -> Tensor:
        """Return the patches of an image, row by row: [N, 3 * patch * patch] float32."""
        rows, columns = (side * self.config.merge for side in image.grid)
        pixels = normalized(image.pixels, self.processor.mean, self.processor.std, self.places.device)
        cut = pixels.view(3, rows, self.config.patch, columns, self.config.patch)
        return cut.permute(1, 3, 0, 2, 4).reshape(rows * columns, -1)

    def run(self, image: PreparedImage) -> Iterator[Tensor]:
        rows, columns = (side * self.config.merge for side in image.grid)
        x = self.patches(self.patchify(image).to(self.dtype))
        x = x + self._learned_positions(rows, columns).to(x.dtype)
        angles = self._angles(rows, columns)
        for block in self.blocks:
            x = block(x, angles)
            yield x
        yield self.project(self.last_norm(x), image.grid)

    def project(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Merge blocks of patches and project them: [N, H]."""
        rows, columns, merge = *grid, self.config.merge
        blocks = self.norm(x).view(rows, merge, columns, merge, -1).transpose(1, 2).reshape(rows * columns, -1)
        return self.down(F.gelu(self.up(blocks)))

    def _learned_positions(self, rows: int, columns: int) -> Tensor:
        """Interpolate the learned positions by cubics: [N, H]."""
        table = self.places.float().permute(2, 0, 1).unsqueeze(0)
        return F.interpolate(table, (rows, columns), mode="bicubic", align_corners=False)[0].flatten(1).T

    def _angles(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of each patch, [N, 1, D/2]: columns turn every other frequency from the first on."""
        spatial, device = self.config.hidden // self.config.heads // 2, self.places.device
        frequencies = self.config.theta ** -(torch.arange(0, spatial, 2, dtype=torch.float, device=device) / spatial)
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        places = torch.stack([column.flatten(), row.flatten()], -1).to(device).float()
        turned = (places[:, None] * frequencies[:, None]).flatten(1).unsqueeze(1)
        return turned.cos(), turned.sin()
