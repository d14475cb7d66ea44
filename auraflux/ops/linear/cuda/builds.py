"""What is compiled for Hopper without a GPU, to see that it compiles and that nothing hot spills; see `hopper/compile.py`."""

from auraflux.ops.hopper.build import Build
from auraflux.ops.linear.cuda.dense import BLOCK, COLUMNS_AT_ONCE, dense_one, dequantize_rows, take_rows
from auraflux.ops.linear.cuda.dequantize import WRITTEN_BUILDS
from auraflux.ops.linear.cuda.gemm_bits_skinny import SOME_BUILDS
from auraflux.ops.linear.cuda.gemm_cluster import BATCH_BUILDS
from auraflux.ops.linear.cuda.gemm_cluster_dense import SCORES_BUILDS
from auraflux.ops.linear.cuda.gemm_int4_skinny import matmul16
from auraflux.ops.linear.cuda.gemm_wgmma_launch import TILE_BUILDS
from auraflux.ops.linear.cuda.matvec import one_token, one_token_gated, one_token_three, order_x
from auraflux.ops.linear.cuda.matvec_bits import ONE_BUILDS
from auraflux.ops.linear.cuda.matvec_dense_normed import NORMED_BUILDS
from auraflux.ops.linear.cuda.matvec_int4 import MOST_WEIGHTS, matvec
from auraflux.ops.linear.cuda.matvec_int4_tma import RING_BUILDS
from auraflux.ops.linear.cuda.matvec_int8 import BYTES_BUILDS


def _stream_builds() -> list[Build]:
    """One weight, three, and two of an MLP; from a normalised stream, with and without something to add."""
    weight, names = "*i8 *i64 *i64", "wsby"
    options = {"num_warps": 4, "maxnreg": 128}

    def absent(first: int) -> dict[str, None]:
        return {f"{name}{number}": None for number in range(first, MOST_WEIGHTS) for name in names}

    none = {"end0": None, "end1": None, "end2": None}
    sizes = {"TILES": 1, "W": 4, "D": 3}
    one = {**absent(1), **none, "COUNT": 1, "GATED": False, "K": 8192, **sizes}
    three = {**absent(3), "end2": None, "COUNT": 3, "GATED": False, "K": 2048, **sizes}
    two = {
        **absent(2),
        "end1": None,
        "end2": None,
        "COUNT": 2,
        "GATED": False,
        "K": 7168,
        **sizes,
        "W": 16,
        "D": 2,
        "delta": None,
    }
    gated = {**absent(2), **none, "y1": None, "COUNT": 1, "GATED": True, "K": 4096, **sizes}
    several = " ".join([f"{weight} *bf16"] * 3)
    plain = {"delta": None, "norm": None, "total": None}
    added, alone = "*bf16 *bf16 *fp32 *bf16 fp32", "*bf16 *fp32 *bf16 fp32"
    return [
        Build(matvec, f"*bf16 fp32 {weight} *bf16", {**one, **plain}, hot=True, options=options),
        Build(matvec, f"*bf16 fp32 {several} i32 i32", {**three, **plain}, hot=True, options=options),
        Build(matvec, f"*bf16 fp32 {weight} *bf16 {weight}", {**gated, **plain}, hot=True, options=options),
        Build(matvec, f"{alone} {several} i32 i32", {**three, "delta": None}, hot=True, options=options),
        Build(matvec, f"{added} {several} i32 i32", {**three, "K": 4096}, hot=True, options=options),
        Build(matvec, f"{added} {weight} *bf16 {weight}", {**gated, "TILES": 2}, hot=True, options=options),
        Build(matvec, f"{added} {weight} *bf16 {weight}", {**gated, "K": 2048, "TILES": 4}, hot=True, options=options),
        Build(matvec, f"{added} {weight} *bf16 {weight}", {**gated, "K": 8192}, hot=True, options=options),
        Build(matvec, f"*bf16 fp32 {weight} *bf16", {**one, **plain, "K": 7168}, hot=True, options={"num_warps": 4}),
        Build(matvec, f"{alone} {weight} *bf16 {weight} *bf16 i32", two, hot=True, options={"num_warps": 16, "maxnreg": 64}),
        Build(matvec, f"{added} {weight} *bf16 {weight}", {**gated, "K": 7168, "TILES": 2}, hot=True, options={"num_warps": 4}),
    ]


def _builds() -> list[Build]:
    four = {"BITS": 4, "GROUP": 64, "AFFINE": True}
    one = {"EVEN": True, "COLUMNS": 128, "ROWS": 4}
    codes, mx = "*i32 *bf16 *bf16", "*i32 *u8 *u8"
    each = f"{codes} *bf16 i32"
    none, warp = {"bias": None}, {"num_warps": 1}
    return [
        Build(order_x, "*bf16 *fp32 i32:16", {"UNIT": 8, "BLOCK": 64}, hot=True, options={"num_warps": 2}),
        Build(one_token, f"*fp32 {codes} *bf16 i32 i32:16", {**none, **four, **one}, hot=True, options=warp),
        Build(one_token, f"*fp32 {codes} *bf16 i32 i32:16", {**none, **four, "BITS": 5, **one, "COLUMNS": 64}, hot=True),
        Build(
            one_token,
            f"*fp32 {mx} *bf16 *bf16 i32 i32:16",
            {"BITS": 4, "GROUP": 32, "AFFINE": False, **one},
            hot=True,
            options=warp,
        ),
        Build(one_token_gated, f"*fp32 {codes} {codes} *bf16 i32 i32:16", {**four, **one}, hot=True, options=warp),
        Build(
            one_token_three,
            f"*fp32 {each} {each} {each} i32:16",
            {"bias0": None, "bias1": None, "bias2": None, **four, **one},
            hot=True,
            options=warp,
        ),
        *_stream_builds(),
        Build(
            matmul16,
            "*bf16 *i8 *i64 *i64 *bf16 i32 i32:16",
            {"K": 8192, "R": 4, "TILES": 2, "W": 8, "D": 1},
            hot=True,
            options={"num_warps": 8},
        ),
        Build(dequantize_rows, f"{codes} *bf16 i32:16 i32:16", {"ids": None, **four, "BLOCK": BLOCK}, hot=True),
        Build(take_rows, "*bf16 *i64 *bf16 i32 i32:16", {"BLOCK": BLOCK}),
        Build(
            dense_one,
            "*bf16 *bf16 *bf16 i32 i32:16",
            {"weight1": None, "out1": None, "COLUMNS": COLUMNS_AT_ONCE},
            hot=True,
            options={"num_warps": 4},
        ),
        Build(dense_one, "*bf16 *bf16 *bf16 *bf16 *bf16 i32 i32:16", {"COLUMNS": COLUMNS_AT_ONCE}, hot=True),
    ]


KERNELS = [
    *_builds(),
    *NORMED_BUILDS,
    *TILE_BUILDS,
    *WRITTEN_BUILDS,
    *ONE_BUILDS,
    *BYTES_BUILDS,
    *SOME_BUILDS,
    *BATCH_BUILDS,
    *SCORES_BUILDS,
    *RING_BUILDS,
]
