"""`read_headers`: what a model's files say about it, from their headers alone: no torch, no weights, any model type."""

import json
import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from auraflux.errors import FormatError
from auraflux.weights.formats.model_files import check_files, gguf_parts, read_config, safetensors_files
from auraflux.weights.formats.untrusted import brief, named, regular_file

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_COUNTS = ("num_experts_per_tok", "moe_k", "top_k_experts", "num_experts_per_token")
MAX_HEADER_NBYTES = 100 << 20
PACKED = ("U32", "I32", "U8")  # dtypes of codes: their elements are not parameters


@dataclass(frozen=True)
class Headers:
    """Facts of a model's headers.

    form        "hf", "mlx" or "gguf"
    model_type  of config.json, or the GGUF architecture
    nbytes      of all tensors
    formats     bytes by dtype or GGUF type, largest first
    parameters  None if codes of weights are packed into words, whose number the headers do not tell
    context     that the model was trained for; None if unknown
    """

    form: str
    model_type: str
    tensors: int
    nbytes: int
    formats: dict[str, int]
    parameters: int | None
    context: int | None


def read_headers(path: Path) -> Headers:
    """Read the headers of a folder or a GGUF file."""
    config = check_files(path)
    return _gguf(path) if config is None else _folder(path, config)


def _gguf(path: Path) -> Headers:
    from auraflux.weights.formats.gguf_reader import read_header

    readers = [read_header(part) for part in gguf_parts(path)]
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    formats: Counter[str] = Counter()
    for tensor in tensors:
        formats[tensor.tensor_type.name] += int(tensor.n_bytes)
    metadata = readers[0].fields
    kind = _value(metadata, "general.architecture") or "unknown"
    context = _value(metadata, f"{kind}.context_length")
    count = sum(int(tensor.n_elements) for tensor in tensors)
    return Headers("gguf", str(kind), len(tensors), formats.total(), dict(formats.most_common()), count, context)


def expert_share(path: Path) -> tuple[tuple[float, float] | None, int | None]:
    """Return the share of a model's bytes that are routed experts with the share that a token uses, and its parameters.

    None for a model without experts, and for parameters that the headers do not tell.
    """
    if path.is_file():
        return _gguf_expert_share(path)
    config = read_config(path)
    nbytes = experts = 0
    for file in safetensors_files(path):
        for name, entry in _safetensors(regular_file(file, path)).items():
            first, last = entry["data_offsets"]
            nbytes += last - first
            experts += (last - first) * (".experts." in name or ".switch_mlp." in name)
    chosen = chosen_share(config)
    share = (experts / nbytes, chosen) if chosen is not None and experts else None
    return share, _folder(path, config).parameters


def chosen_share(config: dict[str, Any]) -> float | None:
    """Return the share of a layer's experts that a token uses; None for a model without experts."""
    text = config.get("text_config")
    inner = {**config, **(text if isinstance(text, dict) else {})}
    count = next((inner[key] for key in EXPERT_COUNTS if type(inner.get(key)) is int), 0)
    chosen = next((inner[key] for key in CHOSEN_COUNTS if type(inner.get(key)) is int), 0)
    return chosen / count if 0 < chosen <= count else None


def _gguf_expert_share(path: Path) -> tuple[tuple[float, float] | None, int | None]:
    from auraflux.weights.formats.gguf_reader import read_header

    readers = [read_header(part) for part in gguf_parts(path)]
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    nbytes = sum(int(tensor.n_bytes) for tensor in tensors)
    experts = sum(int(tensor.n_bytes) for tensor in tensors if "_exps." in tensor.name)
    metadata = readers[0].fields
    kind = _value(metadata, "general.architecture")
    count, chosen = (_value(metadata, f"{kind}.{key}") or 0 for key in ("expert_count", "expert_used_count"))
    share = (experts / nbytes, int(chosen) / int(count)) if experts and 0 < int(chosen) <= int(count) else None
    return share, sum(int(tensor.n_elements) for tensor in tensors)


def pooling_type(path: Path) -> int | None:
    """Return the pooling type of a GGUF file; None for a model that is not one for embeddings."""
    from auraflux.weights.formats.gguf_reader import read_header

    metadata = read_header(gguf_parts(path)[0]).fields
    return _value(metadata, f"{_value(metadata, 'general.architecture')}.pooling_type")


def _value(metadata: dict[str, Any], key: str) -> Any:
    try:
        return metadata[key].contents() if key in metadata else None
    except UnicodeDecodeError:
        return None


def _folder(path: Path, config: dict[str, Any]) -> Headers:
    formats: Counter[str] = Counter()
    count, tensors, packed = 0, 0, False
    for file in safetensors_files(path):
        for entry in _safetensors(regular_file(file, path)).values():
            first, last = entry["data_offsets"]
            formats[entry["dtype"]] += last - first
            count, tensors = count + prod(entry["shape"]), tensors + 1
            packed = packed or entry["dtype"] in PACKED
    inner = config.get("text_config") or {}
    context = config.get("max_position_embeddings") or inner.get("max_position_embeddings")
    form, kind = "mlx" if "quantization" in config else "hf", str(config.get("model_type", "unknown"))
    return Headers(form, kind, tensors, formats.total(), dict(formats.most_common()), None if packed else count, context)


def _safetensors(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file, without its metadata."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_NBYTES:
                raise ValueError("its header is too long")
            found = json.loads(file.read(length))
        found.pop("__metadata__", None)
        for entry in found.values():
            first, last = entry["data_offsets"]
            if not all(type(each) is int for each in (first, last, *entry["shape"])) or type(entry["dtype"]) is not str:
                raise ValueError("an entry of its header is damaged")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as err:
        raise FormatError(f"{named(path)} cannot be read as safetensors: {brief(err)}. Download it again.") from err
    return found
