"""A small real model quantized by llama.cpp's quantizer to each block type, compared with llama.cpp on the same file."""

import ctypes
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from auraflux.eval.text import read_files
from auraflux.loading.load import load
from auraflux.models import family
from auraflux.weights.download.pull import locate
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.memory_plan import plan_memory
from tests.loading.llama_cpp import divergence, llama_cpp_logits, perplexity

pytestmark = pytest.mark.slow

TYPES = [
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "TQ1_0", "TQ2_0"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
]
# the other matrices, and those whose widths no block divides: the model is 576 wide
OTHERS = "Q8_0"
# without an importance matrix, few bits in all layers would leave no model
LAYERS = re.compile(r"blk\.1\d\.")
TOKENS = 192
MOST_IN_MEMORY = 1.1  # of the file
# codes of TQ1_0 take 2 bits; NVFP4 keeps its scales where 256 divides the width
MORE_IN_MEMORY = {"NVFP4": 1.34, "TQ1_0": 1.34}


def quantizer() -> Any:
    module = pytest.importorskip("xllamacpp.xllamacpp", reason="xllamacpp is not installed")
    function = ctypes.CDLL(module.__file__).ggml_quantize_chunk
    function.restype, function.argtypes = (
        ctypes.c_size_t,
        [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p],
    )
    return function


def quantize(quantizes: Any, values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return a matrix's blocks, made by llama.cpp with the same importance for all columns."""
    rows, width = values.shape
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    values, importance = np.ascontiguousarray(values, np.float32), np.ones(width, np.float32)
    out = np.zeros((rows, width // block * nbytes), np.uint8)
    assert quantizes(int(kind), values.ctypes.data, out.ctypes.data, 0, rows, width, importance.ctypes.data) == out.nbytes
    return out


def requantized(source: Path, target: Path, name: str) -> Path:
    """Write a GGUF file in which matrices of some layers have a type; "F32" of a quantized file keeps its values."""
    reader, quantizes = gguf.GGUFReader(source), quantizer()
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name != "general.architecture" and not field.name.startswith("GGUF."):
            inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) < 2 or name == "F32":
            writer.add_tensor(tensor.name, values)
            continue
        kind = gguf.GGMLQuantizationType[name]
        if int(tensor.shape[0]) % gguf.GGML_QUANT_SIZES[kind][0] or not LAYERS.match(tensor.name):
            kind = gguf.GGMLQuantizationType[OTHERS]
        writer.add_tensor(tensor.name, quantize(quantizes, values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize("name", TYPES)
def test_perplexity_and_memory(name: str, tmp_path: Path):
    path = requantized(locate(), tmp_path / "model.gguf", name)
    model = load(str(path), kv="none", exact=True, context=512, device="cpu", calibrate="off")
    ids = model.tokenizer.encode(next(iter(read_files([]).values())))[:TOKENS]
    own, theirs = model.logits(ids), llama_cpp_logits(path, ids)
    # llama.cpp rounds activations to int8 where weights are quantized: with the same values in float32 it does not
    exact = llama_cpp_logits(requantized(path, tmp_path / "values.gguf", "F32"), ids)
    mine, wanted, same = (perplexity(each, ids) for each in (own, exact, theirs))
    checkpoint = open_checkpoint(path)
    total = plan_memory(checkpoint, family(checkpoint.config).rename, None).formats[name]
    ratio = total.memory_nbytes / total.nbytes
    print(f"{name}: perplexity {mine:.3f}; llama.cpp {wanted:.3f} ({mine / wanted - 1:+.3%}), with int8 activations {same:.3f}")
    print(f"{name}: KL {float(divergence(exact, own).mean()):.6f}, memory {ratio:.3f} of the file")
    assert mine == pytest.approx(wanted, rel=0.001)
    assert ratio <= MORE_IN_MEMORY.get(name, MOST_IN_MEMORY)
