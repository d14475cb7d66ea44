"""Qwen3.5's images: a tower with 2D RoPE over patches of any grid, whose blocks of 2 x 2 patches become one embedding each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.models.config import Keys
from auraflux.vision.processor import GridProcessor
from auraflux.vision.settings import ImageSettings
from auraflux.vision.span import PreparedImage
from auraflux.vision.towers.layers import Linear, Loader, activation, attention, normalized, read_heads, rotate_half
from auraflux.weights.fields import LAYER_COUNT, NAME, TOKEN, WIDTH, Fields
from auraflux.weights.formats.untrusted import integer, list_of

NORM_EPS = 1e-6
SIDE = integer(1, 256)  # pixels of a patch, frames of a patch, patches of a block
MIN_PIXELS, MAX_PIXELS = 1 << 16, 1 << 24
MEAN = (0.5, 0.5, 0.5)
SECTIONS = list_of(integer(0, 1024), 3)  # frequencies per kind of position


@dataclass(frozen=True)
class TowerConfig:
    """The sizes of a tower; `positions` is the side of the square grid of learned positions."""

    depth: int
    hidden: int
    inner: int
    heads: int
    patch: int
    frames: int
    merge: int
    output: int
    positions: int
    activation: str

    @classmethod
    def read(cls, keys: Keys, vision: Fields, hidden: int) -> "TowerConfig":
        width, heads = read_heads(vision, "num_heads")
        vision.only("in_channels", 3)
        vision.only("hidden_act", "gelu_pytorch_tanh", "gelu", "silu")
        if vision.get("deepstack_visual_indexes", list_of(integer(0, 1024), 1024), []):
            raise FormatError(f"{vision.title} has deepstack_visual_indexes, which are not supported.")
        output = vision.get("out_hidden_size", WIDTH, hidden)
        if output != hidden:
            raise FormatError(f"{vision.title} has out_hidden_size {output}, and the language model has {hidden}.")
        return cls(
            depth=vision.read("depth", LAYER_COUNT),
            hidden=width,
            inner=vision.read("intermediate_size", WIDTH),
            heads=heads,
            patch=vision.get("patch_size", SIDE, 16),
            frames=vision.get("temporal_patch_size", SIDE, 2),
            merge=vision.get("spatial_merge_size", SIDE, 2),
            output=output,
            positions=int(vision.get("num_position_embeddings", integer(1, 1 << 20), 2304) ** 0.5),
            activation=vision.get("hidden_act", NAME, "gelu_pytorch_tanh"),
        )


def processor(keys: Keys, vision: Fields, settings: ImageSettings, token_id: Callable[[str], int | None]) -> GridProcessor:
    """Return how images are resized."""
    least, most = settings.pixels(MIN_PIXELS, MAX_PIXELS)
    return GridProcessor(
        placeholder=keys.outer.read("image_token_id", TOKEN),
        patch=vision.get("patch_size", SIDE, 16),
        merge=vision.get("spatial_merge_size", SIDE, 2),
        min_pixels=least,
        max_pixels=most,
        mean=settings.mean(MEAN),
        std=settings.std(MEAN),
    )


def position_axes(keys: Keys, config: Any) -> np.ndarray:
    """Return which position each RoPE frequency takes: rows and columns every third one, time the others."""
    frequencies = len(config.rotation.frequencies)
    newer = keys.section("rope_parameters")
    found = next((each for each in (newer, keys.section("rope_scaling")) if "mrope_section" in each), keys)
    sections, axes = found.get("mrope_section", SECTIONS, [11, 11, 10]), np.zeros(frequencies, np.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def rename(name: str) -> str | None:
    """Return a tower's name of a checkpoint's tensor; None for other tensors."""
    for prefix in ("model.visual.", "visual.", "vision_tower."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return None


class Block:
    """A layer of the tower."""

    def __init__(self, load: Loader, name: str, config: TowerConfig):
        width, self.heads = config.hidden, config.heads
        self.norms = [load.layer_norm(f"{name}.norm{number}", width, NORM_EPS) for number in (1, 2)]
        self.qkv = load.linear(f"{name}.attn.qkv", 3 * width, width)
        self.out = load.linear(f"{name}.attn.proj", width, width)
        self.up = load.linear(f"{name}.mlp.linear_fc1", config.inner, width)
        self.down = load.linear(f"{name}.mlp.linear_fc2", width, config.inner)
        self.activation = activation(config.activation)

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Run the layer over the patches of one image: [N, H]."""
        q, k, v = self.qkv(self.norms[0](x)).view(len(x), 3, self.heads, -1).unbind(1)
        x = x + self.out(attention(rotate_half(q, *angles), rotate_half(k, *angles), v))
        return x + self.down(self.activation(self.up(self.norms[1](x))))


