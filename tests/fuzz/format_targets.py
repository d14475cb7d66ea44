"""Mutations of third-party weight formats: their settings, tensor names, dtypes and shapes, and their bytes."""

import random
import struct
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from auraflux.quant.gguf_layouts import LAYOUTS
from auraflux.tokenizer.tokenizer import Tokenizer
from auraflux.weights.formats.folder import MODELOPT_CONFIG
from auraflux.weights.formats.gguf_architectures import ARCHITECTURES
from tests.fuzz import corpus
from tests.fuzz.corpus import SCRATCH, Folder, gguf_of, gguf_split, header_nbytes, join, load_all, open_all
from tests.fuzz.harness import Target
from tests.fuzz.mutate import mutated, mutated_bytes, mutated_json, nearby, odd
from tests.weights.formats.gguf_files import HIDDEN, OTHERS, VOCAB
from tests.weights.formats.gguf_models import METADATA
from tests.weights.formats.test_gguf import llama3_factors

DTYPES = ["F64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "BOOL", "U8", "I8", "I16", "I32", "I64", "F32", "F16", "BF16", "C64"]
MEMORY = 64 << 20  # bytes; the files have less than 1 MiB


def load_mutated(rng: random.Random, folder: Folder, about: str) -> None:
    """Load a folder with mutated quantization settings or weights."""
    config, (data, names), chance = folder.config, folder.parts, rng.random()
    if chance < 0.4:
        config[about] = mutated(rng, config[about])
    elif chance < 0.7:
        names = mutated(rng, names)
    else:
        part = names[rng.choice([name for name in sorted(names) if ".mlp." in name])]
        if chance < 0.85:
            part["dtype"] = rng.choice(DTYPES)
        else:
            first, last = part["data_offsets"]
            data = (
                data[:first]
                + mutated_bytes(rng, data[first:last], 2)[: last - first].ljust(last - first, b"\xff")
                + data[last:]
            )
    load_all(folder.write(mutated_json(rng, config), join(data, mutated_json(rng, names))))


def method(kinds: tuple[str, ...], rng: random.Random) -> None:
    load_mutated(rng, corpus.quantized(rng.choice(kinds)), "quantization_config")


def modelopt_file(rng: random.Random) -> None:
    """Load a ModelOpt folder whose format is described by a mutated hf_quant_config.json instead of config.json."""
    folder = corpus.quantized(rng.choice(["nvfp4", "modelopt-fp8"]))
    config = folder.config
    quantization = {"producer": {"name": "modelopt"}, "quantization": config.pop("quantization_config")}
    path = folder.write(mutated_json(rng, config)) / MODELOPT_CONFIG
    path.write_bytes(mutated_json(rng, mutated(rng, quantization)))
    try:
        load_all(folder.path)
    finally:
        path.unlink()


def mlx(rng: random.Random) -> None:
    """Load a converted folder, possibly with per-module quantization settings."""
    folder = corpus.converted()
    if rng.random() < 0.3:
        own = {"bits": 4, "group_size": 32, "mode": "affine"}
        config = folder.config
        config["quantization"] = mutated(rng, {**config["quantization"], "model.layers.0.mlp.up_proj": own})
        load_all(folder.write(mutated_json(rng, config)))
    else:
        load_mutated(rng, folder, "quantization")


def blocks(rng: random.Random) -> None:
    load_mutated(rng, corpus.blocks(), "quantization_config")


def gguf_header(make: Callable[[], bytes], name: str, rng: random.Random) -> None:
    """Load a GGUF file with mutated bytes, mostly in its header, sometimes in its blocks."""
    path, content = SCRATCH / f"{name}.gguf", make()
    path.write_bytes(mutate_gguf(rng, content))
    load_all(path)


def mutate_gguf(rng: random.Random, content: bytes, most: int = 8) -> bytes:
    """Mutate bytes of a GGUF file, in its header or after it."""
    start = header_nbytes(content)
    if rng.random() < 0.8:
        return mutated_bytes(rng, content[:start], most) + content[start:]
    at = rng.randrange(start, len(content))
    return content[:at] + mutated_bytes(rng, content[at : at + start], most) + content[at + start :]


def gguf_families(rng: random.Random) -> None:
    architecture = rng.choice(sorted(METADATA))
    gguf_header(partial(gguf_of, architecture), "families", rng)


def gguf_parts(rng: random.Random) -> None:
    """Load a split file with one part mutated, missing, or a copy of the other."""
    files, names = gguf_split(), [SCRATCH / f"parts-0000{number}-of-00002.gguf" for number in (1, 2)]
    for path, content in zip(names, files, strict=True):
        path.unlink(missing_ok=True)
        if rng.random() < 0.95:
            content = content if rng.random() < 0.95 else rng.choice(files)
            path.write_bytes(mutate_gguf(rng, content, 3) if rng.random() < 0.7 else content)
    load_all(rng.choice(names))


@cache
def metadata(architecture: str) -> dict[str, Any]:
    """Return the metadata of a file with its types."""
    path = SCRATCH / "read.gguf"
    path.write_bytes(gguf_of(architecture))
    fields = gguf.GGUFReader(path).fields
    return {key: (field.types, field.contents()) for key, field in fields.items() if not key.startswith("GGUF.")}


def gguf_metadata(rng: random.Random) -> None:
    """Load a file with mutated metadata values and types."""
    path = SCRATCH / "metadata.gguf"
    architecture = rng.choice(sorted(METADATA))
    found = dict(metadata(architecture))
    if rng.random() < 0.4:
        found |= SENTENCE_PIECE
    if rng.random() < 0.3:
        found |= {f"{architecture}.rope.scaling.{key}": value for key, value in SCALING.items()}
    changes = {key: rng.choice([nearby, lambda r, v: odd(r)])(rng, found[key][1]) for key in rng.sample(sorted(found), 2)}
    if rng.random() < 0.1:
        changes["general.architecture"] = rng.choice(sorted(ARCHITECTURES))
    fields = [
        packed(key, *((types, value) if key not in changes else (None, changes[key]))) for key, (types, value) in found.items()
    ]
    arrays = {"token_embd.weight": np.zeros((VOCAB, HIDDEN), np.float32)}
    if rng.random() < 0.2:
        factors = llama3_factors(8.0)
        arrays["rope_freqs.weight"] = rng.choice([factors, factors[1:], factors * 2])
    path.write_bytes(gguf_content([field for field in fields if field], arrays))
    checkpoint = open_all(path)
    Tokenizer.from_gguf(checkpoint.metadata).encode("ab")  # type: ignore[attr-defined]


SENTENCE_PIECE = {
    "tokenizer.ggml.model": ([GGUFValueType.STRING], "llama"),
    "tokenizer.ggml.scores": ([GGUFValueType.ARRAY, GGUFValueType.FLOAT32], [float(-number) for number in range(VOCAB)]),
    "tokenizer.ggml.unknown_token_id": ([GGUFValueType.UINT32], 0),
}
SCALING = {
    "type": ([GGUFValueType.STRING], "yarn"),
    "factor": ([GGUFValueType.FLOAT32], 4.0),
    "original_context_length": ([GGUFValueType.UINT32], 64),
}
TYPES = {bool: GGUFValueType.BOOL, int: GGUFValueType.INT64, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
# numbers out of range and invalid strings: `gguf` cannot write them
UNWRITABLE = (OverflowError, UnicodeEncodeError, struct.error)


WRITER = gguf.GGUFWriter(None, "llama")


def packed(key: str, types: list[GGUFValueType] | None, value: Any) -> bytes:
    """Encode a metadata field with the given types or those of its Python value; return nothing if GGUF has no such type."""
    if types is None:
        inner = {type(each) for each in value} if isinstance(value, list) else {type(value)}
        if len(inner) != 1 or not inner <= set(TYPES) or value == "":
            return b""
        types = [GGUFValueType.ARRAY] if isinstance(value, list) else [TYPES[type(value)]]
    try:
        name = WRITER._pack_val(key, GGUFValueType.STRING, add_vtype=False)
        return name + WRITER._pack_val(value, types[0], True, types[-1] if len(types) > 1 else None)
    except UNWRITABLE:
        return b""


def gguf_content(fields: list[bytes], arrays: dict[str, np.ndarray]) -> bytes:
    """Return a GGUF file with the given fields and float32 tensors."""
    infos, data = b"", b""
    for name, array in arrays.items():
        sizes = array.shape[::-1]
        infos += WRITER._pack_val(name, GGUFValueType.STRING, add_vtype=False)
        infos += struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, GGMLQuantizationType.F32, len(data))
        data += padded(array.tobytes())
    head = struct.pack("<4sIQQ", b"GGUF", gguf.GGUF_VERSION, len(arrays), len(fields)) + b"".join(fields) + infos
    return padded(head) + data


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % gguf.GGUF_DEFAULT_ALIGNMENT)


TARGETS = [
    *(Target(name, partial(method, kinds), 25, memory=MEMORY) for name, kinds in corpus.METHODS.items()),
    Target("modelopt-file", modelopt_file, 15, memory=MEMORY),
    Target("mlx", mlx, 30, memory=MEMORY),
    Target("mxfp4-blocks", blocks, 10, memory=MEMORY),
    *(
        Target(f"gguf-{kind.lower()}", partial(gguf_header, partial(gguf_of, "llama", kind), kind), 5, memory=MEMORY)
        for kind in sorted({*LAYOUTS, *OTHERS})
    ),
    Target("gguf-header", partial(gguf_header, partial(gguf_of, "llama"), "header"), 20, memory=MEMORY),
    Target("gguf-families", gguf_families, 12, memory=MEMORY),
    Target("gguf-parts", gguf_parts, 10, memory=MEMORY),
    Target("gguf-metadata", gguf_metadata, 20, memory=MEMORY),
]
