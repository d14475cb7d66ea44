"""What is compiled for Hopper without a GPU, to see that it compiles and that nothing hot spills; see `hopper/compile.py`."""

import triton.language as tl

from auraflux.ops.delta.cuda.chunks import chunk_kernel, scan_kernel
from auraflux.ops.delta.cuda.conv import _keep_kernel, _serial_kernel, _tile_kernel
from auraflux.ops.delta.cuda.decode import layer_step
from auraflux.ops.delta.cuda.gates import _gates_kernel
from auraflux.ops.delta.cuda.prefill import CHUNK_REGISTERS, SCAN_REGISTERS, STAGES, chunk_tiles, tile_layout
from auraflux.ops.delta.cuda.scan import scan_tiles
from auraflux.ops.delta.cuda.step import _step_kernel
from auraflux.ops.hopper.build import Build


def _tiles_type(columns: int) -> str:
    return f"tensordesc<bf16[64,{columns}],{tile_layout(columns)!r}>".replace(" ", "")


STEP = "*bf16 *bf16 *bf16 *bf16 *bf16 *fp32 *fp32 *fp32 *fp32 *fp32 *bf16 fp32 fp32 fp32"
WIDE, NARROW = _tiles_type(128), _tiles_type(64)
CHUNKS = {"K": 128, "V": 128, "C": 64, "BK": 128, "DOT": tl.bfloat16}
KERNELS = [
    Build(_step_kernel, "*fp32 *bf16 *bf16 *bf16 *fp32 *fp32 *bf16 i32:16 i32 i32:16 i32:16", {"BK": 128, "BV": 16}, hot=True),
    Build(_step_kernel, "*fp32 *bf16 *bf16 *bf16 *fp32 *fp32 *bf16 i32:16 i32 i32:16 i32:16", {"BK": 128, "BV": 32}, hot=True),
    Build(
        chunk_kernel,
        "*bf16 *bf16 *bf16 *fp32 *fp32 *i32 *bf16 *bf16 *bf16 *fp32 i32 i32:16 i32:16 i32",
        {**CHUNKS, "LEVELS": 6, "BV": 128, "INVERSE": tl.float16},
        hot=True,
    ),
    Build(
        chunk_kernel,
        "*fp32 *fp32 *fp32 *fp32 *fp32 *i32 *fp32 *fp32 *fp32 *fp32 i32 i32:16 i32:16 i32",
        {**CHUNKS, "C": 32, "DOT": tl.float32, "LEVELS": 5, "BV": 128, "INVERSE": tl.float32},
    ),
    Build(
        scan_kernel,
        "*fp32 *bf16 *bf16 *bf16 *bf16 *bf16 *fp32 *bf16 *i32 i32:16 i32:16 i32",
        {**CHUNKS, "BV": 32},
        hot=True,
        options={"num_warps": 8, "num_stages": 2},
    ),
    Build(
        scan_kernel,
        "*fp32 *fp32 *fp32 *fp32 *fp32 *fp32 *fp32 *fp32 *i32 i32:16 i32:16 i32",
        {**CHUNKS, "C": 32, "DOT": tl.float32, "BV": 32},
        options={"num_warps": 8, "num_stages": 2},
    ),
    *(
        Build(
            chunk_tiles,
            f"{WIDE} {WIDE} {NARROW} {NARROW} *fp32 *fp32 *fp32 *i32 i32 i32:16 i32",
            {"HEADS": 32, "SHARED": 2, "SINGLE": single},
            hot=True,
            options={"maxnreg": CHUNK_REGISTERS},
        )
        for single in (True, False)
    ),
    *(
        Build(
            scan_tiles,
            f"{WIDE} {WIDE} {' '.join([NARROW] * 4)} *bf16 *fp32 *fp32 *i32 i32:16 i32",
            {"HEADS": 32, "SHARED": 2, "SINGLE": single, "ST": STAGES},
            hot=True,
            options={"maxnreg": SCAN_REGISTERS},
        )
        for single in (True, False)
    ),
    Build(layer_step, STEP, {"KEYS": 16, "G": 2, "NS": 4}, hot=True, options={"num_ctas": 8}),
    Build(layer_step, STEP, {"KEYS": 16, "G": 2, "NS": 1}, hot=True, options={"num_warps": 8, "num_ctas": 2}),
    Build(layer_step, STEP, {"KEYS": 16, "G": 4, "NS": 1}, hot=True, options={"num_warps": 8, "num_ctas": 4}),
    Build(layer_step, STEP, {"KEYS": 16, "G": 1, "NS": 1}, hot=True, options={"num_warps": 8}),
    Build(_serial_kernel, "*bf16 *bf16 *bf16 *i32 *bf16 i32 i32:16", {"BC": 256}, hot=True, options={"num_warps": 2}),
    Build(_tile_kernel, "*bf16 *bf16 *bf16 *i32 *bf16 i32 i32:16", {"sequences": 1, "STEPS": 0, "BT": 16, "BC": 128}, hot=True),
    Build(_keep_kernel, "*bf16 *bf16 *i32 i32 i32:16", {"BC": 256}, hot=True),
    Build(_gates_kernel, "*bf16 *bf16 *fp32 *fp32 *fp32 *fp32 i32:16 i32:16", {"BLOCK": 512}, hot=True),
]
