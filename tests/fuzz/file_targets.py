"""Files of a model that were changed by chance, and the code that opens them."""

import json
import os
import random
import struct
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import gguf
import torch
from gguf import GGUFValueType
from transformers import AutoConfig

from auraflux.cache import Cache, CacheSettings
from auraflux.models import FAMILIES, family
from auraflux.run.tokenizer import Tokenizer
from auraflux.weights.checkpoint import open_checkpoint
from auraflux.weights.convert import convert
from auraflux.weights.loader import Weights
from auraflux.weights.stored import Checkpoint
from tests.fuzz.harness import Target
from tests.fuzz.mutate import mutated, nearby, octets, odd
from tests.run.tiny import tiny
from tests.weights.gguf_files import llama_tensors, write_gguf
from tests.weights.quantized_folders import FOLDERS, rewrite

FUZZED = ("awq", "gptq-4", "gptq-act-order", "ct-4-zeros", "ct-int8", "fp8", "fp8-powers", "ct-fp8-rows", "ct-mxfp4")
METHODS = {kind: FOLDERS[kind] for kind in (*FUZZED, "ct-nvfp4", "nvfp4", "modelopt-fp8")}
SCRATCH = Path(mkdtemp(prefix="auraflux-fuzz-"))
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
BESIDE = ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
# of Hugging Face's defaults, what would be slow to open
SMALL = {"num_hidden_layers": 4, "vocab_size": 300}


def open_all(path: Path) -> Checkpoint:
    """Open a model as far as it can be before weights are read: config, caches, names and sizes of tensors."""
    checkpoint = open_checkpoint(path)
    module = family(checkpoint.config)
    Cache(module.make_caches(module.Config.from_hf(checkpoint.config)), CacheSettings("k8v4"), context=64, device="meta")
    checkpoint.sizes()
    return checkpoint


def load_all(path: Path) -> None:
    """Also read its weights."""
    checkpoint = open_all(path)
    module = family(checkpoint.config)
    weights = Weights(checkpoint, module.rename)
    module.Model(module.Config.from_hf(checkpoint.config), weights)
    weights.done()


@cache
def copy_of(name: str) -> Path:
    """A folder for one target, with the files of the tiny model as links within it would be: as they are."""
    folder = SCRATCH / name
    folder.mkdir()
    for path in tiny().iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@cache
def original(name: str) -> bytes:
    return (tiny() / name).read_bytes()


def _as_json(rng: random.Random, value: Any) -> bytes:
    """A JSON value as a file has it, now and then with its octets changed too."""
    written = json.dumps(value).encode()
    return octets(rng, written, 2) if rng.random() < 0.1 else written


@cache
def configs() -> list[dict[str, Any]]:
    found = [json.loads(original("config.json"))]
    for kind in sorted(FAMILIES):
        try:
            made = AutoConfig.for_model(kind).to_dict()
        # a family that the installed transformers does not know
        except Exception:
            continue
        inner = made.get("text_config")
        layers = None if kind != "gpt_oss" else ["sliding_attention", "full_attention"] * 2
        (inner if isinstance(inner, dict) else made).update(SMALL, layer_types=layers)
        found.append(json.loads(json.dumps(made, default=str)))
    return found


def config(rng: random.Random) -> None:
    folder = copy_of("config")
    (folder / "config.json").write_bytes(_as_json(rng, mutated(rng, rng.choice(configs()))))
    open_all(folder)


def loaded_config(rng: random.Random) -> None:
    folder = copy_of("loaded-config")
    (folder / "config.json").write_bytes(_as_json(rng, mutated(rng, json.loads(original("config.json")))))
    load_all(folder)


def index(rng: random.Random) -> None:
    folder = copy_of("index")
    _, header = split(original(WEIGHTS))
    whole = {"metadata": {"total_size": 1}, "weight_map": {name: WEIGHTS for name in header if name != "__metadata__"}}
    (folder / INDEX).write_bytes(_as_json(rng, mutated(rng, whole)))
    load_all(folder)


@cache
def coded() -> Path:
    """The tiny model as `convert` writes it."""
    checkpoint = open_checkpoint(tiny())
    return convert(checkpoint, family(checkpoint.config), SCRATCH / "coded", group=32)


