"""Writing a model as a folder in mlx-lm's layout, which this package and mlx-lm both load.

The model's own constructor says which tensors there are, under which names and with which values: it is given `Writing`, which
puts every tensor it is asked for into the folder and hands back a blank. So one tensor is in memory at a time, and a shard.
"""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant import QTensor, check_format
from auraflux.weights.boundary import regular
from auraflux.weights.destination import NEW, put_in_place, working_folder
from auraflux.weights.loader import Weights
from auraflux.weights.names import ROUTERS, Rename
from auraflux.weights.rounding import for_mlx, quantize_large
from auraflux.weights.row_forms import as_bytes, form_of, with_checksums
from auraflux.weights.stored import Checkpoint, Stored, dense, is_blank

SHARD_NBYTES = 1 << 30
RECORDS_NBYTES = 1 << 28  # of a table that are in one tensor
# families whose language model lies within another in mlx-lm, and what it calls those that come alone
INNER = dict.fromkeys(("qwen3_5", "qwen3_5_moe", "gemma3", "mistral3", "kimi_k25"), "language_model.")
ALONE = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
EMBEDDINGS = re.compile(r"(embed_tokens|lm_head)\.weight$")
COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
# files, by what is in them: mlx-lm reads those called model, and stops at tensors it has no use for
MODEL, MTP = "model", "mtp"
ROWS = "rows"  # of tables that are read from disk: files that hold nothing else need not be mapped
OWN = ("config.json", "model.safetensors.index.json")


class Family(Protocol):
    """A module of auraflux.models."""

    Config: Any
    Model: Any
    rename: Rename


class Shards:
    """Files of tensors of about `limit` bytes, named when their number is known; those of each stem fill files of their own."""

    def __init__(self, folder: Path, limit: int = SHARD_NBYTES):
        self.folder, self.limit = folder, limit
        self._waiting: dict[str, dict[str, Tensor]] = {MODEL: {}}
        self._written: dict[str, list[tuple[Path, list[str]]]] = {MODEL: []}
        self.nbytes = 0

    def add(self, name: str, tensor: Tensor, stem: str = MODEL) -> None:
        """Put a tensor into the files whose names begin so."""
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
            # what the system said is only in the text
            raise OSError(str(err)) from err
        # safetensors lets only the owner read what it writes
        path.chmod(self.folder.stat().st_mode & 0o666)
        written.append((path, list(waiting)))

    def close(self) -> None:
        """Write what is left, and the index."""
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


class Writing(Weights):
    """Weights that are written to files as they are taken.

    formats  how each matrix was written: what mlx-lm wants to know of it
    beyond   what names of a layer begin with that predicts further tokens: it has files of its own. None where there is none
    """

    def __init__(
        self, checkpoint: Checkpoint, rename: Rename, shards: Shards, beyond: tuple[str, ...] | None = None, **options: Any
    ):
        super().__init__(checkpoint, rename, mtp=beyond is not None, **options)
        self.shards, self.beyond, self.written = shards, beyond or (), set[str]()
        self.prefix = INNER.get(_model_type(checkpoint.config), "")
        self.formats: dict[str, dict[str, Any]] = {}

    def vector(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, shift: float = 0.0) -> Tensor:
        found = dense(self._take(name, shape))
        # single precision would make mlx-lm compute in it
        return self.keep(name, (found.float() + shift).to(found.dtype) if shift else found).to(dtype)

    def matrix(self, name: str, rows: int, width: int, take: Tensor | None = None, in_order: bool = False) -> Stored:
        # mlx-lm has all rows in the order of the checkpoint, and takes what it needs after each product
        found = self._take(f"{name}.weight", (rows if take is None else None, width))
        if f"{name}.weight" in self.written:
            return blank(rows, width)
        if name.endswith(".kv_b_proj") and not is_blank(found):
            self._halves(name, dense(found))
        else:
            self.keep(f"{name}.weight", self.rounded(found, f"{name}.weight"))
        return blank(rows, width)

    def table(self, name: str, least: int, width: int) -> None:
        """Write a table as records, some rows at a time, each with its checksum."""
        found = super().table(name, least, width)
        if found is None or self.shards is None:
            return
        for number, rows in enumerate(found.pieces(RECORDS_NBYTES)):
            made: Stored | None = None
            if self.bits is not None and found.form.bits is None and width % self.group == 0:
                made = quantize_large(found.form.numbers(rows).to(found.form.dtype), self.bits, self.group)
            form = found.form if made is None else form_of(made)
            records = with_checksums(rows if made is None else as_bytes(made))
            self.shards.add(f"{self.prefix}{name}.rows_{number}.{form.name}", records, ROWS)

    def _halves(self, name: str, found: Tensor) -> None:
        """Write a latent's way back to keys and values as mlx-lm has it: as two stacks, the first turned over."""
        config = {**self.checkpoint.config, **(self.checkpoint.config.get("text_config") or {})}
        heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
        rows, module = found.view(heads, -1, found.shape[-1]), name.removesuffix(".kv_b_proj")
        halves = {"embed_q": rows[:, :nope].transpose(1, 2).contiguous(), "unembed_out": rows[:, nope:].contiguous()}
        for half, stack in halves.items():
            self.keep(f"{module}.{half}.weight", self.rounded(stack, f"{module}.{half}.weight"))
        self.release(f"{name}.weight")

    def rounded(self, found: Stored, name: str) -> Stored:
        """Round what is dense, and codes with more bits than were asked for."""
        if isinstance(found, QTensor) and not found.in_mlx and self.bits is not None:
            # mlx-lm has no such formats; those who publish FP8 give bf16 as the dtype of all else
            found = dense(found).to(torch.bfloat16) if found.kind == "fp8" else for_mlx(found)
        # mlx-lm has codes for the routers of some families, and reads them dense in all
        if self.bits is None or is_blank(found) or found.shape[-1] % self.group or ROUTERS.search(name):
            return found
        if not isinstance(found, QTensor):
            return quantize_large(found, self.bits, self.group)
        # who quantized the rest and left these more bits had a reason
        if found.bits <= self.bits or EMBEDDINGS.search(name):
            return found
        dtype = found.scales.dtype if found.super_block is None else torch.float32
        return quantize_large(dense(found).to(dtype), self.bits, self.group)

    def ready(self, found: Stored, in_order: bool = False) -> Stored:
        return found

    def keep(self, name: str, value: Any) -> Any:
        if not is_blank(value) and name not in self.written:
            self.written.add(name)
            self._write(name, value)
            super().keep(name, value)
        return blank(*value.shape)

    def _write(self, name: str, value: Stored) -> None:
        stem = MTP if name.startswith(self.beyond) else MODEL
        name = self.prefix + name
        if not isinstance(value, QTensor):
            self.shards.add(name, value, stem)
            return
        value = self.written_as(value)
        module = name.removesuffix(".weight")
        self.formats[module] = {"group_size": value.group, "bits": value.bits, "mode": value.kind}
        self.shards.add(name, value.packed.view(torch.uint32), stem)
        self.shards.add(f"{module}.scales", value.scales, stem)
        if value.biases is not None:
            self.shards.add(f"{module}.biases", value.biases, stem)

    def written_as(self, value: QTensor) -> QTensor:
        """Codes as they are written: as mlx-lm reads them."""
        return value.widened()


