"""Products of row-major weights on CPU: formats that tests of experts leave out, and the instructions of other processors."""

import pytest
import torch
from llvmlite import ir

from auraflux.ops.moe.cpu import row_major
from auraflux.ops.moe.cpu.row_form import LANES, RowForm
from auraflux.ops.moe.cpu.row_major import arrange, rows_times_tokens
from auraflux.ops.simd.jit import Kernel, arguments
from auraflux.ops.simd.vectors import I64, StrictBuilder
from auraflux.quant import QTensor, affine
from bench.lab.cycles import X86, Target, optimized

ROWS = 8


def build(form: RowForm) -> Kernel:
    text = form.text

    @Kernel
    def multiply(args, job, jobs):
        codes, scales, biases, groups, source, x, sums, row_nbytes, scale_nbytes, out = arguments(args, 10)
        arrange((text, source, groups, x, x + sums))
        for row in range(0, ROWS, 4):
            c, s, b = codes + row * row_nbytes, scales + row * scale_nbytes, biases + row * scale_nbytes
            c2, s2, b2 = c + 2 * row_nbytes, s + 2 * scale_nbytes, b + 2 * scale_nbytes
            rows_times_tokens((text, 2, groups, sums, out + 8 * row, c, s, b, c2, s2, b2, x, x))

    return multiply


FORMS = [RowForm(2, 64, "bf16", False), RowForm(8, 32, "f32", False), RowForm(2, 32, "bf16", True)]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_match_float64(form: RowForm):
    if form.bf16 and LANES != 16:
        pytest.skip("bf16 products need AVX-512")
    multiply, dtype = build(form), torch.float32 if form.kind == "f32" else torch.bfloat16
    for groups in (1, 5, 19, 32):
        width = groups * form.group
        parts = affine.encode(torch.randn(ROWS, width).to(dtype), form.bits, form.group)
        weight = QTensor(*parts, form.bits, form.group, (ROWS, width))
        source = torch.zeros(width + form.unit, dtype=torch.bfloat16)
        source[:width] = torch.randn(width)
        # what lies in the memory does not matter
        space = torch.full((form.token_nbytes(width),), 255, dtype=torch.uint8)
        out = torch.full((ROWS // 4, 2, 4), torch.nan)
        nbytes = width * form.bits // 8, groups * form.scale_nbytes
        sums = form.sums_offset(width)
        multiply(1, *weight.addresses, groups, source.data_ptr(), space.data_ptr(), sums, *nbytes, out.data_ptr())
        wanted = weight.dequantize(torch.float64) @ source[:width].double()
        for token in range(2):
            assert (out[:, token].flatten() - wanted).norm() < 1e-6 * wanted.norm()


@pytest.mark.skipif(LANES != 16, reason="bf16 products need AVX-512")
@pytest.mark.parametrize("tokens", [1, 2])
def test_sapphire_rapids_multiplies_bf16(tokens: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_major, "HAS_BF16", True)
    module = ir.Module("rows")
    module.triple = X86
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * (9 + tokens)), "kernel")
    b = ir.IRBuilder(function.append_basic_block())
    rows_times_tokens.build(StrictBuilder(b), RowForm(4, 64, "bf16", True).text, tokens, *function.args)
    b.ret_void()
    text = optimized(str(module), Target(X86, "sapphirerapids", "", "avx512-vnni"))
    # four parts of four rows, in the loop and after it
    assert text.count("vdpbf16ps") == 2 * 4 * 4 * tokens
    assert text.count("vpermw") >= 2 * 4 * 4
