"""`convert`: writes a model as a folder in mlx-lm's layout, which both this package and mlx-lm load.

The model's constructor determines the tensors, their names and values: it is given a `FolderWriter`, which writes every
requested tensor to the folder and returns a placeholder. At most one tensor and one shard are in memory.
"""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant import QTensor, check_format
from auraflux.weights.convert.destination import NEW, put_in_place, working_folder
from auraflux.weights.convert.quantize_large import quantize_large, requantize_for_mlx
from auraflux.weights.fields import COUNT, HEAD, fields_of
from auraflux.weights.formats.row_layout import as_bytes, row_format_of, with_checksums
from auraflux.weights.formats.stored import Checkpoint, Stored, dense, is_placeholder
from auraflux.weights.formats.untrusted import regular_file
from auraflux.weights.loader import Weights
from auraflux.weights.names import ROUTERS, Rename

SHARD_NBYTES = 1 << 30
RECORDS_NBYTES = 1 << 28  # bytes of a table's records in one tensor
# families whose language model is nested in mlx-lm, and its model_type for text-only checkpoints
NESTED_PREFIX = dict.fromkeys(("qwen3_5", "qwen3_5_moe", "gemma3", "mistral3", "kimi_k25"), "language_model.")
TEXT_ONLY = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
EMBEDDINGS = re.compile(r"(embed_tokens|lm_head)\.weight$")
COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
# file name stems: mlx-lm loads model*.safetensors and fails on unknown tensors, so MTP head and vision tower have own files
MODEL, MTP, TOWER = "model", "mtp", "vision"
ROWS = "rows"  # tables read from disk: in separate files, which can be unmapped
OWN = ("config.json", "model.safetensors.index.json")


class Family(Protocol):
    """Interface of a module in auraflux.models."""

    Config: Any
    Model: Any
    rename: Rename


class Shards:
    """Safetensors files of about `limit` bytes, per stem; final names are given when the count is known."""

    def __init__(self, folder: Path, limit: int = SHARD_NBYTES):
        self.folder, self.limit = folder, limit
        self._waiting: dict[str, dict[str, Tensor]] = {MODEL: {}}
        self._written: dict[str, list[tuple[Path, list[str]]]] = {MODEL: []}
        self.nbytes = 0

    def add(self, name: str, tensor: Tensor, stem: str = MODEL) -> None:
        """Add a tensor to the files of a stem."""
        waiting = self._waiting.setdefault(stem, {})
        if waiting and sum(each.nbytes for each in waiting.values()) + tensor.nbytes > self.limit:
            self._flush(stem)
        self._waiting.setdefault(stem, {})[name] = tensor.contiguous()
        self.nbytes += tensor.nbytes

    def _flush(self, stem: str) -> None:
        waiting, written = self._waiting.pop(stem), self._written.setdefault(stem, [])
        path = self.folder / f"part-{stem}-{len(written)}"
        try:
            save_file(waiting, path, metadata={"format": "mlx"})
        except SafetensorError as err:
            # safetensors does not pass on the original OSError
            raise OSError(str(err)) from err
        # safetensors creates files readable by the owner only
        path.chmod(self.folder.stat().st_mode & 0o666)
        written.append((path, list(waiting)))

    def close(self) -> None:
        """Write the remaining tensors and the index."""
        for stem in list(self._waiting):
            self._flush(stem)
        homes: dict[str, str] = {}
        for stem, written in self._written.items():
            count = len(written)
            for i, (path, names) in enumerate(written, 1):
                final = f"{stem}.safetensors" if count == 1 else f"{stem}-{i:05d}-of-{count:05d}.safetensors"
                path.rename(self.folder / final)
                homes |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self.nbytes}, "weight_map": dict(sorted(homes.items()))}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=4))