def blank(*shape: int) -> Tensor:
    """A tensor that takes no memory, see `is_blank`."""
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
) -> Path:
    """Write a checkpoint as an MLX folder of codes.

    force    replace a model folder that is there
    advance  called with the bytes of each tensor that was read
    add      puts further files into the folder, such as a tokenizer
    """
    check_format(bits, group)
    if checkpoint.experts is not None:
        raise FormatError(f"{checkpoint.path} holds packed experts. Convert the model that it was packed from.")
    target = target.absolute()
    try:
        with working_folder(target) as aside:
            check_paths(checkpoint, target, force)
            folder = aside / NEW
            folder.mkdir()
            shards = Shards(folder)
            config = family.Config.from_hf(checkpoint.config)
            form: dict[str, Any] = {"bits": bits, "group": group, "beyond": further(checkpoint, family, config)}
            weights = Writing(checkpoint, family.rename, shards, **form, advance=advance)
            family.Model(config, weights)
            weights.done()
            if not weights.formats:
                raise FormatError(
                    f"groups of {group} divide the width of no weight in {checkpoint.path}; try a smaller --group."
                )
            shards.close()
            written = mlx_config(checkpoint.config, weights.formats)
            (folder / "config.json").write_text(json.dumps(written, indent=4))
            copy_others(checkpoint.path, folder)
            add(folder)
            put_in_place(folder, target, aside, lambda: check_paths(checkpoint, target, force))
    except OSError as err:
        raise FormatError(f"{target} cannot be written: {err.strerror or err}.") from err
    return target


def further(checkpoint: Checkpoint, family: Family, config: Any) -> tuple[str, ...] | None:
    """What names of a checkpoint's layer begin with that predicts further tokens; None where it has none."""
    place = family.Model.mtp_place(config)
    return place.beyond if place is not None and place.is_in(checkpoint, family.rename) else None


def check_paths(checkpoint: Checkpoint, target: Path, force: bool) -> None:
    """Refuse to write over what is read, or over something else."""
    if not os.path.lexists(target):
        return
    if target.resolve() == checkpoint.path.resolve():
        raise FormatError(f"{target} is the model that is to be written anew; name another folder.")
    if not force:
        raise FormatError(f"{target} is already there. Use --force to replace it.")
    if not (target / "config.json").exists() and (target.is_file() or any(target.iterdir())):
        raise FormatError(f"{target} is not a model folder, so it is not replaced.")


def mlx_config(config: dict[str, Any], formats: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """config.json with what mlx-lm calls "quantization": the most frequent format, and every module that has another."""
    usual, _ = Counter(tuple(form.items()) for form in formats.values()).most_common(1)[0]
    entry = {**dict(usual), **{module: form for module, form in formats.items() if tuple(form.items()) != usual}}
    gone = ("quantization", "quantization_config", "vision_config")
    kept = {key: _older_keys(value) if key == "text_config" else value for key, value in config.items() if key not in gone}
    return {**_older_keys(kept), "model_type": _model_type(config), "quantization": entry, "quantization_config": entry}


def _model_type(config: dict[str, Any]) -> str:
    return ALONE.get(config["model_type"], config["model_type"])


def _older_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The same with what transformers 5 renamed also under the older keys, which are those mlx-lm reads."""
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
    """Copy tokenizer and settings; no code."""
    if not source.is_dir():
        return
    for path in sorted({path for pattern in COPIED for path in source.glob(pattern)}):
        if path.name not in OWN and path.is_file():
            shutil.copyfile(regular(path, source), folder / path.name)
