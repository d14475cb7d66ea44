"""Conditions under which each CUDA product kernel takes a call: one table per kernel, one row per condition.

A kernel takes a call if every row of its table holds; otherwise `auraflux ops --explain` prints the reason of the first row
that does not. Rows look only at what `key` contains, so that the choice can be cached per key. Thresholds on tokens, rows and
widths were measured on an H200 and are constants of the kernel's module.
"""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from auraflux.ops._dispatch import is_invariant, rounds_to_fp8
from auraflux.ops.fake_gpu import fake_capability
from auraflux.ops.gpu.device import not_clusters, not_fp8, not_gluon, not_signed_maximum, not_tma, not_wgmma
from auraflux.ops.gpu.sizes import cached_per_weight
from auraflux.ops.linear.cuda.call import DENSE_ROWS, Call
from auraflux.ops.linear.cuda.dequantize import refuses_bf16
from auraflux.ops.linear.cuda.gemm import bits_skinny as gemm_bits_skinny
from auraflux.ops.linear.cuda.gemm import cluster as gemm_cluster
from auraflux.ops.linear.cuda.gemm import cluster_dense as gemm_cluster_dense
from auraflux.ops.linear.cuda.gemm import fp8 as gemm_fp8
from auraflux.ops.linear.cuda.gemm import int4_skinny as gemm_int4_skinny
from auraflux.ops.linear.cuda.gemm import int4_tiles as gemm_int4_tiles
from auraflux.ops.linear.cuda.gemm import wgmma_launch as gemm_wgmma_launch
from auraflux.ops.linear.cuda.matvec import bits as matvec_bits
from auraflux.ops.linear.cuda.matvec import dense_normed as matvec_dense_normed
from auraflux.ops.linear.cuda.matvec import int4 as matvec_int4
from auraflux.ops.linear.cuda.matvec import int4_loop as matvec_int4_loop
from auraflux.ops.linear.cuda.matvec import int4_tma as matvec_int4_tma
from auraflux.ops.linear.cuda.matvec import int8 as matvec_int8
from auraflux.ops.linear.cuda.matvec import integer as matvec_integer
from auraflux.ops.linear.cuda.row_copies import SUPPORTED_FORMATS
from auraflux.quant import QTensor

Condition = Callable[[Call], str | None]  # None where it holds, otherwise the reason

BF16 = torch.bfloat16
INT4 = (4, 64, 1, BF16)  # the commonest format: 4 bits in groups of 64
ALIGNMENT = 16  # bytes, as required by wide copies

NOT_UNIFORM = "the weights are not all quantized in one format"
UNALIGNED = "an address is not a multiple of 16 bytes"
DENSE = "the weight is dense"


_layouts: dict[Hashable, int] = {}  # ids of layouts: weights of one layout are interchangeable to all conditions


@cached_per_weight
def _layout_id(weight: QTensor) -> int:
    biases = None if weight.biases is None else weight.biases.dtype
    layout = weight.format, biases, weight.shape, tuple(address % ALIGNMENT for address in weight.addresses)
    return _layouts.setdefault(layout, len(_layouts))


def key(call: Call) -> Hashable:
    """Return everything that conditions look at: sizes, dtypes, alignment of addresses, which arguments are present."""
    x, norm = call.x, call.norm
    weights: list[Hashable] = [
        _layout_id(weight) if isinstance(weight, QTensor) else (weight.dtype, weight.shape, weight.data_ptr() % ALIGNMENT)
        for weight in call.weights
    ]
    return (
        *(
            call.tokens,
            call.width,
            x.dtype,
            x.data_ptr() % ALIGNMENT,
            x.device,
            fake_capability(),
            rounds_to_fp8(),
            call.gated,
            call.needs_normed,
        ),
        None if norm is None else (norm.delta is None, norm.weight.dtype),
        tuple([bias is None for bias in call.biases]) if call.biased else None,
        *weights,
    )


def require(holds: Callable[[Call], object], reason: str | Callable[[Call], str]) -> Condition:
    """Return a row of a table: a predicate, and the reason to print where it is false."""

    def check(call: Call) -> str | None:
        if holds(call):
            return None
        return reason if isinstance(reason, str) else reason(call)

    return check


