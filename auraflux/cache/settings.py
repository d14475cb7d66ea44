"""Settings of the KV cache, and the quantization bits of each layer that follow from them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from auraflux.defaults import AUTO, CPU_RECENT_WINDOW, KV, KV_BITS, KV_OF, RECENT_WINDOW, SINK_TOKENS
from auraflux.errors import SettingsError
from auraflux.renamed import renamed_fields

Bits = tuple[int, int]
MAX_FULL_PRECISION = 1 << 24  # tokens
# names of other engines
PEER_FORMATS = {
    **dict.fromkeys(("f32", "f16", "fp16", "bf16", "float16", "bfloat16", "16"), "none"),
    **dict.fromkeys(("q8_0", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "8"), "k8v8"),
    **dict.fromkeys(("q4_0", "q4_1", "iq4_nl", "fp4", "int4", "4"), "k4v4"),
}


class Shape(Protocol):
    """The shape of a layer, as far as settings need it."""

    @property
    def attends(self) -> bool: ...

    def refusal(self, bits: Bits, settings: "CacheSettings") -> str | None:
        """Return why the layer cannot be quantized to these bits; None if it can."""


def parse_kv(name: str) -> Bits | None:
    """Return the bits of keys and values that a name like "k8v4" stands for; None for "none"."""
    if name == "none":
        return None
    name = KV if name == AUTO else name
    found = re.fullmatch(r"k(\d)v(\d)", name)
    if found is None:
        similar = f"; the nearest to {name} is {PEER_FORMATS[name]}" if name in PEER_FORMATS else ""
        raise SettingsError(f"kv={name!r:.80} is neither 'none' nor a pair of bits such as k8v4, k4v4, k4v2 or k3v3{similar}.")
    key, value = int(found[1]), int(found[2])
    if key not in KV_BITS or value not in KV_BITS:
        bits = ", ".join(map(str, KV_BITS))
        raise SettingsError(f"kv={name!r} is not supported: keys and values may have {bits} bits, such as k8v4 or k4v4.")
    return key, value


@renamed_fields(
    {
        "first": "sink_tokens",
        "newest": "recent_window",
        "protect_first": "skip_first_layers",
        "protect_last": "skip_last_layers",
    }
)
@dataclass(frozen=True)
class CacheSettings:
    """Settings of the KV cache.

    kv                 "none", or bits of keys and values: "k8v4", "k4v4", "k4v2", "k3v3" or any pair of 2, 3, 4, 6, 8;
                       latents (MLA) take the key's bits; "auto" selects them by model family, see `for_family`
    skip_first_layers  attention layers at the start that stay in full precision; recurrent layers are not counted
    skip_last_layers   attention layers at the end that stay in full precision
    sink_tokens        tokens at the start of a sequence that stay in full precision; None for the default
    recent_window      most recent tokens that a query reads in full precision; None for the default
    sparse_v           skip quantized values whose attention weight is below this share; 1e-6 loses nothing
    seed               of the rotation; part of the format
    checkpoint_stride  tokens between automatic checkpoints of a sequence; None for none
    device             "cpu" or "cuda": whose defaults apply, see `for_device`; None for a GPU's
    checkpoint_nbytes  budget of all checkpoints together; the least recently used are evicted first
    """

    kv: str = KV
    skip_first_layers: int = 0
    skip_last_layers: int = 0
    sink_tokens: int | None = None
    recent_window: int | None = None
    sparse_v: float = 0.0
    seed: int = 0
    checkpoint_stride: int | None = None
    checkpoint_nbytes: int = 1 << 30
    device: str | None = None

    def __post_init__(self) -> None:
        parse_kv(self.kv)
        for name in ("skip_first_layers", "skip_last_layers", "sink_tokens", "recent_window", "sparse_v", "checkpoint_nbytes"):
            if (getattr(self, name) or 0) < 0:
                raise SettingsError(f"{name}={getattr(self, name)} is negative.")
        for name in ("sink_tokens", "recent_window"):
            if (value := getattr(self, name) or 0) > MAX_FULL_PRECISION:
                raise SettingsError(
                    f"{name}={value} is more than the {MAX_FULL_PRECISION:,} tokens that can be stored in full precision."
                )
        if not 0 <= self.seed < 1 << 63:
            raise SettingsError(f"seed={self.seed} is not between 0 and 2**63 - 1.")
        if self.checkpoint_stride is not None and self.checkpoint_stride < 1:
            raise SettingsError(f"checkpoint_stride={self.checkpoint_stride} must be at least 1, or None for no checkpoints.")
        if self.kv == "none":
            for name in ("skip_first_layers", "skip_last_layers", "sink_tokens", "recent_window", "sparse_v"):
                if getattr(self, name):
                    raise SettingsError(f"{name}={getattr(self, name)} has no effect with kv='none': nothing is quantized.")
        if not self.sparse_v < 1:
            raise SettingsError(f"sparse_v={self.sparse_v} is a share of the attention weights: it must be below 1.")

    def for_family(self, family: str) -> "CacheSettings":
        """Return the settings with "auto" replaced by the bits of a model family."""
        return replace(self, kv=KV_OF.get(family, KV)) if self.kv == AUTO else self

    def for_device(self, device: str) -> "CacheSettings":
        """Return the settings with the defaults of a device: on a CPU, a longer recent window, stored in bf16."""
        return replace(self, device=device)

    @property
    def bf16_window(self) -> bool:
        """True if sink and recent tokens are stored in bf16, whatever the cache's other tensors are."""
        return self.device == "cpu"

    @property
    def resolved_sink_tokens(self) -> int:
        """Number of sink tokens that quantized layers store in full precision, with the default filled in."""
        return SINK_TOKENS if self.sink_tokens is None else self.sink_tokens

    @property
    def resolved_recent_window(self) -> int:
        """Number of recent tokens that quantized layers store in full precision, with the default filled in."""
        default = CPU_RECENT_WINDOW if self.device == "cpu" else RECENT_WINDOW
        return default if self.recent_window is None else self.recent_window

    def plan(self, shapes: Sequence[Shape]) -> list[Bits | None]:
        """Return the bits of each layer; None for layers that are not quantized."""
        bits = parse_kv(self.kv)
        attending = [i for i, shape in enumerate(shapes) if shape.attends]
        plan: list[Bits | None] = [None] * len(shapes)
        if bits is None or not attending:
            return plan
        chosen = attending[self.skip_first_layers : len(attending) - self.skip_last_layers]
        if not chosen:
            raise SettingsError(
                f"kv='{self.kv}' would quantize nothing: skip_first_layers={self.skip_first_layers} and "
                f"skip_last_layers={self.skip_last_layers} cover all {len(attending)} attention layers."
            )
        for i in chosen:
            reason = shapes[i].refusal(bits, self)
            if reason is not None:
                raise SettingsError(f"kv='{self.kv}' is not possible in layer {i}: {reason}")
            plan[i] = bits
        return plan
