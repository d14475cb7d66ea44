"""One token times a matrix of each GGUF type, here and in llama.cpp: `python -m bench.lab.gguf_formats [TYPE…]`.

It needs the package xllamacpp, whose library has ggml's functions. Both multiply by the same blocks, by copies of them that
together exceed the caches, with as many threads, in alternating bursts. Rates count the bytes of the file; shares are of the
peak read bandwidth measured in the same run. "Theirs" is llama.cpp; the ratio is its time over ours.
"""

import argparse
import ctypes
import statistics
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import torch

from auraflux.bench.timing import Contender, race
from auraflux.ops import linear
from auraflux.ops._dispatch import exact
from auraflux.ops.layout.words import LANES
from auraflux.ops.simd.jit import threads
from auraflux.ops.simd.peak_bandwidth import peak_read_bandwidth
from auraflux.quant import QTensor
from auraflux.quant.gguf_blocks import from_blocks
from auraflux.quant.gguf_layouts import LAYOUTS

ROWS, WIDTH = 11008, 4096
DIFFERENT_ROWS = 64  # quantized by llama.cpp; the others repeat them
COPIES_NBYTES = 320 << 20  # of all copies, at least
BUDGET_S = 0.8
F32 = 0


class Parameters(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def library() -> Any:
    """Return ggml's functions."""
    import xllamacpp.xllamacpp as module

    found, pointer, whole = ctypes.CDLL(module.__file__), ctypes.c_void_p, ctypes.c_int64
    kinds: dict[str, tuple[Any, list[Any]]] = {
        "ggml_init": (pointer, [Parameters]),
        "ggml_free": (None, [pointer]),
        "ggml_new_tensor_2d": (pointer, [pointer, ctypes.c_int, whole, whole]),
        "ggml_mul_mat": (pointer, [pointer, pointer, pointer]),
        "ggml_new_graph": (pointer, [pointer]),
        "ggml_build_forward_expand": (None, [pointer, pointer]),
        "ggml_graph_compute_with_ctx": (ctypes.c_int, [pointer, pointer, ctypes.c_int]),
        "ggml_get_data": (pointer, [pointer]),
        "ggml_cpu_init": (None, []),
        "ggml_quantize_chunk": (ctypes.c_size_t, [ctypes.c_int, pointer, pointer, whole, whole, whole, pointer]),
    }
    for name, (result, arguments) in kinds.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    found.ggml_cpu_init()
    return found


def blocks_of(ggml: Any, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return the blocks of a random matrix, uint8 [ROWS, bytes]."""
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    values = np.random.default_rng(0).standard_normal((DIFFERENT_ROWS, WIDTH), np.float32)
    out, importance = np.zeros((DIFFERENT_ROWS, WIDTH // block * nbytes), np.uint8), np.ones(WIDTH, np.float32)
    ggml.ggml_quantize_chunk(int(kind), values.ctypes.data, out.ctypes.data, 0, DIFFERENT_ROWS, WIDTH, importance.ctypes.data)
    return np.ascontiguousarray(np.tile(out, (ROWS // DIFFERENT_ROWS, 1)))


def their_product(ggml: Any, kind: int, blocks: np.ndarray, x: torch.Tensor, copies: int) -> tuple[Callable[[], object], Any]:
    """Return a call of llama.cpp's product with all copies, and the address of the last result."""
    context = ggml.ggml_init(Parameters((copies + 1) * (blocks.nbytes + (1 << 20)) + (64 << 20), None, False))
    tokens = ggml.ggml_new_tensor_2d(context, F32, WIDTH, 1)
    ctypes.memmove(ggml.ggml_get_data(tokens), x.data_ptr(), 4 * WIDTH)
    graph, last = ggml.ggml_new_graph(context), None
    for _ in range(copies):
        matrix = ggml.ggml_new_tensor_2d(context, kind, WIDTH, ROWS)
        ctypes.memmove(ggml.ggml_get_data(matrix), blocks.ctypes.data, blocks.nbytes)
        last = ggml.ggml_mul_mat(context, matrix, tokens)
        ggml.ggml_build_forward_expand(graph, last)
    return lambda: ggml.ggml_graph_compute_with_ctx(context, graph, threads()), (context, ggml.ggml_get_data(last))


def copied(weight: QTensor) -> QTensor:
    return weight._map(torch.Tensor.clone)


def measure(ggml: Any, name: str, peak: float) -> str:
    kind = gguf.GGMLQuantizationType[name]
    blocks = blocks_of(ggml, kind)
    copies, x = max(2, COPIES_NBYTES // blocks.nbytes), torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1))
    theirs, (context, result) = their_product(ggml, int(kind), blocks, x, copies)
    weight = from_blocks(blocks, name).interleave(LANES)
    matrices = [weight, *(copied(weight) for _ in range(copies - 1))]
    with exact(False):
        ours = [lambda each=each: linear(x, each) for each in matrices]
        found = ours[0]()
        theirs()
        wanted = torch.from_numpy(np.ctypeslib.as_array((ctypes.c_float * ROWS).from_address(result)).copy())
        error = float((found[0] - wanted).norm() / wanted.norm())
        contenders = [Contender(ours), Contender([theirs], copies)]
        race(contenders, BUDGET_S)
    mine, other = (statistics.median(each.samples_s) for each in contenders)
    best = min(contenders[0].samples_s)
    ggml.ggml_free(context)
    bits, memory = 8 * blocks.nbytes / (ROWS * WIDTH), weight.nbytes / blocks.nbytes
    rates = (f"{blocks.nbytes / each / 1e9:.1f}" for each in (mine, other))
    shares = (f"{blocks.nbytes / each / peak:.2f}" for each in (mine, best, other))
    cells = name, f"{bits:.2f}", f"{memory:.2f}", *(f"{1e3 * each:.2f}" for each in (mine, other)), *rates, *shares
    return "| " + " | ".join([*cells, f"{other / mine:.2f}", f"{error:.4f}"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", default=[name for name in LAYOUTS if name != "NVFP4"])
    ggml, peak = library(), peak_read_bandwidth()["all_threads"]
    print(f"{ROWS} x {WIDTH}, {threads()} threads, peak read bandwidth {peak / 1e9:.1f} GB/s")
    print(
        "| type | bits | memory / file | ms | llama.cpp | GB/s | llama.cpp | of peak | best | llama.cpp | ratio | difference |"
    )
    print("|" + "---|" * 12)
    for name in parser.parse_args().types:
        print(measure(ggml, name, peak), flush=True)


if __name__ == "__main__":
    main()
