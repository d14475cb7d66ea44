"""Tables that stay on disk: rows are what was written, few of them are in memory, and harm to a file ends in a sentence."""

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
from auraflux.weights.folder import Folder
from auraflux.weights.loader import Weights
from auraflux.weights.row_forms import RowForm, as_bytes, form_named, form_of, with_checksums
from auraflux.weights.row_table import RowTable, loaded_nbytes

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
    weights.done()
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
    named = {f"{NAME}.rows_{n}.{form_of(part).name}": with_checksums(as_bytes(part)) for n, part in enumerate(table.split(300))}
    return folder_of(path, named), table.float()


def coded_records(path: Path, dtype: torch.dtype) -> tuple[Folder, Tensor]:
    made = quantize(table_of(dtype), 3, 32)
    return folder_of(path, {f"{NAME}.rows_0.{form_of(made).name}": with_checksums(as_bytes(made))}), made.dequantize(
        torch.float32
    )


LAYOUTS = {each.__name__: each for each in (dense, shards, codes, records, coded_records)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_what_was_written(layout: str, dtype: torch.dtype, tmp_path: Path):
    folder, wanted = LAYOUTS[layout](tmp_path, dtype)
    table = opened(folder, hot_nbytes=40 * 256)
    assert (table.rows, table.form.width) == (ROWS, WIDTH)
    random = torch.Generator().manual_seed(1)
    for count in (1, 7, 300, 0, 64, 7):
        ids = torch.randint(0, ROWS, (count,), generator=random)
        assert torch.equal(table.fetch(ids).result(), wanted[ids])
    assert torch.equal(torch.cat([table.form.numbers(piece) for piece in table.pieces(10_000)]), wanted)


def test_several_steps_may_be_under_way(tmp_path: Path):
    folder, wanted = shards(tmp_path, torch.bfloat16)
    table = opened(folder, hot_nbytes=20 * 128)

    def read(seed: int) -> bool:
        ids = torch.randint(0, ROWS, (50,), generator=torch.Generator().manual_seed(seed))
        return torch.equal(table.fetch(ids).result(), wanted[ids])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(60)))


def test_the_newest_rows_stay_in_memory_and_no_more(tmp_path: Path):
    folder, _ = dense(tmp_path, torch.bfloat16)
    table = opened(folder, hot_nbytes=10 * 2 * WIDTH)
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
        assert table.hot_nbytes <= 10 * 2 * WIDTH
    table.fetch(torch.arange(ROWS)).result()
    assert table.hot_nbytes == 10 * 2 * WIDTH


def test_rows_that_are_not_there_are_refused(tmp_path: Path):
    table = opened(dense(tmp_path, torch.float32)[0])
    for row in (-1, ROWS):
        with pytest.raises(FormatError, match=f"of a table that has {ROWS}"):
            table.fetch(torch.tensor([0, row]))


@pytest.mark.parametrize("harm", ["written", "cut"])
def test_a_file_that_changes_in_use_is_refused(harm: str, tmp_path: Path):
    folder, wanted = dense(tmp_path, torch.float32)
    table = opened(folder)
    first = torch.tensor([3, 4])
    assert torch.equal(table.fetch(first).result(), wanted[first])
    path = tmp_path / "model-0.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 8)
        file.write(b"\0" * 8) if harm == "written" else file.truncate()
    os.utime(path, ns=(0, 12345))
    with pytest.raises(FormatError, match=f"{path} was changed while the model was in use; load it again"):
        table.fetch(torch.tensor([ROWS - 1, 5])).result()


def test_a_file_that_is_replaced_is_read_as_it_was(tmp_path: Path):
    folder, wanted = dense(tmp_path, torch.float32)
    table = opened(folder)
    (tmp_path / "other").write_bytes(bytes((tmp_path / "model-0.safetensors").stat().st_size))
    os.replace(tmp_path / "other", tmp_path / "model-0.safetensors")
    assert torch.equal(table.fetch(torch.tensor([9])).result(), wanted[9:10])


def test_a_damaged_row_is_found_when_it_is_read(tmp_path: Path):
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
    with pytest.raises(FormatError, match=r"row 100 of .*rows_1.bfloat16 is damaged: .* \(CRC-32 [0-9a-f]{8}, not"):
        table.fetch(torch.tensor([400])).result()
    with pytest.raises(FormatError, match="row 100 of"):
        list(table.pieces(1 << 20))


