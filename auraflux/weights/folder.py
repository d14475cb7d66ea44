"""Folders of safetensors with a config.json: Hugging Face's and mlx-lm's."""

import ctypes
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant import KINDS, QTensor, mxfp4
from auraflux.weights.boundary import brief, listed, named, read_json, regular
from auraflux.weights.expert_files import ExpertFiles, has_experts, open_experts
from auraflux.weights.methods import Header, Held, method_of
from auraflux.weights.model_keys import check_beside, check_config, check_index
from auraflux.weights.row_forms import DTYPES, RECORDS, RowForm, form_named
from auraflux.weights.row_table import Extent, TablePart
from auraflux.weights.stored import Stored

PARTS = (".scales", ".biases")
# gpt-oss as OpenAI published it: nibbles and exponents of MXFP4, both as bytes
BLOCKS, EXPONENTS = "_blocks", "_scales"
BESIDE = "hf_quant_config.json"  # what ModelOpt says of its weights, in older folders there alone
DONTNEED, PAGE = 4, 4096


class Folder:
    """A checkpoint of safetensors files, of which one weight may be several tensors (codes, scales, biases)."""

    def __init__(self, path: Path):
        self.path = path
        if not (path / "config.json").exists():
            raise FormatError(f"{path} has no config.json, so it is not a model folder.")
        self.config = read_json(path / "config.json", path)
        check_config(path / "config.json", self.config)
        self.quantization: dict[str, Any] = self.config.get("quantization") or {}
        self.experts: ExpertFiles | None = open_experts(path) if has_experts(path) else None
        # what is packed was written as convert writes it
        self.form = "mlx" if self.quantization or self.experts else "hf"
        self.method = method_of(self.config, self._beside())
        self._plans: dict[str, Held] = {}
        self._files: dict[Path, Any] = {}
        self._offsets: dict[Path, dict[str, int]] = {}

    def _beside(self) -> dict[str, Any] | None:
        path = self.path / BESIDE
        return check_beside(path, read_json(path, self.path)) if path.exists() else None

    @cached_property
    def _homes(self) -> dict[str, Path]:
        """The file of every tensor."""
        files = sorted(self.path.glob("*.safetensors"))
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            wanted = sorted(set(check_index(index, read_json(index, self.path)).values()))
            missing = [name for name in wanted if not (self.path / name).exists()]
            if missing:
                raise FormatError(f"{index} lists files that are not there: {listed(missing)}.")
            files = [self.path / name for name in wanted]
        if not files:
            raise FormatError(f"{self.path} has no .safetensors file.")
        return {name: path for path in files for name in self._open(path).keys()}  # noqa: SIM118

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = safe_open(regular(path, self.path), framework="pt").__enter__()
            # what torch cannot map is a RuntimeError
            except (OSError, RuntimeError, SafetensorError) as err:
                raise FormatError(f"{path} cannot be read: {brief(err)}. It may have been cut short; fetch it again.") from err
        return self._files[path]

    @cached_property
    def notes(self) -> list[str]:
        if self.method is None:
            return []
        counts = Counter(held.kept for name in self._coded if (held := self.held(name)) is not None)
        kept = [f"{self.method.title}: {count} weights are {kept}." for kept, count in counts.most_common()]
        return [*kept, *self.method.notes()]

    def _slice(self, name: str) -> Any:
        return self._open(self._homes[name]).get_slice(name)

    def _part_of(self, name: str) -> bool:
        """Whether a tensor is the scales or biases of a quantized weight."""
        if name.endswith(EXPONENTS) and name.removesuffix(EXPONENTS) + BLOCKS in self._homes:
            return True
        stem, dot, part = name.rpartition(".")
        return dot + part in PARTS and stem + ".weight" in self._homes and stem + ".scales" in self._homes

    @cached_property
    def _coded(self) -> dict[str, dict[str, str]]:
        """The weights that are of the folder's method, and the tensors that they consist of, by what these are."""
        if self.method is None:
            return {}
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        for name in self._homes:
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
        """The stack of experts that a tensor lies beside, such as experts.down_proj_weight_scale, and what it is of that."""
        assert self.method is not None
        for part in (*self.method.parts, *self.method.unused):
            stem = name.removesuffix(f"_{part}")
            if stem != name and stem in self._homes:
                return stem, part
        return None

    def _of_method(self, name: str) -> bool:
        """Whether a tensor is part of a weight of the folder's method, or lies beside it and is not used."""
        if self.method is None:
            return False
        module, _, part = name.rpartition(".")
        weight, fused = f"{module}.weight", self._fused(name)
        beside = part in self.method.unused and (weight in self._homes or weight in self._coded)
        return name in self._named or beside or (fused is not None and fused[0] in self._coded)

    @cached_property
    def _named(self) -> set[str]:
        return {name for parts in self._coded.values() for name in parts.values()}

    @cached_property
    def _parts(self) -> dict[str, list[str]]:
        """The tensors that each weight consists of."""
        parts = {weight: list(found.values()) for weight, found in self._coded.items()}
        for name in self._homes:
            if self._of_method(name):
                continue
            if name in parts:
                raise FormatError(f"{self.path} has {name} twice, as it is and as codes: {listed(parts[name])}.")
            if name.endswith(BLOCKS):
                stem = name.removesuffix(BLOCKS)
                if stem + EXPONENTS not in self._homes:
                    raise FormatError(f"{self.path} has {named(name)} and no {named(stem + EXPONENTS)}.")
                parts[stem] = [name, stem + EXPONENTS]
            elif not self._part_of(name):
                stem = name.removesuffix(".weight")
                found = [stem + part for part in PARTS if stem != name and stem + part in self._homes]
                parts[name] = [name, *found]
        return parts

    def files(self) -> list[Path]:
        packed = [] if self.experts is None else self.experts.paths
        configs = [path for name in ("config.json", BESIDE) if (path := self.path / name).exists()]
        return [*configs, *sorted(set(self._homes.values())), *packed]

    def sizes(self) -> dict[str, int]:
        return self._sizes

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {name: sum(map(self._nbytes, parts)) for name, parts in self._parts.items()}

    def _nbytes(self, name: str) -> int:
        part = self._slice(name)
        return torch.Size(part.get_shape()).numel() * ITEMSIZES.get(part.get_dtype(), 1)

    def shape(self, name: str) -> tuple[int, ...]:
        if (held := self.held(name)) is not None:
            return held.shape
        parts = self._parts[name]
        found = tuple(self._slice(parts[0]).get_shape())
        if len(parts) == 1:
            return found
        if parts[0].endswith(BLOCKS):
            return (*found[:-2], found[-2] * found[-1] * 2)
        bits, _, _ = self._format(name)
        return (*found[:-1], found[-1] * 32 // bits)

    def held(self, name: str) -> Held | None:
        """How a weight of the folder's method will be held; None for all others."""
        if self.method is None or name not in self._coded:
            return None
        if name not in self._plans:
            slices = {part: self._slice(tensor) for part, tensor in self._coded[name].items()}
            headers = {part: Header(tuple(each.get_shape()), each.get_dtype()) for part, each in slices.items()}
            try:
                self._plans[name] = self.method.plan(headers, lambda part: slices[part][:])
            except FormatError as err:
                raise FormatError(f"{name} in {self.path} is no weight of {self.method.title}: {err}") from err
        return self._plans[name]

    def _format(self, name: str) -> tuple[int, int, str]:
        """Bits, group and mode of a quantized weight."""
        module = name.removesuffix(".weight")
        own = self.quantization.get(module)
        entry = {**self.quantization, **own} if isinstance(own, dict) else self.quantization
        try:
            return int(entry["bits"]), int(entry["group_size"]), str(entry.get("mode", "affine"))
        except (KeyError, TypeError, ValueError) as err:
            raise FormatError(
                f"{self.path / 'config.json'} does not say how {module} is quantized: "
                f"'quantization' needs 'bits' and 'group_size', for all or for it."
            ) from err

    def load(self, name: str) -> Stored:
        parts = self._parts[name]
        try:
            found = [self._open(self._homes[part]).get_tensor(part) for part in parts]
        except SafetensorError as err:
            raise FormatError(f"{self._homes[parts[0]]}: tensor {name} cannot be read: {brief(err)}.") from err
        if self.held(name) is not None:
            return self._decoded(name, found)
        if len(parts) == 1:
            return found[0]
        if parts[0].endswith(BLOCKS):
            try:
                return _mxfp4_blocks(*found)
            except FormatError as err:
                raise FormatError(f"{name} in {self.path} is no weight of MXFP4: {err}") from err
        return self._quantized(name, *found)

    def _decoded(self, name: str, found: list[Tensor]) -> Stored:
        assert self.method is not None
        try:
            return self.method.load(dict(zip(self._coded[name], found, strict=True)))
        except FormatError as err:
            raise FormatError(f"{name} in {self.path} is no weight of {self.method.title}: {err}") from err

    def load_one(self, name: str, index: int) -> Stored:
        return self.load(name)[index]

    def table_part(self, name: str) -> TablePart:
        shape, parts = self.shape(name), self._parts[name]
        if self.held(name) is not None or len(shape) != 2 or parts[0].endswith(BLOCKS):
            raise FormatError(f"{name} in {self.path} is held as {self._words(name)}, which is not read by rows.")
        extents = tuple(map(self._extent, parts))
        if (found := RECORDS.search(name)) is not None and self._slice(name).get_dtype() == "U8":
            if (form := form_named(found[2], shape[1])) is None:
                raise FormatError(f"{name} in {self.path} has rows of {shape[1]} bytes, of which no row is made.")
            return TablePart(name, shape[0], form, extents, records=True)
        kind = KINDS_OF.get(self._slice(parts[-1]).get_dtype())
        if kind is None:
            raise FormatError(f"{name} in {self.path} has rows of {self._words(name)}, which are not read by rows.")
        form = RowForm(shape[1], DTYPES[kind])
        if len(parts) > 1:
            bits, group, mode = self._format(name)
            if mode != "affine" or len(parts) != 3 or shape[1] % group or shape[1] * bits % 32:
                raise FormatError(f"{name} in {self.path} is held as {self._words(name)}, which is not read by rows.")
            form = RowForm(shape[1], DTYPES[kind], bits, group)
        if [extent.nbytes for extent in extents] != form.parts or len({self._slice(part).get_shape()[0] for part in parts}) > 1:
            raise FormatError(f"{name} in {self.path}: codes, scales and biases are not those of {form.name}.")
        return TablePart(name, shape[0], form, extents)

    def _words(self, name: str) -> str:
        return ", ".join(f"{self._slice(part).get_dtype()} {list(self._slice(part).get_shape())}" for part in self._parts[name])

    def _extent(self, name: str) -> Extent:
        """Where the rows of a matrix lie; the header was found right when the file was opened."""
        path = self._homes[name]
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
        for path in {self._homes[part] for part in gone}:
            if all(part in gone for part, home in self._homes.items() if home == path) and path in self._files:
                self._files.pop(path).__exit__(None, None, None)

    def release(self, name: str) -> None:
        for part in self._parts[name]:
            tensor = self._open(self._homes[part]).get_tensor(part)
            first, last = -(-tensor.data_ptr() // PAGE) * PAGE, (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE
            if last > first:
                # pages of a file mapped for reading are read anew should anyone look at them again
                _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), DONTNEED)

    def _quantized(self, name: str, codes: Tensor, scales: Tensor, biases: Tensor | None = None) -> QTensor:
        bits, group, mode = self._format(name)
        if mode not in KINDS:
            raise FormatError(f"{name} is quantized in mode {mode!r}; auraflux reads {', '.join(KINDS)}.")
        shape = (*codes.shape[:-1], codes.shape[-1] * 32 // bits)
        if mode == "nvfp4" and scales.dtype is torch.uint8:
            scales = scales.view(torch.float8_e4m3fn).float()
        try:
            made = QTensor(codes.view(torch.int32), scales, biases, bits, group, shape)
        except FormatError as err:
            raise FormatError(f"{name} in {self.path}: {err}") from err
        if made.kind != mode:
            raise FormatError(
                f"{name} in {self.path}: its tensors are those of mode {made.kind!r}, and config.json says {mode!r}."
            )
        return made


KINDS_OF = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
ITEMSIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _mxfp4_blocks(blocks: Tensor, exponents: Tensor) -> QTensor:
    """blocks uint8 [E, N, K/32, 16], exponents uint8 [E, N, K/32]."""
    if blocks.dtype is not torch.uint8 or blocks.ndim < 3 or blocks.shape[-1] != mxfp4.GROUP // 2:
        raise FormatError(f"its blocks are {list(blocks.shape)} of {blocks.dtype}, not of {mxfp4.GROUP // 2} bytes each.")
    if exponents.dtype is not torch.uint8 or exponents.shape != blocks.shape[:-1]:
        raise FormatError(f"its scales are {list(exponents.shape)} of {exponents.dtype}, not one byte of each block.")
    *leading, groups, nbytes = blocks.shape
    packed = blocks.contiguous().view(torch.int32).reshape(*leading, groups * nbytes // 4)
    return QTensor(packed, exponents, None, mxfp4.BITS, mxfp4.GROUP, (*leading, groups * mxfp4.GROUP))
