"""What is compiled for Hopper without a GPU, to see that it compiles and that nothing hot spills; see `hopper/compile.py`."""

from typing import Any

from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.build import Build
from auraflux.ops.hopper.split_kv import tile_layout
from auraflux.ops.turboquant.cuda import mla_rows
from auraflux.ops.turboquant.cuda.attend import attend_pairs
from auraflux.ops.turboquant.cuda.attend_launch import AHEAD, ALONE, CUTS, ROTATED_COLUMNS, Cut, depth, finish_sizes
from auraflux.ops.turboquant.cuda.attend_merge import finish_pairs, finish_rotated
from auraflux.ops.turboquant.cuda.codec import (
    append_coded,
    append_coded_latent,
    decode_rows,
    encode_rows,
    finish_rows,
    rotate_rows,
)
from auraflux.ops.turboquant.cuda.dequantize import write_pages
from auraflux.ops.turboquant.cuda.encode_prefill import append_many, launch_options, sizes
from auraflux.ops.turboquant.cuda.flash_codes import attend_codes, sum_coded
from auraflux.ops.turboquant.cuda.mla_columns import REGISTERS, RINGS, STAGES, latent_code_columns
from auraflux.ops.turboquant.cuda.mla_merge import MERGED, hadamard_rows, merge_rotated_shares
from auraflux.ops.turboquant.cuda.mla_rope_append import CODED_BUILDS
from auraflux.ops.turboquant.cuda.rope_append import rotate_and_append


def _attend(
    kind: str, bits: tuple[int, int], rows: int, keys: int, latent: bool = False, pairs: bool = False, **options: int
) -> Build:
    """Attention over codes in pages of 64: 32 heads of 128 on 8, or 16 heads on one latent of 512."""
    codes = [f"*{kind}"] + ["*bf16"] * latent + ["*i32", "*fp32", f"*{kind}"] * 2 + ["*bf16"] * latent
    types = [*codes, *["*i32"] * 3, *["*fp32"] * 3, *["fp32"] * 3, *["i32"] * 3, "i32:16", *["i32"] * 4]
    shape = {"G": 16, "HEADS": 1, "D": 512, "R": 64, "P": 512, "PR": 64} if latent else {
        "G": 4, "HEADS": 8, "D": 128, "R": 0, "P": 128, "PR": 0, "q_rope": None, "rope": None}  # fmt: skip
    flags = {
        "KEY_BITS": bits[0],
        "VALUE_BITS": bits[1],
        "WIDE": kind == "fp32",
        "LATENT": latent,
        "SOFTCAP": False,
        "ALIGNED": True,
        "PAIRS": pairs,
    }
    constants = {**shape, "PAGE": 64, "M": rows, "N": keys, "S": 1, **flags}
    return Build(attend_codes, " ".join(types), constants, kind == "fp16", options)


def _pairs(
    bits: tuple[int, int], heads: tuple[int, int], width: int, sequences: int = 1, long: bool = False, **flags: bool
) -> Build:
    """Attention over codes in pairs, in pages of 64; heads are (query heads, coded heads)."""
    return _parts(bits, heads, width, sequences, CUTS[width], 2 if long and depth(*bits, width, 2) else 1, **flags)


def _parts(
    bits: tuple[int, int], heads: tuple[int, int], width: int, sequences: int, cut: Cut, blocks: int, **flags: bool
) -> Build:
    left = {"sinks": None, "out": None, "ONE": False, "SHARED": False}
    return _paired(bits, heads, width, sequences, cut, blocks, "*fp32 *fp32 *fp32", {**left, **flags})


def _rows_of(bits: tuple[int, int], heads: tuple[int, int], width: int, sequences: int, cut: Cut) -> Build:
    """The same of a batch, where rows have one part."""
    left = {"part_o": None, "part_m": None, "part_l": None, "sinks": None, "splits": 1, "ONE": True, "SHARED": False}
    return _paired(bits, heads, width, sequences, cut, 1, "*bf16", left)


