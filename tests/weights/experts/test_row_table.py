"""Tables that stay on disk: rows are exact, the row cache is bounded, and damaged files are refused."""

import json
import os
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant import quantize
from auraflux.weights.experts.row_table import RowTable, loaded_nbytes
from auraflux.weights.formats.folder import Folder
from auraflux.weights.formats.row_layout import RowFormat, as_bytes, parse_row_format, row_format_of, with_checksums
from auraflux.weights.loader import Weights

ROWS, WIDTH = 500, 64
NAME = "model.layers.0.ple.ple_embedding.ngram_embedding"


def table_of(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)


def folder_of(path: Path, *files: dict[str, Tensor], **config: object) -> Folder:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen4_exp_text", **config}))
    for number, tensors in enumerate(files):
        save_file(tensors, path / f"model-{number}.safetensors")
    return Folder(path)


def opened(folder: Folder, **options: int) -> RowTable:
    weights = Weights(folder, lambda name: name)
    made = weights.table(NAME, ROWS, WIDTH)
    weights.skip("other")
    weights.check_loaded()
    return RowTable(made.parts, **options) if options else made


def dense(path: Path, dtype: torch.dtype) -> tuple[Folder, Tensor]:
    table = table_of(dtype)
    return folder_of(path, {f"{NAME}.weight": table}), table.float()


def shards(path: Path, dtype: torch.dtype) -> tuple[Folder, Tensor]:
    table = table_of(dtype)
    parts = {f"{NAME}.shard_{number}.weight": part.clone() for number, part in enumerate(table.chunk(11))}
    names = [*parts]
    return folder_of(path, *({name: parts[name] for name in names[first::3]} for first in range(3))), table.float()


def codes(path: Path, dtype: torch.dtype) -> tuple[Folder, Tensor]:
    made = quantize(table_of(dtype), 4, 32)
    assert made.biases is not None
    parts = {"weight": made.packed.view(torch.uint32), "scales": made.scales, "biases": made.biases}
    files = [{f"{NAME}.{part}": tensor} for part, tensor in parts.items()]
    return folder_of(path, *files, quantization={"bits": 4, "group_size": 32}), made.dequantize(torch.float32)


def records(path: Path, dtype: torch.dtype) -> tuple[Folder, Tensor]:
    table = table_of(dtype)
    named = {
        f"{NAME}.rows_{n}.{row_format_of(part).name}": with_checksums(as_bytes(part)) for n, part in enumerate(table.split(300))
    }
    return folder_of(path, named), table.float()


def coded_records(path: Path, dtype: torch.dtype) -> tuple[Folder, Tensor]:
    made = quantize(table_of(dtype), 3, 32)
    return folder_of(path, {f"{NAME}.rows_0.{row_format_of(made).name}": with_checksums(as_bytes(made))}), made.dequantize(
        torch.float32
    )


LAYOUTS = {each.__name__: each for each in (dense, shards, codes, records, coded_records)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_exact(layout: str, dtype: torch.dtype, tmp_path: Path):
    folder, wanted = LAYOUTS[layout](tmp_path, dtype)
    table = opened(folder, cache_nbytes=40 * 256)
    assert (table.rows, table.form.width) == (ROWS, WIDTH)
    random = torch.Generator().manual_seed(1)
    for count in (1, 7, 300, 0, 64, 7):
        ids = torch.randint(0, ROWS, (count,), generator=random)
        assert torch.equal(table.fetch(ids).result(), wanted[ids])
    assert torch.equal(torch.cat([table.form.dequantize(chunk) for chunk in table.chunks(10_000)]), wanted)


def test_several_fetches_may_be_in_flight(tmp_path: Path):
    folder, wanted = shards(tmp_path, torch.bfloat16)
    table = opened(folder, cache_nbytes=20 * 128)

    def read(seed: int) -> bool:
        ids = torch.randint(0, ROWS, (50,), generator=torch.Generator().manual_seed(seed))
        return torch.equal(table.fetch(ids).result(), wanted[ids])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(60)))