def test_files_of_tables_alone_are_not_mapped(tmp_path: Path):
    table = table_of()
    folder = folder_of(tmp_path, {f"{NAME}.weight": table}, {"other": torch.zeros(3)})
    assert set(folder.sizes()) == {f"{NAME}.weight", "other"}
    made = opened(folder)
    made.fetch(torch.tensor([1])).result()
    mapped = Path("/proc/self/maps").read_text()
    assert str(tmp_path / "model-0.safetensors") not in mapped
    assert str(tmp_path / "model-1.safetensors") in mapped
    assert loaded_nbytes(folder.sizes()) == 12


LARGE = 12 << 30  # bytes, of which none is on disk
PROGRAM = """
import resource, sys
from pathlib import Path
import torch
from auraflux.weights.folder import Folder
from auraflux.weights.loader import Weights

weights = Weights(Folder(Path(sys.argv[1])), lambda name: name)
table = weights.table(sys.argv[2], int(sys.argv[3]), 128)
weights.done()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(200):
    table.fetch(torch.randint(0, table.rows, (512,))).result()
assert table.read > 50_000, table.read
print(table.nbytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, table.hot_nbytes)
print(sys.argv[1] in open("/proc/self/maps").read())
"""


def test_a_table_larger_than_memory_takes_what_is_stated(tmp_path: Path):
    """Of twelve gigabytes a process reads a hundred thousand rows, and holds 16 MiB of them."""
    rows = LARGE // 256
    header = json.dumps({f"{NAME}.weight": {"dtype": "BF16", "shape": [rows, 128], "data_offsets": [0, LARGE]}}).encode()
    folder_of(tmp_path)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + LARGE)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), NAME, str(rows)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.getcwd()}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (nbytes, grown, hot), (mapped,) = (line.split() for line in done.stdout.splitlines())
    assert int(nbytes) == LARGE
    assert int(hot) == 16 << 20
    # kilobytes; rows, their places and threads' stacks
    assert int(grown) < 80 << 10
    assert mapped == "False"


@pytest.mark.parametrize(
    ("name", "nbytes", "wanted"),
    [
        ("bfloat16", 260, RowForm(128, torch.bfloat16)),
        ("float32", 8, RowForm(1, torch.float32)),
        ("affine4_64_bfloat16", 76, RowForm(128, torch.bfloat16, 4, 64)),
        ("affine3_32_float16", 36, RowForm(64, torch.float16, 3, 32)),
        ("affine4_64_bfloat16", 77, None),
        ("affine4_0_bfloat16", 76, None),
        ("bfloat16", 4, None),
        ("bfloat16", 3, None),
        ("int8", 12, None),
    ],
)
def test_a_name_says_the_form_of_records(name: str, nbytes: int, wanted: RowForm | None):
    assert form_named(name, nbytes) == wanted
    if wanted is not None:
        assert (wanted.name, wanted.nbytes + 4) == (name, nbytes)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {f"{NAME}.weight": torch.zeros(ROWS, WIDTH, dtype=torch.int16)},
            "has rows of I16 .500, 64., which are not read by rows",
        ),
        ({f"{NAME}.weight": torch.zeros(ROWS, 3)}, r"is a table of \[500, 3\], \[500, 64\] is needed"),
        ({f"{NAME}.weight": torch.zeros(ROWS - 1, WIDTH)}, r"is a table of \[499, 64\]"),
        ({f"{NAME}.weight": torch.zeros(ROWS, WIDTH, 1)}, r"has shape \[500, 64, 1\], \[any, any\] is needed"),
        ({f"{NAME}.shard_1.weight": torch.zeros(ROWS, WIDTH)}, "1 missing: .*ngram_embedding.shard_0.weight"),
        ({f"{NAME}.rows_0.affine4_32_float32": torch.zeros(ROWS, 9, dtype=torch.uint8)}, "rows of 9 bytes, of which no row"),
        ({"other": torch.zeros(3)}, "1 missing: .*ngram_embedding.weight"),
        (
            {f"{NAME}.shard_0.weight": torch.zeros(300, WIDTH), f"{NAME}.shard_1.weight": torch.zeros(200, WIDTH).bfloat16()},
            "shard_1.weight are bfloat16, and those of .*shard_0.weight float32",
        ),
    ],
)
def test_what_is_no_table_is_refused(tensors: dict[str, Tensor], message: str, tmp_path: Path):
    with pytest.raises(FormatError, match=message):
        opened(folder_of(tmp_path, tensors))