class Tower:
    """The tower with its merger."""

    def __init__(self, load: Loader, config: TowerConfig, processor: GridProcessor):
        self.config, self.processor, self.dtype = config, processor, load.dtype
        weight = load.patch_weight("patch_embed.proj.weight", config.hidden, config.frames, config.patch)
        self.patches = Linear(weight, load.tensor("patch_embed.proj.bias", config.hidden))
        self.places = load.tensor("pos_embed.weight", config.positions**2, config.hidden)
        self.blocks = [Block(load, f"blocks.{number}", config) for number in range(config.depth)]
        merged = config.hidden * config.merge**2
        self.norm = load.layer_norm("merger.norm", config.hidden, NORM_EPS)
        self.up = load.linear("merger.linear_fc1", merged, merged)
        self.down = load.linear("merger.linear_fc2", config.output, merged)
        self.nbytes = load.nbytes

    def patchify(self, image: PreparedImage) -> Tensor:
        """Return the patches of an image, block by block: [N, 3 * frames * patch * patch] float32."""
        config, (rows, columns) = self.config, image.grid
        pixels = normalized(image.pixels, self.processor.mean, self.processor.std, self.places.device)
        cut = pixels.view(3, rows, config.merge, config.patch, columns, config.merge, config.patch)
        # a still image fills all frames of a patch
        cut = cut.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
        return cut.expand(-1, -1, -1, -1, -1, config.frames, -1, -1).reshape(rows * columns * config.merge**2, -1)

    def run(self, image: PreparedImage) -> Iterator[Tensor]:
        config, device = self.config, self.places.device
        rows, columns = (side * config.merge for side in image.grid)
        row, column = _block_order(rows, columns, config.merge)
        x = self.patches(self.patchify(image).to(device, self.dtype))
        x = x + self._learned_positions(row, column, rows, columns).to(x.dtype)
        angles = self._angles(row.to(device), column.to(device))
        for block in self.blocks:
            x = block(x, angles)
            yield x
        merged = self.norm(x).view(-1, self.config.hidden * config.merge**2)
        yield self.down(torch.nn.functional.gelu(self.up(merged)))

    def _learned_positions(self, row: Tensor, column: Tensor, rows: int, columns: int) -> Tensor:
        """Interpolate the learned positions bilinearly, corners on corners: [N, H]."""
        side = self.config.positions
        (top, below, down), (left, right, across) = (_taps(at, count, side) for at, count in ((row, rows), (column, columns)))
        corners = (
            (top, left, (1 - down) * (1 - across)),
            (top, right, (1 - down) * across),
            (below, left, down * (1 - across)),
            (below, right, down * across),
        )
        found = torch.zeros(len(row), self.config.hidden, device=self.places.device)
        for a, b, weight in corners:
            found += self.places[(a * side + b).to(found.device)].float() * weight.to(found.device)[:, None]
        return found

    def _angles(self, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of each patch, [N, 1, D/2]: half of the frequencies turn by rows, half by columns."""
        spatial = self.config.hidden // self.config.heads // 2
        frequencies = 1.0 / (10000.0 ** (torch.arange(0, spatial, 2, dtype=torch.float, device=row.device) / spatial))
        turned = torch.cat([at.float()[:, None] * frequencies for at in (row, column)], -1).unsqueeze(1)
        return turned.cos(), turned.sin()


def _taps(at: Tensor, count: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the learned positions before and after each of `count`, and the weight of the second."""
    source = at.float() * (side - 1) / max(count - 1, 1)
    low = source.floor()
    return low.long(), (low.long() + 1).clamp(max=side - 1), source - low


def _block_order(rows: int, columns: int, merge: int) -> tuple[Tensor, Tensor]:
    """Return row and column of each patch in the order of blocks."""
    grid = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    row, column = (each.view(rows // merge, merge, columns // merge, merge).transpose(1, 2).flatten() for each in grid)
    return row, column
