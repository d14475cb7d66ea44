"""Synthetic experts, and the contenders that read them."""

import shutil
import zlib
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from auraflux.bench.offload import contenders
from auraflux.bench.offload.contenders import MODES, TRACES, MappedLayer, Mapping, Mode, RawReads, Streaming, make_trace
from auraflux.bench.offload.measure import MAPPED, Run, Runner, Sample, measure, rows, warm_up
from auraflux.bench.offload.random_experts import SHAPES, Shape, build, parse_shape
from auraflux.errors import InputError
from auraflux.weights.experts.disk_reader import DiskReader
from auraflux.weights.experts.packed_files import ExpertFiles
from auraflux.weights.experts.stats import ExpertCacheStats

SHAPE = Shape(256, 128, 8, 2)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> ExpertFiles:
    return build(tmp_path_factory.mktemp("experts"), SHAPE, 2)


def test_shapes_have_the_sizes_of_the_models():
    sizes = {name: shape.expert_nbytes for name, shape in SHAPES.items()}
    assert sizes == {"35b-a3b": 1_769_472, "397b-a17b": 7_077_888, "deepseek-v3": 24_772_608}
    assert parse_shape("256,128,8,2") == SHAPE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("35b", "'35b' is not a shape. Name one of 35b-a3b, "),
        ("1,2,3", "is not a shape"),
        ("-64,64,8,2", "is not a shape"),
        ("100,64,8,2", "widths must be multiples of 64"),
        ("64,64,8,9", "a token needs 1 to 8 experts"),
        ("64,64,8,0", "a token needs 1 to 8 experts"),
        ("0,64,8,1", "cannot be made"),
    ],
)
def test_invalid_shapes_are_refused(text: str, message: str):
    with pytest.raises(InputError, match=message):
        parse_shape(text)


def test_random_experts_are_complete_and_finite(files: ExpertFiles):
    files.check()
    for file in files.files:
        data = file.path.read_bytes()
        for expert in range(file.count):
            start = file.offset(expert)
            assert zlib.crc32(data[start : start + file.nbytes]) == file.checksum(expert)
    first, second = (np.fromfile(file.path, np.uint8).reshape(8, -1) for file in files.files)
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first[0], second[0])


def test_full_disk_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(InputError, match=r"2 layers of experts take 0\.0 GB, and the disk of .* has 0\.0 GB free"):
        build(tmp_path, SHAPE, 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", TRACES)
def test_traces_select_distinct_experts(kind: str):
    ids = make_trace(kind, SHAPES["35b-a3b"], 3, 50)
    assert (ids.shape, ids.dtype) == ((50, 3, 8), torch.int32)
    assert all(len(set(chosen.tolist())) == 8 for chosen in ids.flatten(0, 1))
    assert torch.equal(ids, make_trace(kind, SHAPES["35b-a3b"], 3, 50))
    counts = np.sort(np.bincount(ids[:, 0].flatten(), minlength=256))[::-1]
    # of 400 draws from 256 experts the eight most frequent have many under Zipf's law, few under a uniform one
    assert (counts[:8].sum() > 120) == (kind == "zipf")


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_direct_reads_match_mmap(files: ExpertFiles, mode: Mode):
    budget = files.nbytes // 2
    ids, x, weights = make_trace("uniform", SHAPE, 2, 12), torch.randn(1, 256), torch.full((1, 2), 0.5)
    ours, theirs = Streaming(files, SHAPE, budget), Mapping(files, budget)
    ours.use(mode)
    with closing(ours), closing(theirs):
        for token in ids:
            assert ours.token(x, token, weights) > 0
            assert theirs.token(x, token, weights) > 0
            for number in range(2):
                chosen = token[number : number + 1]
                assert torch.equal(ours.layers[number](x, chosen, weights), theirs.layers[number](x, chosen, weights))


def test_mmap_counts_hits_of_a_limited_cache(files: ExpertFiles):
    contender = Mapping(files, 3 * files.files[0].stride)
    x, weights = torch.randn(1, 256), torch.full((1, 2), 0.5)
    with closing(contender):
        for chosen in ([0, 1], [0, 1], [2, 3]):
            contender.token(x, torch.tensor([chosen, [7, 6]], dtype=torch.int32), weights)
    found = contender.traffic()
    # two layers evict each other's experts: one of two remains cached
    assert (found.hits, found.misses) == (3, 9)
    assert found.nbytes == 9 * files.files[0].stride


def test_mapped_pages_are_dropped(files: ExpertFiles):
    with closing(MappedLayer(files.files[0])) as layer:
        before = bytes(layer._memory[: layer.file.stride])
        layer.forget([3])
        layer.forget([])
        assert bytes(layer._memory[: layer.file.stride]) == before


def test_every_contender_runs(files: ExpertFiles, monkeypatch):
    monkeypatch.setattr(contenders, "RAW_S", 0.01)
    budget, messages = files.nbytes // 4, []
    runs = list(measure(files, SHAPE, budget, 2, ["zipf"], 3, messages.append))
    assert [run.who for run in runs] == [*(mode.name for mode in MODES), MAPPED]
    assert {len(run.samples) for run in runs} == {3}
    assert messages == ["zipf: warming up", *(f"zipf: round {number} of 3" for number in (1, 2, 3))]
    found = rows(runs)
    assert (found[-1]["who"], found[-1]["mapped_ratio"], found[-1]["raw_share"], found[-1]["stall"]) == (MAPPED, 1, None, None)
    for row in found:
        assert 0 < row["tokens_per_s"] <= row["best_tokens_per_s"]
        assert 0 <= row["hit_rate"] + row["ahead_rate"] <= 1


def test_median_round_is_reported():
    traffic = ExpertCacheStats(hits=3, misses=1, nbytes=100, stall_s=0.25)
    samples = [Sample(4, took, traffic, 400.0) for took in (1.0, 4.0, 0.5)]
    mapped = Run(MAPPED, "uniform", [Sample(4, 8.0, ExpertCacheStats(misses=4, nbytes=400))] * 3)
    ours = Run("streamed", "uniform", samples)
    row, other = rows([ours, mapped])
    assert (row["tokens_per_s"], row["best_tokens_per_s"], row["read_gb_per_s"]) == (4.0, 8.0, 1e-7)
    assert (row["raw_share"], row["best_raw_share"], row["hit_rate"], row["stall"]) == (0.25, 0.5, 0.75, 0.25)
    assert (row["mapped_ratio"], other["mapped_ratio"], other["raw_gb_per_s"]) == (8.0, 1.0, None)


def test_cache_warm_up_is_not_counted(files: ExpertFiles):
    warm = warm_up(files, SHAPE, files.nbytes // 2)
    assert warm == 6
    with closing(Streaming(files, SHAPE, files.nbytes // 2)) as contender:
        runner = Runner(contender, SHAPE, make_trace("uniform", SHAPE, 2, warm + 3))
        first, second = runner.run(warm), runner.run(3)
    lookups = [each.traffic.hits + each.traffic.misses for each in (first, second)]
    assert lookups == [warm * 4, 3 * 4]
    assert second.traffic.nbytes == second.traffic.misses * files.files[0].stride


def test_raw_disk_speed_is_measured(files: ExpertFiles):
    reader = DiskReader(verify=False)
    assert RawReads(files, reader, files.nbytes).rate(0.01) > 0
    reader.close()


def test_built_folder_can_be_opened(tmp_path: Path):
    made = build(tmp_path, SHAPE, 1)
    assert (made.count, made.hidden, made.inner, len(made.files)) == (8, 256, 128, 1)
