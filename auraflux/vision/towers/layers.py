"""The interface of towers, and layers in torch whose weights stay in the checkpoint's dtype."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from auraflux.errors import FormatError
from auraflux.vision.span import PreparedImage
from auraflux.weights.fields import COUNT, WIDTH, Fields
from auraflux.weights.formats.stored import dense
from auraflux.weights.loader import Weights

KEPT = (torch.float32, torch.bfloat16, torch.float16)


class Tower(Protocol):
    """A vision tower with its projector.

    nbytes  of its weights
    """

    nbytes: int

    def run(self, image: PreparedImage) -> Iterator[Tensor]:
        """Encode an image; yield after every layer, and the embeddings [N, H] last."""


def read_heads(vision: Fields, key: str, size: str = "hidden_size") -> tuple[int, int]:
    """Return the width of a tower and its number of attention heads, whose name in the config is given."""
    width, heads = vision.read(size, WIDTH), vision.read(key, COUNT)
    if width % heads or (width // heads) % 4:
        raise FormatError(f"{vision.title} has {heads} heads for a {size} of {width}; 2D RoPE needs multiples of 4.")
    return width, heads


class Loader:
    """Loads a tower's weights: on a CPU in the dtype they are stored in, for products in float32; on a GPU in its own.

    dtype  of the activations
    """

    def __init__(self, weights: Weights):
        self.weights = weights
        self.dtype = torch.float32 if weights.device.type == "cpu" else weights.dtype
        self.nbytes = 0

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Load a tensor of this shape, or a placeholder that `check_loaded` reports."""
        found = dense(self.weights.stored(name, *shape))
        dtype = found.dtype if found.dtype in KEPT and self.weights.device.type == "cpu" else self.dtype
        made = self.weights.complete(name, found.to(self.weights.device, dtype))
        self.nbytes += made.nbytes
        return made

    def linear(self, name: str, outputs: int, inputs: int, bias: bool = True) -> "Linear":
        """Load a linear layer."""
        return Linear(self.tensor(f"{name}.weight", outputs, inputs), self.tensor(f"{name}.bias", outputs) if bias else None)

    def layer_norm(self, name: str, width: int, eps: float) -> "LayerNorm":
        """Load a layer norm."""
        return LayerNorm(self.tensor(f"{name}.weight", width), self.tensor(f"{name}.bias", width), eps)

    def rms_norm(self, name: str, width: int, eps: float) -> "RMSNorm":
        """Load an RMS norm."""
        return RMSNorm(self.tensor(f"{name}.weight", width), eps)

    def clipped(self, name: str, linear: "Linear") -> "ClippedLinear":
        """Load the ranges of a linear layer's inputs and outputs."""
        ends = {f"{side}_{end}": self.tensor(f"{name}.{side}_{end}") for side in ("input", "output") for end in ("min", "max")}
        return ClippedLinear(linear, **{name: float(end) for name, end in ends.items()})

    def patch_weight(self, name: str, hidden: int, *sides: int) -> Tensor:
        """Load a convolution over square patches, of so many frames if two numbers are given, as a matrix; mlx stores its
        channels last."""
        sides = (*sides, sides[-1])
        if self.weights.has(name) and self.weights.shape(name)[-1] == 3 != sides[-1]:
            return self.tensor(name, hidden, *sides, 3).movedim(-1, 1).reshape(hidden, -1)
        return self.tensor(name, hidden, 3, *sides).reshape(hidden, -1)


def normalized(pixels: np.ndarray, mean: Sequence[float], std: Sequence[float], device: torch.device) -> Tensor:
    """Scale uint8 [H, W, 3] to 0..1, then by mean and standard deviation of each channel: float32 [3, H, W] on a device."""
    scaled = (torch.tensor(pixels).to(device).permute(2, 0, 1).double() * (1 / 255)).float()
    center, spread = (torch.tensor(each, dtype=torch.float32, device=device)[:, None, None] for each in (mean, std))
    return scaled.sub_(center).div_(spread)


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear layer whose weight is converted to the activations' dtype at each use."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


@dataclass(frozen=True, eq=False)
class ClippedLinear:
    """A linear layer with clipped inputs and outputs."""

    linear: Linear
    input_min: float
    input_max: float
    output_min: float
    output_max: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x.clamp(self.input_min, self.input_max)).clamp(self.output_min, self.output_max)


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """A norm over the last dimension."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """An RMS norm over the last dimension."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Attend from every token of an image to all: [N, heads, D] each -> [N, heads * D]."""
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1).flatten(1)


def rotate_half(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of each head: x [N, heads, D], cosine and sine [N, 1, D/2]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1).to(x.dtype)


def activation(name: str) -> Any:
    """Return the activation function of a config's name."""
    known = {"gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"), "gelu": F.gelu, "silu": F.silu}
    return known[name]


ACTIVATIONS = "gelu_pytorch_tanh", "gelu", "silu"
