"""Few tokens times the heads' rows of `kv_b_proj` on Hopper, on numpy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from auraflux.ops._cases import Args, relative_rms
from auraflux.ops.attention._latent_cases import down, in_bf16, strided_heads, up
from auraflux.ops.attention.reference import latent_output, latent_query

pytest.importorskip("triton")
from auraflux.ops.attention.cuda import mla_products_codes as kernels
from tests.emulator.ptx import Device, Machine

TOL = 1e-4  # of results in bf16: few are rounded to a neighbour


def run(
    kernel: str, x: torch.Tensor, weight: Any, like: torch.Tensor, parts: int, warps: int, nope: int, together: int = 8
) -> torch.Tensor:
    """Return the output of all programs of a kernel."""
    device, (tokens, heads, _), pitch = Device(), x.shape, x.stride(1)
    out = device.put(torch.full(like.shape, float("nan"), dtype=torch.bfloat16))
    held = torch.as_strided(x, (tokens, heads, pitch), (heads * pitch, pitch, 1)).contiguous()
    given = [device.put(part) for part in (held, weight.packed.view(torch.int8), weight.scales, weight.biases)]
    shape = kernels.CodesShape(heads, weight.shape[0] // heads, nope, weight.shape[1], weight.bits, together, warps)
    for head in range(heads):
        for part in range(parts):
            program = Machine(device, warps, head, part, 0).program(getattr(kernels, kernel))
            program(*given, out, tokens, pitch, shape)
    return device.get(out, like)


def inputs(make: Callable[..., Args], name: str, sizes: tuple[int, ...], bits: int, between: bool) -> Args:
    torch.manual_seed(0)
    args = in_bf16(make, name, *sizes, bits)
    return strided_heads(args, name) if between else args


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("sizes", "warps", "between"),
    [
        ((1, 2, 128, 128, 512), 8, False),
        ((2, 1, 64, 64, 256), 4, False),
        ((3, 2, 192, 64, 256), 2, True),
        ((9, 1, 128, 32, 512), 4, True),
    ],
)
def test_queries(sizes: tuple[int, ...], warps: int, between: bool, bits: int):
    args = inputs(up, "q_nope", sizes, bits, between)
    wanted, (tokens, _, nope, _, width) = latent_query.reference(**args), sizes
    together = tokens if tokens < 3 else 4
    found = run("query_codes", args["q_nope"], args["weight"], wanted, width // (64 * warps), warps, nope, together)
    assert relative_rms(found, wanted) < TOL


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("sizes", "warps", "between"),
    [
        ((1, 2, 128, 128, 512), 8, False),
        ((3, 2, 64, 64, 512), 4, True),
        ((11, 1, 64, 128, 256), 4, False),
        ((9, 1, 0, 64, 128), 4, True),
    ],
)
def test_outputs(sizes: tuple[int, ...], warps: int, between: bool, bits: int):
    args = inputs(down, "v", sizes, bits, between)
    wanted, (_, _, nope, used, _) = latent_output.reference(**args), sizes
    found = run("output_codes", args["v"], args["weight"], wanted, used // (16 * warps), warps, nope)
    assert relative_rms(found, wanted) < TOL
