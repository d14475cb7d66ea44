"""Expert files of a packed model: one file per layer, and `experts/manifest.json`, which describes them.

Expert e of a layer starts at e * stride of its file. Its bytes are those of `blob_of`: codes, scales and biases of gate, up and
down, padded with zeros to the stride, a multiple of 4096, so that O_DIRECT reads of one expert are aligned.

The manifest is untrusted: every value is validated, and files must be in its folder. `docs/streaming.md` describes its keys.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from auraflux.errors import FormatError
from auraflux.ops.moe.experts import KINDS
from auraflux.quant import QTensor, scale_count
from auraflux.quant.packing import LANE_FIELDS
from auraflux.weights.formats.untrusted import read_json, regular_file

FOLDER, MANIFEST = "experts", "manifest.json"
LAYER = re.compile(r"(model|mtp)\.layers\.(\d{1,6})\.")
NAME, VERSION = "auraflux-experts", 2
FIRST_VERSION = 1  # differs in the layout of 3, 5 and 6-bit codes in interleaved rows
ALIGNMENT = 4096
PARTS = ("packed", "scales", "biases")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "uint8": torch.uint8}
DTYPES["int32"] = torch.int32  # words of super-blocks
DTYPES["int16"] = torch.int16  # halves of grids
# far above any model; products of manifest values stay within 64 bits
LIMITS = {"count": 1 << 16, "hidden": 1 << 20, "inner": 1 << 20, "lanes": 64, "bits": 8, "group": 1 << 10}
MAX_LAYERS = 1 << 12


@dataclass(frozen=True, eq=False)
class ExpertFile:
    """Expert file of one layer.

    module     name of the mixture in the model, such as model.layers.3.mlp
    like       one expert's gate (if any), up and down on the meta device, for `Experts.from_blobs`
    stride     bytes from one expert to the next in the file
    checksums  uint32 [E], CRC-32 of each expert's first `nbytes` bytes
    """

    module: str
    path: Path
    count: int
    like: Mapping[str, QTensor]
    stride: int
    checksums: np.ndarray

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one expert, without padding."""
        return sum(matrix.nbytes for matrix in self.like.values())

    @property
    def file_nbytes(self) -> int:
        return self.count * self.stride

    @property
    def lanes(self) -> int:
        return self.like["up"].lanes

    @property
    def layer(self) -> int | None:
        """Number of the layer; None for an MTP layer."""
        found = LAYER.match(self.module)
        return int(found[2]) if found is not None and found[1] == "model" else None

    def offset(self, expert: int) -> int:
        return expert * self.stride

    def checksum(self, expert: int) -> int:
        return int(self.checksums[expert])

    def check(self) -> None:
        """Raise if the file is missing or has the wrong size."""
        found = regular_file(self.path, self.path.parent.parent).stat().st_size
        if found != self.file_nbytes:
            raise FormatError(
                f"{self.path} with the experts of {self.module} has {found} bytes, not the expected "
                f"{self.file_nbytes}. Pack the model again."
            )