def _paired(
    bits: tuple[int, int], heads: tuple[int, int], width: int, sequences: int, cut: Cut, blocks: int, left: str,
    flags: dict[str, Any],
) -> Build:  # fmt: skip
    one = " i32" * (not flags["ONE"])
    types = f"*bf16 *fp32 *i32 *fp32 *i32 *fp32 *i32 *i32 *i32 *i32 {left} fp32 fp32 i32 i32 i32 i32 i32{one}"
    deep = max(1, depth(*bits, width, blocks, cut))
    few = cut is ALONE or (width == 256 and bits == (4, 4) and not flags["ONE"])
    steps = {"DEEP": min(AHEAD, deep), "SOON": 1} if few else {"DEEP": deep, "SOON": deep}
    sizes = {"G": heads[0] // heads[1], "HEADS": heads[1], "D": width, "PAGE": 64, "S": sequences, "NW": cut.warps}
    codes = {"KEY_BITS": bits[0], "VALUE_BITS": bits[1], "U": blocks, **steps}
    constants = {**sizes, **codes, "WINDOW": False, "SOFTCAP": False, **flags}
    return Build(attend_pairs, types, constants, True, {"num_warps": cut.warps, "maxnreg": cut.registers})


def _finish(width: int, splits: int, sequences: int = 1) -> Build:
    """Parts of a row merged; of several sequences, those that programs have shared out."""
    shared = sequences > 1
    sizes = finish_sizes(splits, width, shared) | {"STEP": 128, "S": sequences, "SHARED": shared, "sinks": None}
    constants = sizes if shared else sizes | {"lengths": None, "starts": None, "sequences": 1}
    types = f"*fp32 *fp32 *fp32 *fp32 *bf16{' *i32 *i32' * shared} i32:16 i32 i32{' i32' * shared}"
    return Build(finish_pairs, types, constants, True, {"num_warps": sizes["NW"]})


def _turned(splits: int) -> Build:
    """Parts of rows of width 256 merged, which are rotated back already."""
    constants = {"D": 256, "P": splits, "C": min(splits, 32), "N": ROTATED_COLUMNS, "sinks": None}
    return Build(finish_rotated, "*fp32 *fp32 *fp32 *bf16 i32:16 i32", constants, True, _ONE)


def _tiles(rows: int, width: int, dtype: gl.dtype = gl.bfloat16) -> str:
    name = "bf16" if dtype is gl.bfloat16 else "fp16"
    return f"tensordesc<{name}[{rows},{width}],{tile_layout(rows, width, dtype)!r}>".replace(" ", "")


def _latent(heads: int, bits: int, sequences: int = 1) -> Build:
    """Heads over coded latents in pages of 64."""
    rest = "*fp32 *fp32 fp32 fp32 i32 i32:16 i32 i32 i32"
    constants = {"PAGE": 64, "S": sequences, "BITS": bits}
    if heads > 32:
        constants |= {
            "NP": mla_rows.TILE,
            "RP": mla_rows.RINGS[bits][0],
            "DEEP": mla_rows.RINGS[bits][1],
            "ST": mla_rows.STAGES,
        }
        types = f"{_tiles(64, 512, gl.float16)} {_tiles(64, 64)} *i32 {_tiles(32, 64)} *fp32 *i32 *i32 *i32 *i32 *fp16 {rest}"
        return Build(mla_rows.latent_code_rows, types, constants, True, {"maxnreg": mla_rows.REGISTERS})
    constants |= {"N": heads, "RP": RINGS[heads, bits][0], "DEEP": RINGS[heads, bits][1], "ST": STAGES}
    types = f"*bf16 *fp32 {_tiles(heads, 64)} *i32 {_tiles(64, 64)} *fp32 *i32 *i32 *i32 *i32 *fp32 {rest}"
    return Build(latent_code_columns, types, constants, True, {"maxnreg": REGISTERS[heads]})


def _merged(kind: str, splits: int) -> Build:
    """Shares of latents merged: of many heads in float16."""
    constants = {"D": 512, "S": splits, "P": MERGED, "HALF": 32 if kind == "fp16" else 64, "EARLY": kind != "fp16"}
    return Build(merge_rotated_shares, f"*{kind} *fp32 *fp32 *fp32 *bf16 i32", constants, True, _FOUR)


_INDEX = "*i32 *i32 *i32 i32 i32 i32"
_CODED = "*i32 *fp32 *i64 *i64 fp32 fp32"
_APPEND = f"*bf16 *bf16 {_CODED} {_CODED} *fp32 {_INDEX}"
_TURNED = f"*bf16 *bf16 *bf16 *bf16 *fp32 *fp32 *fp32 *i32 i32:16 fp32 fp32 i32:16 {_CODED} {_CODED} *fp32 {_INDEX}"
_ENCODE = "*bf16 *fp32 *i64 *i64 fp32 fp32 *i32 *fp32 i32"
_SIGNS = {"D": 128, "P": 128, "MATRIX": False}
_MATRIX = {"D": 96, "P": 128, "MATRIX": True}
_KV = {"HEADS": 8, "KEY_BITS": 8, "VALUE_BITS": 4, "PAGE": 64, "S": 1}
_ONE = {"num_warps": 1}
_FOUR = {"num_warps": 4}
_HEADS = 32, 8
_SHAPE = {"HEADS": 8, "D": 128, "P": 128, "COLUMNS": 128, "PAGE": 64, "N": 64}


def _many(bits: tuple[int, int], batch: bool = False) -> Build:
    """Many tokens coded into pages of 64."""
    types = f"*bf16 *bf16{' *i32 *fp32 *i32 fp32 fp32' * 2} *i32 *i32 *i32 *i32 i32 i32 i32 i32 i32"
    return Build(
        append_many, types, {"BATCH": batch, "HEADS": 8, "PAGE": 64, **sizes(*bits)}, True, launch_options(*bits, batch)
    )


_WRITE = "*i32 *fp32 *fp16 *i32 *fp32 *fp16 *fp16 *i32 *i32 *i32 *bf16 *bf16 fp32 i32 i32 i32"

KERNELS = [
    Build(write_pages, _WRITE, {**_SHAPE, "KEY_BITS": 8, "VALUE_BITS": 4, "PAIRS": True}, True, _FOUR),
    Build(write_pages, _WRITE, {**_SHAPE, "KEY_BITS": 6, "VALUE_BITS": 3, "PAIRS": False}, True, _FOUR),
    *(_pairs((k, v), _HEADS, 128) for k in (2, 4, 8) for v in (2, 4, 8)),
    *(_pairs(bits, _HEADS, 128, long=True) for bits in ((4, 4), (4, 2), (2, 2), (3, 3), (6, 4))),
    *(_pairs(bits, _HEADS, 128, sequences=8, long=True) for bits in ((4, 4), (8, 4), (4, 2))),
    *(_pairs(bits, _HEADS, 128) for bits in ((3, 3), (6, 3), (8, 6))),
    *(_pairs((k, v), (64, 8), 64, WINDOW=k == 8) for k, v in ((4, 4), (8, 4), (8, 8))),
    *(_pairs(bits, (64, 8), 64, long=True) for bits in ((4, 4), (6, 6))),
    *(_parts(bits, (64, 8), 64, 1, CUTS[64], 4) for bits in ((4, 4), (4, 2), (2, 4), (2, 2))),
    *(_pairs((k, v), (16, 2), 256, SOFTCAP=k == 8) for k, v in ((4, 4), (8, 4), (8, 8), (6, 3))),
    _pairs((4, 4), (12, 1), 128, sequences=8, WINDOW=True, SOFTCAP=True),
    _pairs((8, 8), (16, 1), 256, sequences=8, WINDOW=True, SOFTCAP=True),
    *(_pairs(bits, (32, 4), 128, 32, long=bits == (4, 4), SHARED=True) for bits in ((4, 4), (8, 4), (8, 8))),
    _parts((4, 4), (64, 8), 64, 32, CUTS[64], 4, SHARED=True),
    *(_pairs(bits, (16, 2), 256, 32, SHARED=True) for bits in ((4, 4), (8, 4))),
    _pairs((8, 4), (16, 2), 256, long=True),
    *(_rows_of(bits, (32, 4), 128, 32, ALONE) for bits in ((8, 4), (4, 4), (4, 2), (3, 3), (8, 8))),
    *(_rows_of((8, 4), heads, width, 32, CUTS[width]) for heads, width in (((32, 8), 128), ((16, 2), 256))),
    *(_parts(bits, _HEADS, 128, 1, ALONE, 2) for bits in ((4, 4), (4, 2), (2, 2))),
    _parts((8, 4), (32, 4), 128, 8, ALONE, 1),
    _attend("fp16", (4, 4), 16, 64, num_warps=4, num_stages=3),
    _attend("fp16", (8, 4), 16, 64, num_warps=4, num_stages=3),
    _attend("fp16", (6, 3), 16, 64, num_warps=4, num_stages=3),
    _attend("fp16", (8, 4), 64, 64, num_warps=8, num_stages=3),
    _attend("fp16", (8, 4), 64, 64, pairs=True, num_warps=8, num_stages=3),
    _attend("fp32", (4, 4), 16, 32, num_warps=4, num_stages=3),
    _attend("fp16", (8, 8), 16, 32, latent=True, num_warps=8, num_stages=2),
    Build(sum_coded, "*bf16 *i32 *fp32 *fp32 *fp32 fp32 i32 i32 i32", {"D": 128, "P": 128, "BITS": 4, "M": 16, "N": 64}),
    Build(rotate_rows, "*bf16 *fp32 *fp16 fp32", {**_SIGNS, "INVERSE": False}, True, _ONE),
    Build(rotate_rows, "*bf16 *fp32 *fp16 fp32", {**_MATRIX, "INVERSE": False}, False, _ONE),
    Build(encode_rows, _ENCODE, {**_SIGNS, "BITS": 6, "R": 1}, True, _ONE),
    Build(encode_rows, _ENCODE, {**_SIGNS, "BITS": 8, "R": 16}, True, _FOUR),
    Build(decode_rows, "*i32 *fp32 *fp32 *fp32 *fp32", {**_SIGNS, "BITS": 3}, True, _ONE),
    Build(decode_rows, "*i32 *fp32 *fp32 *fp32 *fp32", {**_MATRIX, "BITS": 6}, False, _ONE),
    *(_many(bits) for bits in ((8, 4), (4, 4), (4, 2), (8, 8), (8, 2), (4, 8))),
    *(_many(bits, batch=True) for bits in ((8, 4), (4, 4))),
    Build(append_coded, _APPEND, {**_SIGNS, **_KV, "PAIRS": True, "R": 1}, True, _ONE),
    Build(append_coded, _APPEND, {**_SIGNS, **_KV, "VALUE_BITS": 3, "PAIRS": True, "R": 1}, True, _ONE),
    Build(append_coded, _APPEND, {**_SIGNS, **_KV, "PAIRS": False, "R": 16}, True, _FOUR),
    Build(append_coded, _APPEND, {**_MATRIX, **_KV, "PAIRS": False, "R": 1}, False, _ONE),
    Build(
        rotate_and_append,
        _TURNED,
        {**_KV, "Q_HEADS": 32, "D": 128, "INTERLEAVED": False, "PAIRS": True, "EARLY": True},
        True,
        _ONE,
    ),
    *CODED_BUILDS,
    Build(
        append_coded_latent,
        f"*bf16 *bf16 {_CODED} *bf16 *fp32 {_INDEX}",
        {"D": 512, "P": 512, "R": 64, "PR": 64, "BITS": 8, "MATRIX": False, "PAGE": 64, "S": 1},
        True,
        _FOUR,
    ),
    Build(finish_rows, "*fp32 *fp32 *fp32 *fp32 *bf16 i32:16 i32:16", {"sinks": None, "D": 128, "S": 64, "C": 32}, hot=True),
    *(_latent(heads, bits) for heads, bits in ((8, 8), (16, 8), (16, 4), (32, 8), (32, 4), (64, 8), (64, 4))),
    *(_latent(heads, 8, sequences=32) for heads in (16, 64)),
    Build(hadamard_rows, "*bf16 *fp32 *fp16", {"D": 512}, True, _FOUR),
    *(_merged(kind, splits) for kind, splits in (("fp32", 128), ("fp32", 1), ("fp16", 128), ("fp16", 16))),
    *(_finish(width, splits) for width, splits in ((128, 33), (128, 16), (128, 4), (64, 33), (64, 32))),
    *(_turned(splits) for splits in (4, 64, 128)),
    *(_finish(width, splits, 32) for width, splits in ((128, 66), (64, 33), (256, 66))),
]
