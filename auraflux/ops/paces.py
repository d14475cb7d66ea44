"""What to expect of a weight before anything is measured: routes of products, by what they do with a weight and how fast.

`pace_of` asks the tables (`routes.py` of `linear` and `moe`) which kernel a weight of some format and shape meets, and looks
it up here. A route that only hands on to others has no pace of its own.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from auraflux.ops._dispatch import Op
from auraflux.ops.assumed import HOPPER, Capability, assume_gpu
from auraflux.ops.linear.reference import linear
from auraflux.ops.moe.experts import Experts
from auraflux.ops.moe.reference import expert_mlp
from auraflux.ops.routes import Verdict, verdict_of
from auraflux.quant import QTensor, scale_count

NO_KERNEL = "no kernel"
CHOSEN = 8  # experts of a token, where a call is only asked for


class Pace(NamedTuple):
    """What a route does with a weight.

    does   in a few words
    one    how fast that is for one token
    many   and for many; like `one` if empty
    """

    does: str
    one: str
    many: str = ""

    def fast(self, tokens: int) -> str:
        return self.many if self.many and tokens > 1 else self.one


READ = Pace("codes are read as they are", "near the read ceiling")
READ_SLOWER = Pace("codes are read as they are", "0.4 to 0.9 of the read ceiling")
FROM_CODES = Pace("multiplied from codes", "about as fast as dense bf16")
FROM_TILES = Pace("unpacked tile by tile as they are multiplied", "slower than dense bf16")
IN_ORDER = Pace("multiplied from codes in a fixed order", "slower than dense bf16")
WRITTEN = Pace("written out, then a dense product", "a dense product's time and that of the writing")
DENSE = Pace("read as they are, 16 or 32 bits a weight", "near the read ceiling", "products in float32")
DENSE_PRODUCT = Pace("a dense product", "cuBLAS's")
INT8 = Pace("codes are read as they are, activations in int8", "0.4 to 0.9 of the read ceiling", "products of int8")
HALVES = Pace(
    "codes are read as they are, activations in half precision", "half of the read ceiling", "products in half precision"
)
FLOAT32 = Pace("codes are read as they are, activations in float32", "below 0.6 of the read ceiling", "products in float32")

CODES = {"activations in int8": INT8, "activations in half precision": HALVES, "activations in float32": FLOAT32}
# family -> backend -> route
PACES: dict[str, dict[str, dict[str, Pace]]] = {
    "linear": {
        "cpu": {**CODES, "dense rows": DENSE},
        "cuda": {
            **dict.fromkeys(("matvec_int4_tma", "matvec_int4", "matvec_int4_alike", "matvec_int8", "matvec_bits"), READ),
            **dict.fromkeys(("matvec_whole", "matvec of three", "matvec of gate and up", "matvec"), READ_SLOWER),
            **dict.fromkeys(("gemm_int4_skinny", "gemm_bits_skinny", "gemm_cluster", "gemm_wgmma"), FROM_CODES),
            **dict.fromkeys(("gemm_int4_alike", "gemm_alike"), IN_ORDER),
            **dict.fromkeys(("dequantized in bf16, then cuBLAS", "dequantized, then cuBLAS"), WRITTEN),
            **dict.fromkeys(("matvec_dense_normed", "dense matvec of two", "dense matvec"), DENSE),
            **dict.fromkeys(("gemm_cluster_dense", "cuBLAS"), DENSE_PRODUCT),
        },
    },
    "moe": {
        "cpu": {**CODES, "dense experts one by one": DENSE},
        "cuda": {
            "slots": READ,
            "matvec": READ_SLOWER,
            "persistent": FROM_CODES,
            "grouped_wgmma": FROM_CODES,
            "grouped_gemm": FROM_TILES,
        },
    },
}
# what hands on to other routes, or has nothing to do
WITHOUT = {
    *("nothing to multiply", "norm first", "one by one", "gate and up apart", "codes", "gate and up in one list"),
    *("step by step", "route first"),
}


def pace_of(weight: torch.Tensor | QTensor, tokens: int, backend: str, gpu: Capability = HOPPER) -> Pace:
    """What becomes of a weight [N, K], or of a stack of experts [E, N, K], that so many tokens meet.

    gpu  for which `cuda` is asked; none need be there
    """
    op, arguments = _call(weight, tokens, backend)
    if backend == "cuda":
        with assume_gpu(gpu):
            verdict = verdict_of(op, backend, arguments)
    else:
        verdict = verdict_of(op, backend, arguments)
    if verdict is None or verdict.taken is None:
        reason = "there is none" if verdict is None else verdict.refused[-1][1]
        return Pace(NO_KERNEL, f"the reference runs, slowly: {reason}")
    taken = [name for name in _taken(verdict) if name not in WITHOUT] or [verdict.taken]
    return PACES[op.family][backend].get(taken[-1], Pace(taken[-1], "not measured"))


def _call(weight: torch.Tensor | QTensor, tokens: int, backend: str) -> tuple[Op, dict[str, Any]]:
    x = torch.empty(tokens, weight.shape[-1], dtype=torch.bfloat16 if backend == "cuda" else torch.float32)
    if len(weight.shape) == 2:
        return linear, {"x": x, "weight": weight}
    count, inner, hidden = weight.shape
    ids = torch.zeros(tokens, min(CHOSEN, count), dtype=torch.int32)
    experts = Experts(weight, weight, unfilled(weight, (count, hidden, inner)))
    return expert_mlp, {"x": x, "ids": ids, "weights": torch.empty(ids.shape), "experts": experts}


def unfilled(like: torch.Tensor | QTensor, shape: tuple[int, ...]) -> Any:
    """A weight of another one's format, of any shape, in memory that nobody writes to; dense where its width has no groups."""
    if isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=like.dtype)
    *stack, rows, width = shape
    if width % like.whole:
        return torch.empty(shape, dtype=torch.float32)

    def made(part: torch.Tensor, count: int) -> torch.Tensor:
        blocks = (-(-rows // like.lanes), count, like.lanes) if like.lanes > 1 else (rows, count)
        return torch.empty(*stack, *blocks, dtype=part.dtype)

    groups = scale_count(like.kind, width, like.group)
    biases = None if like.biases is None else made(like.biases, groups)
    packed = made(like.packed, width * like.bits // 32)
    return QTensor(packed, made(like.scales, groups), biases, like.bits, like.group, shape, like.lanes)


def _taken(verdict: Verdict) -> Iterator[str]:
    if verdict.taken is not None:
        yield verdict.taken
    for inner in verdict.then:
        yield from _taken(inner)
