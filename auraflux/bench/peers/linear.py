"""`linear` with an affine weight elsewhere: mlx, onnxruntime's MatMulNBits, torch's int4 packing and its dense product."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auraflux.bench.peers.peer import Peer, each
from auraflux.bench.timing import Contender
from auraflux.ops._cases import Args, Case
from auraflux.quant import QTensor
from auraflux.quant.packing import unpack

MLX_BF16_MAX_TOKENS = 8  # half a second a token at 11008 x 4096


def affine(args: Args, *bits: int) -> bool:
    """Return True for a product without bias with an affine matrix of one of these bit widths."""
    weight = args["weight"]
    return isinstance(weight, QTensor) and weight.kind == "affine" and weight.bits in bits and args.get("bias") is None


def tokens(args: Args) -> int:
    return args["x"].numel() // args["x"].shape[-1]


def _mlx(dtype: str) -> Callable[[Args], Callable[[], Any]]:
    def prepare(args: Args) -> Callable[[], Any]:
        import mlx.core as mx

        weight, kind = args["weight"].rows(), getattr(mx, dtype)
        x, scales, biases = (mx.array(t.float().numpy()).astype(kind) for t in (args["x"], weight.scales, weight.biases))
        packed = mx.array(weight.packed.numpy().view(np.uint32))
        options = {"transpose": True, "group_size": weight.group, "bits": weight.bits, "stream": mx.cpu}

        def call() -> Any:
            y = mx.quantized_matmul(x, packed, scales, biases, **options)
            mx.eval(y)
            return y

        return call

    return prepare


def _read_mlx(result: Any) -> Tensor:
    import mlx.core as mx

    return torch.from_numpy(np.array(result.astype(mx.float32)))


def _onnx_arrays(weight: QTensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [N, K/group, bytes], scales [N * K/group] and whole zero points packed like the codes.

    The bias of an affine group is a whole multiple of its scale whenever the group's range holds zero.
    """
    rows, count = weight.shape[0], weight.shape[1] // weight.group
    codes = weight.packed.numpy().view(np.uint8).reshape(rows, count, -1)
    scales = weight.scales.float().flatten().numpy()
    assert weight.biases is not None
    zeros = (-weight.biases.float() / weight.scales.float()).round().clamp(0, 2**weight.bits - 1).to(torch.uint8).numpy()
    each_byte = 8 // weight.bits
    zeros = np.pad(zeros, ((0, 0), (0, -count % each_byte)))
    packed = np.zeros((rows, zeros.shape[1] // each_byte), np.uint8)
    for place in range(each_byte):
        packed |= zeros[:, place::each_byte] << (weight.bits * place)
    return codes, scales, packed.reshape(-1)


def _onnx_graph(weight: QTensor, arrays: Sequence[dict[str, np.ndarray]], accuracy_level: int) -> bytes:
    """Build a graph that multiplies one input by several weights, whose arrays are passed by name."""
    from onnx import TensorProto, helper

    rows, width = weight.shape
    options: dict[str, Any] = {"K": width, "N": rows, "bits": weight.bits, "block_size": weight.group}
    nodes, constants, results = [], [], []
    for number, named in enumerate(arrays):
        for name, array in named.items():
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            tensor = TensorProto(name=name, data_type=kind, dims=array.shape, data_location=TensorProto.EXTERNAL)
            tensor.external_data.add(key="location", value="given with the session")
            constants.append(tensor)
        operands, options["accuracy_level"] = ["x", *named], accuracy_level
        nodes.append(helper.make_node("MatMulNBits", operands, [f"y{number}"], domain="com.microsoft", **options))
        results.append(helper.make_tensor_value_info(f"y{number}", TensorProto.FLOAT, ["T", rows]))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", width])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "linear", [x], results, constants)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def _onnxruntime(accuracy_level: int) -> Callable[[Args, int], Contender]:
    def make(args: Args, copies: int) -> Contender:
        import onnxruntime

        from auraflux.ops.simd.threads import threads

        weight = args["weight"].rows()
        codes, scales, zeros = _onnx_arrays(weight)
        # each copy in memory of its own
        # every copy is shifted by some rows: prepacked weights of equal content would share one place in memory, and the cache
        turned = [(np.roll(codes, n, 0), np.roll(scales, n, 0), np.roll(zeros, n, 0)) for n in range(copies)]
        arrays = [{f"codes{n}": c, f"scales{n}": s, f"zeros{n}": z} for n, (c, s, z) in enumerate(turned)]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads()
        options.log_severity_level = 3
        # its threads would otherwise spin on into the next contender's burst
        options.add_session_config_entry("session.force_spinning_stop", "1")
        given = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for named in arrays for name, array in named.items()}
        options.add_external_initializers(list(given), list(given.values()))
        model = _onnx_graph(weight, arrays, accuracy_level)
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        x = args["x"].float().reshape(-1, weight.shape[1]).numpy()
        # one run over all copies: waking the threads is not held against it
        return Contender([lambda: session.run(None, {"x": x})], work=copies)

    return make


def _int4pack(args: Args, copies: int) -> Contender:
    weight = args["weight"].rows()
    codes = unpack(weight.packed, weight.bits).to(torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    # it takes codes minus 8
    scales, biases = weight.scales.float(), weight.biases.float()
    both = torch.stack([scales, biases + 8 * scales], -1).transpose(0, 1).contiguous().bfloat16()
    x = args["x"].reshape(-1, args["x"].shape[-1]).bfloat16()
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
    return Contender([partial(multiply, x, packed.clone(), weight.group, both.clone()) for _ in range(copies)])


def _dense(args: Args, copies: int) -> Contender:
    weight, x, bias = args["weight"], args["x"].float(), args.get("bias")
    matrix = weight.dequantize(torch.float32) if isinstance(weight, QTensor) else weight.float()
    return Contender([partial(torch.nn.functional.linear, x, matrix.clone(), bias) for _ in range(copies)])


def _narrow(args: Args, copies: int) -> Contender:
    x, weight = args["x"].to(args["weight"].dtype), args["weight"]
    return Contender([partial(torch.nn.functional.linear, x, weight.clone()) for _ in range(copies)])


def _is_narrow(case: Case, args: Args) -> bool:
    weight = args["weight"]
    return isinstance(weight, Tensor) and weight.dtype is not torch.float32 and args.get("bias") is None


def _few_tokens(case: Case, args: Args) -> bool:
    return affine(args, 2, 3, 4, 5, 6, 8) and tokens(args) <= MLX_BF16_MAX_TOKENS


def _onnx(name: str, level: int, contract: str) -> Peer:
    return Peer(
        f"onnxruntime {name}",
        _onnxruntime(level),
        lambda result: torch.from_numpy(result[0]),
        lambda case, args: affine(args, 2, 4, 8),
        contract,
        ("onnx", "onnxruntime"),
    )


PEERS = [
    Peer("torch bf16", _narrow, Tensor.float, _is_narrow),
    Peer("mlx f32", each(_mlx("float32")), _read_mlx, lambda case, args: affine(args, 2, 3, 4, 5, 6, 8), packages=("mlx",)),
    Peer("mlx bf16", each(_mlx("bfloat16")), _read_mlx, _few_tokens, packages=("mlx",)),
    _onnx("f32", 0, "exact"),
    _onnx("int8", 4, "fast"),
    Peer("torch int4pack bf16", _int4pack, Tensor.float, lambda case, args: affine(args, 4)),
    Peer("torch dense f32", _dense, nbytes=lambda args: 4 * args["weight"].shape[0] * args["weight"].shape[1]),
]
