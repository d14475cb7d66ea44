"""Products with GGUF's grids: within the op's contract of the dequantized weights, on every route of the CPU."""

import pytest
import torch

from auraflux.ops import Experts, embed, expert_mlp, gate_up_swiglu, linear, linears, use_backend
from auraflux.ops._dispatch import exact
from auraflux.ops.linear.cpu.forms import BLOCK, Form
from auraflux.ops.linear.cpu.grid_codes import grid_order
from auraflux.ops.linear.cpu.products import driver
from auraflux.ops.moe.experts import blob_of
from auraflux.ops.simd.isa import ISA
from auraflux.quant import QTensor, grids
from auraflux.quant.gguf_blocks import from_blocks
from auraflux.quant.grids import FORMATS
from tests.ops.quick import some
from tests.quant.test_gguf_blocks import WIDTH, random_blocks

# the others are compiled for the same code: high bits of entries from words, two of them, from other halves
QUICK = {"iq2_xxs", "iq3_s", "iq1_m"}
KINDS = some(FORMATS, QUICK)


def weight(kind: str, rows: int, lanes: int = ISA.lanes) -> QTensor:
    return from_blocks(random_blocks(kind.upper(), rows, decades=0), kind.upper()).interleave(lanes)


def hold(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert (found - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("lanes", [1, ISA.lanes])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on", [False, True], ids=["fast", "exact"])
def test_products_are_those_of_the_dequantized_weight(kind: str, lanes: int, on: bool):
    w = weight(kind, 2 * BLOCK + 3, lanes)
    dense = w.dequantize(torch.float32)
    for tokens in (1, 2, 6, 16, 37, 64):
        x = torch.randn(tokens, WIDTH) * 10.0 ** torch.randint(-3, 3, (tokens, 1))
        with exact(on):
            hold(linear(x, w), x @ dense.T, 1e-5 if on else 0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_gives_the_same_bits_among_others(kind: str):
    w, x = weight(kind, BLOCK + 5), torch.randn(37, WIDTH)
    many = linear(x, w)
    for first, count in ((0, 1), (3, 4), (20, 17)):
        assert torch.equal(linear(x[first : first + count].contiguous(), w), many[first : first + count])


@pytest.mark.parametrize("kind", KINDS)
def test_both_orders_of_rows_give_the_same_bits(kind: str):
    x = torch.randn(3, WIDTH)
    assert torch.equal(linear(x, weight(kind, 21)), linear(x, weight(kind, 21, 1)))


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_nothing_and_the_largest(kind: str):
    w = weight(kind, BLOCK, 1)
    if kind != "iq1_m":
        w.packed[0], w.packed[1] = 0, -1
        w.scales.view(BLOCK, -1, FORMATS[kind].halves)[:2, :, 1:] = torch.tensor([0, -1]).to(torch.int16)[:, None, None]
    x = torch.randn(2, WIDTH)
    with exact():
        hold(linear(x, w.interleave(ISA.lanes)), x @ w.dequantize().T, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_is_no_number_spoils_its_row_alone(kind: str):
    w = weight(kind, BLOCK, 1)
    w.scales.view(BLOCK, -1, FORMATS[kind].halves)[1, 0, : 4 if kind == "iq1_m" else 1] = 0x7E00 if kind != "iq1_m" else -0x1000
    assert w.dequantize()[1, :256].isnan().all()
    for tokens in (1, 20):
        bad = linear(torch.randn(tokens, WIDTH), w.interleave(ISA.lanes)).isnan()
        assert bad[:, 1].all()
        assert not bad[:, torch.arange(BLOCK) != 1].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lanes", [1, ISA.lanes])
def test_rows_of_a_table_are_exact(kind: str, lanes: int):
    table, ids = weight(kind, 21, lanes), torch.tensor([0, 20, 7, 7])
    found = embed(ids, table)
    assert torch.equal(found, table.dequantize()[ids])
    assert torch.equal(embed(ids.int(), table), found)
    assert torch.equal(found.view(torch.int32), embed.reference(ids, table).view(torch.int32))


def test_weights_of_several_formats_in_one_call():
    x, (gate, up) = torch.randn(2, WIDTH), (weight("iq2_xxs", 24) for _ in range(2))
    with use_backend("reference"):
        wanted = gate_up_swiglu(x, gate, up)
    hold(gate_up_swiglu(x, gate, up), wanted, 0.02)
    others = gate, weight("iq3_s", 9), up
    for found, each in zip(linears(x, others), others, strict=True):
        assert torch.equal(found, linear(x, each))


@pytest.mark.parametrize(
    "kinds", [("iq2_xxs", "iq2_xxs", "iq3_s"), ("iq1_m", "iq1_m", "iq2_xxs"), ("iq2_xxs", "iq3_s", "iq1_m")]
)
@pytest.mark.parametrize("tokens", [1, 40])
def test_experts_in_blobs(kinds: tuple[str, ...], tokens: int):
    count, hidden, inner = 3, WIDTH, WIDTH
    each = [{name: weight(kind, WIDTH) for kind, name in zip(kinds, ("gate", "up", "down"), strict=True)} for _ in range(count)]
    blobs = torch.stack([blob_of(one) for one in each])
    assert blobs.shape[1] == sum(one.nbytes for one in each[0].values())
    experts = Experts.from_blobs(blobs, {name: one.to("meta") for name, one in each[0].items()})
    dense = {name: torch.stack([one[name].dequantize(torch.float32) for one in each]) for name in each[0]}
    x, ids = torch.randn(tokens, hidden), torch.randint(0, count, (tokens, 2), dtype=torch.int32)
    weights = torch.rand(tokens, 2)
    with use_backend("reference"):
        wanted = expert_mlp(x, ids, weights, Experts(**dense))
    assert experts.inner == inner
    with exact():
        hold(expert_mlp(x, ids, weights, experts), wanted, 1e-5)
    hold(expert_mlp(x, ids, weights, experts), wanted, 0.05)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_kernel_is_compiled_for_a_grid(kind: str):
    grid = FORMATS[kind]
    form = driver(8, grid.bits, grid.group, kind).form
    assert form == Form(8, grid.bits, grid.group, kind, grid.halves)
    assert Form.parse(form.text) == form
    # activations of a group must not leave it
    order = grid_order(form)
    groups = [sorted(order[first : first + grid.group]) for first in range(0, grids.CHUNK, grid.group)]
    assert groups == [list(range(first, first + grid.group)) for first in range(0, grids.CHUNK, grid.group)]
