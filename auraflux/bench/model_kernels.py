"""The kernels that the steps of a model take, from the route tables alone: without weights, and for a GPU without one.

A model of a real shape is built on the meta device, where tensors have shapes and no memory, and runs one step. No op runs:
each call is looked up in the op's route table and returns a result of the right shape.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from auraflux.bench.random_weights import outlined_model
from auraflux.cache import Batch, Cache, CacheSettings
from auraflux.engine.device import CHUNK, activation_dtype
from auraflux.engine.engine import padded_batch_size
from auraflux.ops._dispatch import Op, exact, invariant
from auraflux.ops.attention.pages import RowPages
from auraflux.ops.attention.reference_token_selection import TokenSelection, empty_selection
from auraflux.ops.explain import fake_device
from auraflux.ops.moe.experts import Experts, SharedExpert
from auraflux.ops.routes import Explanation, explain_call
from auraflux.quant import QTensor

Arguments = dict[str, Any]
GROUP = 64


@dataclass(frozen=True)
class Use:
    """Calls of one op with arguments of one shape.

    shapes   of tensors and weights, as a string
    calls    in a step
    verdict  of the op's route table; None where it has one kernel and no table
    """

    op: str
    shapes: str
    calls: int
    verdict: Explanation | None


def explain_model(
    config: dict[str, Any],
    settings: CacheSettings,
    backend: str,
    *,
    bits: int | None = 4,
    batch: int = 1,
    at: int = 1024,
    exactly: bool = False,
    batch_invariant: bool = False,
) -> dict[str, list[Use]]:
    """List the ops of a decode step of `batch` sequences at `at` tokens, and of the last prefill chunk of such a prompt.

    config           of a shape (`bench/shapes/`)
    batch_invariant  inside `invariant`
    """
    with fake_device(backend), exact(exactly), invariant(batch_invariant):
        model, shapes = outlined_model(config, bits, GROUP, backend)
        dtype = activation_dtype(torch.device(backend))
        # the length bucket of such a step
        sizes: dict[str, Any] = {"context": 1 << at.bit_length(), "sequences": batch + 1, "chunk": CHUNK[backend]}
        cache = Cache(shapes, settings, **sizes, dtype=dtype, device="meta")
        return {
            "decode": list(_merged(_step(model, cache, _decode_batch(cache, batch, at, backend), backend))),
            "prompt": list(_merged(_step(model, cache, _prefill_batch(cache, at), backend))),
        }


def _decode_batch(cache: Cache, count: int, at: int, backend: str) -> Batch:
    """Make a batch of sequences of `at` tokens that decode one more each, padded as the engine does."""
    sequences = [cache.open() for _ in range(count)]
    for sequence in sequences:
        _fill(cache.batch([sequence]), at, cache.chunk)
    padded = backend == "cuda" and cache.supports_padding
    batch = cache.batch(sequences, padding_sequences=padded_batch_size(count) - count if padded else 0)
    batch.extend([1] * count)
    return batch


def _fill(batch: Batch, tokens: int, chunk: int) -> None:
    """Extend a sequence chunk by chunk, as prefill does."""
    for first in range(0, tokens, chunk):
        batch.extend([min(chunk, tokens - first)])


def _prefill_batch(cache: Cache, at: int) -> Batch:
    """Make a batch of the last prefill chunk of a prompt."""
    batch = cache.batch([cache.open()])
    _fill(batch, at, cache.chunk)
    return batch


def _step(model: Any, cache: Cache, batch: Batch, backend: str) -> list[Use]:
    """List the calls of a step in order, with those of its logits."""
    calls: list[Use] = []
    with _answered(backend, calls.append):
        hidden = model.forward(batch.positions, batch, cache)
        model.logits(hidden if batch.single else hidden[-1:])
    return calls


def _merged(calls: list[Use]) -> Iterator[Use]:
    """Count equal calls, in the order of their first occurrence."""
    counts: dict[Use, int] = {}
    for call in calls:
        counts[call] = counts.get(call, 0) + call.calls
    for call, count in counts.items():
        yield replace(call, calls=count)


@contextmanager
def _answered(backend: str, note: Callable[[Use], None]) -> Iterator[None]:
    """Look up the calls of ops inside the block in their route tables, and return results of the right shapes."""

    def call(op: Op, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(inspect.signature(op.reference).bind(*args, **kwargs).arguments)
        note(Use(op.name, _described(arguments), 1, explain_call(op, backend, arguments)))
        with patch.object(Op, "__call__", lambda inner, *a, **k: inner.reference(*a, **k)):
            return RESULTS.get(op.name, lambda a: op.reference(**a))(arguments)

    with patch.object(Op, "__call__", call):
        yield


def _like(name: str) -> Callable[[Arguments], Tensor]:
    return lambda arguments: torch.empty_like(arguments[name])


def _attended(arguments: Arguments) -> Tensor:
    q: Tensor = arguments["q"]
    return q.new_empty(*q.shape[:2], arguments["pages"].v.shape[3])


def _embedded(arguments: Arguments) -> Tensor:
    table = arguments["table"]
    return torch.empty(len(arguments["ids"]), table.shape[1], device=table.device)


def _split(arguments: Arguments) -> tuple[Tensor, Tensor]:
    q: Tensor = arguments["q"]
    heads = q.view(len(q), arguments["heads"], -1)
    return heads[..., : arguments["nope"]], heads[..., arguments["nope"] :].contiguous()


def _products(arguments: Arguments) -> tuple[Tensor, ...]:
    x: Tensor = arguments["x"]
    return tuple(x.new_empty(len(x), weight.shape[0]) for weight in arguments["weights"])


def _chosen(arguments: Arguments) -> TokenSelection:
    pages: RowPages = arguments["pages"]
    return empty_selection(len(arguments["q"]), arguments["most"], pages.table, pages.pool[1])


# of ops whose references need the values of tensors, or dequantize weights
RESULTS: dict[str, Callable[[Arguments], Any]] = {
    "add_norm_gate_up": lambda arguments: (arguments["x"], *_products({**arguments, "weights": [arguments["gate"]]})),
    "add_norm_linears": lambda arguments: (arguments["x"], _products(arguments)),
    "add_norm_scores": lambda arguments: (arguments["x"], arguments["x"], _products(arguments)),
    "append_codes": lambda arguments: None,
    "append_keys": lambda arguments: None,
    "append_kv": lambda arguments: None,
    "append_latent": lambda arguments: None,
    "append_latent_codes": lambda arguments: None,
    "attention": _attended,
    "choose_positions": _chosen,
    "compress_windows": lambda arguments: None,
    "delta_layer_step": _like("z"),
    "embed": _embedded,
    "expert_mlp": _like("x"),
    "far_conv": _like("x"),
    "gated_delta_prefill": _like("v"),
    "latent_attention": _like("q_latent"),
    "linear": lambda arguments: _products({**arguments, "weights": [arguments["weight"]]})[0],
    "linears": _products,
    "mixture": _like("h"),
    "rope_append_attention": _like("q"),
    "rope_append_codes": _like("q"),
    "rope_append_latent": _split,
    "rope_append_latent_codes": _split,
    "short_conv": _like("x"),
    "turboquant_attention": _like("q"),
    "turboquant_latent_attention": _like("q_latent"),
}


def _described(arguments: Arguments) -> str:
    """Describe the shapes of arguments, without vectors, numbers and `delta`, which has the shape of x."""
    return ", ".join(f"{name} {text}" for name, value in arguments.items() if name != "delta" and (text := _shape(value)))


def _shape(value: Any) -> str:
    if isinstance(value, QTensor):
        return f"{'x'.join(map(str, value.shape))} of {value.bits} bits"
    if isinstance(value, Tensor):
        return "x".join(map(str, value.shape)) if value.dim() > 1 else ""
    if isinstance(value, Experts | SharedExpert):
        return _shape(value.up)
    if isinstance(value, list | tuple):
        return " + ".join(text for each in value if (text := _shape(each)))
    return ""
