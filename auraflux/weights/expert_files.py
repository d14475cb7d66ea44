"""The experts of a packed model: one file per layer, and `experts/manifest.json`, which says what lies where.

Expert e of a layer starts at e * stride of its file. Its bytes are those of `blob_of`: gate, up and down, of each codes, scales
and biases; zeros fill them up to the stride, a multiple of 4096, so that direct reads of one expert are aligned.

The manifest is taken as it comes from anywhere: what it says is checked before it is believed, and files are only looked for
beside it. `docs/streaming.md` describes it key by key.
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
from auraflux.quant.packing import PLACES
from auraflux.weights.boundary import read_json, regular

FOLDER, MANIFEST = "experts", "manifest.json"
LAYER = re.compile(r"(model|mtp)\.layers\.(\d{1,6})\.")
NAME, VERSION = "auraflux-experts", 2
FIRST_VERSION = 1  # the same, but for the places of codes of 3, 5 and 6 bits in rows that lie side by side
ALIGNMENT = 4096
PARTS = ("packed", "scales", "biases")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "uint8": torch.uint8}
DTYPES["int32"] = torch.int32  # words of super-blocks
# no model comes near these; they keep products of what a manifest says within 64 bits
MOST = {"count": 1 << 16, "hidden": 1 << 20, "inner": 1 << 20, "lanes": 64, "bits": 8, "group": 1 << 10}
MOST_LAYERS = 1 << 12


@dataclass(frozen=True, eq=False)
class ExpertFile:
    """The experts of one layer.

    module     the mixture's name in the model, such as model.layers.3.mlp
    like       one expert's gate, if there is one, up and down without memory (device meta), for `Experts.from_blobs`
    stride     bytes from one expert to the next in the file
    checksums  uint32 [E], the CRC-32 of each expert's first `nbytes` bytes
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
        """The layer's number; None for one beyond the model's, which guesses tokens."""
        found = LAYER.match(self.module)
        return int(found[2]) if found is not None and found[1] == "model" else None

    def offset(self, expert: int) -> int:
        return expert * self.stride

    def checksum(self, expert: int) -> int:
        return int(self.checksums[expert])

    def check(self) -> None:
        """Refuse a file that is not there or has another size than was written."""
        found = regular(self.path, self.path.parent.parent).stat().st_size
        if found != self.file_nbytes:
            raise FormatError(
                f"{self.path} with the experts of {self.module} has {found} bytes, not the {self.file_nbytes} that were "
                f"written. Pack the model again."
            )


@dataclass(frozen=True, eq=False)
class ExpertFiles:
    """All experts of a packed model.

    folder      where the files are
    model_type  of the model they belong to
    source      digest of the checkpoint they were made from
    files       one for each layer that has experts, in the model's order
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
        """How many rows lie side by side: those of a processor's vectors, or 1 for rows in order."""
        return self.files[0].lanes

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(file.file_nbytes for file in self.files)

    @property
    def paths(self) -> list[Path]:
        """The manifest and what it names."""
        return [self.folder / MANIFEST, *(file.path for file in self.files)]

    def within(self, layers: range | None) -> "ExpertFiles":
        """The files of some layers; None for all."""
        if layers is None:
            return self
        prefixes = tuple(f"model.layers.{number}." for number in layers)
        return replace(self, files=tuple(file for file in self.files if file.module.startswith(prefixes)))

    def without(self, prefixes: tuple[str, ...]) -> "ExpertFiles":
        """The files of layers whose names begin otherwise."""
        return replace(self, files=tuple(file for file in self.files if not file.module.startswith(prefixes)))

    @cached_property
    def _by_module(self) -> dict[str, ExpertFile]:
        return {file.module: file for file in self.files}

    def under(self, module: str, count: int, hidden: int, inner: int) -> ExpertFile:
        """The file of a mixture, which must have as many experts of such widths as the model wants."""
        if (count, hidden, inner) != (self.count, self.hidden, self.inner):
            raise FormatError(
                f"{self.folder} holds {self.count} experts a layer of widths {self.hidden} and {self.inner}; "
                f"the model has {count} of {hidden} and {inner}."
            )
        if module not in self._by_module:
            raise FormatError(f"{self.folder / MANIFEST} names no file with the experts of {module}.")
        return self._by_module[module]

    def check(self) -> None:
        """Refuse files that are not there or not whole."""
        for file in self.files:
            file.check()


def has_experts(folder: Path) -> bool:
    """Whether a model's folder holds packed experts."""
    return (folder / FOLDER / MANIFEST).exists()


def open_experts(folder: Path) -> ExpertFiles:
    """Read the manifest of a model's folder."""
    path = folder / FOLDER / MANIFEST
    return _Reading(path).files(read_json(path, folder))


