"""Hopper kernels of the quantized KV cache: level tables, split-KV plans, merging of splits."""

import math
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from auraflux.bench.arguments import cloned, moved
from auraflux.ops import invariant
from auraflux.ops._cases import Case, relative_rms
from auraflux.ops.gpu.blocks.softmax import Partials
from auraflux.ops.gpu.launch import redirect_launches
from auraflux.ops.turboquant.arrangement import Arrangement
from auraflux.ops.turboquant.cases import CASES
from auraflux.ops.turboquant.cases.inputs import append, appended_and_attended, attend
from auraflux.ops.turboquant.codebook import BITS, boundaries, codebook, nearest
from auraflux.ops.turboquant.cuda import routes as cuda_routes
from auraflux.ops.turboquant.cuda.call import Append
from auraflux.ops.turboquant.cuda.decode import launch as decode_launch
from auraflux.ops.turboquant.cuda.decode import plan as decode_plan
from auraflux.ops.turboquant.cuda.decode.config import MergeSizes
from auraflux.ops.turboquant.cuda.decode.launch import level_words
from auraflux.ops.turboquant.cuda.decode.plan import EXCLUSIVE, PROGRAM_SHAPES, ProgramShape, depth, plan_for, splits_for
from auraflux.ops.turboquant.cuda.encode.hadamard import levels_for
from auraflux.ops.turboquant.cuda.routes import APPEND
from auraflux.ops.turboquant.pages import CodePages
from auraflux.ops.turboquant.reference import append_codes, rotate, turboquant_attention
from auraflux.ops.turboquant.reference_new_token import rope_append_attention
from auraflux.ops.turboquant.rotation import rotation
from tests.emulator.gluon import launch as emulate

CPU = torch.device("cpu")


