"""`Folder`: safetensors with a config.json, in Hugging Face's or mlx-lm's layout."""

import ctypes
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant import KINDS, QTensor, mxfp4, nvfp4
from auraflux.weights.experts.packed_files import ExpertFiles, has_experts, open_experts
from auraflux.weights.experts.row_table import Extent, TablePart
from auraflux.weights.fields import NAME, Fields
from auraflux.weights.formats.methods import Header, StoredFormat, method_of
from auraflux.weights.formats.model_files import read_config, safetensors_files
from auraflux.weights.formats.row_layout import DTYPES, RECORDS, RowFormat, parse_row_format
from auraflux.weights.formats.stored import Stored
from auraflux.weights.formats.untrusted import OBJECT, brief, integer, listed, named, read_json, regular_file

PARTS = (".scales", ".biases")
# gpt-oss as published by OpenAI: MXFP4 nibbles and exponents, both as bytes
BLOCKS, EXPONENTS = "_blocks", "_scales"
MODELOPT_CONFIG = "hf_quant_config.json"  # older ModelOpt folders have their quantization config only here
DONTNEED, PAGE = 4, 4096


class Folder:
    """Checkpoint of safetensors files; a quantized weight is several tensors (codes, scales, biases)."""

    def __init__(self, path: Path):
        self.path = path
        self.config: dict[str, Any] = read_config(path)
        fields = Fields(path / "config.json", self.config)
        # mlx-lm's default format, and the formats of single modules
        quantization = fields.section("quantization")
        self.quantization = _mlx_format(quantization)
        self._module_formats = {module: _mlx_format(entry) for module, entry in quantization.sections().items()}
        self.experts: ExpertFiles | None = open_experts(path) if has_experts(path) else None
        # packed folders have mlx-lm's layout
        self.form = "mlx" if quantization or self.experts else "hf"
        self.method = method_of(fields, self._modelopt_config())
        self._stored_formats: dict[str, StoredFormat] = {}
        self._files: dict[Path, Any] = {}
        self._offsets: dict[Path, dict[str, int]] = {}

    def _modelopt_config(self) -> Fields | None:
        path = self.path / MODELOPT_CONFIG
        if not path.exists():
            return None
        found = Fields(path, read_json(path, self.path))
        found.read("quantization", OBJECT)
        return found.section("quantization")

    @cached_property
    def _file_of(self) -> dict[str, Path]:
        """File of every tensor."""
        files = safetensors_files(self.path)
        return {name: path for path in files for name in self._open(path).keys()}  # noqa: SIM118

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = safe_open(regular_file(path, self.path), framework="pt").__enter__()
            # torch raises RuntimeError where mapping fails
            except (OSError, RuntimeError, SafetensorError) as err:
                raise FormatError(f"{path} cannot be read: {brief(err)}. It may be truncated; download it again.") from err
        return self._files[path]

    @cached_property
    def notes(self) -> list[str]:
        if self.method is None:
            return []
        counts = Counter(found.precision for name in self._quantized if (found := self.stored_format(name)) is not None)
        precisions = [f"{self.method.title}: {count} weights are {precision}." for precision, count in counts.most_common()]
        return [*precisions, *self.method.notes()]

    def _slice(self, name: str) -> Any:
        return self._open(self._file_of[name]).get_slice(name)

    def _is_scale_or_bias(self, name: str) -> bool:
        """Return whether a tensor holds the scales or biases of a quantized weight."""
        if name.endswith(EXPONENTS) and name.removesuffix(EXPONENTS) + BLOCKS in self._file_of:
            return True
        stem, dot, part = name.rpartition(".")
        return dot + part in PARTS and stem + ".weight" in self._file_of and stem + ".scales" in self._file_of

    @cached_property
    def _quantized(self) -> dict[str, dict[str, str]]:
        """Tensors of each weight of the folder's quantization method, by part name."""
        if self.method is None:
            return {}
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        for name in self._file_of:
            module, _, part = name.rpartition(".")
            modules[f"{module}.weight"][part] = name
            fused = self._fused(name)
            if fused is not None:
                modules[fused[0]] |= {"weight": fused[0], fused[1]: name}
        return {
            weight: {part: found[part] for part in self.method.parts if part in found}
            for weight, found in modules.items()
            if self.method.claims(found)
        }

    def _fused(self, name: str) -> tuple[str, str] | None:
        """Return the stack and part name of a fused experts' tensor such as experts.down_proj_weight_scale."""
        assert self.method is not None
        for part in (*self.method.parts, *self.method.unused):
            stem = name.removesuffix(f"_{part}")
            if stem != name and stem in self._file_of:
                return stem, part
        return None

    def _of_method(self, name: str) -> bool:
        """Return whether a tensor belongs to a weight of the folder's method, used or not."""
        if self.method is None:
            return False
        module, _, part = name.rpartition(".")
        weight, fused = f"{module}.weight", self._fused(name)
        is_unused = part in self.method.unused and (weight in self._file_of or weight in self._quantized)
        return name in self._method_tensors or is_unused or (fused is not None and fused[0] in self._quantized)

    @cached_property
    def _method_tensors(self) -> set[str]:
        return {name for parts in self._quantized.values() for name in parts.values()}

    @cached_property
    def _parts(self) -> dict[str, list[str]]:
        """Tensors of each weight."""
        parts = {weight: list(found.values()) for weight, found in self._quantized.items()}
        for name in self._file_of:
            if self._of_method(name):
                continue
            if name in parts:
                raise FormatError(f"{self.path} has {name} twice, dense and quantized: {listed(parts[name])}.")
            if name.endswith(BLOCKS):
                stem = name.removesuffix(BLOCKS)
                if stem + EXPONENTS not in self._file_of:
                    raise FormatError(f"{self.path} has {named(name)} and no {named(stem + EXPONENTS)}.")
                parts[stem] = [name, stem + EXPONENTS]
            elif not self._is_scale_or_bias(name):
                stem = name.removesuffix(".weight")
                found = [stem + part for part in PARTS if stem != name and stem + part in self._file_of]
                parts[name] = [name, *found]
        return parts

    def files(self) -> list[Path]:
        packed = [] if self.experts is None else self.experts.paths
        configs = [path for name in ("config.json", MODELOPT_CONFIG) if (path := self.path / name).exists()]
        return [*configs, *sorted(set(self._file_of.values())), *packed]

    def sizes(self) -> dict[str, int]:
        return self._sizes

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {name: sum(map(self._nbytes, parts)) for name, parts in self._parts.items()}

    def _nbytes(self, name: str) -> int:
        part = self._slice(name)
        return torch.Size(part.get_shape()).numel() * ITEMSIZES.get(part.get_dtype(), 1)

    def shape(self, name: str) -> tuple[int, ...]:
        if (stored_format := self.stored_format(name)) is not None:
            return stored_format.shape
        parts = self._parts[name]
        found = tuple(self._slice(parts[0]).get_shape())
        if len(parts) == 1:
            return found
        if parts[0].endswith(BLOCKS):
            return (*found[:-2], found[-2] * found[-1] * 2)
        bits, _, _ = self._format(name)
        return (*found[:-1], found[-1] * 32 // bits)

    def stored_format(self, name: str) -> StoredFormat | None:
        """Return the format of a weight of the folder's quantization method; None for others."""
        if self.method is None or name not in self._quantized:
            return None
        if name not in self._stored_formats:
            slices = {part: self._slice(tensor) for part, tensor in self._quantized[name].items()}
            headers = {part: Header(tuple(each.get_shape()), each.get_dtype()) for part, each in slices.items()}
            try:
                self._stored_formats[name] = self.method.plan(headers, lambda part: slices[part][:])
            except FormatError as err:
                raise FormatError(f"{name} in {self.path} is not a valid {self.method.title} weight: {err}") from err
        return self._stored_formats[name]

    def _format(self, name: str) -> tuple[int, int, str]:
        """Return bits, group and mode of a weight quantized by mlx-lm."""
        module = name.removesuffix(".weight")
        entry: _MLXFormat = {**self.quantization}
        if own := self._module_formats.get(module):
            # mlx-lm writes routers as {"group_size": 64, "bits": 8}, which is affine whatever the other weights are
            entry = {**entry, "mode": "affine", **own}
        try:
            return entry["bits"], entry["group_size"], entry.get("mode", "affine")
        except KeyError as err:
            raise FormatError(
                f"{self.path / 'config.json'} does not say how {module} is quantized: "
                f"'quantization' needs 'bits' and 'group_size', for all or for it."
            ) from err

    def load(self, name: str) -> Stored:
        parts = self._parts[name]
        try:
            found = [self._open(self._file_of[part]).get_tensor(part) for part in parts]
        except SafetensorError as err:
            raise FormatError(f"{self._file_of[parts[0]]}: tensor {name} cannot be read: {brief(err)}.") from err
        if self.stored_format(name) is not None:
            return self._load_quantized(name, found)
        if len(parts) == 1:
            return found[0]
        if parts[0].endswith(BLOCKS):
            try:
                return _mxfp4_blocks(*found)
            except FormatError as err:
                raise FormatError(f"{name} in {self.path} is not a valid MXFP4 weight: {err}") from err
        return self._load_mlx(name, *found)

    def _load_quantized(self, name: str, found: list[Tensor]) -> Stored:
        assert self.method is not None
        try:
            return self.method.load(dict(zip(self._quantized[name], found, strict=True)))
        except FormatError as err:
            raise FormatError(f"{name} in {self.path} is not a valid {self.method.title} weight: {err}") from err

    def load_interleaved(self, name: str, lanes: int, expands_scales: bool) -> QTensor | None:
        return None

    def load_one(self, name: str, index: int) -> Stored:
        return self.load(name)[index]

    def table_part(self, name: str) -> TablePart:
        shape, parts = self.shape(name), self._parts[name]
        if self.stored_format(name) is not None or len(shape) != 2 or parts[0].endswith(BLOCKS):
            raise FormatError(f"{name} in {self.path} is stored as {self._describe(name)}, which does not support row reads.")
        extents = tuple(map(self._extent, parts))
        if (found := RECORDS.search(name)) is not None and self._slice(name).get_dtype() == "U8":
            if (form := parse_row_format(found[2], shape[1])) is None:
                raise FormatError(f"{name} in {self.path} has rows of {shape[1]} bytes, which is not a valid record size.")
            return TablePart(name, shape[0], form, extents, records=True)
        kind = KINDS_OF.get(self._slice(parts[-1]).get_dtype())
        if kind is None:
            raise FormatError(f"{name} in {self.path} has rows of {self._describe(name)}, which do not support row reads.")
        form = RowFormat(shape[1], DTYPES[kind])
        if len(parts) > 1:
            bits, group, mode = self._format(name)
            if mode != "affine" or len(parts) != 3 or shape[1] % group or shape[1] * bits % 32:
                raise FormatError(
                    f"{name} in {self.path} is stored as {self._describe(name)}, which does not support row reads."
                )
            form = RowFormat(shape[1], DTYPES[kind], bits, group)
        if [extent.nbytes for extent in extents] != form.parts or len({self._slice(part).get_shape()[0] for part in parts}) > 1:
            raise FormatError(f"{name} in {self.path}: codes, scales and biases do not match {form.name}.")
        return TablePart(name, shape[0], form, extents)

    def _describe(self, name: str) -> str:
        return ", ".join(f"{self._slice(part).get_dtype()} {list(self._slice(part).get_shape())}" for part in self._parts[name])

    def _extent(self, name: str) -> Extent:
        """Return the file extent of a matrix; its header was validated when the file was opened."""
        path = self._file_of[name]
        if path not in self._offsets:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            self._offsets[path] = {each: 8 + length + entry["data_offsets"][0] for each, entry in header.items()}
        shape = self._slice(name).get_shape()
        return Extent(path, self._offsets[path][name], self._nbytes(name) // max(1, shape[0]))

    def unmap(self, names: Sequence[str]) -> None:
        gone = {part for name in names for part in self._parts[name]}
        for path in {self._file_of[part] for part in gone}:
            if all(part in gone for part, home in self._file_of.items() if home == path) and path in self._files:
                self._files.pop(path).__exit__(None, None, None)

    def release(self, name: str) -> None:
        for part in self._parts[name]:
            tensor = self._open(self._file_of[part]).get_tensor(part)
            first, last = -(-tensor.data_ptr() // PAGE) * PAGE, (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE
            if last > first:
                # safe: a later access reads the pages from the file again
                _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), DONTNEED)

    def _load_mlx(self, name: str, codes: Tensor, scales: Tensor, biases: Tensor | None = None) -> QTensor:
        bits, group, mode = self._format(name)
        if mode not in KINDS:
            raise FormatError(f"{name} is quantized in mode {mode!r}; auraflux reads {', '.join(KINDS)}.")
        shape = (*codes.shape[:-1], codes.shape[-1] * 32 // bits)
        if mode == "nvfp4" and scales.dtype is torch.uint8:
            scales = nvfp4.hold_scales(scales.view(nvfp4.SCALES), torch.ones(()))
        try:
            made = QTensor(codes.view(torch.int32), scales, biases, bits, group, shape)
        except FormatError as err:
            raise FormatError(f"{name} in {self.path}: {err}") from err
        if mode not in (made.kind, made.expanded_kind):
            raise FormatError(f"{name} in {self.path}: its tensors have mode {made.kind!r}, and config.json says {mode!r}.")
        return made


KINDS_OF = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
ITEMSIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _mxfp4_blocks(blocks: Tensor, exponents: Tensor) -> QTensor:
    """Build MXFP4 from blocks uint8 [E, N, K/32, 16] and exponents uint8 [E, N, K/32]."""
    if blocks.dtype is not torch.uint8 or blocks.ndim < 3 or blocks.shape[-1] != mxfp4.GROUP // 2:
        raise FormatError(f"its blocks are {list(blocks.shape)} of {blocks.dtype}, not of {mxfp4.GROUP // 2} bytes each.")
    if exponents.dtype is not torch.uint8 or exponents.shape != blocks.shape[:-1]:
        raise FormatError(f"its scales are {list(exponents.shape)} of {exponents.dtype}, not one byte per block.")
    *leading, groups, nbytes = blocks.shape
    packed = blocks.contiguous().view(torch.int32).reshape(*leading, groups * nbytes // 4)
    return QTensor(packed, exponents, None, mxfp4.BITS, mxfp4.GROUP, (*leading, groups * mxfp4.GROUP))


class _MLXFormat(TypedDict, total=False):
    bits: int
    group_size: int
    mode: str


def _mlx_format(found: Fields) -> _MLXFormat:
    """Read mlx-lm's description of a format; missing keys are left out."""
    made = _MLXFormat()
    if (bits := found.get("bits", integer(1, 8), None)) is not None:
        made["bits"] = bits
    if (group := found.get("group_size", integer(1, 1024), None)) is not None:
        made["group_size"] = group
    if (mode := found.get("mode", NAME, None)) is not None:
        made["mode"] = mode
    return made
