"""Division of a GPU's memory, on sizes of Qwen3-30B-A3B at 4 bits."""

import re

import pytest

from auraflux.errors import SettingsError
from auraflux.loading.gpu_division import SMALL_GPU_CHUNK, GpuDivision, GpuRequest, divide
from auraflux.loading.gpu_sizes import ExpertSizes, GpuSizes
from auraflux.weights.experts.settings import parse_nbytes

GB = 10**9
EACH = 2_654_208
EXPERTS = ExpertSizes(layers=48, count=128, k=8, inner=768, nbytes=EACH, total=48 * 128 * EACH)
SIZES = GpuSizes(weights=10**9, hidden=2048, experts=EXPERTS)
CHUNK, MIN_CACHE = 8192, GB // 4


def cache_nbytes(free: int, chunk: int) -> int:
    """Return a quarter of the free memory, and a constant."""
    return max(0, free) // 4 + 10**7


def division(total: int, sizes: GpuSizes = SIZES, capped: bool = True, min_cache: int = MIN_CACHE, **options) -> GpuDivision:
    return divide(sizes, GpuRequest(total, capped, CHUNK, **options), cache_nbytes, min_cache)


def needed(err: pytest.ExceptionInfo[SettingsError], pattern: str) -> int:
    """Return the number of bytes that an error asks for."""
    found = re.search(pattern + r" ([\d.]+ [GM]B)", str(err.value))
    assert found is not None
    return parse_nbytes(found[1])


def test_workspace_of_a_small_gpu():
    assert SIZES.workspace(4096) == 4096 * (int(8 * (2.2 * 2048 + 2 * 768)) + 32 * 2048) + 4 * 10**8
    # the residual stream of 16,384 tokens
    assert SIZES.streaming_workspace(4096) - SIZES.workspace(4096) == 12288 * 2048 * 2
    assert SIZES.streaming_workspace(16384) == SIZES.workspace(16384)


def test_everything_is_resident_where_it_fits():
    found = division(40 * GB)
    assert found.slots is None
    assert found.weights == SIZES.total
    assert found.chunk == CHUNK
    assert found.cache == found.free == 40 * GB - SIZES.total - SIZES.workspace(CHUNK)


@pytest.mark.parametrize("total", [6 * GB, 8 * GB, 12 * GB, 16 * GB])
def test_experts_get_what_the_cache_leaves(total: int):
    found = division(total)
    assert found.slots is not None
    assert found.weights + found.workspace + found.cache + found.slots <= total
    assert found.weights + found.workspace + found.cache + found.slots >= min(total, SIZES.total) - EACH
    assert found.slots >= EXPERTS.min_nbytes
    assert found.chunk == SMALL_GPU_CHUNK
    assert found.workspace == SIZES.streaming_workspace(SMALL_GPU_CHUNK)


def test_larger_gpus_have_the_usual_chunk():
    assert division(17 * GB).slots is not None
    assert division(17 * GB).chunk == CHUNK
    assert division(8 * GB, chunk_given=True).chunk == CHUNK


def test_shorter_chunks_before_experts_leave_the_gpu():
    sizes = GpuSizes(weights=10 * GB, hidden=2048, experts=ExpertSizes(2, 8, 2, 768, 10**8, 16 * 10**8))
    total = sizes.total + sizes.workspace(SMALL_GPU_CHUNK) + MIN_CACHE
    found = division(total, sizes)
    assert found.slots is None
    assert found.chunk == SMALL_GPU_CHUNK


def test_slots_as_requested():
    found = division(40 * GB, slots=4 * GB)
    assert found.slots == 4 * GB
    assert found.for_cache == found.free - 4 * GB
    assert division(40 * GB, slots=EXPERTS.total).slots is None


def test_slots_below_a_token_are_refused_with_the_least():
    with pytest.raises(SettingsError, match=r"uses 8 experts of 2\.66 MB in each of 48 layers") as err:
        division(8 * GB, slots=10**8)
    least = needed(err, "--expert-memory")
    assert EXPERTS.min_nbytes <= least <= EXPERTS.min_nbytes + 10**7
    assert division(8 * GB, slots=least).slots == least


@pytest.mark.parametrize("options", [{}, {"slots": 2 * GB}, {"other_models": GB}])
def test_least_that_is_named_works(options: dict):
    with pytest.raises(SettingsError, match="is too little") as err:
        division(2 * GB, **options)
    least = needed(err, "at least")
    assert division(least, **options).slots is not None
    with pytest.raises(SettingsError, match="is too little"):
        division(least - GB // 2, **options)


def test_model_without_experts():
    sizes = GpuSizes(weights=4 * GB, hidden=4096)
    assert division(8 * GB, sizes).slots is None
    with pytest.raises(SettingsError, match="is too little") as err:
        division(4 * GB, sizes)
    assert division(needed(err, "at least"), sizes).slots is None
    # without a cap the GPU decides
    assert division(4 * GB, sizes, capped=False).slots is None
    with pytest.raises(SettingsError, match="is too little"):
        division(8 * GB, sizes, capped=False, min_cache=9 * GB)