def quantization(rng: random.Random) -> None:
    """What config.json says of the codes, and the codes' names and sizes."""
    folder = coded()
    if not (folder / "config").exists():
        (folder / "config").write_bytes((folder / "config.json").read_bytes())
        (folder / "weights").write_bytes((folder / WEIGHTS).read_bytes())
    found = json.loads((folder / "config").read_bytes())
    data, names = split((folder / "weights").read_bytes())
    if rng.random() < 0.6:
        found["quantization"] = mutated(
            rng, {**found["quantization"], "model.layers.0.mlp.up_proj": {"bits": 4, "group_size": 32}}
        )
    else:
        names = mutated(rng, names)
    (folder / "config.json").write_bytes(_as_json(rng, found))
    written = _as_json(rng, names)
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(written)) + written + data)
    load_all(folder)


@cache
def quantized(kind: str) -> tuple[Path, dict[str, Any], bytes]:
    """The tiny model in a format of others: its folder, config and weights."""
    folder = SCRATCH / kind
    rewrite(tiny(), folder, *METHODS[kind])
    return folder, json.loads((folder / "config.json").read_bytes()), (folder / WEIGHTS).read_bytes()


def methods(rng: random.Random) -> None:
    """What config.json says of the weights of another format, and the names, kinds, sizes and bytes of their parts."""
    folder, found, whole = quantized(rng.choice(sorted(METHODS)))
    (data, names), chance = split(whole), rng.random()
    if chance < 0.4:
        found = {**found, "quantization_config": mutated(rng, found["quantization_config"])}
    elif chance < 0.7:
        names = mutated(rng, names)
    else:
        part = names[rng.choice([name for name in sorted(names) if name.startswith("model.layers.0.mlp.")])]
        if chance < 0.85:
            part["dtype"] = rng.choice(["F64", "F8_E4M3", "F8_E8M0", "BOOL", "U8", "I8", "I16", "I64", "F32", "F16", "BF16"])
        else:
            first, last = part["data_offsets"]
            data = data[:first] + octets(rng, data[first:last], 2)[: last - first].ljust(last - first, b"\xff") + data[last:]
    (folder / "config.json").write_bytes(_as_json(rng, found))
    written = _as_json(rng, names)
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(written)) + written + data)
    load_all(folder)


def places_of_files(rng: random.Random) -> None:
    """Something else where a file should be: a link that leads elsewhere or nowhere, a folder, a FIFO, nothing."""
    folder, name = copy_of("places"), rng.choice(["config.json", WEIGHTS, "tokenizer.json", INDEX])
    path, away = folder / name, SCRATCH / "away.json"
    away.write_bytes(b"{}")
    ways = [lambda: path.symlink_to(away), lambda: path.symlink_to(path), lambda: path.symlink_to("/dev/zero"), path.mkdir]
    ways += [lambda: os.mkfifo(path), lambda: path.symlink_to("nowhere"), lambda: path.write_bytes(b"[" * 99_999), lambda: None]
    path.unlink(missing_ok=True)
    try:
        rng.choice(ways)()
        load_all(folder)
        Tokenizer.from_folder(folder)
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        if (tiny() / name).exists():
            path.write_bytes(original(name))


def split(content: bytes) -> tuple[bytes, dict[str, Any]]:
    """The data of a safetensors file, and its header."""
    length = struct.unpack("<Q", content[:8])[0]
    return content[8 + length :], json.loads(content[8 : 8 + length])


def header(rng: random.Random) -> None:
    folder, (data, found) = copy_of("header"), split(original(WEIGHTS))
    changed = mutated(rng, found)
    if isinstance(changed, dict) and changed and rng.random() < 0.3:
        entry = changed[rng.choice(sorted(changed))]
        if isinstance(entry, dict):
            entry["dtype"] = rng.choice(["F64", "F8_E4M3", "F8_E8M0", "F4", "BOOL", "U8", "I64", "C64", "", 3])
    written = _as_json(rng, changed)
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(written)) + written + data)
    load_all(folder)


def weights(rng: random.Random) -> None:
    folder = copy_of("weights")
    content = original(WEIGHTS)
    (folder / WEIGHTS).write_bytes(octets(rng, content[:4096]) + content[4096:])
    load_all(folder)


def beside(rng: random.Random) -> None:
    folder, name = copy_of("beside"), rng.choice(BESIDE)
    usual = {
        "tokenizer_config.json": {
            "chat_template": "{{ messages }}",
            "eos_token": {"content": "<|im_end|>"},
            "bos_token": "<|im_start|>",
            "add_bos_token": True,
            "added_tokens_decoder": {"706": {"content": "<|new|>", "special": True, "lstrip": False}},
        },
        "generation_config.json": {"eos_token_id": [0, 2], "temperature": 0.5},
        "special_tokens_map.json": {"eos_token": "<|im_end|>", "additional_special_tokens": ["<x>"]},
    }
    for path in BESIDE:
        (folder / path).unlink(missing_ok=True)
    (folder / name).write_bytes(_as_json(rng, mutated(rng, usual[name])))
    made = Tokenizer.from_folder(folder)
    assert made is not None
    assert all(isinstance(number, int) for number in made.eos_ids)
    made.encode("The quick")