@pytest.mark.parametrize("bits", BITS)
def test_bytes_name_two_levels(bits: int):
    words = level_words(bits, 4, 128, CPU)
    assert words.shape == (256, 2)
    levels = words[:, 0].contiguous().view(torch.float16).view(256, 2).float() / math.sqrt(128)
    book, mask = codebook(bits, 128), (1 << bits) - 1
    for byte in (0, 1, 6, 15) if bits == 2 else (0, 1, 37, 63) if bits in (3, 6) else (0, 1, 77, 255):
        pair = (byte, byte) if bits > 4 else (byte & mask, byte >> bits & mask)
        torch.testing.assert_close(levels[byte], book[list(pair)], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("bits", BITS)
def test_buckets_find_the_nearest_level(bits: int):
    """Cover midpoints and their neighbouring floats, outliers, and infinity."""
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


@pytest.mark.parametrize(("width", "program"), [*PROGRAM_SHAPES.items(), (128, EXCLUSIVE)])
def test_rings_fit_shared_memory(width: int, program: ProgramShape):
    for key_bits, value_bits, blocks in product(BITS, BITS, (1, 2)):
        deep = depth(key_bits, value_bits, width, blocks, program)
        ring = program.warps * deep * blocks * 16 * (width * (key_bits + value_bits) // 8 + 8)
        rounded = decode_plan.ring_begin(width) + -(-ring // 4096) * 4096
        assert program.resident * (rounded + decode_plan.RESERVED_NBYTES) <= decode_plan.MULTIPROCESSOR_NBYTES
        assert deep or blocks == 2


def test_long_sequences_take_two_blocks_per_step():
    long = plan_for(8, 132, 131072, 64, 4, 4, 128)
    assert (long.splits, long.blocks) == (32, 2)
    assert plan_for(8, 132, 131072, 16, 4, 4, 128).blocks == 1  # the next block may be on another page
    assert plan_for(8, 132, 1024, 64, 4, 4, 128)[:3] == (8, 1, 2)
    assert plan_for(8, 132, 131072, 64, 8, 4, 128).blocks == 1  # two do not fit


def test_batched_rows_are_not_split_unless_few_or_long():
    assert plan_for(128, 132, 2048, 64, 8, 4, 128)[::3] == (1, EXCLUSIVE)
    assert plan_for(256, 132, 2048, 64, 8, 4, 128)[::3] == (1, PROGRAM_SHAPES[128])
    assert plan_for(64, 132, 2048, 64, 8, 4, 256)[::3] == (1, PROGRAM_SHAPES[256])
    assert plan_for(128, 132, 65536, 64, 8, 4, 128)[::3] == (2, PROGRAM_SHAPES[128])


def test_long_sequences_of_narrow_heads_take_four_blocks_per_step():
    assert plan_for(8, 132, 131072, 64, 4, 4, 64)[:3] == (32, 4, 1)
    assert plan_for(8, 132, 131072, 32, 4, 4, 64).blocks == 2
    assert plan_for(8, 132, 131072, 64, 8, 4, 64).blocks == 2
    assert plan_for(8, 132, 131072, 64, 4, 4, 64, True).blocks == 2


def test_wide_heads_have_few_pipeline_stages():
    assert plan_for(2, 132, 131072, 64, 4, 4, 256)[:5] == (64, 1, 2, PROGRAM_SHAPES[256], 1)
    assert plan_for(2, 132, 131072, 64, 8, 4, 256).blocks == 2


def test_splits_are_balanced_where_a_sequence_may_be_long():
    def shared(sequences: int, keys: int) -> bool:
        return decode_launch.uses_balanced_splits(plan_for(8 * sequences, 132, keys, 64, 8, 4, 128), sequences, keys)

    assert shared(8, 32768)
    assert shared(100, 32768)
    assert not shared(1, 32768)
    assert not shared(8, 4096)


@pytest.mark.parametrize("bits", [(4, 4), (8, 4), (4, 2)])
@pytest.mark.parametrize("keys", [32768, 32832, 65536])
def test_splits_of_a_small_batch_fill_the_gpu_once(bits: tuple[int, int], keys: int):
    assert plan_for(64, 132, keys, 64, *bits, 128)[::3] == (4, PROGRAM_SHAPES[128])


def test_splits_of_suitable_size_have_an_exclusive_multiprocessor():
    assert plan_for(8, 132, 32768, 64, 4, 2, 128)[:5] == (16, 2, 2, EXCLUSIVE, 1)
    assert plan_for(8, 132, 32832, 64, 4, 2, 128)[:5] == (16, 2, 2, EXCLUSIVE, 1)  # one more page does not add a split
    assert plan_for(32, 132, 2048, 64, 8, 4, 128)[:5] == (4, 1, 2, EXCLUSIVE, 1)
    assert plan_for(8, 132, 32768, 64, 8, 4, 128).program is PROGRAM_SHAPES[128]
    assert plan_for(8, 132, 131072, 64, 4, 4, 128).program is PROGRAM_SHAPES[128]


@pytest.fixture
def _emulated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decode_launch, "multiprocessors", lambda device: 3)
    with redirect_launches(emulate):
        yield


def attended(q, pages, starts, scale, window=None, sinks=None, softcap=None):
    return decode_launch.attend_decode(q, pages, starts, scale, window, sinks, softcap)


QUICK = (
    *("k4v4w128", "k8v4w64", "k2v8w256", "k4v2w64", "k8v8w128", "k3v3w128", "k6v4w128", "k3v6w256", "group9", "1000", "few"),
    *("window-sinks", "softcap", "bf16"),
)
PAIRED = [case for case in CASES if case.op is turboquant_attention and case.name.startswith("pairs-")]


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case.name.removeprefix("pairs-") in QUICK else [pytest.mark.slow])
        for case in PAIRED
        if not case.name.startswith(("pairs-exact", "pairs-prefill", "pairs-prompt", "pairs-long"))
    ],
)
def test_emulated_kernel_matches_reference(case: Case):
    args = case.args()
    # prefill reads keys that were dequantized to 16 bits
    most = 2e-3 if case.name.endswith("prompt") else 1e-3
    assert relative_rms(attended(**args), turboquant_attention.reference(**args)) <= min(case.tol, most)


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize(
    ("bits", "width", "window"), [((4, 4), 128, None), ((4, 2), 128, 300), ((3, 3), 128, None), ((6, 4), 64, 90)]
)
def test_emulated_kernel_takes_two_blocks_per_step(
    bits: tuple[int, int], width: int, window: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(decode_launch, "plan_for", partial(blocks_of, 2, decode_launch.plan_for))
    make = partial(attend, [700, 7], [1, 2], (6, 2), width, bits, page=64, arrangement=Arrangement.PAIRS)
    args = make(window=window, sinks=True)
    assert relative_rms(attended(**args), turboquant_attention.reference(**args)) <= 1e-3


@pytest.mark.usefixtures("_emulated")
def test_emulated_kernel_takes_four_blocks_per_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decode_launch, "plan_for", partial(blocks_of, 4, decode_launch.plan_for))
    args = attend([700, 7], [1, 2], (6, 2), 64, (4, 4), page=64, sinks=True, arrangement=Arrangement.PAIRS)
    assert relative_rms(attended(**args), turboquant_attention.reference(**args)) <= 1e-3


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("processors", [1, 3, 20])
@pytest.mark.parametrize(("lengths", "new"), [([900, 40, 1, 333], [1, 1, 1, 1]), ([700, 40, 9], [3, 0, 2]), ([1, 500], [1, 1])])
@pytest.mark.parametrize("window", [None, 200])
def test_emulated_programs_balance_sequences_of_any_lengths(
    lengths: list[int], new: list[int], processors: int, window: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(decode_launch, "multiprocessors", lambda device: processors)
    monkeypatch.setattr(decode_launch, "uses_balanced_splits", lambda *args: True)
    args = attend(lengths, new, (6, 2), 64, (4, 4), page=64, sinks=True, window=window, arrangement=Arrangement.PAIRS)
    assert relative_rms(attended(**args), turboquant_attention.reference(**args)) <= 1e-3


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("processors", [4, 1])
def test_emulated_batched_rows_are_not_split(processors: int, monkeypatch: pytest.MonkeyPatch):
    """Use a multiprocessor per program and one for all; sequences with none, one and several new tokens."""
    monkeypatch.setattr(decode_launch, "multiprocessors", lambda device: processors)
    for new in ([1, 1], [0, 2]):
        args = attend([300, 77], new, (6, 2), 128, (8, 4), sinks=True, arrangement=Arrangement.PAIRS)
        assert relative_rms(attended(**args), turboquant_attention.reference(**args)) <= 1e-3


NEW_TOKENS = [
    ((8, 2), 700, (8, 4), {}),
    ((9, 3), 100, (4, 4), {"full_precision": (4, 32), "calibrated": True}),
    ((6, 2), 333, (4, 2), {"calibrated": True, "window": 200, "strided": True, "rotated": 64}),
    ((16, 2), 257, (2, 8), {"full_precision": (1, 32), "interleaved": True, "mscale": 1.2}),
    ((12, 1), 400, (8, 8), {"normed": False, "softcap": 30.0, "sinks": True}),
]


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize(("heads", "length", "bits", "options"), NEW_TOKENS)
@pytest.mark.parametrize("width", [64, 128])
def test_emulated_kernel_appends_the_new_token(
    heads: tuple[int, int], length: int, bits: tuple[int, int], options: dict, width: int, monkeypatch: pytest.MonkeyPatch
):
    """Codes and full-precision rows as those of the reference, and the same attention."""
    monkeypatch.setattr(decode_launch, "multiprocessors", lambda device: 40)
    monkeypatch.setattr(cuda_routes, "not_gluon", lambda device: None)
    monkeypatch.setattr(cuda_routes, "launches_early", lambda device: True)
    args = appended_and_attended(length, heads, width, bits, **options)
    theirs = cloned(args)
    expected = rope_append_attention.reference(**theirs)
    seen: list[bool] = []
    with redirect_launches(lambda *given, **named: (seen.append("CONFIG" in named), emulate(*given, **named))):
        found = rope_append_attention.kernel("cuda")(**args)
    assert seen == [True, False]
    assert relative_rms(found, expected) <= 2e-3
    for name, mine in vars(args["pages"]).items():
        if isinstance(mine, torch.Tensor) and mine.is_floating_point():
            assert relative_rms(mine, getattr(theirs["pages"], name)) <= 1e-6
        elif isinstance(mine, torch.Tensor):
            assert torch.equal(mine, getattr(theirs["pages"], name))


def first_launch(
    monkeypatch: pytest.MonkeyPatch, processors: int, width: int, full_precision: tuple[int, int] | None
) -> tuple[int, Any]:
    """Return the splits of a row and the `Work` of one token, on a GPU of `processors` multiprocessors."""
    seen: list[tuple[tuple[int, ...], Any]] = []
    monkeypatch.setattr(decode_launch, "multiprocessors", lambda device: processors)
    args = attend([300], [1], (4, 2), width, (4, 4), page=64, full_precision=full_precision, arrangement=Arrangement.PAIRS)
    with redirect_launches(lambda kernel, grid, *given, **named: seen.append((grid, named.get("CONFIG")))):
        attended(**args)
    return seen[0][0][0], seen[0][1].work


def test_full_precision_tokens_have_a_split_where_it_is_resident(monkeypatch: pytest.MonkeyPatch):
    # two heads with three splits of codes each; two programs are resident per multiprocessor
    parts, work = first_launch(monkeypatch, 4, 64, (1, 16))
    assert (parts, work.full_split) == (4, True)
    parts, work = first_launch(monkeypatch, 3, 64, (1, 16))
    assert (parts, work.full_split) == (3, False)


def test_full_precision_tokens_have_a_split_if_invariant_but_none_in_unsplit_rows(
    monkeypatch: pytest.MonkeyPatch,
):
    _, work = first_launch(monkeypatch, 6, 64, None)
    assert not work.full_split
    parts, work = first_launch(monkeypatch, 2, 128, (1, 16))
    assert (parts, work.single_split, work.full_split) == (1, True, False)
    with invariant():
        _, work = first_launch(monkeypatch, 6, 64, (1, 16))
    assert work.split_keys
    assert work.full_split
    monkeypatch.setattr(decode_launch, "uses_balanced_splits", lambda *args: True)
    _, work = first_launch(monkeypatch, 6, 64, (1, 16))
    assert not work.full_split


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize(
    ("width", "bits", "options"),
    [
        (128, (4, 4), {"full_precision": (4, 32), "calibrated": True}),
        (128, (4, 4), {"window": 300}),
        (64, (8, 8), {"sinks": True, "full_precision": (4, 32)}),
        (128, (8, 4), {"full_precision": (0, 32)}),
        (256, (4, 4), {"full_precision": (4, 32)}),
    ],
)
def test_emulated_splits_are_batch_invariant(width: int, bits: tuple[int, int], options: dict, monkeypatch: pytest.MonkeyPatch):
    """Inside `invariant`: one program per split, for several, and for all splits of a row."""
    args = attend([700, 20, 1], [1, 2, 1], (4, 2), width, bits, page=64, arrangement=Arrangement.PAIRS, **options)
    found = []
    for processors in (100, 8, 1):
        monkeypatch.setattr(decode_launch, "multiprocessors", lambda device, processors=processors: processors)
        with invariant():
            found.append(attended(**args))
    assert relative_rms(found[0], turboquant_attention.reference(**args)) <= 1e-3
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 2), (16, 2), (9, 3)])
@pytest.mark.parametrize(
    ("width", "bits", "options"),
    [
        (128, (4, 4), {"full_precision": (4, 32), "calibrated": True}),
        (128, (4, 4), {"full_precision": (1, 32)}),
        (64, (8, 8), {"sinks": True, "full_precision": (4, 32)}),
        (128, (3, 3), {"window": 700}),
    ],
)
def test_splits_on_the_gpu_are_batch_invariant(
    width: int, bits: tuple[int, int], options: dict, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    """Inside `invariant`: one program per split of up to 20, for several, and for all splits of a row."""
    args = attend([5000, 1100, 300, 1], [1, 2, 1, 1], heads, width, bits, page=64, arrangement=Arrangement.PAIRS, **options)
    args, found = moved(args, "cuda"), []
    for processors in (10000, 60, 20, 1):
        monkeypatch.setattr(decode_launch, "multiprocessors", lambda device, processors=processors: processors)
        with invariant():
            found.append(attended(**args))
    assert relative_rms(found[0], turboquant_attention.reference(**args)) <= 1e-3
    assert [torch.equal(each, found[0]) for each in found] == [True] * 4


def blocks_of(blocks: int, plan, *shape):
    return plan(*shape)._replace(blocks=blocks, depth=1, prefetch=1)


def reordered(pages: CodePages) -> CodePages:
    """Return the same pages in another order."""
    order = torch.randperm(pages.pool[0], device=pages.table.device)
    place = torch.argsort(order).int()
    stores = {name: getattr(pages, name)[order] for name in ("key_codes", "key_norms", "value_codes", "value_norms")}
    inside = (pages.table >= 0) & (pages.table < pages.pool[0])
    table = torch.where(inside, place[pages.table.clamp(0, pages.pool[0] - 1).long()], pages.table)
    return replace(pages, **stores, table=table)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1000, 20000])