@dataclass(frozen=True, eq=False)
class ExpertFiles:
    """Expert files of a packed model.

    folder      directory of the files
    model_type  of the model
    source      digest of the checkpoint that was packed
    files       one per layer with experts, in layer order
    """

    folder: Path
    model_type: str
    source: str
    count: int
    hidden: int
    inner: int
    files: tuple[ExpertFile, ...]

    @property
    def lanes(self) -> int:
        """Number of interleaved rows: lanes of a SIMD vector, or 1 for rows in order."""
        return self.files[0].lanes

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(file.file_nbytes for file in self.files)

    @property
    def paths(self) -> list[Path]:
        """Paths of the manifest and the files it names."""
        return [self.folder / MANIFEST, *(file.path for file in self.files)]

    def within(self, layers: range | None) -> "ExpertFiles":
        """Return the files of some layers; None for all."""
        if layers is None:
            return self
        prefixes = tuple(f"model.layers.{number}." for number in layers)
        return replace(self, files=tuple(file for file in self.files if file.module.startswith(prefixes)))

    def without(self, prefixes: tuple[str, ...]) -> "ExpertFiles":
        """Return the files of modules without these prefixes."""
        return replace(self, files=tuple(file for file in self.files if not file.module.startswith(prefixes)))

    @cached_property
    def _by_module(self) -> dict[str, ExpertFile]:
        return {file.module: file for file in self.files}

    def file_of(self, module: str, count: int, hidden: int, inner: int) -> ExpertFile:
        """Return the file of a mixture; raise if its expert count or widths differ from the model's."""
        if (count, hidden, inner) != (self.count, self.hidden, self.inner):
            raise FormatError(
                f"{self.folder} holds {self.count} experts per layer of widths {self.hidden} and {self.inner}; "
                f"the model has {count} of {hidden} and {inner}."
            )
        if module not in self._by_module:
            raise FormatError(f"{self.folder / MANIFEST} names no file with the experts of {module}.")
        return self._by_module[module]

    def check(self) -> None:
        """Raise if a file is missing or has the wrong size."""
        for file in self.files:
            file.check()


def has_experts(folder: Path) -> bool:
    """Return whether a model's folder holds packed experts."""
    return (folder / FOLDER / MANIFEST).exists()


def open_experts(folder: Path) -> ExpertFiles:
    """Read the manifest of a model's folder."""
    path = folder / FOLDER / MANIFEST
    return _ManifestParser(path).files(read_json(path, folder))


def stride_of(nbytes: int) -> int:
    """Round an expert's bytes up to the alignment of direct reads."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def write_format(like: Mapping[str, QTensor]) -> dict[str, Any]:
    """Return the manifest entry for the format of experts like these."""
    formats: dict[str, Any] = {}
    offset = 0
    for kind, matrix in like.items():
        offsets = {}
        for part in PARTS:
            if (array := getattr(matrix, part)) is not None:
                offsets[part] = offset
                offset += array.nbytes
        scales = str(matrix.scales.dtype).removeprefix("torch.")
        formats[kind] = {"kind": matrix.kind, "bits": matrix.bits, "group": matrix.group, "scales": scales, "offsets": offsets}
    return {"nbytes": offset, "stride": stride_of(offset), **formats}


def write_layer(module: str, file: str, form: int, checksums: np.ndarray) -> dict[str, Any]:
    """Return the manifest entry of one layer; each expert's checksum takes eight hexadecimal digits."""
    return {"module": module, "file": file, "format": form, "crc32": checksums.astype(">u4").tobytes().hex()}