def all_of(*conditions: Condition) -> Condition:
    """Return a table: it holds if all rows do, otherwise it gives the reason of the first that does not."""
    return lambda call: next((reason for check in conditions if (reason := check(call))), None)


def each_weight(*checks: Callable[[Call, QTensor], str | None]) -> Condition:
    """Return a row that holds if every check holds for every quantized weight."""
    return lambda call: next((reason for weight in call.quantized for check in checks if (reason := check(call, weight))), None)


def _aligned(*tensors: Tensor | None) -> bool:
    addresses = 0
    for tensor in tensors:
        if tensor is not None:
            addresses |= tensor.data_ptr()
    return addresses % ALIGNMENT == 0


def _int4(call: Call, weight: QTensor) -> str | None:
    """Return why x and a weight are not bf16 and INT4."""
    if weight.format != INT4:
        return f"{weight.bits} bits in groups of {weight.group}; the kernel takes 4 bits in groups of 64, scales in bf16"
    if call.x.dtype is not BF16:
        return "activations are not bf16"
    return not_gluon(call.x.device) or (None if _aligned(call.x, weight.packed, weight.scales) else UNALIGNED)


def _tiles_16x256(call: Call, weight: QTensor) -> str | None:
    rows, width = weight.shape
    if rows % 16 or width % 256:
        return f"{rows} x {width} is no multiple of the 16 x 256 tile"
    return f"wider than {matvec_int4.WIDEST}" if width > matvec_int4.WIDEST else None


def _row_blocks(call: Call, weight: QTensor) -> str | None:
    """Return why the kernels that copy blocks of 16 rows do not take a weight."""
    (rows, width), scales = weight.shape, torch.uint8 if weight.biases is None else BF16
    if call.x.dtype is not BF16 or weight.scales.dtype is not scales:
        return "activations or scales are not bf16"
    if weight.lanes != 1 or (weight.bits, weight.group) not in SUPPORTED_FORMATS:
        return f"{weight.bits} bits in groups of {weight.group}"
    if rows == 0 or rows % 16 or width * weight.bits % 128:
        return f"{rows} x {width} is no multiple of 16 rows by 16 bytes"
    aligned = _aligned(call.x, weight.packed, weight.scales, weight.biases)
    return not_gluon(call.x.device) or (None if aligned else UNALIGNED)


def _skinny_tile(call: Call, weight: QTensor) -> str | None:
    tile = gemm_int4_skinny.choose_tile(call.x, weight)
    return None if tile else f"{tuple(weight.shape)} is no multiple of the 64 x 256 tile"


def _tiles(call: Call) -> str | None:
    if gemm_int4_tiles.plan_for(call.tokens, call.quantized, call.x.device):
        return None
    shapes = " and ".join(str(tuple(each.shape)) for each in call.quantized)
    return f"{shapes}: no multiples of 8 x {gemm_int4_tiles.LEAST_INPUTS}"


def _tiles_are_faster(call: Call) -> bool:
    """Return whether a GPU without wgmma multiplies in tiles rather than with a ring of tokens for each warp."""
    many = call.tokens > gemm_int4_skinny.TILE_TOKENS and bool(not_wgmma(call.x.device))
    return many and _tiles(call) is None


def _affine_bf16(call: Call, weight: QTensor) -> str | None:
    if weight.biases is None or weight.scales.dtype is not BF16 or weight.shape[0] == 0:
        return "a weight is empty, or not affine with scales in bf16"
    return None if _aligned(call.x, weight.packed) else UNALIGNED


def _few_tokens_fit_skinny(call: Call) -> bool:
    few = call.tokens <= gemm_wgmma_launch.FEW
    return few and not any(_int4(call, weight) or _skinny_tile(call, weight) for weight in call.quantized)


def _wgmma_tokens(call: Call) -> bool:
    any_number = call.gated and call.quantized[0].bits == 4
    return call.tokens >= 2 and (call.tokens <= gemm_wgmma_launch.MOST_TOKENS or any_number)


