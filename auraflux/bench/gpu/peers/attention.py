"""Attention elsewhere: torch's with flash or cuDNN over keys and values that lie side by side in bfloat16, uncompressed."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from auraflux.bench.peers.peer import Peer
from auraflux.bench.timing import Contender
from auraflux.ops._cases import Args, Case
from auraflux.ops.attention.pages import rows_of
from auraflux.ops.turboquant.arrangement import Arrangement
from auraflux.ops.turboquant.reference import decode

Rows = Callable[[Args, int], tuple[Tensor, Tensor]]


def dense_rows(args: Args, sequence: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence, [L, Hkv, D]."""
    pages = args["pages"]
    page, slot = rows_of(pages, sequence, 0, int(pages.lengths[sequence]))
    return pages.k[page, :, slot], pages.v[page, :, slot]


def decoded_rows(args: Args, sequence: int) -> tuple[Tensor, Tensor]:
    pages = args["pages"].arranged(Arrangement.ROWS)
    page, slot = pages.rows_of(sequence, 0, int(pages.lengths[sequence]))

    def side(codes: Tensor, norms: Tensor, bits: int) -> Tensor:
        codes, norms = (part[page, :, slot].contiguous() for part in (codes, norms))
        return decode.reference(codes, norms, bits, pages.width, pages.seed).to(args["q"].dtype)

    return (
        side(pages.key_codes, pages.key_norms, pages.key_bits),
        side(pages.value_codes, pages.value_norms, pages.value_bits),
    )


def _equal(case: Case, args: Args) -> bool:
    """Sequences of one length that get one token each, or one that gets all its tokens; no window, no softcap."""
    lengths, new = args["pages"].lengths.tolist(), args["starts"].diff().tolist()
    shaped = len(set(lengths)) == 1 and (set(new) == {1} or new == lengths)
    return shaped and all(args.get(name) is None for name in ("window", "softcap"))


def _heads_first(args: Args, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, Hq, T, D], keys and values [B, Hkv, L, D]."""
    batch = len(args["pages"].lengths)
    sides = zip(*(rows(args, b) for b in range(batch)), strict=True)
    keys, values = (torch.stack([part.transpose(0, 1) for part in side]) for side in sides)
    return args["q"].unflatten(0, (batch, -1)).transpose(1, 2).contiguous(), keys, values


def _attend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    with sdpa_kernel(backend):
        causal, grouped = q.shape[2] > 1, q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal, enable_gqa=grouped)


def _sdpa(backend: SDPBackend, rows: Rows) -> Callable[[Args, int], Contender]:
    """Attention by one library."""

    # heads that share keys are left to it: when they stand as so many queries of one head, cuDNN decodes 32k tokens in 377 µs
    # instead of 38 and flash as fast as before (on an H200)
    def make(args: Args, copies: int) -> Contender:
        q, keys, values = _heads_first(args, rows)
        try:
            _attend(backend, q, keys, values, args["scale"])
        except RuntimeError:
            # it does not know heads that share keys
            keys, values = (side.repeat_interleave(q.shape[1] // keys.shape[1], 1) for side in (keys, values))
        return Contender([partial(_attend, backend, q, keys.clone(), values.clone(), args["scale"]) for _ in range(copies)])

    return make


def _read(result: Tensor) -> Tensor:
    """[B, Hq, T, D] as [B * T, Hq, D]."""
    return result.transpose(1, 2).flatten(0, 1)


def _kv_nbytes(args: Args) -> int:
    """Keys and values in the queries' dtype."""
    pages = args["pages"]
    return int(pages.lengths.sum()) * pages.k.shape[1] * (pages.k.shape[3] + pages.v.shape[3]) * args["q"].element_size()


def _decoded_nbytes(args: Args) -> int:
    pages = args["pages"]
    return int(pages.lengths.sum()) * pages.heads * 2 * pages.width * args["q"].element_size()


def _libraries(rows: Rows, nbytes: Callable[[Args], int]) -> list[Peer]:
    backends = {"cuDNN bf16": SDPBackend.CUDNN_ATTENTION, "flash bf16": SDPBackend.FLASH_ATTENTION}
    return [Peer(name, _sdpa(backend, rows), _read, _equal, nbytes=nbytes) for name, backend in backends.items()]


def _latent(args: Args, copies: int) -> Contender:
    """Two products and a softmax over latents that lie side by side, for one token of one sequence."""
    pages = args["pages"]
    page, slot = rows_of(pages, 0, 0, int(pages.lengths[0]))
    keys = torch.cat([pages.latent[page, slot], pages.rope[page, slot]], -1)
    q, width = torch.cat([args["q_latent"], args["q_rope"]], -1)[0] * args["scale"], pages.latent.shape[2]

    def prepare(rows: Tensor) -> Callable[[], Tensor]:
        return lambda: (q @ rows.T).softmax(-1) @ rows[:, :width]

    return Contender([prepare(keys.clone()) for _ in range(copies)])


def _one_token(case: Case, args: Args) -> bool:
    return args["q_latent"].shape[0] == 1


def _latent_nbytes(args: Args) -> int:
    pages = args["pages"]
    return int(pages.lengths.sum()) * (pages.latent.shape[2] + pages.rope.shape[2]) * pages.latent.element_size()


PEERS = {
    "attention": _libraries(dense_rows, _kv_nbytes),
    "turboquant_attention": _libraries(decoded_rows, _decoded_nbytes),
    "latent_attention": [Peer("cuBLAS bf16, softmax", _latent, applies=_one_token, nbytes=_latent_nbytes)],
}