def test_the_least_recently_used_rows_are_evicted(tmp_path: Path):
    folder, _ = dense(tmp_path, torch.bfloat16)
    table = opened(folder, cache_nbytes=10 * 2 * WIDTH)
    for ids, read in (
        ([1, 2, 3, 2, 1], 3),
        ([3, 2, 1], 3),
        ([*range(4, 11)], 10),
        ([1, 2, 3], 10),
        ([50], 11),
        ([4], 12),
        ([3], 12),
    ):
        table.fetch(torch.tensor(ids)).result()
        assert table.read == read, ids
        assert table.cached_nbytes <= 10 * 2 * WIDTH
    table.fetch(torch.arange(ROWS)).result()
    assert table.cached_nbytes == 10 * 2 * WIDTH


def test_rows_out_of_range_are_refused(tmp_path: Path):
    table = opened(dense(tmp_path, torch.float32)[0])
    for row in (-1, ROWS):
        with pytest.raises(FormatError, match=f"of a table of {ROWS}"):
            table.fetch(torch.tensor([0, row]))


@pytest.mark.parametrize("change", ["overwritten", "truncated"])
def test_a_file_that_changes_in_use_is_refused(change: str, tmp_path: Path):
    folder, wanted = dense(tmp_path, torch.float32)
    table = opened(folder)
    first = torch.tensor([3, 4])
    assert torch.equal(table.fetch(first).result(), wanted[first])
    path = tmp_path / "model-0.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 8)
        file.write(b"\0" * 8) if change == "overwritten" else file.truncate()
    os.utime(path, ns=(0, 12345))
    with pytest.raises(FormatError, match=f"{path} was changed while the model was in use; load it again"):
        table.fetch(torch.tensor([ROWS - 1, 5])).result()


def test_a_replaced_file_is_still_read_from_its_old_inode(tmp_path: Path):
    folder, wanted = dense(tmp_path, torch.float32)
    table = opened(folder)
    (tmp_path / "other").write_bytes(bytes((tmp_path / "model-0.safetensors").stat().st_size))
    os.replace(tmp_path / "other", tmp_path / "model-0.safetensors")
    assert torch.equal(table.fetch(torch.tensor([9])).result(), wanted[9:10])


def test_a_corrupt_row_is_found_when_it_is_read(tmp_path: Path):
    _, wanted = records(tmp_path, torch.bfloat16)
    nbytes, path = 2 * WIDTH + 4, tmp_path / "model-0.safetensors"
    with path.open("r+b") as file:
        # the second part is the last 200 rows
        file.seek(path.stat().st_size - 100 * nbytes + 5)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))
    table = opened(Folder(tmp_path))
    assert torch.equal(table.fetch(torch.tensor([399, 401])).result(), wanted[[399, 401]])
    with pytest.raises(FormatError, match=r"row 100 of .*rows_1.bfloat16 is corrupt: .* \(CRC-32 [0-9a-f]{8}, expected"):
        table.fetch(torch.tensor([400])).result()
    with pytest.raises(FormatError, match="row 100 of"):
        list(table.chunks(1 << 20))


def test_files_with_only_tables_are_not_mapped(tmp_path: Path):
    table = table_of()
    folder = folder_of(tmp_path, {f"{NAME}.weight": table}, {"other": torch.zeros(3)})
    assert set(folder.sizes()) == {f"{NAME}.weight", "other"}
    made = opened(folder)
    made.fetch(torch.tensor([1])).result()
    mapped = Path("/proc/self/maps").read_text()
    assert str(tmp_path / "model-0.safetensors") not in mapped
    assert str(tmp_path / "model-1.safetensors") in mapped
    assert loaded_nbytes(folder.sizes()) == 12


