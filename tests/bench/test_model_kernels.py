"""Tables of the kernels in a model's prefill and decode steps."""

from typing import Any

import pytest
import torch

from auraflux.bench.model_kernels import Use, explain_model
from auraflux.bench.random_weights import Outlines
from auraflux.bench.shapes import MAIN_SHAPES, shape_of
from auraflux.cache import CacheSettings
from auraflux.ops.simd.isa import ISA
from auraflux.quant import QTensor

LAYERS = {"qwen3.6-35b-a3b": 4, "qwen4-exp": 4}  # one of them with attention


def steps(shape: str, backend: str, kv: str = "k8v4", **options: Any) -> dict[str, list[Use]]:
    if backend == "cuda":
        pytest.importorskip("triton")
    return explain_model(shape_of(shape, LAYERS.get(shape, 2)), CacheSettings(kv), backend, **options)


def paths(uses: list[Use]) -> dict[str, str | None]:
    return {use.op: use.verdict.path if use.verdict is not None else None for use in uses}


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("shape", [*MAIN_SHAPES, "qwen4-exp"])
def test_every_op_of_every_shape_has_a_kernel(shape: str, backend: str):
    found = steps(shape, backend)
    assert list(found) == ["decode", "prompt"]
    for uses in found.values():
        assert {"embed", "linear"} <= set(paths(uses))
        assert [use.op for use in uses if use.verdict is not None and use.verdict.taken is None] == []


def test_calls_are_counted():
    decode = steps("qwen3-30b-a3b", "cuda")["decode"]
    calls = {use.op: use.calls for use in decode if use.op != "linear"}
    layers = "add_norm_linears", "rope_append_attention", "add_norm_scores", "mixture"
    assert calls == {"embed": 1, **dict.fromkeys(layers, 2), "rms_norm": 1}
    assert {use.shapes: use.calls for use in decode if use.op == "linear"} == {
        "x 1x4096, weight 2048x4096 of 4 bits": 2,
        "x 1x2048, weight 151936x2048 of 4 bits": 1,
    }


def test_decode_and_prefill_use_different_kernels():
    found = steps("llama-8b", "cuda")
    decode, prompt = paths(found["decode"]), paths(found["prompt"])
    assert decode["add_norm_gate_up"] == "matvec_int4_loop"
    assert prompt["add_norm_gate_up"] == "gemm_wgmma"
    assert decode["rope_append_attention"] == "new token in attention"
    assert prompt["rope_append_attention"] == (
        "append, then attend (norm and RoPE first (full precision, then append (encode_prefill)), dequantized, then attention)"
    )


def test_user_settings_select_kernels():
    assert "attention" in paths(steps("llama-8b", "cuda", kv="none")["decode"])
    assert paths(steps("llama-8b", "cuda", bits=4)["decode"])["linear"] == "matvec_int4_loop"
    assert paths(steps("llama-8b", "cuda", bits=8)["decode"])["linear"] in ("matvec_int8", "matvec_bits")
    exact, fast = (paths(steps("llama-8b", "cpu", exactly=exactly)["decode"])["linear"] for exactly in (True, False))
    tiles = " with AMX" if ISA.matrix_tiles else ""
    assert (exact, fast) == (f"codes (activations in float32{tiles})", f"codes (activations in int8{tiles})")


@pytest.mark.parametrize(("backend", "tokens"), [("cpu", 3), ("cuda", 4)])
def test_batches_are_padded_as_in_the_engine(backend: str, tokens: int):
    decode = steps("llama-8b", backend, batch=3)["decode"]
    name = "rope_append_attention" if backend == "cuda" else "turboquant_attention"
    assert next(use.shapes for use in decode if use.op == name).startswith(f"q {tokens}x32x128")


def test_long_prompt_ends_with_a_partial_chunk():
    prompt = steps("llama-8b", "cpu", at=512 + 70)["prompt"]
    assert {use.shapes for use in prompt if use.op == "turboquant_attention"} == {"q 70x32x128"}


@pytest.mark.parametrize(("layout", "lanes", "dtype"), [("cpu", ISA.lanes, torch.float32), ("cuda", 1, torch.bfloat16)])
def test_fake_weights_have_kernel_layouts(layout: str, lanes: int, dtype: torch.dtype):
    weights = Outlines(4, 64, layout)
    found = weights.matrix("model.layers.0.mlp.up_proj", 128, 64)
    assert isinstance(found, QTensor)
    assert (found.lanes, found.device.type, weights.dtype) == (lanes, "meta", dtype)
