"""`QuantizedCache`: the quantized KV cache for models of transformers.

    cache = QuantizedCache(model.config, kv="k4v4")
    model.generate(**inputs, past_key_values=cache)

Sink tokens and the recent window stay in full precision; older tokens become codes, a page at a time. By default attention
reads dequantized keys and values. After `model.set_attn_implementation("auraflux")` decode steps compute on the codes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from auraflux.cache.settings import parse_kv
from auraflux.defaults import CPU_RECENT_WINDOW, KV, SINK_TOKENS
from auraflux.errors import InputError, SettingsError
from auraflux.ops.attention.reference import merge_partials
from auraflux.ops.turboquant.arrangement import Arrangement, arrangement_for
from auraflux.ops.turboquant.pages import CodePages
from auraflux.ops.turboquant.reference import append_codes, decode, rotate, turboquant_partials

ATTENTION = "auraflux"
PAGE = 64  # tokens that become codes at a time
BLOCK = 512  # tokens of a partial attention
STORES = "key_codes", "key_norms", "value_codes", "value_norms"


@dataclass(frozen=True)
class CacheOptions:
    """Bits of keys and values, tokens in full precision, and the seed of the rotation."""

    bits: tuple[int, int]
    sink_tokens: int
    recent_window: int
    seed: int = 0


@dataclass(frozen=True)
class Coded:
    """The tokens of a layer that are codes: whole pages, page m of sequence b at m * B + b."""

    pages: CodePages
    batch: int
    tokens: int

    @classmethod
    def empty(cls, k: Tensor, options: CacheOptions) -> "Coded":
        """Return a store without tokens for keys like `k` [B, H, T, D]."""
        batch, heads, _, width = k.shape
        table = torch.zeros(batch, 0, dtype=torch.int32, device=k.device)
        lengths = torch.zeros(batch, dtype=torch.int32, device=k.device)
        arrangement = arrangement_for(k.device, *options.bits, width, PAGE)
        return cls(CodePages.empty(0, heads, PAGE, width, table, lengths, *options.bits, options.seed, arrangement), batch, 0)

    def append(self, k: Tensor, v: Tensor) -> "Coded":
        """Return the store with more whole pages: [B, H, T, D] both."""
        tokens = self.tokens + k.shape[2]
        grown = self._resized(tokens // PAGE)
        starts = torch.arange(self.batch + 1, dtype=torch.int32, device=k.device) * k.shape[2]
        rows = (x.transpose(1, 2).reshape(-1, *x.shape[1::2]).contiguous() for x in (k, v))
        append_codes(*rows, grown, starts)
        return replace(self, pages=grown, tokens=tokens)

    def truncate(self, tokens: int) -> "Coded":
        """Return the store with its first whole pages."""
        return replace(self, pages=self._resized(tokens // PAGE), tokens=tokens)

    def select(self, rows: Tensor) -> "Coded":
        """Return the store of some sequences; one may be taken several times."""
        count = len(rows)
        kept: dict[str, Any] = {name: self._by_page(name)[:, rows.to(self.pages.table.device)].flatten(0, 1) for name in STORES}
        lengths = self.pages.lengths.new_full((count,), self.tokens)
        pages = replace(self.pages, **kept, table=self._table(self.tokens // PAGE, count), lengths=lengths)
        return replace(self, pages=pages, batch=count)

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """Return keys and values, [B, H, T, D] float32 both."""
        rows = self.pages.arranged(Arrangement.ROWS)
        sides = (rows.key_codes, rows.key_norms, rows.key_bits), (rows.value_codes, rows.value_norms, rows.value_bits)
        found = (decode(codes, norms, bits, rows.width, rows.seed) for codes, norms, bits in sides)
        key, value = (x.unflatten(0, (-1, self.batch)).permute(1, 2, 0, 3, 4).flatten(2, 3) for x in found)
        return key, value

    def attend(self, q: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Attend from one new token of each sequence, [B, Hq, D], to all coded tokens; return parts for `merge_partials`."""
        starts = torch.arange(self.batch + 1, dtype=torch.int32, device=q.device)
        o, m, l = turboquant_partials(q.contiguous(), self.pages, starts, scale, BLOCK)  # noqa: E741
        return rotate(o, self.pages.seed, True), m, l

    @property
    def nbytes(self) -> int:
        return sum(getattr(self.pages, name).nbytes for name in STORES)

    def _by_page(self, name: str) -> Tensor:
        return getattr(self.pages, name).unflatten(0, (self.tokens // PAGE, self.batch))

    def _table(self, pages: int, batch: int) -> Tensor:
        table = self.pages.table
        return torch.arange(pages * batch, dtype=table.dtype, device=table.device).view(pages, batch).T.contiguous()

    def _resized(self, pages: int) -> CodePages:
        kept = min(pages, self.tokens // PAGE) * self.batch
        stores = {name: getattr(self.pages, name) for name in STORES}
        new = pages * self.batch - kept
        grown: dict[str, Any] = {name: torch.cat([x[:kept], x.new_zeros(new, *x.shape[1:])]) for name, x in stores.items()}
        lengths = self.pages.lengths.new_full((self.batch,), pages * PAGE)
        return replace(self.pages, **grown, table=self._table(pages, self.batch), lengths=lengths)


class CodedKeys(Tensor):
    """The new keys of a decode step, with the layer that has stored them."""

    layer: "QuantizedLayer"
    # results of operations are ordinary tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class QuantizedLayer(DynamicLayer):
    """Keys and values of one layer: sink tokens, codes, then recent tokens.

    on_codes  tells whether the model's attention computes on codes
    """

    def __init__(self, options: CacheOptions, on_codes: Callable[[], bool] = lambda: False):
        super().__init__()
        self.options, self.on_codes = options, on_codes
        self.coded: Coded | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.shape != value_states.shape:
            raise InputError(
                f"keys have {key_states.shape[-1]} channels and values {value_states.shape[-1]}: QuantizedCache needs as many."
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.sinks = self.recent = (key_states[:, :, :0], value_states[:, :, :0])
        self.coded = Coded.empty(key_states, self.options)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens, [B, H, T, D]; return those of all tokens, the new ones unchanged."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != len(self.recent[0]):
            raise InputError(f"the cache holds {len(self.recent[0])} sequences; it was given {key_states.shape[0]}.")
        on_codes = key_states.shape[2] == 1 and self.on_codes()
        self._append(key_states, value_states)
        if on_codes:
            self._encode()
            marked = key_states.as_subclass(CodedKeys)
            marked.layer = self
            return marked, value_states
        found = self.states()
        self._encode()
        return found

    def states(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all tokens, dequantized where they are codes."""
        assert self.coded is not None
        parts = [self.sinks, self.recent]
        if self.coded.tokens:
            keys, values = self.coded.dequantize()
            parts.insert(1, (keys.to(self.dtype), values.to(self.dtype)))
        keys, values = (torch.cat(side, dim=2) for side in zip(*parts, strict=True))
        return keys, values

    def attend(self, query: Tensor, scale: float) -> Tensor:
        """Attend from one new token of each sequence: [B, Hq, 1, D] -> [B, 1, Hq, D]."""
        assert self.coded is not None
        batch, heads, _, width = query.shape
        parts = [_attend_rows(query, *rows, scale) for rows in (self.sinks, self.recent) if rows[0].shape[2]]
        if self.coded.tokens:
            parts.append(self.coded.attend(query[:, :, 0], scale))
        o, m, l = (torch.cat(side, dim=1) for side in zip(*parts, strict=True))  # noqa: E741
        return merge_partials(o, m, l).to(query.dtype).view(batch, 1, heads, width)

    def get_seq_length(self) -> int:
        if not self.is_initialized or self.coded is None:
            return 0
        return self.sinks[0].shape[2] + self.coded.tokens + self.recent[0].shape[2]

    def reset(self) -> None:
        """Forget all tokens."""
        self.coded = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens."""
        if tokens_to_remove > 0:
            raise InputError(f"crop({tokens_to_remove}): give the number of tokens to remove, as a negative number.")
        if not self.is_initialized or self.coded is None or tokens_to_remove == 0:
            return
        keep = max(0, self.get_seq_length() + tokens_to_remove)
        sinks, coded = self.sinks[0].shape[2], self.coded.tokens
        if keep < sinks + coded:
            # the rest of a page is dequantized, and encoded again later: codes are whole pages
            whole = max(0, keep - sinks) // PAGE * PAGE
            keys, values = self.coded.dequantize()
            rest = slice(whole, max(whole, keep - sinks))
            self.recent = keys[:, :, rest].to(self.dtype), values[:, :, rest].to(self.dtype)
            self.coded, self.sinks = self.coded.truncate(whole), _first(self.sinks, keep)
        else:
            self.recent = _first(self.recent, keep - sinks - coded)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        if self.get_seq_length():
            self.batch_select_indices(torch.arange(len(self.recent[0])).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences, in a new order."""
        if not self.get_seq_length():
            return
        assert self.coded is not None
        rows = indices.to(self.device).nonzero().flatten() if indices.dtype == torch.bool else indices.to(self.device)
        for name in ("sinks", "recent"):
            keys, values = getattr(self, name)
            setattr(self, name, (keys[rows], values[rows]))
        self.coded = self.coded.select(rows)

    def offload(self) -> None:
        raise SettingsError("QuantizedCache cannot be offloaded.")

    @property
    def nbytes(self) -> int:
        """Bytes of codes and of tokens in full precision."""
        if not self.is_initialized or self.coded is None:
            return 0
        return self.coded.nbytes + sum(x.nbytes for pair in (self.sinks, self.recent) for x in pair)

    def _append(self, k: Tensor, v: Tensor) -> None:
        missing = self.options.sink_tokens - self.sinks[0].shape[2]
        if missing > 0 and self.recent[0].shape[2] == 0:
            self.sinks = _joined(self.sinks, (k[:, :, :missing], v[:, :, :missing]))
            k, v = k[:, :, missing:], v[:, :, missing:]
        self.recent = _joined(self.recent, (k, v))

    def _encode(self) -> None:
        """Turn the oldest recent tokens beyond the window into codes, in whole pages."""
        assert self.coded is not None
        full = (self.recent[0].shape[2] - self.options.recent_window) // PAGE * PAGE
        if full > 0:
            keys, values = self.recent
            self.coded = self.coded.append(keys[:, :, :full], values[:, :, :full])
            self.recent = keys[:, :, full:].clone(), values[:, :, full:].clone()


class QuantizedCache(Cache):
    """Cache of a transformers model, for `past_key_values`. Layers without full attention are those of `DynamicCache`.

    kv             bits of keys and values: "k8v4", "k4v4", "k4v2", "k3v3" or any pair of 2, 3, 4, 6, 8
    sink_tokens    first tokens of a sequence that stay in full precision, padding included
    recent_window  most recent tokens that stay in full precision
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        kv: str = KV,
        *,
        sink_tokens: int = SINK_TOKENS,
        recent_window: int = CPU_RECENT_WINDOW,
        seed: int = 0,
    ):
        bits = parse_kv(kv)
        if bits is None:
            raise SettingsError("kv='none' quantizes nothing: use transformers' DynamicCache.")
        if sink_tokens < 0 or recent_window < 1:
            raise SettingsError(f"sink_tokens={sink_tokens} and recent_window={recent_window}: at least 0 and 1 are needed.")
        options, text = CacheOptions(bits, sink_tokens, recent_window, seed), config.get_text_config(decoder=True)
        made = [
            QuantizedLayer(options, lambda: text._attn_implementation == ATTENTION) if type(layer) is DynamicLayer else layer
            for layer in DynamicCache(config=config).layers
        ]
        if not any(isinstance(layer, QuantizedLayer) for layer in made):
            raise SettingsError(f"no layer of {config.model_type!r} has full attention: there is nothing to quantize.")
        super().__init__(layers=made)

    @property
    def nbytes(self) -> int:
        """Bytes of the quantized layers."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, QuantizedLayer))


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute on codes in a decode step without padding; otherwise as transformers' sdpa."""
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise SettingsError(f"attention with {name!r} is not supported: use attn_implementation='eager'.")
    if isinstance(key, CodedKeys):
        if attention_mask is None:
            return key.layer.attend(query, query.shape[-1] ** -0.5 if scaling is None else scaling), None
        key, value = key.layer.states()
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options)


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def _joined(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat([first[0], second[0]], dim=2), torch.cat([first[1], second[1]], dim=2)


def _first(rows: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
    return rows[0][:, :, :count], rows[1][:, :, :count]


def _attend_rows(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Attend from one token of each sequence to keys in full precision; return one part for `merge_partials`."""
    batch, heads, _, width = query.shape
    q = query.float().view(batch, keys.shape[1], -1, width)
    scores = q @ keys.float().transpose(2, 3) * scale
    highest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - highest)
    o = (weights @ values.float()).view(batch * heads, 1, width)
    return o, highest.reshape(-1, 1), weights.sum(-1).reshape(-1, 1)
