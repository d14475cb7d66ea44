"""What is compiled of attention's CUDA kernels without a GPU."""

from triton.experimental.gluon import language as gl

from auraflux.ops.attention.cuda.append import append_rows, split_rows
from auraflux.ops.attention.cuda.decode import SHAPES, decode_columns
from auraflux.ops.attention.cuda.flash_paged import attend_pages
from auraflux.ops.attention.cuda.mla_columns import SHAPES as LATENT_SHAPES
from auraflux.ops.attention.cuda.mla_columns import latent_columns
from auraflux.ops.attention.cuda.mla_products import latent_products
from auraflux.ops.attention.cuda.mla_products_codes import HEAD_BUILDS
from auraflux.ops.attention.cuda.mla_rope_append import TURNED_BUILDS
from auraflux.ops.attention.cuda.mla_rows import latent_rows
from auraflux.ops.attention.cuda.prefill import STAGES, prefill_tiles
from auraflux.ops.hopper.build import Build
from auraflux.ops.hopper.softmax import join, merge
from auraflux.ops.hopper.split_kv import merge_shares, tile_layout


def _attend_build(kind: str, rows: int, keys: int, whole: bool, latent: bool = False, **options: int) -> Build:
    """Attention over pages of 64: 32 heads of 128 on 8, or 16 heads on one latent of 512 with a rotated key of 64."""
    pointer, sizes = f"*{kind}", "fp32 fp32 i32 i32 i32:16 i32 i32 i32"
    spare = dict.fromkeys(("part_o", "part_m", "part_l") if whole else (), None)
    spare |= {} if whole else {"out": None}
    spare |= {"sinks": None} if latent else {"q_rope": None, "sinks": None}
    shape = {"G": 16, "HEADS": 1, "D": 512, "DV": 64, "P": 512, "PV": 64} if latent else {
        "G": 4, "HEADS": 8, "D": 128, "DV": 128, "P": 128, "PV": 128}  # fmt: skip
    flags = {"WIDE": kind == "fp32", "LATENT": latent, "SOFTCAP": False, "ALIGNED": True, "WHOLE": whole}
    pointers = [pointer] * (4 if latent else 3) + ["*i32"] * 3 + ([pointer] if whole else ["*fp32"] * 3)
    constants = {**spare, **shape, "PAGE": 64, "M": rows, "N": keys, "S": 1, **flags}
    return Build(attend_pages, f"{' '.join(pointers)} {sizes}", constants, kind != "fp32", options)


def _tiles(rows: int, width: int) -> str:
    return f"tensordesc<bf16[{rows},{width}],{tile_layout(rows, width, gl.bfloat16)!r}>".replace(" ", "")


def _latent_build(heads: int, whole: bool) -> Build:
    """Heads over one sequence in parts, or over a batch of 32 at once."""
    rows = heads > 32
    tiles = " ".join(map(_tiles, (heads, heads, 64, 64), (512, 64, 512, 64)))
    results = "*bf16" if whole else f"*{'bf16' if rows else 'fp32'} *fp32 *fp32"
    constants = {**dict.fromkeys(("part_m", "part_l") if whole else (), None), "PAGE": 64, "S": 32 if whole else 1, "ST": 2}
    constants |= {"N": 64} if rows else {"N": heads, "BEFORE": LATENT_SHAPES[heads][1]}
    again = "" if rows else "*bf16 *bf16 "
    types = f"{tiles} {again}*i32 *i32 *i32 {results} fp32 i32 i32:16 i32 i32 i32"
    options = {} if rows else {"maxnreg": LATENT_SHAPES[heads][0]}
    return Build(latent_rows if rows else latent_columns, types, constants, hot=True, options=options)


