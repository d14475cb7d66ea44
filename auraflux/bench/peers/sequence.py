"""Peers of attention and the delta rule: torch's scaled dot product attention, and transformers without fla."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from auraflux.bench.peers.peer import Peer, each
from auraflux.bench.timing import Contender
from auraflux.ops._cases import Args, Case
from auraflux.ops.attention.pages import rows_of
from auraflux.ops.turboquant.reference import decode


def _plain(case: Case, args: Args) -> bool:
    """One sequence, a causal mask and nothing else."""
    return args["starts"].shape[0] == 2 and all(args.get(name) is None for name in ("window", "sinks", "softcap"))


def _dense_rows(args: Args) -> tuple[Tensor, Tensor]:
    pages = args["pages"]
    page, slot = rows_of(pages, 0, 0, int(pages.lengths[0]))
    return pages.k[page, :, slot], pages.v[page, :, slot]


def _decoded_rows(args: Args) -> tuple[Tensor, Tensor]:
    pages = args["pages"]
    page, slot = pages.rows_of(0, 0, int(pages.lengths[0]))
    sides = (
        (pages.key_codes, pages.key_norms, pages.key_bits),
        (pages.value_codes, pages.value_norms, pages.value_bits),
    )
    keys, values = (
        decode.reference(codes[page, :, slot].contiguous(), norms[page, :, slot].contiguous(), bits, pages.width, pages.seed)
        for codes, norms, bits in sides
    )
    return keys, values


def _sdpa(rows: Callable[[Args], tuple[Tensor, Tensor]]) -> Callable[[Args, int], Contender]:
    """Make attention over contiguous keys and values in q's dtype."""

    def make(args: Args, copies: int) -> Contender:
        q = args["q"].transpose(0, 1)[None].contiguous()  # [1, Hq, T, D]
        keys, values = (side.to(q.dtype).transpose(0, 1)[None].contiguous() for side in rows(args))
        new, length = q.shape[2], keys.shape[2]
        mask = None if new in (1, length) else torch.ones(new, length, dtype=torch.bool).tril(length - new)

        def prepare(k: Tensor, v: Tensor) -> Callable[[], Any]:
            options = {"attn_mask": mask, "is_causal": new == length and new > 1, "scale": args["scale"], "enable_gqa": True}
            return lambda: scaled_dot_product_attention(q, k, v, **options)

        return Contender([prepare(keys.clone(), values.clone()) for _ in range(copies)])

    return make


def _read_sdpa(result: Tensor) -> Tensor:
    return result[0].transpose(0, 1)


def _dense_nbytes(args: Args) -> int:
    """Return the bytes of the keys and values in q's dtype."""
    q, pages = args["q"], args["pages"]
    return 2 * int(pages.lengths[0]) * pages.heads * pages.width * q.element_size()


def _one_sequence(case: Case, args: Args) -> bool:
    return args["state"].shape[0] == 1


def _delta(name: str) -> Callable[[Args], Callable[[], Any]]:
    """Prepare a delta rule of transformers: it takes log decay and one key head per value head, and scales q itself."""

    def prepare(args: Args) -> Callable[[], Any]:
        from transformers.models.qwen3_next import modeling_qwen3_next
        from transformers.utils import logging

        # it would warn on stderr that this path is slow
        logging.set_verbosity_error()
        rule = getattr(modeling_qwen3_next, name)
        state, q = args["state"], args["q"]
        shared = state.shape[1] // q.shape[1]
        q, k = ((x * s).repeat_interleave(shared, 1)[None] for x, s in ((q, q.shape[2] ** 0.5), (args["k"], 1.0)))
        v, beta, g = args["v"][None], args["beta"][None], args["decay"].clamp_min(1e-30).log()[None]
        return lambda: rule(q, k, v, g, beta, initial_state=state, output_final_state=True)

    return prepare


def _delta_peer(name: str) -> list[Peer]:
    read: Callable[[Any], Tensor] = lambda result: result[0][0]  # noqa: E731
    return [Peer("transformers in torch", each(_delta(name)), read, _one_sequence, packages=("transformers",))]


PEERS = {
    "attention": [Peer("torch sdpa", _sdpa(_dense_rows), _read_sdpa, _plain)],
    "turboquant_attention": [Peer("torch sdpa, uncompressed", _sdpa(_decoded_rows), _read_sdpa, _plain, nbytes=_dense_nbytes)],
    "gated_delta_step": _delta_peer("torch_recurrent_gated_delta_rule"),
    "gated_delta_prefill": _delta_peer("torch_chunk_gated_delta_rule"),
}