def _cublas_is_as_fast(call: Call) -> bool:
    weight = call.weights[0]
    return isinstance(weight, Tensor) and call.x.dtype == weight.dtype and weight.shape[0] > DENSE_ROWS


def _sizes(call: Call) -> list[int]:
    """Return the inputs and the outputs of a call."""
    return [call.width, *(weight.shape[0] for weight in call.weights)]


def _needs(lacks: Callable[[torch.device], str | None]) -> Condition:
    """Return a row that holds where the GPU does not lack what a kernel needs."""
    return lambda call: lacks(call.x.device)


def _tokens(least: int, most: int) -> Condition:
    return require(
        lambda call: least <= call.tokens <= most,
        lambda call: f"{call.tokens} tokens; the kernel takes {least} to {most}",
    )


def _at_most_weights(most: int) -> Condition:
    return require(lambda call: len(call.quantized) <= most, f"more than {most} weights")


# rows that several kernels share
ONE_TOKEN = require(lambda call: call.tokens == 1, lambda call: f"{call.tokens} tokens; the kernel takes one")
UNIFORM = require(lambda call: call.quantized, NOT_UNIFORM)
PRODUCTS_ONLY = require(lambda call: call.products_only, "the call has a norm or a gate")
NO_NORM = require(lambda call: call.norm is None, "the call has a norm")
NO_BIAS = require(lambda call: not call.biased, "a bias is added")
ONE_WEIGHT = require(lambda call: len(call.weights) == 1, "there are several weights")
INVARIANT = require(lambda call: is_invariant(), "batch invariance is not requested")
NORM_FITS = all_of(
    require(lambda call: not call.needs_normed, "the normalised activations are a result, too"),
    require(lambda call: call.norm is None or call.norm.weight.dtype is torch.float32, "the norm's weight is not float32"),
)
SMALL_DENSE = require(lambda call: len(call.dense) in (1, 2), "the weights are not one or two small dense ones")
X_ALIGNED = require(lambda call: _aligned(call.x), UNALIGNED)
ONE_TOKEN_CODES = all_of(ONE_TOKEN, UNIFORM, NO_NORM)
INT4_TILES = all_of(UNIFORM, _at_most_weights(matvec_int4.MOST_WEIGHTS), NO_BIAS, each_weight(_int4, _tiles_16x256), NORM_FITS)

# kernels for one token
MATVEC_INT4 = all_of(ONE_TOKEN, INT4_TILES)
MATVEC_INT4_TMA = all_of(
    PRODUCTS_ONLY,
    ONE_WEIGHT,
    MATVEC_INT4,
    _needs(not_tma),
    lambda call: matvec_int4_tma.refuses(call.x, call.quantized[0]),
)
MATVEC_INT4_LOOP = all_of(
    MATVEC_INT4,
    _needs(not_tma),
    lambda call: matvec_int4_loop.refuses(call.x, call.quantized, call.gated),
)
# a prompt's tokens are multiplied by wgmma, in the same order of sums
MATVEC_INT4_INVARIANT = all_of(INVARIANT, _needs(not_wgmma), INT4_TILES, ONE_TOKEN)
MATVEC_BITS = all_of(
    ONE_TOKEN_CODES,
    _at_most_weights(matvec_bits.MOST_WEIGHTS),
    require(lambda call: 0 < call.width <= matvec_bits.WIDEST, f"wider than {matvec_bits.WIDEST}, or empty"),
    require(lambda call: len({bias is None for bias in call.biases}) <= 1, "some weights have a bias, and some have none"),
    each_weight(_row_blocks),
)
MATVEC_INT8 = all_of(MATVEC_BITS, lambda call: matvec_int8.refuses(call.x, call.quantized))
MATVEC_INTEGER = all_of(
    ONE_TOKEN_CODES,
    _at_most_weights(matvec_integer.MOST_WEIGHTS),
    lambda call: matvec_integer.refuses(call.x, call.quantized[0]),
    _needs(not_signed_maximum),
    X_ALIGNED,  # x is loaded in words
)
MATVEC_THREE = all_of(
    ONE_TOKEN,
    PRODUCTS_ONLY,
    require(lambda call: len(call.quantized) == 3, "there are not three weights quantized in one format"),
    require(
        lambda call: _int4(call, call.quantized[0]) or _tiles_16x256(call, call.quantized[0]),
        "the first weight has a faster kernel for itself",
    ),
)
MATVEC_GATED = all_of(
    require(lambda call: call.gated and call.norm is None, "the call is not a gate and an up projection without a norm"),
    ONE_TOKEN,
    UNIFORM,
)
MATVEC_DENSE_NORMED = all_of(
    require(lambda call: call.needs_normed, "the normalised activations are not a result"),
    require(
        lambda call: (call.tokens == 1 or is_invariant()) and call.width <= matvec_dense_normed.WIDEST,
        lambda call: f"{call.tokens} tokens, {call.width} wide; the kernel takes one up to {matvec_dense_normed.WIDEST}",
    ),
    NO_BIAS,
    SMALL_DENSE,
)
MATVEC_DENSE_TWO = all_of(
    ONE_TOKEN,
    PRODUCTS_ONLY,
    NO_BIAS,
    require(lambda call: len(call.dense) == 2, "the weights are not two small dense ones"),
)
MATVEC_ANY_FORMAT = all_of(ONE_TOKEN, require(lambda call: call.quantized, DENSE))
MATVEC_DENSE = all_of(
    ONE_TOKEN,
    require(lambda call: not _cublas_is_as_fast(call), f"more than {DENSE_ROWS} rows of x's dtype: cuBLAS is as fast"),
)

