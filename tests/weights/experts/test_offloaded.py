"""Offloaded experts: bitwise equal to resident ones whatever is cached; read faults."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from auraflux.errors import ExpertError, FormatError, SettingsError
from auraflux.ops import Experts, exact, expert_mlp
from auraflux.weights.experts.offloaded import OffloadedExperts
from auraflux.weights.experts.packed_files import ExpertFiles
from auraflux.weights.experts.settings import ExpertSettings, parse_nbytes, plan_expert_cache
from auraflux.weights.experts.store import ExpertStore
from tests.weights.experts.packed import COUNT, HIDDEN, INNER, write_experts

K = 3


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[ExpertFiles, list[Experts]]:
    torch.manual_seed(0)
    return write_experts(tmp_path_factory.mktemp("packed"))


def stride(files: ExpertFiles) -> int:
    return sum(file.stride for file in files.files)


def store(files: ExpertFiles, slots: int, **options: Any) -> ExpertStore:
    return ExpertStore(files, plan_expert_cache(files, K, slots * stride(files), "direct"), ExpertSettings(**options))


def layers(made: ExpertStore) -> list[Any]:
    return [made.layer(file.module, COUNT, HIDDEN, INNER, {}, None) for file in made.files.files]


def routed(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(COUNT, generator=generator)[:K] for _ in range(tokens)]).int()
    weights = torch.rand(tokens, K, generator=generator).softmax(-1)
    return torch.randn(tokens, HIDDEN, generator=generator), ids, weights


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("slots", [K, COUNT // 2, COUNT])
def test_offloaded_experts_are_bitwise_equal_to_resident_ones(packed: Any, slots: int, overlap: bool, is_exact: bool):
    files, resident = packed
    made = layers(store(files, slots, hits_first=overlap, ahead=overlap))
    with exact(is_exact):
        for step, tokens in enumerate((1, 1, 40, 1, 5, 600, 1)):
            x, ids, weights = routed(tokens, step)
            for layer, experts in zip(made, resident, strict=True):
                layer.fetch(ids)
                assert torch.equal(layer(x, ids, weights), expert_mlp(x, ids, weights, experts))


def test_mapped_experts_are_bitwise_equal_to_resident_ones(packed: Any):
    files, resident = packed
    made = ExpertStore(files, plan_expert_cache(files, K, 2 * files.nbytes))
    x, ids, weights = routed(9)
    assert made.plan.mapped
    assert torch.equal(layers(made)[0](x, ids, weights), expert_mlp(x, ids, weights, resident[0]))


def test_each_expert_is_read_once_for_a_prompt(packed: Any):
    files, _ = packed
    made = store(files, K + 1)
    x, ids, weights = routed(64)
    layers(made)[0](x, ids, weights)
    stats = made.cache_stats()
    assert (stats.total.hits, stats.total.misses) == (0, COUNT)
    assert stats.total.nbytes == COUNT * files.files[0].stride
    assert stats.layers[files.files[0].module].nbytes == stats.total.nbytes


def test_the_most_frequently_used_experts_stay_cached(packed: Any):
    files, _ = packed
    made = store(files, 2 * K)
    layer = layers(made)[0]
    x, _, weights = routed(1)

    def hits_and_misses(*experts: int) -> tuple[int, int]:
        before = made.cache_stats().total
        layer(x, torch.tensor([experts], dtype=torch.int32), weights)
        found = made.cache_stats().total - before
        return found.hits, found.misses

    assert hits_and_misses(0, 1, 2) == (0, 3)
    assert hits_and_misses(3, 4, 5) == (0, 3)
    assert hits_and_misses(2, 1, 0) == (3, 0)
    assert hits_and_misses(6, 7, 8) == (0, 3)
    assert hits_and_misses(0, 1, 2) == (3, 0)
    assert hits_and_misses(3, 0, 1) == (2, 1)


def test_prefetched_experts_are_no_misses(packed: Any):
    files, resident = packed
    made = store(files, 2 * K)
    layer = layers(made)[0]
    x, ids, weights = routed(1)
    layer.prefetch([*ids[0].tolist(), 11])
    assert torch.equal(layer(x, ids, weights), expert_mlp(x, ids, weights, resident[0]))
    total = made.cache_stats().total
    assert (total.prefetched, total.misses) == (K, 0)


def test_the_last_experts_of_the_next_layer_are_prefetched_after_a_prompt(packed: Any):
    files, _ = packed
    made = store(files, 2 * K)
    first, second = layers(made)
    for tokens in (64, 64):
        for layer in (first, second):
            layer(*routed(tokens, seed=4))
    last = second._last_experts
    first(*routed(1, seed=4))
    assert all(second.cache.get(expert) is not None for expert in last)


def test_prefetches_may_occupy_all_slots(packed: Any):
    files, resident = packed
    layer = layers(store(files, K))[0]
    for seed in range(40):
        x, ids, weights = routed(1, seed)
        layer.prefetch(range(seed % COUNT, COUNT))
        assert torch.equal(layer(x, ids, weights), expert_mlp(x, ids, weights, resident[0]))


def copy_of(packed: Any, folder: Path) -> ExpertFiles:
    from shutil import copytree

    from auraflux.weights.experts.packed_files import open_experts

    copytree(packed[0].folder.parent, folder / "copy")
    return open_experts(folder / "copy")


def test_a_corrupt_expert_raises_and_others_still_run(packed: Any, tmp_path: Path):
    files = copy_of(packed, tmp_path)
    made = layers(store(files, K))[0]
    file = files.files[0]
    with file.path.open("r+b") as raw:
        raw.seek(file.offset(4) + 1000)
        byte = raw.read(1)
        raw.seek(file.offset(4) + 1000)
        raw.write(bytes([byte[0] ^ 1]))
    x, _, weights = routed(1)
    for _ in range(2):
        with pytest.raises(
            ExpertError, match=r"expert 4 of model\.layers\.0\.mlp .*layer_000\.bin does not match its checksum"
        ):
            made(x, torch.tensor([[3, 4, 5]], dtype=torch.int32), weights)
    good = torch.tensor([[3, 5, 6]], dtype=torch.int32)
    assert torch.equal(made(x, good, weights), expert_mlp(x, good, weights, packed[1][0]))


def test_without_verify_a_corrupt_expert_runs(packed: Any, tmp_path: Path):
    files = copy_of(packed, tmp_path)
    with files.files[0].path.open("r+b") as raw:
        raw.seek(1000)
        raw.write(b"\x55")
    made = layers(store(files, K, verify=False))[0]
    made(routed(1)[0], torch.tensor([[0, 1, 2]], dtype=torch.int32), routed(1)[2])


def test_mapped_files_are_verified(packed: Any, tmp_path: Path):
    files = copy_of(packed, tmp_path)
    with files.files[1].path.open("r+b") as raw:
        raw.seek(files.files[1].offset(7))
        raw.write(b"\x00\x01\x02\x03\x04")
    made = ExpertStore(files, plan_expert_cache(files, K, files.nbytes, "mapped"))
    with pytest.raises(ExpertError, match=r"expert 7 of model\.layers\.1\.mlp"):
        layers(made)


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, path.stat().st_size - 1), Path.unlink])
def test_incomplete_files_are_refused_at_load(packed: Any, tmp_path: Path, change: Any):
    files = copy_of(packed, tmp_path)
    change(files.files[1].path)
    with pytest.raises(FormatError, match=r"layer_001\.bin (with the experts of model\.layers\.1\.mlp|cannot be read)"):
        store(files, K)


def test_a_file_truncated_in_use_raises(packed: Any, tmp_path: Path):
    files = copy_of(packed, tmp_path)
    made = layers(store(files, K))[0]
    file = files.files[0]
    data = file.path.read_bytes()
    x, _, weights = routed(1)
    os.truncate(file.path, file.offset(11) + 4096)
    ids = torch.tensor([[1, 11, 2]], dtype=torch.int32)
    with pytest.raises(ExpertError, match=r"expert 11 of model\.layers\.0\.mlp cannot be read: .* is truncated"):
        made(x, ids, weights)
    file.path.write_bytes(data)
    assert torch.equal(made(x, ids, weights), expert_mlp(x, ids, weights, packed[1][0]))


def test_a_read_error_names_the_expert_and_may_be_transient(packed: Any, monkeypatch: pytest.MonkeyPatch):
    files, resident = packed
    made = layers(store(files, K))[1]
    x, _, weights = routed(1)
    ids = torch.tensor([[7, 8, 9]], dtype=torch.int32)
    real, broken = os.preadv, files.files[1].offset(8)

    def preadv(handle: int, buffers: Any, offset: int, *rest: int) -> int:
        if offset == broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(handle, buffers, offset, *rest)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(ExpertError, match=r"expert 8 of model\.layers\.1\.mlp .*layer_001\.bin gives an error \(Input/output"):
        made(x, ids, weights)
    monkeypatch.setattr(os, "preadv", real)
    assert torch.equal(made(x, ids, weights), expert_mlp(x, ids, weights, resident[1]))


def test_a_file_system_without_o_direct_is_noted(packed: Any, monkeypatch: pytest.MonkeyPatch):
    files, resident = packed
    real = os.open

    def refuse(path: Any, flags: int, *rest: int) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    made = store(files, K)
    x, ids, weights = routed(5)
    assert torch.equal(layers(made)[0](x, ids, weights), expert_mlp(x, ids, weights, resident[0]))
    assert any("does not support O_DIRECT" in note for note in made.notes)


def test_a_budget_that_is_too_small_names_the_minimum(packed: Any):
    files, _ = packed
    least = K * stride(files)
    with pytest.raises(SettingsError, match=rf"a layer gets 2 of 12, and a token uses 3. The minimum is {least} bytes"):
        plan_expert_cache(files, K, least - 1)
    assert plan_expert_cache(files, K, least).slots == K


def test_files_are_mapped_if_all_experts_fit(packed: Any):
    files, _ = packed
    assert not plan_expert_cache(files, K, files.nbytes).mapped
    assert plan_expert_cache(files, K, files.nbytes).slots == COUNT
    assert plan_expert_cache(files, K, files.nbytes * 4 // 3 + 1).mapped
    assert not plan_expert_cache(files, K, files.nbytes * 2, "direct").mapped
    assert plan_expert_cache(files, K, 0, "mapped").mapped
    with pytest.raises(SettingsError, match="expert_io='fast' is unknown"):
        ExpertSettings(io="fast")


def test_experts_packed_for_another_isa_are_refused(tmp_path: Path):
    files, _ = write_experts(tmp_path, layers=1, lanes=2)
    with pytest.raises(FormatError, match="was packed with 2 interleaved rows"):
        store(files, K)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4GB", 4 * 10**9), ("512MiB", 512 << 20), ("1.5g", 15 * 10**8), ("100", 100), (7, 7), ("2 kB", 2000)]
)
def test_sizes_are_parsed(text: str | int, nbytes: int):
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "4XB", "-1GB", "4 G B"])
def test_invalid_sizes_are_refused(text: str):
    with pytest.raises(SettingsError, match="is not a size"):
        parse_nbytes(text)


def test_rows_without_interleaving_are_bitwise_equal(tmp_path: Path):
    torch.manual_seed(1)
    files, resident = write_experts(tmp_path, layers=1, lanes=1)
    x, ids, weights = routed(40)
    made = layers(store(files, K))[0]
    assert isinstance(made, OffloadedExperts)
    assert torch.equal(made(x, ids, weights), expert_mlp(x, ids, weights, resident[0]))
