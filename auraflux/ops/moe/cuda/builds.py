"""What is compiled for Hopper without a GPU, to see that it compiles and that nothing hot spills; see `hopper/compile.py`."""

from typing import Any

from auraflux.ops.hopper.build import Build
from auraflux.ops.moe.cuda.assign import ASSIGN_BUILDS
from auraflux.ops.moe.cuda.blocks import down_block, up_block
from auraflux.ops.moe.cuda.group import group_pairs
from auraflux.ops.moe.cuda.grouped_gemm import count_pairs, down_many, place_pairs, plan_blocks, up_many
from auraflux.ops.moe.cuda.grouped_wgmma_launch import TILE_BUILDS
from auraflux.ops.moe.cuda.matvec import down_few, up_few
from auraflux.ops.moe.cuda.matvec_tma_launch import RING_BUILDS
from auraflux.ops.moe.cuda.persistent import STREAM_BUILDS
from auraflux.ops.moe.cuda.routing import COMBINED, combine_kernel, rank_kernel, route_kernel
from auraflux.ops.moe.cuda.slots_launch import SLOT_BUILDS
from auraflux.ops.moe.cuda.stacks import SUMMED, sum_slots


def _builds() -> list[Build]:
    four, mx = {"BITS": 4, "GROUP": 64, "AFFINE": True}, {"BITS": 4, "GROUP": 32, "AFFINE": False}
    codes, mx_codes, ints = "*i32 *bf16 *bf16 i32:16 i32:16", "*i32 *u8 *u8 i32:16 i32:16", "i32:16 i32:16"
    plain, up = {"gate_bias": None, "up_bias": None, "CLAMP": False}, {"UNIT": 8, "ROWS": 8, "COLUMNS": 128}
    tile, wide, staged = {"ROWS": 64, "TOKENS": 128, "BK": 64}, {"num_warps": 8}, {"num_stages": 3}
    biased, block = f"{mx_codes} {mx_codes} *bf16 *bf16", {"TILES": 2, "D": 3}
    some: list[tuple[Any, str, dict[str, Any], dict[str, Any]]] = [
        (up_few, f"*bf16 *i32 {codes} {codes} *fp32 i32 i32 {ints} fp32 fp32", plain | four | up, {}),
        (up_few, f"*bf16 *i32 {biased} *fp32 i32 i32 {ints} fp32 fp32", {"CLAMP": True} | mx | up, {}),
        (down_few, f"*fp32 *i32 {codes} *fp32 i32 {ints}", {"bias": None, "ROWS": 16, "COLUMNS": 32} | four, {}),
        (up_block, f"*bf16 *i32 *i32 {codes} {codes} *bf16 i32:16 i32 i32 i32:16", {"H": 2048} | block, wide),
        (down_block, f"*bf16 *i32 *i32 {codes} *fp32 i32:16 i32 i32:16", {"INNER": 768} | block, wide),
        (group_pairs, "*i32 *i32 *i32 i32 i32 i32", {"SIZE": 16, "PIECES": 4, "W": 16}, {"num_warps": 16}),
        (count_pairs, "*i32 *i32 i32 i32", {"BLOCK": 1024}, {}),
        (plan_blocks, "*i32 *i32 *i32 i32 i32", {"SIZE": 64, "BE": 512, "BLOCK": 32}, {}),
        (place_pairs, "*i32 *i32 *i32 i32 i32", {"BLOCK": 1024}, {}),
        (
            up_many,
            f"*bf16 *i32 *i32 {codes} {codes} *bf16 i32 i32 i32 {ints} fp32 fp32",
            plain | four | tile,
            staged,
        ),
        (down_many, f"*bf16 *i32 *i32 {codes} *bf16 i32 i32 {ints}", {"bias": None} | four | tile, staged),
    ]
    return [Build(kernel, types, constants, hot=True, options=options) for kernel, types, constants, options in some]


def _builds_around() -> list[Build]:
    """Routing, and what adds up parts."""
    rule = {"SCORING": "softmax", "RENORMALIZE": True}
    one = {"R": 1, "BG": 1, "BS": 128, "BK": 8, "bias": None, "groups": 1, "kept": 1, **rule}
    grouped = {"R": 1, "BG": 8, "BS": 32, "BK": 8, "SCORING": "sigmoid", "RENORMALIZE": True}
    apart, warp = dict.fromkeys(("spots", "scores", "residual", "beside", "beside_gate")), {"num_warps": 1}
    given = {"K": 8, "SCORING": "", "RENORMALIZE": False, "BE": 1, "BLOCK": 2 * SUMMED, "EARLY": False}
    by_scores = {"K": 8, "BE": 128, "BLOCK": SUMMED, "EARLY": True, "spots": None, "weights": None, **rule}
    alone = {"beside": None, "beside_gate": None}
    return [
        Build(route_kernel, "*bf16 *i32 *fp32 i32 i32:16 i32 fp32", one, hot=True, options=warp),
        Build(route_kernel, "*bf16 *fp32 *i32 *fp32 i32 i32:16 i32 i32 i32 fp32", grouped, hot=True, options=warp),
        Build(rank_kernel, "*bf16 *i32 *fp32 i32:16 i32 fp32", {"bias": None, "BE": 128, "EARLY": True, **rule}, hot=True),
        Build(combine_kernel, "*bf16 *bf16 *bf16 *bf16 *bf16 i32:16", {"BLOCK": COMBINED}, hot=True),
        Build(combine_kernel, "*bf16 *bf16 *bf16 i32:16", {"BLOCK": COMBINED, "shared": None, "gate": None}, hot=True),
        Build(sum_slots, "*bf16 *i32 *fp32 *bf16 i32 i32:16 fp32", apart | given, hot=True),
        Build(sum_slots, "*fp32 *i32 *fp32 *bf16 i32 i32:16 fp32", apart | given | {"BLOCK": SUMMED, "EARLY": True}, hot=True),
        Build(sum_slots, "*fp32 *i32 *i32 *fp32 *bf16 *bf16 *bf16 *bf16 i32 i32:16 fp32", given | {"scores": None}, hot=True),
        Build(sum_slots, "*fp32 *fp32 *bf16 i32 i32:16 fp32", {"ids": None, **apart, **given}),
        Build(sum_slots, "*fp32 *i32 *bf16 *bf16 *bf16 i32 i32:16 fp32", by_scores | alone, hot=True),
        Build(sum_slots, "*fp32 *i32 *bf16 *bf16 *bf16 *bf16 *bf16 i32 i32:16 fp32", by_scores, hot=True),
    ]


KERNELS = _builds() + _builds_around() + SLOT_BUILDS + RING_BUILDS + ASSIGN_BUILDS + STREAM_BUILDS + TILE_BUILDS