class _ManifestParser:
    """Parser of a manifest into `ExpertFiles` that validates every value; errors name the file."""

    def __init__(self, path: Path):
        self.path = path

    def files(self, found: dict[str, Any]) -> ExpertFiles:
        if found.get("format") != NAME:
            raise self.error(f"'format' is {found.get('format')!r}, not {NAME!r}")
        if found.get("version") not in (FIRST_VERSION, VERSION):
            raise self.error(f"its version is {found.get('version')!r}; this auraflux reads version {VERSION}")
        count, hidden, inner, lanes = (self.number(found, key) for key in ("count", "hidden", "inner", "lanes"))
        forms = [self.form(each, hidden, inner, lanes) for each in self.entries(found, "formats")]
        bits = {matrix.bits for like, _ in forms for matrix in like.values()}
        if found["version"] == FIRST_VERSION and lanes > 1 and bits & LANE_FIELDS.keys():
            raise FormatError(
                f"{self.path}: an earlier auraflux packed {min(bits & LANE_FIELDS.keys())}-bit codes in another layout. "
                "Pack the model again."
            )
        layers = [self.layer(each, count, forms) for each in self.entries(found, "layers")]
        for key, names in (("module", [file.module for file in layers]), ("file", [file.path.name for file in layers])):
            if len(set(names)) < len(names):
                raise self.error(f"two layers have the same '{key}'")
        model_type, source = self.string(found, "model_type"), self.string(found, "source")
        return ExpertFiles(self.path.parent, model_type, source, count, hidden, inner, tuple(layers))

    def form(self, entry: dict[str, Any], hidden: int, inner: int, lanes: int) -> tuple[dict[str, QTensor], int]:
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        kinds = [kind for kind in KINDS if kind in entry or kind != "gate"]
        like = {kind: self.matrix(self.object(entry, kind), *shapes[kind], lanes) for kind in kinds}
        wanted = write_format(like)
        for key in ("nbytes", "stride", *kinds):
            have = entry.get(key)
            if have != wanted[key]:
                raise self.error(f"'{key}' of a format is {have!r}; its shapes give {wanted[key]!r}")
        return like, wanted["stride"]

    def matrix(self, entry: dict[str, Any], rows: int, width: int, lanes: int) -> QTensor:
        bits, group, kind = self.number(entry, "bits"), self.number(entry, "group"), self.string(entry, "kind")
        dtype = DTYPES.get(self.string(entry, "scales"))
        if dtype is None:
            raise self.error(f"scales are {entry['scales']!r}; supported: {', '.join(DTYPES)}")

        def array(columns: int, dtype: torch.dtype) -> torch.Tensor:
            shape = (-(-rows // lanes), columns, lanes) if lanes > 1 else (rows, columns)
            return torch.empty(shape, dtype=dtype, device="meta")

        try:
            scales = array(scale_count(kind, width, group), dtype)
            packed, biases = array(width * bits // 32, torch.int32), torch.empty_like(scales) if kind == "affine" else None
            return QTensor(packed, scales, biases, bits, group, (rows, width), lanes)
        except FormatError as err:
            raise self.error(str(err).removesuffix(".")) from err

    def layer(self, entry: dict[str, Any], count: int, forms: list[tuple[dict[str, QTensor], int]]) -> ExpertFile:
        module, name, form = self.string(entry, "module"), self.string(entry, "file"), entry.get("format")
        if not LAYER.match(module):
            raise self.error(f"'module' is {module!r}; it must be in a layer, such as model.layers.0.mlp")
        if not re.fullmatch(r"[A-Za-z0-9_]+\.bin", name):
            raise self.error(f"'file' is {name!r}; it must be the name of a .bin file in the manifest's folder")
        if type(form) is not int or not 0 <= form < len(forms):
            raise self.error(f"'format' of {module} is {form!r}; there are {len(forms)} formats")
        digits = self.string(entry, "crc32")
        try:
            sums = np.frombuffer(bytes.fromhex(digits), ">u4").astype(np.uint32)
        except ValueError as err:
            raise self.error(f"'crc32' of {module} is not hexadecimal") from err
        if len(sums) != count:
            raise self.error(f"'crc32' of {module} has checksums of {len(sums)} experts, not of {count}")
        like, stride = forms[form]
        return ExpertFile(module, self.path.parent / name, count, like, stride, sums)

    def number(self, entry: dict[str, Any], key: str) -> int:
        value = entry.get(key)
        # True is an int too
        if type(value) is not int or not 1 <= value <= LIMITS[key]:
            raise self.error(f"'{key}' is {value!r}; it must be an integer from 1 to {LIMITS[key]}")
        return value

    def string(self, entry: dict[str, Any], key: str) -> str:
        if not isinstance(value := entry.get(key), str):
            raise self.error(f"'{key}' is {value!r}, not a string")
        return value

    def object(self, entry: dict[str, Any], key: str) -> dict[str, Any]:
        if not isinstance(value := entry.get(key), dict):
            raise self.error(f"'{key}' is {value!r}, not an object")
        return value

    def entries(self, found: dict[str, Any], key: str) -> list[dict[str, Any]]:
        value = found.get(key)
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_LAYERS or not all(isinstance(v, dict) for v in value):
            raise self.error(f"'{key}' must be a list of 1 to {MAX_LAYERS} objects")
        return value

    def error(self, reason: str) -> FormatError:
        shown = reason if len(reason) < 400 else reason[:400] + "..."
        return FormatError(f"{self.path} is not an expert manifest: {shown}.")
