"""Gemma 4's images: a tower with 2D RoPE over patches of any grid, whose squares of patches are averaged and projected."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.models.config import VOCABULARY, Keys
from auraflux.vision.processor import check_shape
from auraflux.vision.prompt_images import BothWays
from auraflux.vision.settings import ImageSettings
from auraflux.vision.span import PreparedImage
from auraflux.vision.towers.layers import ClippedLinear, Linear, Loader, RMSNorm, activation, attention, normalized, rotate_half
from auraflux.weights.fields import COUNT, EPS, HEAD, LAYER_COUNT, NAME, THETA, TOKEN, WIDTH, Fields
from auraflux.weights.formats.untrusted import FLAG, integer

SIDE, TOKENS, PLACES = integer(1, 256), integer(1, 1 << 14), integer(1, 1 << 20)
PREFIXES = {"vision_tower.": "tower.", "embed_vision.": "projector."}


@dataclass(frozen=True)
class AreaProcessor:
    """Images of any shape, resized to about `most_tokens` embeddings, whose sides are whole squares of patches.

    placeholder   stands for an image in a rendered prompt
    image_token   of its embeddings
    start_token   the token before an image
    end_token     the token after it
    patch         pixels of a patch's side
    merge         patches of a square's side; a square becomes one embedding
    """

    placeholder: int
    image_token: int
    start_token: int
    end_token: int
    patch: int
    merge: int
    most_tokens: int

    def prepare(self, image: Any) -> PreparedImage:
        check_shape(*image.size)
        rows, columns = self.size(image.height, image.width)
        unit = self.patch * self.merge
        # 3: bicubic
        pixels = np.asarray(image.resize((columns * unit, rows * unit), resample=3))
        return PreparedImage(pixels, (rows, columns))

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of squares that an image is resized to."""
        unit, most = self.patch * self.merge, self.most_tokens
        factor = math.sqrt(most * unit**2 / (height * width))
        rows, columns = (math.floor(factor * side / unit) for side in (height, width))
        if not rows:
            rows, columns = 1, min(math.floor(width / height), most)
        elif not columns:
            rows, columns = min(math.floor(height / width), most), 1
        return rows, columns

    def tokens(self, image: PreparedImage) -> tuple[list[int], int, int, int]:
        rows, columns = image.grid
        return [self.start_token, *[self.image_token] * (rows * columns), self.end_token], 1, rows * columns, columns

    def spaced(self, prompt: str) -> str:
        return prompt

    def limited(self, pixels: int) -> "AreaProcessor":
        return replace(self, most_tokens=max(1, min(self.most_tokens, pixels // (self.patch * self.merge) ** 2)))


@dataclass(frozen=True)
class TowerConfig:
    """The sizes of a tower; `places` are the learned positions of each axis."""

    depth: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    width: int
    patch: int
    merge: int
    places: int
    output: int
    theta: float
    eps: float
    activation: str
    clipped: bool
    standardized: bool

    @classmethod
    def read(cls, keys: Keys, vision: Fields, hidden: int) -> "TowerConfig":
        heads, width = vision.get("num_attention_heads", COUNT, 12), vision.get("head_dim", HEAD, 64)
        kv_heads = vision.get("num_key_value_heads", COUNT, heads)
        if heads % kv_heads or width % 4:
            raise FormatError(
                f"{vision.title} has {heads} heads of {width}, and {kv_heads} of keys; 2D RoPE needs multiples of 4."
            )
        vision.only("attention_bias", False)
        vision.only("hidden_activation", "gelu_pytorch_tanh", "gelu", "silu")
        rope = vision.section("rope_parameters")
        rope.only("rope_type", "axial", "default")
        return cls(
            depth=vision.get("num_hidden_layers", LAYER_COUNT, 16),
            hidden=vision.get("hidden_size", WIDTH, 768),
            inner=vision.get("intermediate_size", WIDTH, 3072),
            heads=heads,
            kv_heads=kv_heads,
            width=width,
            patch=vision.get("patch_size", SIDE, 16),
            merge=vision.get("pooling_kernel_size", SIDE, 3),
            places=vision.get("position_embedding_size", PLACES, 10240),
            output=hidden,
            theta=rope.get("rope_theta", THETA, 100.0),
            eps=vision.get("rms_norm_eps", EPS, 1e-6),
            activation=vision.get("hidden_activation", NAME, "gelu_pytorch_tanh"),
            clipped=vision.get("use_clipped_linears", FLAG, False),
            standardized=vision.get("standardize", FLAG, False),
        )


def processor(keys: Keys, vision: Fields, settings: ImageSettings, token_id: Callable[[str], int | None]) -> AreaProcessor:
    """Return how images are resized."""
    fields, text = settings.fields, keys.section("text_config")
    patch, merge = vision.get("patch_size", SIDE, 16), vision.get("pooling_kernel_size", SIDE, 3)
    if (fields.get("patch_size", SIDE, patch), fields.get("pooling_kernel_size", SIDE, merge)) != (patch, merge):
        raise FormatError(f"{fields.title} does not say patches of {patch} and squares of {merge}, which the tower has.")
    most = fields.get("max_soft_tokens", TOKENS, 280)
    if most * merge > vision.get("position_embedding_size", PLACES, 10240):
        raise FormatError(f"{fields.title} says {most} max_soft_tokens, more than the tower has learned positions for.")
    padding = text.get("pad_token_id", TOKEN, 0)
    return AreaProcessor(
        placeholder=keys.outer.get("image_token_id", TOKEN, 258880),
        # embeddings take the place of its own; per-layer inputs are those of padding
        image_token=padding if padding < text.get("vocab_size", VOCABULARY, 262144) else 0,
        start_token=keys.outer.get("boi_token_id", TOKEN, 255999),
        end_token=keys.outer.get("eoi_token_id", TOKEN, 258882),
        patch=patch,
        merge=merge,
        most_tokens=most,
    )


def both_ways(keys: Keys, processor: AreaProcessor) -> BothWays | None:
    """Return how the tokens of an image attend to each other: in larger models in both directions, in layers with windows."""
    listed = keys.get("use_bidirectional_attention", NAME, None)
    return BothWays(processor.most_tokens, windows_only=True) if listed == "vision" else None


def rename(name: str) -> str | None:
    """Return a tower's name of a checkpoint's tensor; None for other tensors."""
    name = name.removeprefix("model.")
    for prefix, ours in PREFIXES.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return None


class Block:
    """A layer of the tower."""

    def __init__(self, load: Loader, name: str, config: TowerConfig):
        self.config = config
        self.norms = [
            load.rms_norm(f"{name}.{norm}layernorm", config.hidden, config.eps)
            for norm in ("input_", "post_attention_", "pre_feedforward_", "post_feedforward_")
        ]
        across, shared = config.heads * config.width, config.kv_heads * config.width
        sizes = {"q": (across, config.hidden), "k": (shared, config.hidden), "v": (shared, config.hidden)}
        self.q, self.k, self.v, self.out = (
            _linear(load, f"{name}.self_attn.{part}_proj", *size, config.clipped)
            for part, size in {**sizes, "o": (config.hidden, across)}.items()
        )
        self.q_norm, self.k_norm = (
            load.rms_norm(f"{name}.self_attn.{part}_norm", config.width, config.eps) for part in ("q", "k")
        )
        self.v_norm = RMSNorm(torch.ones(config.width, device=self.q_norm.weight.device), config.eps)
        self.gate, self.up, self.down = (
            _linear(load, f"{name}.mlp.{part}_proj", *size, config.clipped)
            for part, size in (
                ("gate", (config.inner, config.hidden)),
                ("up", (config.inner, config.hidden)),
                ("down", (config.hidden, config.inner)),
            )
        )
        self.activation = activation(config.activation)

    def __call__(self, x: Tensor, angles: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Run the layer over the patches of one image: [N, H]."""
        h, width = self.norms[0](x), self.config.width
        q, k, v = (
            norm(part(h).view(len(x), -1, width))
            for part, norm in ((self.q, self.q_norm), (self.k, self.k_norm), (self.v, self.v_norm))
        )
        share = self.config.heads // self.config.kv_heads
        k, v = (each.repeat_interleave(share, 1) for each in (_rotate(k, angles), v))
        x = x + self.norms[1](self.out(attention(_rotate(q, angles), k, v, scale=1.0)))
        h = self.norms[2](x)
        return x + self.norms[3](self.down(self.activation(self.gate(h)) * self.up(h)))


def _linear(load: Loader, name: str, outputs: int, inputs: int, clipped: bool) -> Linear | ClippedLinear:
    linear = load.linear(f"{name}.linear", outputs, inputs, bias=False)
    return load.clipped(name, linear) if clipped else linear


def _rotate(x: Tensor, angles: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Rotate the first half of each head by columns, the second by rows: [N, heads, D]."""
    return torch.cat([rotate_half(half, *each) for half, each in zip(x.chunk(2, -1), angles, strict=True)], -1)


class Tower:
    """The tower with its projector."""

    def __init__(self, load: Loader, config: TowerConfig, processor: AreaProcessor):
        self.config, self.dtype = config, load.dtype
        width = config.hidden
        self.patches = load.linear("tower.patch_embedder.input_proj", width, 3 * config.patch**2, bias=False)
        self.places = load.tensor("tower.patch_embedder.position_embedding_table", 2, config.places, width)
        self.blocks = [Block(load, f"tower.encoder.layers.{number}", config) for number in range(config.depth)]
        self.standard: tuple[Tensor, Tensor] | None = None
        if config.standardized:
            self.standard = load.tensor("tower.std_bias", width), load.tensor("tower.std_scale", width)
        self.norm = RMSNorm(torch.ones(width, device=self.places.device), config.eps)
        self.out = load.linear("projector.embedding_projection", config.output, width, bias=False)
        self.nbytes = load.nbytes

    def patchify(self, image: PreparedImage) -> Tensor:
        """Return the patches of an image, row by row, from 0 to 1: [N, patch * patch * 3] float32."""
        rows, columns, patch = *(side * self.config.merge for side in image.grid), self.config.patch
        pixels = normalized(image.pixels, (0.0,) * 3, (1.0,) * 3, self.places.device)
        cut = pixels.view(3, rows, patch, columns, patch)
        return cut.permute(1, 3, 2, 4, 0).reshape(rows * columns, -1)

    def run(self, image: PreparedImage) -> Iterator[Tensor]:
        config, device = self.config, self.places.device
        rows, columns = (side * config.merge for side in image.grid)
        row, column = (each.flatten().to(device) for each in torch.meshgrid(
            torch.arange(rows), torch.arange(columns), indexing="ij"))  # fmt: skip
        x = self.patches((2 * (self.patchify(image) - 0.5)).to(device, self.dtype))
        x = x + (self.places[0, column] + self.places[1, row]).to(x.dtype)
        angles = [self._angles(column), self._angles(row)]
        for block in self.blocks:
            x = block(x, angles)
            yield x
        yield self.project(x, image.grid)

    def project(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Average squares of patches and project them: [N, H]."""
        rows, columns, merge = *grid, self.config.merge
        pooled = x.float().view(rows, merge, columns, merge, -1).mean((1, 3)).view(rows * columns, -1)
        # in float32: the scale exceeds float16
        pooled = pooled.to(x.dtype).float() * self.config.hidden**0.5
        if self.standard is not None:
            bias, scale = (each.float() for each in self.standard)
            pooled = (pooled - bias) * scale
        return self.out(self.norm(pooled.to(x.dtype)))

    def _angles(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of each patch on one axis, [N, 1, D/4]."""
        spatial = self.config.width // 2
        steps = torch.arange(0, spatial, 2, dtype=torch.float, device=at.device) / spatial
        turned = (at.float()[:, None] * (1.0 / self.config.theta**steps)).unsqueeze(1)
        return turned.cos(), turned.sin()