def test_results_on_the_gpu_do_not_depend_on_pages_splits_or_batch(length: int, monkeypatch: pytest.MonkeyPatch):
    """Agree bit for bit where equal shapes fix the splits: page order, neighbours, place in the batch; within 1e-3 where
    the number of splits differs: alone or in a batch, among neighbours of other lengths where sequences may be long, and on a
    GPU of another size."""
    torch.manual_seed(0)
    args = moved(attend([length, 77, length - 9], [1, 1, 1], (32, 8), 128, page=64, arrangement=Arrangement.PAIRS), "cuda")
    pages, found = args["pages"], attended(**args)
    assert torch.equal(attended(**args), found)
    assert torch.equal(attended(**{**args, "pages": reordered(pages)}), found)
    order = torch.tensor([2, 0, 1], device="cuda")
    moved_on = replace(pages, table=pages.table[order], lengths=pages.lengths[order])
    assert torch.equal(attended(**{**args, "q": args["q"][order], "pages": moved_on}), found[order])
    others = replace(pages, lengths=pages.lengths // torch.tensor([1, 3, 2], device="cuda", dtype=torch.int32))
    balanced = attended(**{**args, "pages": others})[0]
    exactly = length <= decode_launch.MOST_KEYS
    assert torch.equal(balanced, found[0]) if exactly else relative_rms(balanced, found[0]) < 1e-3
    for b in range(3):
        alone = replace(pages, table=pages.table[b : b + 1].contiguous(), lengths=pages.lengths[b : b + 1].contiguous())
        starts = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
        one = attended(**{**args, "q": args["q"][b : b + 1], "pages": alone, "starts": starts})
        assert relative_rms(one, found[b : b + 1]) < 1e-3
    monkeypatch.setattr(decode_launch, "multiprocessors", lambda device: 17)
    assert relative_rms(attended(**args), found) < 1e-3


@pytest.mark.usefixtures("_emulated")
def test_results_do_not_depend_on_pages_splits_or_batch(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    args = attend([300, 77], [1, 1], (4, 2), 128, arrangement=Arrangement.PAIRS)
    pages, found = args["pages"], attended(**args)
    assert torch.equal(attended(**{**args, "pages": reordered(pages)}), found)
    for b in range(2):
        alone = replace(pages, table=pages.table[b : b + 1].contiguous(), lengths=pages.lengths[b : b + 1].contiguous())
        one = {**args, "q": args["q"][b : b + 1], "pages": alone, "starts": torch.tensor([0, 1], dtype=torch.int32)}
        assert relative_rms(attended(**one), found[b : b + 1]) < 5e-4
    monkeypatch.setattr(decode_launch, "multiprocessors", lambda device: 1)
    assert relative_rms(attended(**args), found) < 5e-4


def explicit_codebook(x: torch.Tensor) -> torch.Tensor:
    """Set some tokens to zeros, a single channel, very short, very long, infinity and NaN."""
    x[3], x[5, :, 1:], x[7], x[9] = 0.0, 0.0, x[7] * 1e-37, x[9] * 1e30
    x[11, 0, 6], x[11, 1, 2] = torch.inf, torch.nan
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [(8, 4), (4, 4), (4, 2), (8, 2)])
def test_prefill_codes_equal_the_reference(bits: tuple[int, int]):
    torch.manual_seed(0)
    args = append([1300], [1111], 8, 128, dtype=torch.bfloat16, bits=bits, page=64, arrangement=Arrangement.PAIRS)
    args["k"], args["v"] = explicit_codebook(args["k"]), explicit_codebook(args["v"])
    mine = moved(args, "cuda")
    assert APPEND.explain(Append(**mine)).taken == "encode_prefill"
    append_codes.reference(**args)
    append_codes(**mine)
    _hold_codes(mine["pages"], args["pages"])


def _hold_codes(mine: CodePages, want: CodePages) -> None:
    for kind in ("key", "value"):
        assert torch.equal(getattr(mine, f"{kind}_codes").cpu(), getattr(want, f"{kind}_codes"))
        norms = getattr(mine, f"{kind}_norms").cpu(), getattr(want, f"{kind}_norms")
        torch.testing.assert_close(*norms, rtol=4e-7, atol=0, equal_nan=True)


@pytest.mark.usefixtures("_emulated")
def test_masked_tokens_may_hold_nan():
    """Check that NaN norms past the end or before a window do not reach the output."""
    args = attend([100, 20], [1, 1], (4, 2), 64, window=30, arrangement=Arrangement.PAIRS)
    found = attended(**args)
    pages, size = args["pages"], 16
    for b, length in enumerate((100, 20)):
        for t in [*range(max(0, length - 30)), *range(length, -(-length // size) * size)]:
            page = int(pages.table[b, t // size])
            pages.key_norms[page, :, t % size] = pages.value_norms[page, :, t % size] = torch.nan
    assert torch.equal(attended(**args), found)


@pytest.mark.parametrize(("width", "splits", "sinks"), [(64, 1, True), (128, 5, False), (128, 33, True), (256, 40, True)])
def test_splits_are_merged_and_unrotated(width: int, splits: int, sinks: bool):
    torch.manual_seed(0)
    tokens, heads, seed = 2, 3, 7
    rows = tokens * heads
    o, m, l = torch.randn(rows, splits, width), 3 * torch.randn(rows, splits), torch.rand(rows, splits) + 0.1  # noqa: E741
    o[1], m[1], l[1] = 0.0, -1e29, 0.0  # an empty split
    sink = torch.randn(heads) if sinks else None
    logits = torch.full((rows, 1), -math.inf) if sink is None else sink.repeat(tokens)[:, None] / math.log(2)
    top = torch.maximum(m.amax(1, keepdim=True), logits)
    total = (torch.exp2(m - top) * l).sum(1, keepdim=True) + torch.exp2(logits - top)
    mean = (torch.exp2(m - top)[..., None] * o).sum(1) / total.clamp(min=1e-30) / math.sqrt(width)
    want = rotate.reference(mean, seed, inverse=True)
    r = torch.arange(width)
    parts = o[..., r % 8 * (width // 8) + r // 8].contiguous(), m, l
    out, padded = torch.empty(tokens, heads, width), 1 << (splits - 1).bit_length()
    sizes = MergeSizes(width, padded, min(padded, 16), 8)
    rest = rotation(width, seed).signs, out, None, heads, splits, 1 << 30
    emulate(decode_launch.finish_pairs, (rows,), Partials(*parts), sink, *rest, SIZES=sizes)
    assert relative_rms(out.view(rows, width), want) < 1e-5


@pytest.mark.parametrize(("width", "splits", "sinks"), [(64, 1, True), (128, 5, False), (128, 33, True)])
def test_splits_are_accumulated_in_order_and_unrotated(width: int, splits: int, sinks: bool):
    torch.manual_seed(0)
    tokens, heads, seed = 2, 3, 7
    rows = tokens * heads
    o, m, l = torch.randn(rows, splits, width), 3 * torch.randn(rows, splits), torch.rand(rows, splits) + 0.1  # noqa: E741
    o[1, splits // 2 :], m[1, splits // 2 :], l[1, splits // 2 :] = torch.nan, -1e30, 0.0  # the sequence is shorter
    sink = torch.randn(heads) if sinks else None
    logits = torch.full((rows,), -math.inf) if sink is None else sink.repeat(tokens) / math.log(2)
    top = torch.maximum(m.amax(1), logits)
    weights = torch.exp2(m - top[:, None])
    total = (weights * l).sum(1) + torch.exp2(logits - top)
    mean = (weights[..., None] * o.nan_to_num()).sum(1) / total.clamp(min=1e-30)[:, None] / math.sqrt(width)
    want = rotate.reference(mean, seed, inverse=True)
    r, out = torch.arange(width), torch.empty(tokens, heads, width)
    parts = Partials(o[..., r % 8 * (width // 8) + r // 8].contiguous(), m, l)
    rest = rotation(width, seed).signs, out, heads, splits
    emulate(decode_launch.finish_in_order, (rows,), parts, sink, *rest, D=width, P=64, C=decode_launch.SPLITS_AT_ONCE)
    assert relative_rms(out.view(rows, width), want) < 1e-5


@pytest.mark.parametrize(("splits", "sinks"), [(3, False), (40, True), (66, False)])
def test_unrotated_splits_are_merged(splits: int, sinks: bool):
    torch.manual_seed(0)
    tokens, heads, width = 2, 3, 256
    rows = tokens * heads
    y, m, l = torch.randn(rows, splits, width), 3 * torch.randn(rows, splits), torch.rand(rows, splits) + 0.1  # noqa: E741
    y[1, -1], m[1, -1], l[1, -1] = torch.nan, -1e30, 0.0  # an empty split
    sink = torch.randn(heads) if sinks else None
    logits = torch.full((rows, 1), -math.inf) if sink is None else sink.repeat(tokens)[:, None] / math.log(2)
    weight = torch.exp2(m)
    want = (weight[..., None] * y.nan_to_num()).sum(1) / ((weight * l).sum(1, keepdim=True) + torch.exp2(logits))
    out, padded = torch.empty(tokens, heads, width), 1 << (splits - 1).bit_length()
    sizes = {"D": width, "P": padded, "C": min(padded, 32), "N": decode_launch.ROTATED_COLUMNS}
    grid = rows, width // decode_launch.ROTATED_COLUMNS
    emulate(decode_launch.finish_rotated, grid, Partials(y, m, l), sink, out, heads, splits, **sizes)
    assert relative_rms(out.view(rows, width), want) < 1e-5
