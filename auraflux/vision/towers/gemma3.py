"""Gemma 3's images: SigLIP over a square of fixed size, whose patches are averaged to 16 x 16 embeddings and projected."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.models.config import VOCABULARY, Keys
from auraflux.vision.processor import check_shape
from auraflux.vision.prompt_images import BothWays
from auraflux.vision.settings import ImageSettings
from auraflux.vision.span import PreparedImage
from auraflux.vision.towers.layers import ACTIVATIONS, Linear, Loader, RMSNorm, activation, attention, normalized
from auraflux.weights.fields import COUNT, EPS, LAYER_COUNT, NAME, TOKEN, WIDTH, Fields
from auraflux.weights.formats.untrusted import integer

SIDE, EDGE = integer(1, 256), integer(1, 1 << 12)
HALF = (0.5, 0.5, 0.5)
START = "<start_of_image>"
PREFIXES = {"vision_tower.": "tower.", "multi_modal_projector.": "projector."}


@dataclass(frozen=True)
class SquareProcessor:
    """Images resized to a square, whatever their shape.

    placeholder  the token before an image
    image_token  of its embeddings
    end_token    the token after it
    edge         pixels of a side
    tokens_side  embeddings of a side
    """

    placeholder: int
    image_token: int
    end_token: int
    edge: int
    tokens_side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def prepare(self, image: Any) -> PreparedImage:
        check_shape(*image.size)
        # 2: bilinear
        pixels = np.asarray(image.resize((self.edge, self.edge), resample=2))
        return PreparedImage(pixels, (self.tokens_side, self.tokens_side))

    def tokens(self, image: PreparedImage) -> tuple[list[int], int, int, int]:
        count = self.tokens_side**2
        return [self.placeholder, *[self.image_token] * count, self.end_token], 1, count, self.tokens_side

    def spaced(self, prompt: str) -> str:
        """Put empty lines around images, as the model was trained; their tokens depend on the text around them."""
        return prompt.replace(START, f"\n\n{START}\n\n")

    def limited(self, pixels: int) -> "SquareProcessor":
        return self


@dataclass(frozen=True)
class TowerConfig:
    """The sizes of a tower; `tokens_side` are embeddings of a side, `side` its patches."""

    depth: int
    hidden: int
    inner: int
    heads: int
    patch: int
    side: int
    tokens_side: int
    output: int
    eps: float
    activation: str

    @classmethod
    def read(cls, keys: Keys, vision: Fields, hidden: int) -> "TowerConfig":
        width, heads = vision.get("hidden_size", WIDTH, 768), vision.get("num_attention_heads", COUNT, 12)
        if width % heads:
            raise FormatError(f"{vision.title} has {heads} heads for a hidden_size of {width}.")
        vision.only("num_channels", 3)
        vision.only("hidden_act", *ACTIVATIONS)
        edge, patch, tokens_side = _sizes(keys, vision)
        return cls(
            depth=vision.get("num_hidden_layers", LAYER_COUNT, 12),
            hidden=width,
            inner=vision.get("intermediate_size", WIDTH, 3072),
            heads=heads,
            patch=patch,
            side=edge // patch,
            tokens_side=tokens_side,
            output=hidden,
            eps=vision.get("layer_norm_eps", EPS, 1e-6),
            activation=vision.get("hidden_act", NAME, "gelu_pytorch_tanh"),
        )


def _sizes(keys: Keys, vision: Fields) -> tuple[int, int, int]:
    """Return the pixels of an image's side, those of a patch's side, and the embeddings of an image's side."""
    edge, patch = vision.get("image_size", EDGE, 224), vision.get("patch_size", SIDE, 16)
    tokens = keys.outer.get("mm_tokens_per_image", COUNT, 256)
    tokens_side, side = math.isqrt(tokens), edge // patch
    if tokens_side**2 != tokens or not side or edge % patch or side % tokens_side:
        raise FormatError(f"{vision.title} has {edge} pixels and patches of {patch}, and {tokens} tokens stand for an image.")
    return edge, patch, tokens_side