class FolderWriter(Weights):
    """Weights that are written to files as the model loads them.

    formats       mlx-lm's quantization entry of each matrix
    mtp_prefixes  prefixes of the MTP head's tensor names, which go to separate files; None without one
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        rename: Rename,
        shards: Shards | None,
        mtp_prefixes: tuple[str, ...] | None = None,
        **options: Any,
    ):
        super().__init__(checkpoint, rename, mtp=mtp_prefixes is not None, **options)
        self.shards, self.mtp_prefixes, self.written = shards, mtp_prefixes or (), set[str]()
        self.prefix = NESTED_PREFIX.get(_model_type(checkpoint.config), "")
        self.formats: dict[str, dict[str, Any]] = {}

    def vector(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, shift: float = 0.0) -> Tensor:
        found = dense(self._take(name, shape))
        # keep the stored dtype: with float32 mlx-lm would compute in float32
        return self.complete(name, (found.float() + shift).to(found.dtype) if shift else found).to(dtype)

    def matrix(self, name: str, rows: int, width: int, take: Tensor | None = None, in_order: bool = False) -> Stored:
        # mlx-lm stores all rows in the checkpoint's order and selects after the product
        found = self._take(f"{name}.weight", (rows if take is None else None, width))
        if f"{name}.weight" in self.written:
            return placeholder(rows, width)
        if name.endswith(".kv_b_proj") and not is_placeholder(found):
            self._split_kv_b(name, dense(found))
        else:
            self.complete(f"{name}.weight", self.quantized(found, f"{name}.weight"))
        return placeholder(rows, width)

    def table(self, name: str, least: int, width: int) -> None:
        """Write a table as records with checksums, a chunk of rows at a time."""
        found = super().table(name, least, width)
        if found is None or self.shards is None:
            return
        for number, rows in enumerate(found.chunks(RECORDS_NBYTES)):
            made: Stored | None = None
            if self.bits is not None and found.form.bits is None and width % self.group == 0:
                made = quantize_large(found.form.dequantize(rows).to(found.form.dtype), self.bits, self.group)
            form = found.form if made is None else row_format_of(made)
            records = with_checksums(rows if made is None else as_bytes(made))
            self.shards.add(f"{self.prefix}{name}.rows_{number}.{form.name}", records, ROWS)

    def _split_kv_b(self, name: str, found: Tensor) -> None:
        """Write kv_b_proj of MLA in mlx-lm's layout: two stacks, the one for keys transposed."""
        outer = fields_of(self.checkpoint.config, "config.json")
        config = outer.section("text_config") if "text_config" in outer else outer
        heads, nope = config.read("num_attention_heads", COUNT), config.read("qk_nope_head_dim", HEAD)
        rows, module = found.view(heads, -1, found.shape[-1]), name.removesuffix(".kv_b_proj")
        stacks = {"embed_q": rows[:, :nope].transpose(1, 2).contiguous(), "unembed_out": rows[:, nope:].contiguous()}
        for part, stack in stacks.items():
            self.complete(f"{module}.{part}.weight", self.quantized(stack, f"{module}.{part}.weight"))
        self.release(f"{name}.weight")

    def quantized(self, found: Stored, name: str) -> Stored:
        """Quantize dense weights, and requantize codes with more bits than requested."""
        if isinstance(found, QTensor) and not found.in_mlx and self.bits is not None:
            # mlx-lm lacks these formats; FP8 checkpoints use bf16 for everything else
            found = dense(found).to(torch.bfloat16) if found.kind == "fp8" else requantize_for_mlx(found)
        # mlx-lm accepts dense routers in all families
        if self.bits is None or is_placeholder(found) or found.shape[-1] % self.group or ROUTERS.search(name):
            return found
        if not isinstance(found, QTensor):
            return quantize_large(found, self.bits, self.group)
        # embeddings with more bits than the rest were left so on purpose
        if found.bits <= self.bits or EMBEDDINGS.search(name):
            return found
        dtype = found.scales.dtype if found.is_expanded else found.expand_scales().scales.dtype
        return quantize_large(dense(found).to(dtype), self.bits, self.group)

    def to_kernel_layout(self, found: Stored, in_order: bool = False) -> Stored:
        return found

    def complete(self, name: str, value: Any) -> Any:
        if not is_placeholder(value) and name not in self.written:
            self.written.add(name)
            self._write(name, value)
            super().complete(name, value)
        return placeholder(*value.shape)

    def _write(self, name: str, value: Stored) -> None:
        assert self.shards is not None, "a plan writes nothing"
        stem = MTP if name.startswith(self.mtp_prefixes) else MODEL
        name = self.prefix + name
        if not isinstance(value, QTensor):
            self.shards.add(name, value, stem)
            return
        value = self.to_file_layout(value)
        module = name.removesuffix(".weight")
        self.formats[module] = {"group_size": value.group, "bits": value.bits, "mode": value.kind}
        self.shards.add(name, value.packed.view(torch.uint32), stem)
        self.shards.add(f"{module}.scales", value.scales, stem)
        if value.biases is not None:
            self.shards.add(f"{module}.biases", value.biases, stem)

    def to_file_layout(self, value: QTensor) -> QTensor:
        """Return codes in the layout that mlx-lm reads."""
        return value.expand_scales()


def placeholder(*shape: int) -> Tensor:
    """Return a tensor that takes no memory, see `is_placeholder`."""
    return torch.zeros(()).expand(shape)