# kernels for several tokens
GEMM_INT4_INVARIANT = all_of(INVARIANT, _needs(not_wgmma), INT4_TILES)
GEMM_CLUSTER_DENSE = all_of(
    require(
        lambda call: call.needs_normed and call.norm is not None and call.norm.delta is not None,
        "nothing is added to the residual stream, or the normalised activations are not a result",
    ),
    NO_BIAS,
    _tokens(2, gemm_cluster_dense.MOST_TOKENS),
    SMALL_DENSE,
    require(lambda call: call.width in gemm_cluster_dense.WIDTHS, f"the width is not one of {gemm_cluster_dense.WIDTHS}"),
    require(lambda call: call.norm is not None and call.norm.weight.dtype is torch.float32, "the norm's weight is not float32"),
    require(lambda call: all(t.dtype is BF16 for t in (call.x, *call.dense)), "not all tensors are bf16"),
    _needs(not_clusters),
    require(lambda call: _aligned(call.x, *call.dense), UNALIGNED),
)
GEMM_CLUSTER = all_of(
    _tokens(2, gemm_cluster.MOST_TOKENS),
    UNIFORM,
    _at_most_weights(gemm_cluster.MOST_WEIGHTS),
    NO_BIAS,
    require(lambda call: not call.gated, "the weights are gate and up projections"),
    require(
        lambda call: call.norm is not None or len(call.quantized) > 1 or call.tokens > gemm_wgmma_launch.FEW,
        lambda call: f"one weight and {call.tokens} tokens: a skinny GEMM is as fast",
    ),
    each_weight(
        _int4, lambda call, weight: None if weight.shape[0] and _aligned(weight.biases) else "a weight is empty or unaligned"
    ),
    _needs(not_wgmma),
    NORM_FITS,
    lambda call: gemm_cluster.refuses(call.x, call.quantized),
)
GEMM_WGMMA = all_of(
    UNIFORM,
    require(
        _wgmma_tokens,
        lambda call: (
            f"{call.tokens} tokens; the kernel takes 2 to {gemm_wgmma_launch.MOST_TOKENS}, of 4-bit gate and up any number"
        ),
    ),
    require(lambda call: call.norm is None or not call.biased, "a bias is added after a norm"),
    require(
        lambda call: call.norm is None or call.width <= gemm_wgmma_launch.WIDEST,
        f"tokens wider than {gemm_wgmma_launch.WIDEST} after a norm",
    ),
    require(
        lambda call: call.norm is None or call.gated or len(call.quantized) <= gemm_wgmma_launch.MOST_TOGETHER,
        f"more than {gemm_wgmma_launch.MOST_TOGETHER} weights after a norm",
    ),
    require(lambda call: call.x.dtype is BF16, "activations are not bf16"),
    require(
        lambda call: call.quantized[0].bits in gemm_wgmma_launch.BITS,
        lambda call: f"{call.quantized[0].bits} bits; the kernel takes {gemm_wgmma_launch.BITS}",
    ),
    each_weight(_affine_bf16),
    require(lambda call: not _few_tokens_fit_skinny(call), lambda call: f"{call.tokens} tokens: skinny GEMMs are faster"),
    _needs(not_wgmma),
    NORM_FITS,
)
GEMM_FP8 = all_of(
    require(lambda call: rounds_to_fp8(), "FP8 products are not requested"),
    require(
        lambda call: call.tokens >= gemm_fp8.FEWEST_TOKENS,
        lambda call: f"{call.tokens} tokens; FP8 products take {gemm_fp8.FEWEST_TOKENS} or more",
    ),
    require(lambda call: not call.needs_normed, "the weights are a router's"),
    require(lambda call: call.x.dtype is BF16, "activations are not bf16"),
    require(
        lambda call: all(isinstance(weight, QTensor) or weight.dtype is BF16 for weight in call.weights),
        "a dense weight is not bf16",
    ),
    require(
        lambda call: call.width <= gemm_fp8.WIDEST and not any(size % gemm_fp8.MULTIPLE for size in _sizes(call)),
        lambda call: f"wider than {gemm_fp8.WIDEST}, or a size is no multiple of {gemm_fp8.MULTIPLE}",
    ),
    _needs(not_fp8),
)
GEMM_INVARIANT = INVARIANT
GEMM_INT4_SKINNY = all_of(
    PRODUCTS_ONLY,
    NO_BIAS,
    require(lambda call: len(call.quantized) == 1, "the kernel takes one quantized weight"),
    _tokens(2, gemm_int4_skinny.MOST_TOKENS),
    each_weight(_int4, _skinny_tile),
    require(lambda call: not _tiles_are_faster(call), lambda call: f"{call.tokens} tokens: tiles are faster without wgmma"),
)
GEMM_INT4_TILES = all_of(
    PRODUCTS_ONLY,
    require(lambda call: len(call.quantized) == 1, "the kernel takes one quantized weight"),
    _tokens(2, gemm_int4_tiles.MOST_TOKENS),
    each_weight(_int4),
    _tiles,
)
# on Hopper wgmma multiplies several weights at once
SEVERAL_INT4_TILES = all_of(
    require(lambda call: call.norm is None, "the call has a norm"),
    require(
        lambda call: 2 <= len(call.quantized) <= gemm_int4_tiles.MOST_WEIGHTS,
        f"there are not 2 to {gemm_int4_tiles.MOST_WEIGHTS} weights quantized in one format",
    ),
    NO_BIAS,
    _tokens(gemm_int4_skinny.TILE_TOKENS + 1, gemm_int4_tiles.MOST_TOKENS),
    each_weight(_int4),
    _tiles,
    require(lambda call: not_wgmma(call.x.device), "wgmma is faster"),
)
GEMM_BITS_SKINNY = all_of(
    _tokens(2, gemm_bits_skinny.MOST_TOKENS),
    require(lambda call: call.quantized and call.width, "the kernel takes one quantized weight"),
    lambda call: _row_blocks(call, call.quantized[0]),
    require(lambda call: gemm_bits_skinny.choose_tile(call.x, call.quantized[0]), "its block does not fit into shared memory"),
)

# compositions of other routes
EMPTY = require(
    lambda call: call.products_only and len(call.weights) == 1 and not call.tokens * call.weights[0].shape[0] * call.width,
    "the product is not empty",
)
NORM_FIRST = require(lambda call: call.norm is not None, "there is no norm")
GATE_AND_UP = require(lambda call: call.gated, "there is no gate")
ONE_BY_ONE = require(lambda call: len(call.weights) != 1, "there is one weight")
QUANTIZED = require(lambda call: call.quantized, DENSE)
DEQUANTIZE_BF16 = all_of(QUANTIZED, lambda call: refuses_bf16(call.quantized[0], call.x.dtype))
ALWAYS = require(lambda call: True, "")