def stride_of(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def write_format(like: Mapping[str, QTensor]) -> dict[str, Any]:
    """What the manifest says of layers whose experts look like these."""
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
    """What the manifest says of one layer; eight hexadecimal digits are an expert's checksum."""
    return {"module": module, "file": file, "format": form, "crc32": checksums.astype(">u4").tobytes().hex()}


class _Reading:
    """A manifest on its way to `ExpertFiles`: everything is checked here, and errors name the file."""

    def __init__(self, path: Path):
        self.path = path

    def files(self, found: dict[str, Any]) -> ExpertFiles:
        if found.get("format") != NAME:
            raise self.wrong(f"'format' is {found.get('format')!r}, not {NAME!r}")
        if found.get("version") not in (FIRST_VERSION, VERSION):
            raise self.wrong(f"its version is {found.get('version')!r}; this auraflux reads version {VERSION}")
        count, hidden, inner, lanes = (self.number(found, key) for key in ("count", "hidden", "inner", "lanes"))
        forms = [self.form(each, hidden, inner, lanes) for each in self.entries(found, "formats")]
        bits = {matrix.bits for like, _ in forms for matrix in like.values()}
        if found["version"] == FIRST_VERSION and lanes > 1 and bits & PLACES.keys():
            raise FormatError(
                f"{self.path}: an earlier auraflux packed codes of {min(bits & PLACES.keys())} bits in another order. "
                "Pack the model again."
            )
        layers = [self.layer(each, count, forms) for each in self.entries(found, "layers")]
        for what, names in (("module", [file.module for file in layers]), ("file", [file.path.name for file in layers])):
            if len(set(names)) < len(names):
                raise self.wrong(f"two layers have the same '{what}'")
        model_type, source = self.text(found, "model_type"), self.text(found, "source")
        return ExpertFiles(self.path.parent, model_type, source, count, hidden, inner, tuple(layers))

    def form(self, entry: dict[str, Any], hidden: int, inner: int, lanes: int) -> tuple[dict[str, QTensor], int]:
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        kinds = [kind for kind in KINDS if kind in entry or kind != "gate"]
        like = {kind: self.matrix(self.object(entry, kind), *shapes[kind], lanes) for kind in kinds}
        wanted = write_format(like)
        for key in ("nbytes", "stride", *kinds):
            have = entry.get(key)
            if have != wanted[key]:
                raise self.wrong(f"'{key}' of a format is {have!r}; {wanted[key]!r} is what its shapes make")
        return like, wanted["stride"]

    def matrix(self, entry: dict[str, Any], rows: int, width: int, lanes: int) -> QTensor:
        bits, group, kind = self.number(entry, "bits"), self.number(entry, "group"), self.text(entry, "kind")
        dtype = DTYPES.get(self.text(entry, "scales"))
        if dtype is None:
            raise self.wrong(f"scales are {entry['scales']!r}; those known: {', '.join(DTYPES)}")

        def array(columns: int, dtype: torch.dtype) -> torch.Tensor:
            shape = (-(-rows // lanes), columns, lanes) if lanes > 1 else (rows, columns)
            return torch.empty(shape, dtype=dtype, device="meta")

        try:
            scales = array(scale_count(kind, width, group), dtype)
            packed, biases = array(width * bits // 32, torch.int32), torch.empty_like(scales) if kind == "affine" else None
            return QTensor(packed, scales, biases, bits, group, (rows, width), lanes)
        except FormatError as err:
            raise self.wrong(str(err).removesuffix(".")) from err

    def layer(self, entry: dict[str, Any], count: int, forms: list[tuple[dict[str, QTensor], int]]) -> ExpertFile:
        module, name, form = self.text(entry, "module"), self.text(entry, "file"), entry.get("format")
        if not LAYER.match(module):
            raise self.wrong(f"'module' is {module!r}; it must be that of a layer, such as model.layers.0.mlp")
        if not re.fullmatch(r"[A-Za-z0-9_]+\.bin", name):
            raise self.wrong(f"'file' is {name!r}; it must be the name of a .bin file beside the manifest")
        if type(form) is not int or not 0 <= form < len(forms):
            raise self.wrong(f"'format' of {module} is {form!r}; there are {len(forms)} formats")
        digits = self.text(entry, "crc32")
        try:
            sums = np.frombuffer(bytes.fromhex(digits), ">u4").astype(np.uint32)
        except ValueError as err:
            raise self.wrong(f"'crc32' of {module} is not hexadecimal") from err
        if len(sums) != count:
            raise self.wrong(f"'crc32' of {module} has checksums of {len(sums)} experts, not of {count}")
        like, stride = forms[form]
        return ExpertFile(module, self.path.parent / name, count, like, stride, sums)

    def number(self, entry: dict[str, Any], key: str) -> int:
        value = entry.get(key)
        # True is an int too
        if type(value) is not int or not 1 <= value <= MOST[key]:
            raise self.wrong(f"'{key}' is {value!r}; a number from 1 to {MOST[key]} is needed")
        return value

    def text(self, entry: dict[str, Any], key: str) -> str:
        if not isinstance(value := entry.get(key), str):
            raise self.wrong(f"'{key}' is {value!r}, not a text")
        return value

    def object(self, entry: dict[str, Any], key: str) -> dict[str, Any]:
        if not isinstance(value := entry.get(key), dict):
            raise self.wrong(f"'{key}' is {value!r}, not an object")
        return value

    def entries(self, found: dict[str, Any], key: str) -> list[dict[str, Any]]:
        value = found.get(key)
        if not isinstance(value, list) or not 1 <= len(value) <= MOST_LAYERS or not all(isinstance(v, dict) for v in value):
            raise self.wrong(f"'{key}' must be a list of 1 to {MOST_LAYERS} objects")
        return value

    def wrong(self, what: str) -> FormatError:
        shown = what if len(what) < 400 else what[:400] + "..."
        return FormatError(f"{self.path} is not a manifest of experts: {shown}.")