LARGE = 12 << 30  # bytes of a sparse file
PROGRAM = """
import resource, sys
from pathlib import Path
import torch
from auraflux.weights.formats.folder import Folder
from auraflux.weights.loader import Weights

weights = Weights(Folder(Path(sys.argv[1])), lambda name: name)
table = weights.table(sys.argv[2], int(sys.argv[3]), 128)
weights.check_loaded()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(200):
    table.fetch(torch.randint(0, table.rows, (512,))).result()
assert table.read > 50_000, table.read
print(table.nbytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, table.cached_nbytes)
print(sys.argv[1] in open("/proc/self/maps").read())
"""


def test_a_table_larger_than_memory_takes_only_its_cache(tmp_path: Path):
    """Read a hundred thousand rows of a 12 GiB table and check that 16 MiB of them are cached."""
    rows = LARGE // 256
    header = json.dumps({f"{NAME}.weight": {"dtype": "BF16", "shape": [rows, 128], "data_offsets": [0, LARGE]}}).encode()
    folder_of(tmp_path)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + LARGE)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), NAME, str(rows)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.getcwd()}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (nbytes, grown, cached), (mapped,) = (line.split() for line in done.stdout.splitlines())
    assert int(nbytes) == LARGE
    assert int(cached) == 16 << 20
    # kilobytes: cached rows, their index and thread stacks
    assert int(grown) < 80 << 10
    assert mapped == "False"


@pytest.mark.parametrize(
    ("name", "nbytes", "wanted"),
    [
        ("bfloat16", 260, RowFormat(128, torch.bfloat16)),
        ("float32", 8, RowFormat(1, torch.float32)),
        ("affine4_64_bfloat16", 76, RowFormat(128, torch.bfloat16, 4, 64)),
        ("affine3_32_float16", 36, RowFormat(64, torch.float16, 3, 32)),
        ("affine4_64_bfloat16", 77, None),
        ("affine4_0_bfloat16", 76, None),
        ("bfloat16", 4, None),
        ("bfloat16", 3, None),
        ("int8", 12, None),
    ],
)
def test_the_format_of_records_is_in_their_name(name: str, nbytes: int, wanted: RowFormat | None):
    assert parse_row_format(name, nbytes) == wanted
    if wanted is not None:
        assert (wanted.name, wanted.nbytes + 4) == (name, nbytes)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {f"{NAME}.weight": torch.zeros(ROWS, WIDTH, dtype=torch.int16)},
            "has rows of I16 .500, 64., which do not support row reads",
        ),
        ({f"{NAME}.weight": torch.zeros(ROWS, 3)}, r"form a table of \[500, 3\], \[500, 64\] is needed"),
        ({f"{NAME}.weight": torch.zeros(ROWS - 1, WIDTH)}, r"form a table of \[499, 64\]"),
        ({f"{NAME}.weight": torch.zeros(ROWS, WIDTH, 1)}, r"has shape \[500, 64, 1\], \[any, any\] is needed"),
        ({f"{NAME}.shard_1.weight": torch.zeros(ROWS, WIDTH)}, "1 missing: .*ngram_embedding.shard_0.weight"),
        (
            {f"{NAME}.rows_0.affine4_32_float32": torch.zeros(ROWS, 9, dtype=torch.uint8)},
            "rows of 9 bytes, which is not a valid record",
        ),
        ({"other": torch.zeros(3)}, "1 missing: .*ngram_embedding.weight"),
        (
            {f"{NAME}.shard_0.weight": torch.zeros(300, WIDTH), f"{NAME}.shard_1.weight": torch.zeros(200, WIDTH).bfloat16()},
            "shard_1.weight are bfloat16, and those of .*shard_0.weight float32",
        ),
    ],
)
def test_invalid_tables_are_refused(tensors: dict[str, Tensor], message: str, tmp_path: Path):
    with pytest.raises(FormatError, match=message):
        opened(folder_of(tmp_path, tensors))
