"""Weights in the formats of others, changed by chance: what describes them, their names, kinds and sizes, and their bytes."""

import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import gguf
import numpy as np
from gguf import GGUFValueType

from auraflux.quant.gguf_blocks import LAYOUTS
from auraflux.run.tokenizer import Tokenizer
from auraflux.weights.gguf_families import ARCHITECTURES
from tests.fuzz import corpus
from tests.fuzz.corpus import SCRATCH, Folder, gguf_of, join, load_all, open_all
from tests.fuzz.harness import Target
from tests.fuzz.mutate import as_json, mutated, nearby, octets, odd
from tests.weights.gguf_files import HIDDEN, OTHERS, VOCAB
from tests.weights.gguf_models import WORDS
from tests.weights.test_gguf import llama3_factors

DTYPES = ["F64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "BOOL", "U8", "I8", "I16", "I32", "I64", "F32", "F16", "BF16", "C64"]
HEADER = 8192  # octets of a GGUF file, about as many as it has before its tensors


def changed(rng: random.Random, folder: Folder, about: str) -> None:
    """Load a folder of which something is other than it was: what config.json says of the format, or the weights' parts."""
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
            data = data[:first] + octets(rng, data[first:last], 2)[: last - first].ljust(last - first, b"\xff") + data[last:]
    load_all(folder.write(as_json(rng, config), join(data, as_json(rng, names))))


def method(kinds: tuple[str, ...], rng: random.Random) -> None:
    changed(rng, corpus.quantized(rng.choice(kinds)), "quantization_config")


def mlx(rng: random.Random) -> None:
    """What `convert` writes, in which modules may have a format of their own."""
    folder = corpus.converted()
    if rng.random() < 0.3:
        own = {"bits": 4, "group_size": 32, "mode": "affine"}
        config = folder.config
        config["quantization"] = mutated(rng, {**config["quantization"], "model.layers.0.mlp.up_proj": own})
        load_all(folder.write(as_json(rng, config)))
    else:
        changed(rng, folder, "quantization")


def blocks(rng: random.Random) -> None:
    changed(rng, corpus.blocks(), "quantization_config")


def gguf_header(make: Callable[[], bytes], name: str, rng: random.Random) -> None:
    """A GGUF file with octets changed: most often in its header, sometimes in its blocks."""
    path, content = SCRATCH / f"{name}.gguf", make()
    at = 0 if rng.random() < 0.8 else rng.randrange(len(content))
    path.write_bytes(content[:at] + octets(rng, content[at : at + HEADER]) + content[at + HEADER :])
    load_all(path)


def gguf_families(rng: random.Random) -> None:
    architecture = rng.choice(sorted(WORDS))
    gguf_header(partial(gguf_of, architecture), "families", rng)


def gguf_parts(rng: random.Random) -> None:
    """A file that is cut into two, one of them changed, missing, or the same as the other."""
    content, names = gguf_of("llama"), [SCRATCH / f"parts-0000{number}-of-00002.gguf" for number in (1, 2)]
    for path in names:
        path.unlink(missing_ok=True)
        if rng.random() < 0.9:
            path.write_bytes(octets(rng, content[:HEADER], 2) + content[HEADER:] if rng.random() < 0.7 else content)
    load_all(rng.choice(names))


@cache
def metadata(architecture: str) -> dict[str, Any]:
    """What a file says besides tensors, and the types in which it does."""
    path = SCRATCH / "read.gguf"
    path.write_bytes(gguf_of(architecture))
    fields = gguf.GGUFReader(path).fields
    return {key: (field.types, field.contents()) for key, field in fields.items() if not key.startswith("GGUF.")}


def gguf_words(rng: random.Random) -> None:
    """Metadata whose values, and with them their types, are others."""
    path = SCRATCH / "words.gguf"
    architecture = rng.choice(sorted(WORDS))
    found = dict(metadata(architecture))
    if rng.random() < 0.4:
        found |= SENTENCE_PIECE
    if rng.random() < 0.3:
        found |= {f"{architecture}.rope.scaling.{key}": value for key, value in SCALING.items()}
    spoken = {key: rng.choice([nearby, lambda r, v: odd(r)])(rng, found[key][1]) for key in rng.sample(sorted(found), 2)}
    if rng.random() < 0.1:
        spoken["general.architecture"] = rng.choice(sorted(ARCHITECTURES))
    writer = gguf.GGUFWriter(path, "llama")
    writer.kv_data[0].clear()
    for key, (types, value) in found.items():
        _add(writer, key, *((types, value) if key not in spoken else (None, spoken[key])))
    writer.add_tensor("token_embd.weight", np.zeros((VOCAB, HIDDEN), np.float32))
    if rng.random() < 0.2:
        factors = llama3_factors(8.0)
        writer.add_tensor("rope_freqs.weight", rng.choice([factors, factors[1:], factors * 2]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
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
# a number that has no room in its type, and a text that is none: the package cannot write them, so no file has them
UNWRITABLE = (OverflowError, UnicodeEncodeError, gguf.gguf_writer.struct.error)


def _add(writer: gguf.GGUFWriter, key: str, types: list[GGUFValueType] | None, value: Any) -> None:
    """Put a value under a key, in the types given or those it has in Python; what GGUF has no type for is left out."""
    if types is None:
        inner = {type(each) for each in value} if isinstance(value, list) else {type(value)}
        if len(inner) != 1 or not inner <= set(TYPES) or value == "":
            return
        types = [GGUFValueType.ARRAY] if isinstance(value, list) else [TYPES[type(value)]]
    try:
        writer._pack_val(value, types[0], True, types[-1] if len(types) > 1 else None)
    except UNWRITABLE:
        return
    writer.add_key_value(key, value, types[0], sub_type=types[-1] if len(types) > 1 else None)


TARGETS = [
    *(Target(name, partial(method, kinds), 25) for name, kinds in corpus.METHODS.items()),
    Target("mlx", mlx, 30),
    Target("mxfp4-blocks", blocks, 10),
    *(
        Target(f"gguf-{kind.lower()}", partial(gguf_header, partial(gguf_of, "llama", kind), kind), 5)
        for kind in sorted({*LAYOUTS, *OTHERS})
    ),
    Target("gguf-header", partial(gguf_header, partial(gguf_of, "llama"), "header"), 20),
    Target("gguf-families", gguf_families, 12),
    Target("gguf-parts", gguf_parts, 10),
    Target("gguf-words", gguf_words, 20),
]
