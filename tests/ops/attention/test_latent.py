"""Latent attention: the absorbed form against the expanded one and transformers."""

import pytest
import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._cases import relative_rms
from auraflux.ops._dispatch import use_backend
from auraflux.ops.attention._inputs import starts_of
from auraflux.ops.attention._latent_cases import latent_pages, matrix, up
from auraflux.ops.attention.pages import LatentPages
from auraflux.ops.attention.reference import (
    append_latent,
    latent_attention,
    latent_output,
    latent_query,
    split_latent,
)
from auraflux.quant import quantize

BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])
HEADS, NOPE, ROPE, VALUES, WIDTH = 6, 24, 16, 20, 64


def expanded(q_nope: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Compute keys and values of every head from the latents, then plain causal attention."""
    new, length = q_nope.shape[0], latent.shape[0]
    both = torch.einsum("tc,hrc->htr", latent, weight.unflatten(0, (HEADS, -1)))
    k, v = both[..., :NOPE], both[..., NOPE:]
    scores = torch.einsum("nhi,hti->hnt", q_nope, k) + torch.einsum("nhr,tr->hnt", q_rope, rope)
    hidden = torch.arange(length) > torch.arange(length - new, length)[:, None]
    weights = (scores * scale).masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hnt,htf->nhf", weights, v)


@BACKENDS
@pytest.mark.parametrize("bits", [4, 32])
@pytest.mark.parametrize("chunks", [[30], [11, 1, 18], [1] * 30])
def test_absorbed_equals_expanded(backend, bits, chunks):
    torch.manual_seed(1)
    length, scale = sum(chunks), (NOPE + ROPE) ** -0.5
    weight = matrix(HEADS * (NOPE + VALUES), WIDTH, bits, 64, torch.float32)
    plain = weight if isinstance(weight, Tensor) else weight.dequantize(torch.float32)
    q, kv = torch.randn(length, HEADS * (NOPE + ROPE)), torch.randn(length, WIDTH + ROPE)
    pages, done, found = latent_pages([length], WIDTH, ROPE, page=7), 0, []
    with use_backend(backend):
        for new in chunks:
            now, done = slice(done, done + new), done + new
            pages.lengths[0] = done
            q_nope, q_rope, latent, k_rope = split_latent(q[now], kv[now], HEADS, NOPE)
            append_latent(latent, k_rope, pages, starts_of([new]))
            query = latent_query(q_nope, weight, NOPE + VALUES)
            mixed = latent_attention(query, q_rope, pages, starts_of([new]), scale)
            found.append(latent_output(mixed, weight, NOPE))
        q_nope, q_rope, latent, k_rope = split_latent(q, kv, HEADS, NOPE)
    expected = expanded(q_nope, q_rope, latent, k_rope, plain, scale)
    assert relative_rms(torch.cat(found), expected) < 2e-6


def test_equals_transformers():
    deepseek = pytest.importorskip("transformers.models.deepseek_v3")
    torch.manual_seed(0)
    config = deepseek.DeepseekV3Config(
        hidden_size=32,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=None,
        kv_lora_rank=WIDTH,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUES,
        attn_implementation="eager",
    )
    layer = deepseek.modeling_deepseek_v3.DeepseekV3Attention(config, 0).eval()
    x, length = torch.randn(1, 12, 32), 12
    still = torch.ones(1, length, ROPE), torch.zeros(1, length, ROPE)  # cos and sin of the identity rotation
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        expected = layer(x, still, mask)[0][0]
        kv = layer.kv_a_proj_with_mqa(x)[0]
        q_nope, q_rope, latent, k_rope = split_latent(layer.q_proj(x)[0], kv, HEADS, NOPE)
        latent = layer.kv_a_layernorm(latent)
        pages, weight = latent_pages([length], WIDTH, ROPE), layer.kv_b_proj.weight.detach()
        append_latent(latent, k_rope, pages, starts_of([length]))
        query = latent_query(q_nope, weight, NOPE + VALUES)
        mixed = latent_attention(query, q_rope, pages, starts_of([length]), layer.scaling)
        found = layer.o_proj(latent_output(mixed, weight, NOPE).flatten(1))
    assert relative_rms(found, expected) < 5e-6


@BACKENDS
def test_page_order_does_not_matter(backend):
    pages = latent_pages([100], WIDTH, ROPE, page=7)
    q, rope = torch.randn(9, 4, WIDTH), torch.randn(9, 4, ROPE)
    order = torch.randperm(pages.latent.shape[0])
    moved = LatentPages(pages.latent[order], pages.rope[order], order.argsort()[pages.table.long()].int(), pages.lengths)
    with use_backend(backend):
        found = [latent_attention(q, rope, p, starts_of([9]), 0.1) for p in (pages, moved)]
    assert torch.equal(*found)


@BACKENDS
@pytest.mark.parametrize("new", [1, 20])
def test_nan_does_not_spread(backend, new):
    pages = latent_pages([20], WIDTH, ROPE)
    last = pages.table[0, 1]
    pages.latent[last, 3, 7] = torch.nan  # position 19
    pages.latent[last, 4:] = torch.nan  # beyond the end
    pages.rope[last, 4:] = torch.nan
    q, rope = torch.randn(new, 4, WIDTH), torch.randn(new, 4, ROPE)
    with use_backend(backend):
        found = latent_attention(q, rope, pages, starts_of([new]), 0.1).isnan()
    assert found[-1].all()
    assert not found[:-1].any()


@BACKENDS
def test_ragged_equals_one_by_one(backend):
    lengths, new = [20, 0, 7, 33], [2, 0, 7, 1]
    pages, starts = latent_pages(lengths, WIDTH, ROPE, page=7), starts_of(new)
    q, rope = torch.randn(10, 4, WIDTH), torch.randn(10, 4, ROPE)
    with use_backend(backend):
        found = latent_attention(q, rope, pages, starts, 0.1)
        for b in (0, 2, 3):
            alone = LatentPages(pages.latent, pages.rope, pages.table[b : b + 1].clone(), pages.lengths[b : b + 1].clone())
            mine = slice(int(starts[b]), int(starts[b + 1]))
            expected = latent_attention(q[mine], rope[mine], alone, starts_of([new[b]]), 0.1)
            assert relative_rms(found[mine], expected) < 1e-6


def test_split_parts_are_contiguous_and_complete():
    q, kv = torch.randn(3, HEADS * (NOPE + ROPE)), torch.randn(3, WIDTH + ROPE)
    parts = split_latent(q, kv, HEADS, NOPE)
    assert all(part.is_contiguous() for part in parts)
    assert torch.equal(torch.cat(parts[:2], -1).flatten(1), q)
    assert torch.equal(torch.cat(parts[2:], -1), kv)


def test_other_weight_orders_are_declined_but_served(caplog):
    args = up(2, 4, 16, 16, 64)
    plain = latent_query(**args)
    assert "declined" not in caplog.text
    for held in (args["weight"].interleave(4), quantize(args["weight"].dequantize(torch.float32), kind="mxfp4")):
        found = latent_query(args["q_nope"], held, 32)
        assert relative_rms(found, latent_query.reference(args["q_nope"], held, 32)) == 0
    assert relative_rms(latent_query(args["q_nope"], args["weight"].interleave(4), 32), plain) < 1e-6
    assert "declined (affine weight in groups of 64 with 4 rows side by side" in caplog.text
    assert "declined (mxfp4 weight" in caplog.text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: latent_query(torch.randn(2, 4, 16), w, 31), "the weight has 128 rows; 4 heads of 31 rows"),
        (lambda w: latent_query(torch.randn(2, 4, 33), w, 32), "the first 33 for keys, do not fit"),
        (lambda w: latent_query(torch.randn(2, 4, 16, 1), w, 32), r"'q_nope' has shape \[2, 4, 16, 1\]"),
        (lambda w: latent_output(torch.randn(2, 4, 63), w, 16), r"'v' has shape \[2, 4, 63\]; \[any, any, 64\]"),
        (lambda w: latent_output(torch.randn(2, 3, 64), w, 16), "the weight has 128 rows; 3 heads"),
        (lambda w: latent_output(torch.randn(2, 4, 64), w, 32), "4 heads with values after 32 rows"),
        (lambda w: split_latent(torch.randn(2, 40), torch.randn(2, 20), 4, 10), "q is 40 wide, kv 20"),
        (lambda w: split_latent(torch.randn(2, 40), torch.randn(3, 20), 4, 5), r"'kv' has shape \[3, 20\]"),
    ],
)
def test_mismatched_arguments_are_rejected(call, message):
    with pytest.raises(InputError, match=message):
        call(matrix(128, 64, 4, 64, torch.float32))


@BACKENDS
def test_positions_outside_the_pages_are_rejected(backend):
    pages = latent_pages([20, 9], WIDTH, ROPE)
    pages.table[1, 0] = 99
    q, rope, before = torch.randn(3, 4, WIDTH), torch.randn(3, 4, ROPE), pages.latent.clone()
    with use_backend(backend):
        with pytest.raises(InputError, match="page 0 of sequence 1 is 99 in the table; the pool has 7 pages"):
            latent_attention(q, rope, pages, starts_of([2, 1]), 0.1)
        with pytest.raises(InputError, match="page 0 of sequence 1 is 99"):
            append_latent(q[:, 0].contiguous(), rope[:, 0].contiguous(), pages, starts_of([2, 1]))
    assert torch.equal(pages.latent, before)


def test_pages_without_a_rotated_part_are_rejected():
    index = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(InputError, match="rotated keys have width 0"):
        LatentPages(torch.zeros(1, 4, 8), torch.zeros(1, 4, 0), *index)