def processor(keys: Keys, vision: Fields, settings: ImageSettings, token_id: Callable[[str], int | None]) -> SquareProcessor:
    """Return how images are resized."""
    edge, _, tokens_side = _sizes(keys, vision)
    size = settings.fields.section("size")
    if (size.get("height", EDGE, edge), size.get("width", EDGE, edge)) != (edge, edge):
        raise FormatError(f"{size.title} does not say {edge} x {edge} pixels, which the tower takes.")
    token = keys.outer.get("image_token_index", TOKEN, keys.outer.get("image_token_id", TOKEN, 262144))
    return SquareProcessor(
        placeholder=keys.outer.get("boi_token_index", TOKEN, 255999),
        # embeddings take the place of its own, which some models do not have
        image_token=token if token < keys.section("text_config").get("vocab_size", VOCABULARY, 262208) else 0,
        end_token=keys.outer.get("eoi_token_index", TOKEN, 256000),
        edge=edge,
        tokens_side=tokens_side,
        mean=settings.mean(HALF),
        std=settings.std(HALF),
    )


def both_ways(keys: Keys, processor: SquareProcessor) -> BothWays:
    """Return how the tokens of an image attend to each other."""
    return BothWays(processor.tokens_side**2)


def rename(name: str) -> str | None:
    """Return a tower's name of a checkpoint's tensor; None for other tensors."""
    name = name.removeprefix("model.")
    for prefix, ours in PREFIXES.items():
        if name.startswith(prefix):
            rest = name.removeprefix(prefix).removeprefix("vision_model.")
            # the pooling head is not used
            return None if rest.startswith("head.") else ours + rest
    return None


class Block:
    """A layer of the tower."""

    def __init__(self, load: Loader, name: str, config: TowerConfig):
        width, self.heads = config.hidden, config.heads
        self.norms = [load.layer_norm(f"{name}.layer_norm{number}", width, config.eps) for number in (1, 2)]
        self.q, self.k, self.v, self.out = (
            load.linear(f"{name}.self_attn.{part}_proj", width, width) for part in ("q", "k", "v", "out")
        )
        self.up = load.linear(f"{name}.mlp.fc1", config.inner, width)
        self.down = load.linear(f"{name}.mlp.fc2", width, config.inner)
        self.activation = activation(config.activation)

    def __call__(self, x: Tensor) -> Tensor:
        """Run the layer over the patches of one image: [N, H]."""
        h = self.norms[0](x)
        q, k, v = (part(h).view(len(x), self.heads, -1) for part in (self.q, self.k, self.v))
        x = x + self.out(attention(q, k, v))
        return x + self.down(self.activation(self.up(self.norms[1](x))))


class Tower:
    """The tower with its projector."""

    def __init__(self, load: Loader, config: TowerConfig, processor: SquareProcessor):
        self.config, self.processor, self.dtype = config, processor, load.dtype
        width = config.hidden
        weight = load.patch_weight("tower.embeddings.patch_embedding.weight", width, config.patch)
        self.patches = Linear(weight, load.tensor("tower.embeddings.patch_embedding.bias", width))
        self.places = load.tensor("tower.embeddings.position_embedding.weight", config.side**2, width)
        self.blocks = [Block(load, f"tower.encoder.layers.{number}", config) for number in range(config.depth)]
        self.last_norm = load.layer_norm("tower.post_layernorm", width, config.eps)
        shift = load.tensor("projector.mm_soft_emb_norm.weight", width)
        self.norm = RMSNorm(1 + shift.float(), config.eps)
        self.out = Linear(load.tensor("projector.mm_input_projection_weight", width, config.output).t(), None)
        self.nbytes = load.nbytes

    def patchify(self, image: PreparedImage) -> Tensor:
        """Return the patches of an image, row by row: [N, 3 * patch * patch] float32."""
        side, patch = self.config.side, self.config.patch
        pixels = normalized(image.pixels, self.processor.mean, self.processor.std, self.places.device)
        return pixels.view(3, side, patch, side, patch).permute(1, 3, 0, 2, 4).reshape(side * side, -1)

    def run(self, image: PreparedImage) -> Iterator[Tensor]:
        x = self.patches(self.patchify(image).to(self.places.device, self.dtype)) + self.places.to(self.dtype)
        for block in self.blocks:
            x = block(x)
            yield x
        rows = self.config.tokens_side
        pooled = self.last_norm(x).view(rows, self.config.side // rows, rows, -1, self.config.hidden).mean((1, 3))
        yield self.out(self.norm(pooled.view(rows * rows, -1)))
