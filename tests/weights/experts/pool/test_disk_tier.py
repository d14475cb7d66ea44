"""`DiskTier`: experts that native threads read from disk into a cache in host memory, for requests of the host."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from auraflux.errors import ExpertError, FormatError, SettingsError
from auraflux.ops import exact
from auraflux.ops.moe.cpu import read_setup
from auraflux.ops.simd.crc32 import advance_table, step_table
from auraflux.weights.experts.packed_files import ExpertFiles
from auraflux.weights.experts.pool.disk_tier import DiskTier
from auraflux.weights.experts.resident import ResidentExperts
from auraflux.weights.experts.settings import ExpertSettings, plan_expert_cache
from auraflux.weights.experts.store import ExpertStore
from tests.weights.experts.packed import COUNT, write_experts

LAYERS, K = 2, 3
CPU = torch.device("cpu")


@pytest.fixture
def files(tmp_path: Path) -> ExpertFiles:
    torch.manual_seed(0)
    return write_experts(tmp_path, LAYERS, lanes=1)[0]


def tier_of(files: ExpertFiles, slots: int, **options) -> DiskTier:
    tier = DiskTier(slots * files.files[0].stride, CPU, **options)
    for file in files.files:
        tier.add_layer(file, file.like, {})
    tier.start(K)
    return tier


def stored(files: ExpertFiles, layer: int, expert: int) -> torch.Tensor:
    file = files.files[layer]
    rows = torch.from_numpy(np.fromfile(file.path, np.uint8)).view(file.count, file.stride)
    return rows[expert]


def read(tier: DiskTier, layer: int, experts: list[int], streamed: bool = False) -> dict[int, torch.Tensor]:
    return {expert: row.clone() for expert, row in tier.read(layer, experts, streamed)}


@pytest.mark.parametrize("slots", [K, 7, LAYERS * COUNT])
def test_experts_arrive_as_they_are_in_the_file(files: ExpertFiles, slots: int):
    tier = tier_of(files, slots)
    random = np.random.default_rng(0)
    for _ in range(60):
        layer, experts = int(random.integers(LAYERS)), random.permutation(COUNT)[:K].tolist()
        found = read(tier, layer, experts)
        assert sorted(found) == sorted(experts)
        for expert, row in found.items():
            assert torch.equal(row[: files.files[layer].stride], stored(files, layer, expert))
    stats = tier.cache_stats()
    assert stats.hits + stats.misses == 60 * K
    assert stats.nbytes == stats.misses * files.files[0].stride
    if slots == LAYERS * COUNT:
        assert stats.misses == LAYERS * COUNT
    tier.check()
    tier.stop()


def test_experts_of_several_chunks(tmp_path: Path):
    torch.manual_seed(1)
    files = write_experts(tmp_path, 1, 4, 1024, 1024, lanes=1, distinct=2)[0]
    assert files.files[0].nbytes % read_setup.CHUNK_NBYTES
    tier = tier_of(files, 3)
    for experts in ([0, 1, 2], [3, 1], [2, 0, 3]):
        for expert, row in read(tier, 0, experts).items():
            assert torch.equal(row, stored(files, 0, expert))
    tier.check()


def test_experts_of_a_request_are_kept_until_the_next(files: ExpertFiles):
    tier = tier_of(files, K)
    found = dict(tier.read(0, [0, 1, 2]))
    for expert, row in found.items():
        assert torch.equal(row, stored(files, 0, expert))
    assert len(read(tier, 1, [0, 1, 2])) == K


def test_the_least_used_expert_is_evicted(files: ExpertFiles):
    tier = tier_of(files, 4)
    for _ in range(3):
        read(tier, 0, [0, 1])
    read(tier, 0, [2, 3])
    read(tier, 1, [5])
    before = tier.cache_stats().hits
    read(tier, 0, [0, 1])
    assert tier.cache_stats().hits == before + 2


def test_a_stream_evicts_its_own_experts_first(files: ExpertFiles):
    tier = tier_of(files, 6)
    read(tier, 0, [0, 1, 2])
    for layer in range(LAYERS):
        for first in range(0, COUNT, 3):
            read(tier, layer, [first, first + 1, first + 2], streamed=True)
    before = tier.cache_stats().hits
    read(tier, 0, [0, 1, 2])
    assert tier.cache_stats().hits == before + 3


def test_biases_follow_the_bytes_of_the_file(tmp_path: Path):
    files = write_experts(tmp_path, 1, lanes=1)[0]
    file, biases = files.files[0], {"up_bias": torch.randn(COUNT, 128), "down_bias": torch.randn(COUNT, 64)}
    tier = DiskTier(4 * (file.stride + 4096), CPU)
    tier.add_layer(file, {**file.like, **{name: each[0] for name, each in biases.items()}}, biases)
    tier.start(K)
    for expert, row in read(tier, 0, [7, 11, 2]).items():
        assert torch.equal(row[: file.nbytes], stored(files, 0, expert)[: file.nbytes])
        added = row[file.nbytes :][: 4 * 192].view(torch.float32)
        assert torch.equal(added, torch.cat([biases["up_bias"][expert], biases["down_bias"][expert]]))


def overwrite(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff\x00\xff")


def fails(tier: DiskTier, layer: int, experts: list[int], match: str) -> None:
    """Hold a read to its error, and the next one of other experts to none."""
    found = read(tier, layer, experts)
    assert len(found) < len(experts)
    with pytest.raises(ExpertError, match=match):
        tier.check()
    tier.check()
    assert len(read(tier, 1 - layer, [0, 1, 2])) == 3
    tier.check()


def test_a_corrupt_expert_is_refused(files: ExpertFiles):
    path = files.files[0].path
    overwrite(path, files.files[0].offset(2) + 5)
    tier = tier_of(files, 6)
    what = rf"expert 2 of model.layers.0.mlp cannot be read: {path} does not match its checksum"
    fails(tier, 0, [1, 2, 3], what)
    fails(tier, 0, [2], what)
    assert read(tier, 0, [3]).keys() == {3}


def test_a_changed_file_is_verified_again(files: ExpertFiles):
    tier = tier_of(files, K)
    read(tier, 0, [4, 5, 6])
    read(tier, 1, [4, 5, 6])
    overwrite(files.files[0].path, files.files[0].offset(4))
    fails(tier, 0, [4], "expert 4 of model.layers.0.mlp")
    unverified = tier_of(files, K, verify=False)
    assert len(read(unverified, 0, [4])) == 1


def test_a_truncated_file_is_named(files: ExpertFiles):
    tier = tier_of(files, 6)
    os.truncate(files.files[1].path, files.files[1].offset(5) + 100)
    fails(tier, 1, [5, 1], r"expert 5 of model.layers.1.mlp cannot be read: .*layer_001.bin is truncated")
    fails(tier, 1, [9], "is truncated")
    with pytest.raises(FormatError, match="not the expected"):
        tier_of(files, 6)


def test_a_failed_read_gives_the_reason_of_the_system(files: ExpertFiles):
    tier = tier_of(files, 6)
    handle = tier._layers[0].handle
    other, again = os.open(os.devnull, os.O_WRONLY), os.dup(handle)
    os.dup2(other, handle)
    fails(tier, 0, [8], r"expert 8 of model.layers.0.mlp cannot be read: .* gives an error \(Bad file descriptor\)")
    os.dup2(again, handle)
    assert read(tier, 0, [8]).keys() == {8}
    tier.stop()
    os.close(other)
    os.close(again)


def test_a_disk_that_does_not_answer_is_given_up(files: ExpertFiles):
    tier = tier_of(files, 6, bandwidth=2 * files.files[0].stride)
    tier.patience_s = 0.01
    found = read(tier, 0, [1, 2])
    assert len(found) < 2
    with pytest.raises(ExpertError, match=r"an expert of model.layers.0.mlp cannot be read: .* no answer for 0 seconds"):
        tier.check()
    tier.patience_s = 60.0
    assert len(read(tier, 1, [1, 2])) == 2
    tier.check()


def test_wrong_requests_are_refused(files: ExpertFiles):
    tier = tier_of(files, K)
    for layer, experts, match in (
        (LAYERS, [0], "a step used layer 2 of 2"),
        (0, [COUNT], "has no such expert"),
        (0, [0, 1, 2, 3], "more experts in this step than host memory has room for"),
    ):
        assert len(read(tier, layer, experts)) == len(experts) - 1
        with pytest.raises(ExpertError, match=match):
            tier.check()


def test_too_little_host_memory_is_refused_with_the_least(files: ExpertFiles):
    with pytest.raises(SettingsError, match=r"a token uses 3 experts of .* Give --expert-host-memory .* or more"):
        tier_of(files, K - 1)


def test_too_many_experts_are_refused(tmp_path: Path):
    files = write_experts(tmp_path, 1, 1025, 64, 64, lanes=1, distinct=1)[0]
    with pytest.raises(SettingsError, match="a layer has 1025 experts; below a GPU up to 1024 can be on disk"):
        tier_of(files, K)


@pytest.mark.parametrize("slots", [8, COUNT])
def test_a_store_with_a_pool_equals_resident_experts(tmp_path: Path, slots: int):
    """As ranks on GPUs use it, here with the reference kernels on a CPU; also with a slot for every expert."""
    files, resident = write_experts(tmp_path, LAYERS, lanes=1)
    each = sum(file.stride for file in files.files)
    store = ExpertStore(files, plan_expert_cache(files, K, slots * each, "direct"))
    store.pool = store._make_pool(6 * each, ExpertSettings())
    layers = [store.layer(file.module, COUNT, 64, 128, {}, None) for file in files.files]
    store.finish()
    assert any("are on disk" in note for note in store.notes)
    for tokens in (1, 2, 3, 1):
        if tokens == 3:
            # for the KV cache
            before = len(store.pool.pool.memory)
            assert store.pool.give_up(each) >= each
            assert len(store.pool.pool.memory) < before
        ids = torch.stack([torch.randperm(COUNT)[:K] for _ in range(tokens)]).int()
        ids[-1, -1] = -1
        x = torch.randn(tokens, 64)
        for mine, theirs in zip(layers, resident, strict=True):
            mine.fetch(ids)
            with exact(True):
                found, expected = (each.partial_sum(x, ids, torch.ones(tokens, K)) for each in (mine, ResidentExperts(theirs)))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert store.cache_stats().total.from_disk > 0


def test_the_crc_of_pieces():
    import zlib

    data = np.random.default_rng(0).bytes(5000)
    table = advance_table(2000)
    crc = zlib.crc32(data[:3000])
    advanced = 0
    for place in range(4):
        advanced ^= int(table[place, crc >> 8 * place & 255])
    assert advanced ^ zlib.crc32(data[3000:]) == zlib.crc32(data)
    assert step_table()[0, 1] == 0x77073096
