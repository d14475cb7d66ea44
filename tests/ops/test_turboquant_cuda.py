"""What the Hopper kernel of compressed attention relies on: its table of levels, how work is cut, how parts are merged."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from auraflux.ops._cases import Case, relative_rms
from auraflux.ops.turboquant import _few
from auraflux.ops.turboquant._few import CUTS, depth, level_words, splits_for
from auraflux.ops.turboquant._inputs import attend
from auraflux.ops.turboquant._turn import levels_for
from auraflux.ops.turboquant.arrangement import PAIR_BITS, Arrangement
from auraflux.ops.turboquant.cases import CASES
from auraflux.ops.turboquant.codebook import BITS, boundaries, codebook, nearest
from auraflux.ops.turboquant.reference import rotate, turboquant_attention
from auraflux.ops.turboquant.rotation import rotation
from tests.ops.emulated import launch

CPU = torch.device("cpu")


@pytest.mark.parametrize("bits", PAIR_BITS)
def test_bytes_name_two_levels(bits: int):
    words = level_words(bits, 4, 128, CPU)
    assert words.shape == (256, 2)
    levels = words[:, 0].contiguous().view(torch.float16).view(256, 2).float() / math.sqrt(128)
    book, mask = codebook(bits, 128), (1 << bits) - 1
    for byte in (0, 1, 6, 15) if bits == 2 else (0, 1, 77, 255):
        pair = (byte, byte) if bits == 8 else (byte & mask, byte >> bits & mask)
        torch.testing.assert_close(levels[byte], book[list(pair)], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("bits", BITS)
def test_buckets_find_the_nearest_level(bits: int):
    """Midpoints and their neighbours among floats, far outliers, and what is no number."""
    levels, width, book = levels_for(bits, 64, CPU), 64, codebook(bits, 64)
    middles = boundaries(bits, 64)
    near = [torch.nextafter(middles, torch.full_like(middles, away)) for away in (-9.0, 9.0)]
    y = torch.cat([middles, *near, torch.randn(5000) / math.sqrt(width), torch.tensor([0.0, -0.0, 9.0, -9.0, torch.inf])])
    place = ((y + torch.tensor(levels.offset)) * torch.tensor(levels.factor)).clamp(0, (4 << bits) - 1).int().long()
    found, ends = levels.codes[place], levels.levels[place]
    above = _low(found) < y
    rank = (found >> 32) + above
    padded = torch.zeros(-(-len(y) // width) * width)
    padded[: len(y)] = y
    assert torch.equal(rank, nearest(padded.view(-1, width), bits).flatten()[: len(y)])
    assert torch.equal(torch.where(above, _low(ends >> 32), _low(ends)), book[rank])


def _low(words: torch.Tensor) -> torch.Tensor:
    return words.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("programs", [1, 8, 64, 100, 160, 200, 264, 300, 1000])
def test_splits_leave_little_of_the_gpu_idle(programs: int):
    slots = 264
    splits = splits_for(programs, slots, 1 << 20)
    used = programs * splits / (math.ceil(programs * splits / slots) * slots)
    assert 1 <= splits <= slots
    assert used >= 0.75


@pytest.mark.parametrize("width", CUTS)
def test_rings_fit_shared_memory(width: int):
    cut = CUTS[width]
    for key_bits in PAIR_BITS:
        for value_bits in PAIR_BITS:
            ring = cut.warps * depth(key_bits, value_bits, width) * 16 * (width * (key_bits + value_bits) // 8 + 8)
            rounded = _few.RING.value + -(-ring // 4096) * 4096
            assert cut.resident * (rounded + _few.RESERVED_NBYTES) <= _few.SHARED_NBYTES


class Emulated:
    """Stands for a kernel: `launch` runs it on numpy."""

    def __init__(self, name: str):
        self.name = name

    def __getitem__(self, grid: tuple[int, ...]):
        return partial(self.run, (*grid, 1, 1)[:3])

    def run(self, grid: tuple[int, int, int], *args, num_warps=0, maxnreg=0, launch_pdl=False, **constants) -> None:
        root = Path(_few.__file__).parent
        with np.errstate(all="ignore"):
            launch([root / "_hopper_parts.py", root / "_hopper.py"], self.name, grid, *args, **constants)


@pytest.fixture
def _emulated(monkeypatch: pytest.MonkeyPatch):
    for name in ("attend_pairs", "finish_pairs"):
        monkeypatch.setattr(_few, name, Emulated(name))
    monkeypatch.setattr(_few, "multiprocessors", lambda device: 3)


def attended(q, pages, starts, scale, window=None, sinks=None, softcap=None):
    return _few.attend_few(q, pages, starts, scale, window, sinks, softcap)


QUICK = ("k4v4w128", "k8v4w64", "k2v8w256", "k4v2w64", "k8v8w128", "group9", "1000", "few", "window-sinks", "softcap", "bf16")
PAIRED = [case for case in CASES if case.op is turboquant_attention and case.name.startswith("pairs-")]


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case.name.removeprefix("pairs-") in QUICK else [pytest.mark.slow])
        for case in PAIRED
        if case.name not in ("pairs-exact", "pairs-prefill")
    ],
)
def test_emulated_kernel_matches_reference(case: Case):
    args = case.args()
    assert relative_rms(attended(**args), turboquant_attention.reference(**args)) <= min(case.tol, 1e-3)


@pytest.mark.usefixtures("_emulated")
def test_results_do_not_depend_on_pages_splits_or_batch(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    args = attend([300, 77], [1, 1], (4, 2), 128, arrangement=Arrangement.PAIRS)
    pages, found = args["pages"], attended(**args)
    order = torch.randperm(pages.pool[0])
    place = torch.argsort(order).int()
    stores = {name: getattr(pages, name)[order] for name in ("key_codes", "key_norms", "value_codes", "value_norms")}
    inside = (pages.table >= 0) & (pages.table < pages.pool[0])
    table = torch.where(inside, place[pages.table.clamp(0, pages.pool[0] - 1).long()], pages.table)
    assert torch.equal(attended(**{**args, "pages": replace(pages, **stores, table=table)}), found)
    for b in range(2):
        alone = replace(pages, table=pages.table[b : b + 1].contiguous(), lengths=pages.lengths[b : b + 1].contiguous())
        one = {**args, "q": args["q"][b : b + 1], "pages": alone, "starts": torch.tensor([0, 1], dtype=torch.int32)}
        assert relative_rms(attended(**one), found[b : b + 1]) < 5e-4
    monkeypatch.setattr(_few, "multiprocessors", lambda device: 1)
    assert relative_rms(attended(**args), found) < 5e-4


@pytest.mark.usefixtures("_emulated")
def test_what_is_not_seen_may_be_anything():
    """Norms that are no numbers, in slots past the end or before a window, reach no result."""
    args = attend([100, 20], [1, 1], (4, 2), 64, window=30, arrangement=Arrangement.PAIRS)
    found = attended(**args)
    pages, size = args["pages"], 16
    for b, length in enumerate((100, 20)):
        for t in [*range(max(0, length - 30)), *range(length, -(-length // size) * size)]:
            page = int(pages.table[b, t // size])
            pages.key_norms[page, :, t % size] = pages.value_norms[page, :, t % size] = torch.nan
    assert torch.equal(attended(**args), found)


@pytest.mark.parametrize(("width", "splits", "sinks"), [(64, 1, True), (128, 5, False), (128, 33, True), (256, 40, True)])
def test_parts_are_merged_and_turned_back(width: int, splits: int, sinks: bool):
    torch.manual_seed(0)
    tokens, heads, seed = 2, 3, 7
    rows = tokens * heads
    o, m, l = torch.randn(rows, splits, width), 3 * torch.randn(rows, splits), torch.rand(rows, splits) + 0.1  # noqa: E741
    o[1], m[1], l[1] = 0.0, -1e29, 0.0  # nothing was seen
    sink = torch.randn(heads) if sinks else None
    logits = torch.full((rows, 1), -math.inf) if sink is None else sink.repeat(tokens)[:, None] / math.log(2)
    top = torch.maximum(m.amax(1, keepdim=True), logits)
    total = (torch.exp2(m - top) * l).sum(1, keepdim=True) + torch.exp2(logits - top)
    mean = (torch.exp2(m - top)[..., None] * o).sum(1) / total.clamp(min=1e-30) / math.sqrt(width)
    want = rotate.reference(mean, seed, inverse=True)
    r = torch.arange(width)
    parts = o[..., r % 8 * (width // 8) + r // 8].contiguous(), m, l
    out, padded = torch.empty(tokens, heads, width), 1 << (splits - 1).bit_length()
    sizes = {"D": width, "S": padded, "C": min(padded, 16), "NW": 8}
    Emulated("finish_pairs")[(rows,)](*parts, sink, rotation(width, seed).signs, out, heads, splits, **sizes)
    assert relative_rms(out.view(rows, width), want) < 1e-5