def convert(
    checkpoint: Checkpoint,
    family: Family,
    target: Path,
    *,
    bits: int = 4,
    group: int = 64,
    force: bool = False,
    advance: Callable[[int], None] = lambda nbytes: None,
    add: Callable[[Path], None] = lambda folder: None,
    writer: Callable[..., FolderWriter] = FolderWriter,
    tower: Sequence[str] = (),
) -> Path:
    """Write a checkpoint as a quantized MLX folder.

    force    replace an existing model folder
    advance  called with the bytes of each loaded tensor
    writer   the class that writes the weights
    add      writes further files to the folder, such as a tokenizer
    tower    names of a vision tower's tensors, which are copied
    """
    check_format(bits, group)
    if checkpoint.experts is not None:
        raise FormatError(f"{checkpoint.path} holds packed experts. Convert the original model.")
    target = target.absolute()
    try:
        with working_folder(target) as aside:
            check_paths(checkpoint, target, force)
            folder = aside / NEW
            folder.mkdir()
            shards = Shards(folder)
            config = family.Config.from_hf(checkpoint.config)
            form: dict[str, Any] = {"bits": bits, "group": group, "mtp_prefixes": find_mtp_prefixes(checkpoint, family, config)}
            weights = writer(checkpoint, family.rename, shards, **form, advance=advance)
            family.Model(config, weights)
            weights.check_loaded()
            if not weights.formats:
                raise FormatError(
                    f"no weight in {checkpoint.path} has a width that is a multiple of {group}; try a smaller --group."
                )
            copy_tower(checkpoint, tower, shards, advance)
            shards.close()
            written = mlx_config(checkpoint.config, weights.formats, has_tower=bool(tower))
            if weights.has_untied_head:
                written["tie_word_embeddings"] = False
            (folder / "config.json").write_text(json.dumps(written, indent=4))
            copy_others(checkpoint.path, folder)
            add(folder)
            put_in_place(folder, target, aside, lambda: check_paths(checkpoint, target, force))
    except OSError as err:
        raise FormatError(f"{target} cannot be written: {err.strerror or err}.") from err
    return target


def copy_tower(checkpoint: Checkpoint, names: Sequence[str], shards: Shards, advance: Callable[[int], None]) -> None:
    """Copy a vision tower's tensors to files of their own, under their names and in their dtype."""
    sizes = checkpoint.sizes()
    for name in names:
        shards.add(name, dense(checkpoint.load(name)).clone(), TOWER)
        checkpoint.release(name)
        advance(sizes[name])


def find_mtp_prefixes(checkpoint: Checkpoint, family: Family, config: Any) -> tuple[str, ...] | None:
    """Return the prefixes of the MTP head's tensor names; None if the checkpoint has none."""
    place = family.Model.mtp_names(config)
    return place.prefixes if place is not None and place.is_in(checkpoint, family.rename) else None


def check_paths(checkpoint: Checkpoint, target: Path, force: bool) -> None:
    """Raise if the target is the source, exists without `force`, or is not a model folder."""
    if not os.path.lexists(target):
        return
    if target.resolve() == checkpoint.path.resolve():
        raise FormatError(f"{target} is the source model; name another folder.")
    if not force:
        raise FormatError(f"{target} already exists. Use --force to replace it.")
    if not (target / "config.json").exists() and (target.is_file() or any(target.iterdir())):
        raise FormatError(f"{target} is not a model folder, so it is not replaced.")


def mlx_config(config: dict[str, Any], formats: dict[str, dict[str, Any]], has_tower: bool = False) -> dict[str, Any]:
    """Return config.json with mlx-lm's "quantization": the most frequent format, and exceptions by module.

    has_tower  the folder has the model's vision tower
    """
    usual, _ = Counter(tuple(form.items()) for form in formats.values()).most_common(1)[0]
    entry = {**dict(usual), **{module: form for module, form in formats.items() if tuple(form.items()) != usual}}
    dropped = ("quantization", "quantization_config", *(() if has_tower else ("vision_config",)))
    result = {key: _older_keys(value) if key == "text_config" else value for key, value in config.items() if key not in dropped}
    return {**_older_keys(result), "model_type": _model_type(config), "quantization": entry, "quantization_config": entry}


def _model_type(config: dict[str, Any]) -> str:
    return TEXT_ONLY.get(config["model_type"], config["model_type"])


def _older_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Add the keys that transformers 5 renamed under their old names, which mlx-lm reads."""
    if "num_local_experts" in config:
        config = {"num_experts": config["num_local_experts"], **config}
    given = config.get("rope_parameters")
    if not isinstance(given, dict):
        return config
    full, sliding = given.get("full_attention", given), given.get("sliding_attention")
    older: dict[str, Any] = {key: full[key] for key in ("rope_theta", "partial_rotary_factor") if key in full}
    if full.get("rope_type", "default") != "default":
        older["rope_scaling"] = {key: value for key, value in full.items() if key not in older}
    if isinstance(sliding, dict) and "rope_theta" in sliding:
        older["rope_local_base_freq"] = sliding["rope_theta"]
    return {**older, **{key: value for key, value in config.items() if key not in older or value is not None}}


def copy_others(source: Path, folder: Path) -> None:
    """Copy tokenizer and config files, but no code."""
    if not source.is_dir():
        return
    for path in sorted({path for pattern in COPIED for path in source.glob(pattern)}):
        if path.name not in OWN and path.is_file():
            shutil.copyfile(regular_file(path, source), folder / path.name)