def tokenizer(rng: random.Random) -> None:
    folder = copy_of("tokenizer")
    (folder / "tokenizer.json").write_bytes(octets(rng, original("tokenizer.json"), 3))
    made = Tokenizer.from_folder(folder)
    assert made is not None
    made.decode(made.encode("The quick"))


def manifest(rng: random.Random) -> None:
    folder = copy_of("manifest")
    matrix = {"kind": "affine", "bits": 4, "group": 64, "scales": "float16", "offsets": {"packed": 0}}
    form = {"nbytes": 1, "stride": 4096, "gate": matrix, "up": matrix, "down": matrix}
    layer = {"module": "model.layers.0.mlp", "file": "layer_000.bin", "format": 0, "crc32": "00000000" * 8}
    sizes = {"count": 8, "hidden": 64, "inner": 128, "lanes": 8, "nbytes": 1}
    whole = {"format": "auraflux-experts", "version": 1, "model_type": "x", "source": "y", **sizes}
    (folder / "experts").mkdir(exist_ok=True)
    written = _as_json(rng, mutated(rng, {**whole, "formats": [form], "layers": [layer]}))
    (folder / "experts" / "manifest.json").write_bytes(written)
    open_all(folder)


@cache
def gguf_file() -> bytes:
    return write_gguf(SCRATCH / "whole.gguf", llama_tensors(), tokenizer=True).read_bytes()


def gguf_octets(rng: random.Random) -> None:
    path, content = SCRATCH / "octets.gguf", gguf_file()
    path.write_bytes(octets(rng, content[:8192]) + content[8192:])
    load_all(path)


@cache
def gguf_metadata() -> dict[str, Any]:
    path = SCRATCH / "read.gguf"
    path.write_bytes(gguf_file())
    fields = gguf.GGUFReader(path).fields
    return {key: (field.types, field.contents()) for key, field in fields.items() if not key.startswith("GGUF.")}


def gguf_words(rng: random.Random) -> None:
    """Metadata whose values, and with them their types, are others."""
    path = SCRATCH / "words.gguf"
    metadata = dict(gguf_metadata())
    changed = {key: rng.choice([nearby, lambda r, v: odd(r)])(rng, metadata[key][1]) for key in rng.sample(sorted(metadata), 2)}
    writer = gguf.GGUFWriter(path, "llama")
    writer.kv_data[0].clear()
    for key, (types, value) in metadata.items():
        _add(writer, key, *((types, value) if key not in changed else (None, changed[key])))
    for name in ("token_embd.weight", "output_norm.weight"):
        writer.add_tensor(name, torch.zeros(96, 128).numpy() if "embd" in name else torch.zeros(128).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_all(path)
    made = Tokenizer.from_gguf(checkpoint.metadata)  # type: ignore[attr-defined]
    made.encode("ab")


TYPES = {bool: GGUFValueType.BOOL, int: GGUFValueType.INT64, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}


def _add(writer: gguf.GGUFWriter, key: str, types: list[GGUFValueType] | None, value: Any) -> None:
    """Put a value under a key, in the types given or those it has in Python; what GGUF has no type for is left out."""
    if types is None:
        inner = {type(each) for each in value} if isinstance(value, list) else {type(value)}
        if len(inner) != 1 or not inner <= set(TYPES) or value == "":
            return
        types = [GGUFValueType.ARRAY] if isinstance(value, list) else [TYPES[type(value)]]
    try:
        writer._pack_val(value, types[0], True, types[-1] if len(types) > 1 else None)
    # a number without room, or a text that is none
    except Exception:
        return
    writer.add_key_value(key, value, types[0], sub_type=types[-1] if len(types) > 1 else None)


TARGETS = [
    Target("config", config, 60),
    Target("loaded-config", loaded_config, 40),
    Target("index", index, 30),
    Target("header", header, 40),
    Target("quantization", quantization, 40),
    Target("methods", methods, 60),
    Target("places", places_of_files, 20),
    Target("weights", weights, 30),
    Target("beside", beside, 60),
    Target("tokenizer", tokenizer, 10),
    Target("manifest", manifest, 40),
    Target("gguf-octets", gguf_octets, 20),
    Target("gguf-words", gguf_words, 40, every=10),
]
