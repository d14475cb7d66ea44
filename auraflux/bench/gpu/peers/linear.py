"""`linear` elsewhere: torch's int4 packing (tinygemm), gemlite, and cuBLAS on the weight written out in bfloat16."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from auraflux.bench.peers.peer import Peer
from auraflux.bench.timing import Contender
from auraflux.ops._cases import Args, Case
from auraflux.quant import QTensor
from auraflux.quant.packing import unpack

INNER_TILES = 8  # of tinygemm's layout, where the width allows it
ROWS_OF_TILES = 16


def _affine(*bits: int) -> Callable[[Case, Args], bool]:
    def applies(case: Case, args: Args) -> bool:
        weight = args["weight"]
        return isinstance(weight, QTensor) and weight.kind == "affine" and weight.bits in bits and args.get("bias") is None

    return applies


def _int4pack(args: Args, copies: int) -> Contender:
    weight, x = args["weight"], args["x"]
    codes = unpack(weight.packed, 4).to(torch.uint8)
    tiles = INNER_TILES if weight.shape[1] % (INNER_TILES * ROWS_OF_TILES) == 0 else INNER_TILES // 2
    packed = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], tiles)
    # it takes codes minus 8
    scales, biases = weight.scales.float(), weight.biases.float()
    both = torch.stack([scales, biases + 8 * scales], -1).transpose(0, 1).contiguous().bfloat16()
    multiply = torch.ops.aten._weight_int4pack_mm
    return Contender([partial(multiply, x, packed.clone(), weight.group, both.clone()) for _ in range(copies)])


def _gemlite(args: Args, copies: int) -> Contender:
    import gemlite

    weight, x = args["weight"], args["x"]
    codes = unpack(weight.packed, weight.bits).to(torch.uint8)
    zeros = -weight.biases / weight.scales
    kind = gemlite.DType.BF16

    def pack() -> Any:
        rows, width = weight.shape
        options = {"input_dtype": kind, "output_dtype": kind}
        layer = gemlite.GemLiteLinear(weight.bits, weight.group, in_features=width, out_features=rows, **options)
        layer.pack(codes.clone(), weight.scales.clone(), zeros.clone(), None)
        return layer

    return Contender([partial(pack().forward, x) for _ in range(copies)])


def _cublas(args: Args, copies: int) -> Contender:
    weight, x = args["weight"], args["x"]
    matrix = weight.dequantize(x.dtype) if isinstance(weight, QTensor) else weight.to(x.dtype)
    return Contender([partial(torch.nn.functional.linear, x, matrix.clone(), args.get("bias")) for _ in range(copies)])


def _dense_nbytes(args: Args) -> int:
    return args["weight"].shape[0] * args["weight"].shape[1] * args["x"].element_size()


PEERS = [
    Peer("tinygemm", _int4pack, Tensor.float, _affine(4)),
    Peer("gemlite", _gemlite, Tensor.float, _affine(2, 4, 8), packages=("gemlite",)),
    Peer("cuBLAS bf16", _cublas, Tensor.float, nbytes=_dense_nbytes),
]