def _decode_build(width: int, whole: bool) -> Build:
    """32 query heads over 8, in parts of one sequence or for a batch of 32 at once."""
    tiles = f"{_tiles(8, width)} {_tiles(64, width)} {_tiles(64, width)}"
    results = "*bf16" if whole else "*fp32 *fp32 *fp32"
    constants = {"sinks": None, **dict.fromkeys(("part_m", "part_l") if whole else (), None), "G": 4, "HEADS": 8, "D": width}
    constants |= {
        "PAGE": 64,
        "S": 32 if whole else 1,
        "N": 8,
        "ST": SHAPES[width][1],
        "BEFORE": SHAPES[width][2],
        "SOFTCAP": False,
    }
    types = f"{tiles} *i32 *i32 *i32 {results} fp32 fp32 i32 i32 i32:16 i32 i32 i32"
    return Build(decode_columns, types, constants, hot=True, options={"maxnreg": SHAPES[width][3]})


def _prefill_build(width: int, sequences: int = 1) -> Build:
    tiles = f"{_tiles(64, width)} {_tiles(64, width)}"
    constants = {"sinks": None, "G": 4, "HEADS": 8, "D": width, "PAGE": 64, "S": sequences, "ST": STAGES[width]}
    constants["SOFTCAP"] = False
    types = f"*bf16 {tiles} *bf16 *i32 *i32 *i32 *bf16 fp32 fp32 i32 i32 i32:16 i32 i32"
    # heads of 256 keep places of rows in memory while they attend
    return Build(prefill_tiles, types, constants, hot=width < 256)


_MERGED = {"sinks": None, "D": 128, "P": 64, "S": 64, "C": 32}
_ROWS = "*i32 *i32 *i32 i32 i32 i32"
_WEIGHT = {"HEADS": 64, "ROWS": 256, "USED": 128, "C": 512, "BITS": 4, "GROUP": 64, "R": 32, "B": 64, "WIDE": True}
_KV = {"HEADS": 8, "A": 128, "B": 128, "PAGE": 64, "P": 128, "S": 1}
_SPLIT = {"HEADS": 128, "NOPE": 128, "ROPE": 64, "LATENT": 512, "BLOCK": 1024}

KERNELS = [
    _attend_build("bf16", 16, 64, whole=False, num_warps=4, num_stages=3),
    _attend_build("bf16", 128, 64, whole=True, num_warps=8, num_stages=3),
    _attend_build("fp32", 16, 32, whole=False, num_warps=4, num_stages=2),
    _attend_build("fp32", 32, 32, whole=True, num_warps=4, num_stages=2),
    _attend_build("bf16", 16, 32, whole=False, latent=True, num_warps=8, num_stages=2),
    *(_decode_build(width, whole) for width in (64, 128, 256) for whole in (False, True)),
    *(_prefill_build(width) for width in (64, 128, 256)),
    _prefill_build(128, sequences=8),
    *(_latent_build(heads, whole) for heads in (16, 32, 64) for whole in (False, True)),
    Build(
        merge_shares,
        "*bf16 *fp32 *fp32 *bf16 i32:16 i32",
        {"sinks": None, "D": 512, "S": 128, "P": 64, "EARLY": True},
        hot=True,
    ),
    Build(merge_shares, "*fp32 *fp32 *fp32 *fp32 *bf16 i32:16 i32", {"D": 128, "S": 32, "P": 64, "EARLY": True}, hot=True),
    Build(merge, "*fp32 *fp32 *fp32 *bf16 i32:16 i32:16", _MERGED, hot=True),
    Build(join, "*fp32 *fp32 *fp32 *fp32 *fp32 *fp32 i32:16 i32:16", _MERGED, hot=True),
    Build(append_rows, f"*bf16 *bf16 *bf16 *bf16 {_ROWS}", _KV, hot=True),
    *TURNED_BUILDS,
    *HEAD_BUILDS,
    Build(split_rows, "*bf16 *bf16 *bf16 *bf16 *bf16 *bf16", _SPLIT),
    Build(latent_products, "*fp32 *i32 *bf16 *bf16 *fp32 i32", {**_WEIGHT, "SKIP": 0, "QUERY": True, "T": 16}),
    Build(latent_products, "*fp32 *i32 *bf16 *bf16 *fp32 i32", {**_WEIGHT, "SKIP": 128, "QUERY": False, "T": 64}),
]
