"""Values arranged in pairs: the same codes in another order, for every op on pages and every copy of pages."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auraflux.cache.cache import Cache
from auraflux.cache.layer_shapes import AttentionShape
from auraflux.cache.settings import CacheSettings
from auraflux.errors import InputError
from auraflux.ops._cases import relative_rms
from auraflux.ops._dispatch import exact
from auraflux.ops.fake_gpu import use_fake_gpu
from auraflux.ops.turboquant.arrangement import PAIR_WIDTHS, Arrangement, arrangement_for
from auraflux.ops.turboquant.cases.inputs import append, attend, code_pages
from auraflux.ops.turboquant.codebook import BITS
from auraflux.ops.turboquant.pages import pack, unpack
from auraflux.ops.turboquant.reference import append_codes, turboquant_attention, turboquant_partials

ROWS, PAIRS = Arrangement.ROWS, Arrangement.PAIRS


@given(
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from((16, 48, 64)),
    st.sampled_from(PAIR_WIDTHS),
    st.sampled_from(BITS),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=30, deadline=None)
def test_pairs_are_a_permutation_that_comes_back(pool: int, heads: int, page: int, width: int, bits: int, seed: int):
    codes = torch.from_numpy(np.random.default_rng(seed).integers(0, 1 << bits, (pool, heads, page, width)))
    stored = PAIRS.stored(codes)
    assert torch.equal(PAIRS.restored(stored), codes)
    eights = codes.reshape(-1, 8 * width).sort(-1).values
    assert torch.equal(stored.reshape(-1, 8 * width).sort(-1).values, eights)
    assert torch.equal(PAIRS.restored(unpack(pack(stored, bits), bits, width)), codes)


def test_two_tokens_share_a_byte():
    """Check the position of each code literally: kernels rely on this order."""
    width = 128
    token, d = torch.arange(16)[:, None], torch.arange(width)[None, :]
    stored = PAIRS.stored(token * 1000 + d)
    for row, c, x, e in ((0, 0, 0, 0), (0, 0, 0, 1), (3, 2, 5, 1), (9, 3, 15, 0), (15, 3, 15, 1)):
        want = (row // 8 * 8 + 2 * c + e) * 1000 + row % 8 * (width // 8) + x
        assert stored[row, c * (width // 4) + 2 * x + e] == want


def test_pages_change_their_order_and_back():
    pages = code_pages([40, 7], 2, 64, (8, 4))
    there = pages.arranged(PAIRS)
    assert there.arranged(PAIRS) is there
    assert not torch.equal(there.value_codes, pages.value_codes)
    assert there.key_codes is pages.key_codes
    assert torch.equal(there.arranged(ROWS).value_codes, pages.value_codes)


def test_attention_does_not_depend_on_the_order():
    args = attend([70, 33], [2, 1], (4, 2), 64, (8, 4), window=40)
    paired = {**args, "pages": args["pages"].arranged(PAIRS)}
    with exact():
        assert relative_rms(turboquant_attention(**paired), turboquant_attention(**args)) < 1e-5
        for mine, plain in zip(
            turboquant_partials(**paired, block=32), turboquant_partials.reference(**args, block=32), strict=True
        ):
            torch.testing.assert_close(mine, plain)


def test_appending_does_not_depend_on_the_order_and_preserves_neighbours():
    args = append([21, 9, 40], [6, 9, 1], 2, 64, bits=(8, 4))
    pages = args["pages"]
    paired = pages.arranged(PAIRS)
    append_codes(**{**args, "pages": paired})
    append_codes(**args)
    assert torch.equal(paired.arranged(ROWS).value_codes, pages.value_codes)
    assert torch.equal(paired.value_norms, pages.value_norms)


@pytest.mark.parametrize(("page", "width"), [(24, 64), (16, 96), (7, 128), (16, 512)])
def test_other_pages_are_refused(page: int, width: int):
    with pytest.raises(InputError, match=f"pages of {page} tokens of width {width} cannot be arranged in pairs"):
        code_pages([5], 1, width, page=page, arrangement=PAIRS)


def test_gpus_since_ampere_get_pairs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert arrangement_for("cpu", 8, 4, 128, 64) is ROWS
    for key_bits in BITS:
        for value_bits in BITS:
            assert arrangement_for("cuda", key_bits, value_bits, 128, 64) is PAIRS
            # sixteen codes of 3 bits fill a word and a half
            assert arrangement_for("cuda", key_bits, value_bits, 64, 64) is (ROWS if 3 in (key_bits, value_bits) else PAIRS)
    assert arrangement_for("cuda", 8, 4, 96, 64) is ROWS
    assert arrangement_for("cuda", 8, 4, 128, 24) is ROWS
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert arrangement_for("cuda", 8, 4, 128, 64) is PAIRS
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert arrangement_for("cuda", 8, 4, 128, 64) is ROWS


def test_a_fake_gpu_gets_pairs():
    with use_fake_gpu():
        assert arrangement_for("meta", 8, 4, 128, 64) is PAIRS
        assert arrangement_for("meta", 8, 4, 96, 64) is ROWS
    assert arrangement_for("meta", 8, 4, 128, 64) is ROWS


def decoded(arrangement: Arrangement, monkeypatch: pytest.MonkeyPatch, window: int | None) -> list[torch.Tensor]:
    """Attend along a history with a fork, a cut and a snapshot, in a cache with a given arrangement of values."""
    monkeypatch.setattr("auraflux.cache.layers.quantized.arrangement_for", lambda *_: arrangement)
    torch.manual_seed(3)
    cache = Cache([AttentionShape(2, 64, window=window)], CacheSettings(kv="k8v4"), context=96, sequences=4, page=16, chunk=32)
    layer, found = cache.layers[0], []

    def step(sequence, new: int) -> None:
        batch = cache.batch([sequence])
        batch.extend([new])
        k, v, q = torch.randn(new, 2, 64), torch.randn(new, 2, 64), torch.randn(new, 4, 64)
        layer.append(batch, k, v)
        found.append(layer.attend(batch, q, 0.125))

    first = cache.open()
    for new in (21, 1, 1):
        step(first, new)
    second = first.fork()
    step(second, 1)
    step(first, 2)
    first.truncate(first.length - 3)
    step(first, 1)
    third = cache.restore(second.snapshot())
    for sequence in (third, second, first):
        step(sequence, 3)
    return found


@pytest.mark.parametrize("window", [None, 20])
def test_forks_cuts_and_snapshots_preserve_pairs(monkeypatch: pytest.MonkeyPatch, window: int | None):
    with exact():
        plain, paired = (decoded(order, monkeypatch, window) for order in (ROWS, PAIRS))
    for a, b in zip(plain, paired, strict=True):
        assert relative_rms(b, a) < 1e-5
