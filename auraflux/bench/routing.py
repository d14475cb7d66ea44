"""Expert routing of random models: by chance, evenly or not, or as in a recorded trace.

A random model can follow a trace with the kernels of any other. Its layers add next to nothing to the residual stream, so a
token's embedding alone decides what each router and the LM head see. Given embeddings X of the trace's tokens [T, H], a router
with the weights Y^T X^+ returns exactly the wanted scores Y [T, E], where T <= H; an LM head of this kind returns the next
token.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from auraflux.errors import FormatError, InputError
from auraflux.quant import QTensor, quantize
from auraflux.weights.formats.stored import Stored
from auraflux.weights.names import ROUTERS

OUTPUTS = re.compile(r"(o_proj|out_proj|down_proj)\.weight$")  # what layers add to the residual stream
SMALL = 1 / 64  # factor of these
LOGIT = 20.0  # of the next token of a trace: others are about 1
IDS = "ids"  # name of a trace's tensor in its file

Normal = Callable[[list[int]], Tensor]


class RandomRouting(Protocol):
    """Choice of experts by tokens."""

    def adapt(self, name: str, found: Stored, normal: Normal) -> Stored:
        """Return a random weight as the routing needs it; `normal` draws standard normal numbers."""


@dataclass(frozen=True)
class SkewedRouting:
    """Routing by chance: `skew` is the standard deviation of the logarithm of experts' router weights, 0 for even routing."""

    skew: float = 0.0

    def adapt(self, name: str, found: Stored, normal: Normal) -> Stored:
        found = by_token(name, found)
        if ROUTERS.search(name) and isinstance(found, Tensor):
            factors = torch.exp(self.skew * normal([found.shape[0], 1]))
            return (factors * found.float()).to(found.dtype)
        return found


@dataclass(eq=False)
class TracedRouting:
    """Routing of a trace.

    ids  [T, L, k]  experts of token t in mixture layer l; a model with more layers begins again with the first
    """

    ids: Tensor
    _embeddings: Tensor | None = field(default=None, init=False)
    _routers: list[str] = field(default_factory=list, init=False)

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @classmethod
    def load(cls, path: Path) -> "TracedRouting":
        """Load a trace that `bench.lab.record_routing` wrote."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            found = load_file(path)
        except FileNotFoundError:
            raise InputError(f"{path}: there is no such trace of expert routing. Give 'uniform', 'zipf' or a file.") from None
        except (OSError, SafetensorError) as err:
            raise FormatError(f"{path} is no trace of expert routing: {err}.") from err
        ids = found.get(IDS)
        if ids is None or ids.dim() != 3 or ids.dtype.is_floating_point or not ids.numel() or int(ids.min()) < 0:
            raise FormatError(f"{path} is no trace of expert routing: it needs a tensor '{IDS}' of shape [tokens, layers, k].")
        return cls(ids.long())

    def check(self, k: int, hidden: int, vocab: int) -> None:
        """Refuse a trace that a model cannot follow."""
        if self.ids.shape[2] != k:
            raise InputError(f"the trace has {self.ids.shape[2]} experts per token and layer; the shape has {k}.")
        if self.tokens > min(hidden, vocab):
            raise InputError(f"the trace has {self.tokens} tokens; a width of {hidden} allows {min(hidden, vocab)}.")

    def adapt(self, name: str, found: Stored, normal: Normal) -> Stored:
        found = by_token(name, found)
        if "embed_tokens" in name:
            rows = found.row_range(range(self.tokens)).dequantize() if isinstance(found, QTensor) else found[: self.tokens]
            self._embeddings = rows.float()
        elif name.startswith("lm_head"):
            following = torch.eye(self.tokens, device=self._x.device).roll(1, 1)
            return _replace_rows(found, LOGIT * self._weights(following))
        elif ROUTERS.search(name) and isinstance(found, Tensor) and "shared" not in name:
            if (most := int(self.ids.max())) >= len(found):
                raise InputError(f"the trace has an expert {most}; the shape has {len(found)} per layer.")
            self._routers.append(name)
            ids = self.ids[:, (len(self._routers) - 1) % self.ids.shape[1]].to(found.device)
            wanted = torch.zeros(self.tokens, found.shape[0], device=found.device)
            wanted.scatter_(1, ids, torch.linspace(2.0, 1.0, ids.shape[1], device=found.device).expand_as(ids))
            return self._weights(wanted).to(found.dtype)
        return found

    def prompt(self, length: int) -> list[int]:
        """Return a prompt after which the first token of the trace comes next."""
        return [index % self.tokens for index in range(-length, 0)]

    @property
    def _x(self) -> Tensor:
        assert self._embeddings is not None, "the embedding comes first"
        return self._embeddings

    def _weights(self, wanted: Tensor) -> Tensor:
        """Return the weights of a linear layer whose outputs are `wanted` for normalised embeddings: [T, N] -> [N, H]."""
        x = self._x * self._x.square().mean(1, keepdim=True).rsqrt()
        return wanted.T @ torch.linalg.pinv(x.double()).T.float()


def by_token(name: str, found: Stored) -> Stored:
    """Scale a weight such that a token's embedding decides its experts, whatever its context."""
    if "embed_tokens" in name:
        return _scaled(found, found.shape[-1] ** 0.5)
    return _scaled(found, SMALL) if OUTPUTS.search(name) else found


def _scaled(found: Stored, factor: float) -> Stored:
    if isinstance(found, Tensor):
        return found * factor
    assert found.biases is not None
    return replace(found, scales=found.scales * factor, biases=found.biases * factor)


def _replace_rows(found: Stored, rows: Tensor) -> Stored:
    """Return a matrix whose first rows are replaced."""
    if isinstance(found, Tensor):
        return torch.cat([rows.to(found.dtype), found[len(rows) :]])
    packed = quantize(rows.to(found.scales.dtype), found.bits, found.group)
    assert found.biases is not None
    assert packed.biases is not None
    for mine, new in ((found.packed, packed.packed), (found.scales, packed.scales), (found.biases, packed.biases)):
        mine[: len(rows)] = new
    return found
