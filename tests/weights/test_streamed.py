"""Experts that are read as they are chosen: the same bits as those in memory, whatever is held; faults on the way."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from auraflux.errors import ExpertError, FormatError, SettingsError
from auraflux.ops import Experts, exact, expert_mlp
from auraflux.weights.expert_files import ExpertFiles
from auraflux.weights.expert_settings import ExpertSettings, parse_nbytes, share_out
from auraflux.weights.expert_store import ExpertStore
from auraflux.weights.streamed import Streamed
from tests.weights.packed import COUNT, HIDDEN, INNER, write_experts

K = 3


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[ExpertFiles, list[Experts]]:
    torch.manual_seed(0)
    return write_experts(tmp_path_factory.mktemp("packed"))


def stride(files: ExpertFiles) -> int:
    return sum(file.stride for file in files.files)


def store(files: ExpertFiles, slots: int, **options: Any) -> ExpertStore:
    return ExpertStore(files, share_out(files, K, slots * stride(files), "direct"), ExpertSettings(**options))


def layers(made: ExpertStore) -> list[Any]:
    return [made.layer(file.module, COUNT, HIDDEN, INNER, {}, None) for file in made.files.files]


def routed(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(COUNT, generator=generator)[:K] for _ in range(tokens)]).int()
    weights = torch.rand(tokens, K, generator=generator).softmax(-1)
    return torch.randn(tokens, HIDDEN, generator=generator), ids, weights


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize("slots", [K, COUNT // 2, COUNT])
def test_the_same_bits_as_in_memory(packed: Any, slots: int, overlapped: bool, is_exact: bool):
    files, resident = packed
    made = layers(store(files, slots, hits_first=overlapped, ahead=overlapped))
    with exact(is_exact):
        for step, tokens in enumerate((1, 1, 40, 1, 5, 600, 1)):
            x, ids, weights = routed(tokens, step)
            for layer, held in zip(made, resident, strict=True):
                layer.fetch(ids)
                assert torch.equal(layer(x, ids, weights), expert_mlp(x, ids, weights, held))


def test_mapped_experts_give_the_same_bits(packed: Any):
    files, resident = packed
    made = ExpertStore(files, share_out(files, K, 2 * files.nbytes))
    x, ids, weights = routed(9)
    assert made.share.mapped
    assert torch.equal(layers(made)[0](x, ids, weights), expert_mlp(x, ids, weights, resident[0]))


def test_each_expert_is_read_once_for_a_prompt(packed: Any):
    files, _ = packed
    made = store(files, K + 1)
    x, ids, weights = routed(64)
    layers(made)[0](x, ids, weights)
    traffic = made.traffic()
    assert (traffic.total.hits, traffic.total.misses) == (0, COUNT)
    assert traffic.total.nbytes == COUNT * files.files[0].stride
    assert traffic.layers[files.files[0].module].nbytes == traffic.total.nbytes


def test_what_was_asked_for_most_is_held(packed: Any):
    files, _ = packed
    made = store(files, 2 * K)
    layer = layers(made)[0]
    x, _, weights = routed(1)

    def ask(*experts: int) -> tuple[int, int]:
        before = made.traffic().total
        layer(x, torch.tensor([experts], dtype=torch.int32), weights)
        found = made.traffic().total - before
        return found.hits, found.misses

    assert ask(0, 1, 2) == (0, 3)
    assert ask(3, 4, 5) == (0, 3)
    assert ask(2, 1, 0) == (3, 0)
    assert ask(6, 7, 8) == (0, 3)
    assert ask(0, 1, 2) == (3, 0)
    assert ask(3, 0, 1) == (2, 1)


def test_what_is_expected_is_read_ahead(packed: Any):
    files, resident = packed
    made = store(files, 2 * K)
    layer = layers(made)[0]
    x, ids, weights = routed(1)
    layer.expect([*ids[0].tolist(), 11])
    assert torch.equal(layer(x, ids, weights), expert_mlp(x, ids, weights, resident[0]))
    total = made.traffic().total
    assert (total.ahead, total.misses) == (K, 0)


def test_after_a_prompt_the_next_layer_gets_its_last_set_back(packed: Any):
    files, _ = packed
    made = store(files, 2 * K)
    first, second = layers(made)
    for tokens in (64, 64):
        for layer in (first, second):
            layer(*routed(tokens, seed=4))
    likely = second._last
    first(*routed(1, seed=4))
    assert all(second.bank.get(expert) is not None for expert in likely)


def test_what_is_read_ahead_may_take_all_slots(packed: Any):
    files, resident = packed
    layer = layers(store(files, K))[0]
    for seed in range(40):
        x, ids, weights = routed(1, seed)
        layer.expect(range(seed % COUNT, COUNT))
        assert torch.equal(layer(x, ids, weights), expert_mlp(x, ids, weights, resident[0]))


def copy_of(packed: Any, folder: Path) -> ExpertFiles:
    from shutil import copytree

    from auraflux.weights.expert_files import open_experts

    copytree(packed[0].folder.parent, folder / "copy")
    return open_experts(folder / "copy")


def test_a_flipped_byte_is_found_and_the_rest_goes_on(packed: Any, tmp_path: Path):
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
        with pytest.raises(ExpertError, match=r"expert 4 of model\.layers\.0\.mlp .*layer_000\.bin holds other bytes"):
            made(x, torch.tensor([[3, 4, 5]], dtype=torch.int32), weights)
    good = torch.tensor([[3, 5, 6]], dtype=torch.int32)
    assert torch.equal(made(x, good, weights), expert_mlp(x, good, weights, packed[1][0]))


def test_without_checksums_a_flipped_byte_is_used(packed: Any, tmp_path: Path):
    files = copy_of(packed, tmp_path)
    with files.files[0].path.open("r+b") as raw:
        raw.seek(1000)
        raw.write(b"\x55")
    made = layers(store(files, K, verify=False))[0]
    made(routed(1)[0], torch.tensor([[0, 1, 2]], dtype=torch.int32), routed(1)[2])


def test_mapped_files_are_checked_too(packed: Any, tmp_path: Path):
    files = copy_of(packed, tmp_path)
    with files.files[1].path.open("r+b") as raw:
        raw.seek(files.files[1].offset(7))
        raw.write(b"\x00\x01\x02\x03\x04")
    made = ExpertStore(files, share_out(files, K, files.nbytes, "mapped"))
    with pytest.raises(ExpertError, match=r"expert 7 of model\.layers\.1\.mlp"):
        layers(made)


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, path.stat().st_size - 1), Path.unlink])
def test_files_that_are_not_whole_are_refused_at_once(packed: Any, tmp_path: Path, change: Any):
    files = copy_of(packed, tmp_path)
    change(files.files[1].path)
    with pytest.raises(FormatError, match=r"layer_001\.bin (with the experts of model\.layers\.1\.mlp|cannot be read)"):
        store(files, K)


def test_a_file_cut_short_while_it_is_read_is_an_error(packed: Any, tmp_path: Path):
    files = copy_of(packed, tmp_path)
    made = layers(store(files, K))[0]
    file = files.files[0]
    whole = file.path.read_bytes()
    x, _, weights = routed(1)
    os.truncate(file.path, file.offset(11) + 4096)
    ids = torch.tensor([[1, 11, 2]], dtype=torch.int32)
    with pytest.raises(ExpertError, match=r"expert 11 of model\.layers\.0\.mlp cannot be read: .* ends before it does"):
        made(x, ids, weights)
    file.path.write_bytes(whole)
    assert torch.equal(made(x, ids, weights), expert_mlp(x, ids, weights, packed[1][0]))


def test_an_error_of_the_system_names_the_expert_and_can_pass(packed: Any, monkeypatch: pytest.MonkeyPatch):
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


def test_a_file_system_without_direct_reads_is_said_to_be_one(packed: Any, monkeypatch: pytest.MonkeyPatch):
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
    assert any("past the page cache" in note for note in made.notes)


def test_a_budget_too_small_names_the_least(packed: Any):
    files, _ = packed
    least = K * stride(files)
    with pytest.raises(
        SettingsError, match=rf"a layer gets 2 of 12, and a token uses 3. The least that works is {least} bytes"
    ):
        share_out(files, K, least - 1)
    assert share_out(files, K, least).slots == K


def test_everything_is_mapped_where_it_fits_well(packed: Any):
    files, _ = packed
    assert not share_out(files, K, files.nbytes).mapped
    assert share_out(files, K, files.nbytes).slots == COUNT
    assert share_out(files, K, files.nbytes * 4 // 3 + 1).mapped
    assert not share_out(files, K, files.nbytes * 2, "direct").mapped
    assert share_out(files, K, 0, "mapped").mapped
    with pytest.raises(SettingsError, match="not a way to read experts"):
        ExpertSettings(io="fast")


def test_rows_packed_for_another_processor_are_refused(tmp_path: Path):
    files, _ = write_experts(tmp_path, layers=1, lanes=2)
    with pytest.raises(FormatError, match="was packed with 2 rows side by side"):
        store(files, K)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4GB", 4 * 10**9), ("512MiB", 512 << 20), ("1.5g", 15 * 10**8), ("100", 100), (7, 7), ("2 kB", 2000)]
)
def test_sizes(text: str | int, nbytes: int):
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "4XB", "-1GB", "4 G B"])
def test_sizes_that_are_none(text: str):
    with pytest.raises(SettingsError, match="is not a size"):
        parse_nbytes(text)


def test_rows_in_order_give_the_same_bits(tmp_path: Path):
    torch.manual_seed(1)
    files, resident = write_experts(tmp_path, layers=1, lanes=1)
    x, ids, weights = routed(40)
    made = layers(store(files, K))[0]
    assert isinstance(made, Streamed)
    assert torch.equal(made(x, ids, weights), expert_mlp(x, ids, weights, resident[0]))
