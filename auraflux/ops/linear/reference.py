"""Products with weight matrices, quantized or dense."""

from collections.abc import Sequence

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_shape, op
from auraflux.ops.norm.reference import add_rms_norm, check_add_rms_norm, rms_norm
from auraflux.quant import QTensor

Weight = QTensor | Tensor
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def dense(weight: Weight) -> Tensor:
    """Return a weight dequantized to float32."""
    return weight.dequantize(torch.float32) if isinstance(weight, QTensor) else weight.float()


def check_weight(name: str, x: Tensor, weight: Weight) -> None:
    if len(weight.shape) != 2:
        raise InputError(f"'{name}' has shape {list(weight.shape)}; a matrix [N, K] is needed.")
    if x.shape[-1] != weight.shape[1]:
        raise InputError(f"'x' has width {x.shape[-1]}, '{name}' takes {weight.shape[1]} inputs; they must be equal.")


def _check_linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> None:
    check_dense(x=x, weight=weight, bias=bias)
    check_dtype("x", x, *FLOAT_DTYPES)
    check_weight("weight", x, weight)
    if bias is not None:
        check_shape("bias", bias, weight.shape[0])


@op(
    origins=(
        "dequant_matvec_4bit",
        "dequant_matvec_4bit_fast",
        "dequant_matvec_4bit_v3",
        "dequant_matvec_4bit_v4",
        "dequant_matvec_4bit_v5",
        "dequant_matvec_8bit_v3",
        "dequant_matvec_2bit",
        "dequant_matvec_4bit_v3_n_tokens",
        "dequant_matvec_4bit_fast_n_tokens",
        "dequant_matvec_8bit_v3_n_tokens",
        "bf16_matvec",
        "bf16_matmul_n_tokens",
    ),
    check=_check_linear,
)
def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Multiply rows by a weight matrix.

    x       [..., K]
    weight  [N, K]    QTensor, or a dense tensor
    bias    [N]       or None
    returns [..., N]  in x's dtype
    """
    y = x.float() @ dense(weight).T
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def check_linears(x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None] | None = None) -> None:
    check_dtype("x", x, *FLOAT_DTYPES)
    if not weights:
        raise InputError("no weights were given; at least one is needed.")
    if biases is not None and len(biases) != len(weights):
        raise InputError(f"{len(biases)} biases were given for {len(weights)} weights; one for each, or None, is needed.")
    for number, weight in enumerate(weights):
        bias = None if biases is None else biases[number]
        check_dense(x=x, weights=weight, biases=bias)
        check_weight("weights", x, weight)
        if bias is not None:
            check_shape("biases", bias, weight.shape[0])


@op(check=check_linears)
def linears(x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None] | None = None) -> tuple[Tensor, ...]:
    """Multiply the same rows by several weight matrices, as the projections to queries, keys and values do.

    x        [..., K]
    weights  [N, K]    of any N each; QTensors, or dense tensors
    biases   [N]       one or None for each weight; or None
    returns  [..., N]  for each weight, in x's dtype
    """
    return tuple(
        linear.reference(x, weight, bias) for weight, bias in zip(weights, biases or [None] * len(weights), strict=True)
    )


def _check_add_norm_linears(
    x: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None] | None = None,
) -> None:
    check_add_rms_norm(x if delta is None else delta, x, norm, eps)
    check_linears(x, weights, biases)


@op(check=_check_add_norm_linears)
def add_norm_linears(
    x: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Add to the residual stream, normalise the sum, and multiply that by several weight matrices.

    x        [..., K]  the stream
    delta    [..., K]  added to the stream, or None
    norm, eps          see `rms_norm`
    weights, biases    see `linears`
    returns  (the sum [..., K], the products, [..., N] for each weight), in x's dtype
    """
    h, total = _normed(x, delta, norm, eps)
    return total, linears.reference(h, weights, biases)


def _normed(x: Tensor, delta: Tensor | None, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return (rms_norm.reference(x, norm, eps), x) if delta is None else add_rms_norm.reference(delta, x, norm, eps)


@op(check=_check_add_norm_linears)
def add_norm_scores(
    x: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Run `add_norm_linears` for weights of few rows, such as a router's, and return the normalised sum as well.

    returns  (the norm [..., K], the sum [..., K], the products, [..., N] for each weight), in x's dtype
    """
    h, total = _normed(x, delta, norm, eps)
    return h, total, linears.reference(h, weights, biases)


def _check_gate_up_swiglu(x: Tensor, gate: Weight, up: Weight) -> None:
    check_dense(x=x, gate=gate, up=up)
    check_dtype("x", x, *FLOAT_DTYPES)
    check_weight("gate", x, gate)
    if tuple(up.shape) != tuple(gate.shape):
        raise InputError(f"'gate' has shape {list(gate.shape)}, 'up' {list(up.shape)}; they must be equal.")


@op(origins=("fused_gate_up_swiglu",), check=_check_gate_up_swiglu)
def gate_up_swiglu(x: Tensor, gate: Weight, up: Weight) -> Tensor:
    """Multiply rows by two matrices at once and gate one product with the other: silu(x gateᵀ) * (x upᵀ).

    x         [..., K]
    gate, up  [N, K]
    returns   [..., N]  in x's dtype
    """
    wide = x.float()
    return (torch.nn.functional.silu(wide @ dense(gate).T) * (wide @ dense(up).T)).to(x.dtype)


def _check_add_norm_gate_up(x: Tensor, delta: Tensor | None, norm: Tensor, eps: float, gate: Weight, up: Weight) -> None:
    check_add_rms_norm(x if delta is None else delta, x, norm, eps)
    _check_gate_up_swiglu(x, gate, up)


@op(check=_check_add_norm_gate_up)
def add_norm_gate_up(
    x: Tensor, delta: Tensor | None, norm: Tensor, eps: float, gate: Weight, up: Weight
) -> tuple[Tensor, Tensor]:
    """Add to the residual stream, normalise the sum, and apply the first half of an MLP to it, see `gate_up_swiglu`.

    x, delta, norm, eps  see `add_norm_linears`
    returns  (the sum [..., K], silu(gate h) * up h [..., N]), in x's dtype
    """
    h, total = _normed(x, delta, norm, eps)
    return total, gate_up_swiglu.reference(h, gate, up)


def _check_embed(ids: Tensor, table: Weight) -> None:
    check_dense(ids=ids, table=table)
    check_shape("ids", ids, None)
    check_dtype("ids", ids, torch.int32, torch.int64)
    if len(table.shape) != 2:
        raise InputError(f"'table' has shape {list(table.shape)}; a matrix [V, D] is needed.")
    # reading values back from a GPU would stall the step; its kernel returns NaN for an id out of range
    if ids.is_cpu and ids.numel():
        # for a few ids, Python's min and max are faster
        found = ids.tolist() if ids.numel() <= 16 else ids.aminmax()
        low, high = min(found), max(found)
        if low < 0 or high >= table.shape[0]:
            raise InputError(f"ids reach from {int(low)} to {int(high)}; the table has {table.shape[0]} rows.")


@op(origins=("embed_gather_4bit",), check=_check_embed)
def embed(ids: Tensor, table: Weight) -> Tensor:
    """Look up rows of an embedding table.

    ids     [T]     int32 or int64
    table   [V, D]
    returns [T, D]  float32 for a quantized table, else in its dtype
    """
    if not isinstance(table, QTensor):
        return table[ids.long()]
    return table.take(ids.long()).dequantize(torch.float32)
