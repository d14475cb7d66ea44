"""Mutations of a model's files, and the code that opens them."""

import base64
import os
import random
from itertools import accumulate

import torch

from auraflux.adapters.peft_folder import read_adapter
from auraflux.adapters.placement import place
from auraflux.tokenizer.tokenizer import Tokenizer
from auraflux.weights.named_weights import NamedWeight, NamedWeights
from tests.engine.tiny import tiny
from tests.fuzz import corpus
from tests.fuzz.corpus import CONFIG, INDEX, SCRATCH, WEIGHTS, copy_of, join, load_all, open_all, original, split
from tests.fuzz.harness import Target
from tests.fuzz.mutate import mutated, mutated_bytes, mutated_json

SIDE_FILES = ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json")


def config(rng: random.Random) -> None:
    folder = copy_of("config")
    (folder / CONFIG).write_bytes(mutated_json(rng, mutated(rng, rng.choice(corpus.configs()))))
    open_all(folder)


def families(rng: random.Random) -> None:
    """Load a model of any family with a mutated config, or with mutated tensor names, dtypes and shapes."""
    model = corpus.model_of(rng.choice(sorted(corpus.MODELS)))
    if rng.random() < 0.8:
        load_all(model.write(config=mutated_json(rng, mutated(rng, model.config))))
    else:
        data, names = model.parts
        load_all(model.write(weights=join(data, mutated_json(rng, mutated(rng, names)))))


def index(rng: random.Random) -> None:
    folder = copy_of("index")
    _, header = split(original(WEIGHTS))
    complete = {"metadata": {"total_size": 1}, "weight_map": {name: WEIGHTS for name in header if name != "__metadata__"}}
    (folder / INDEX).write_bytes(mutated_json(rng, mutated(rng, complete)))
    load_all(folder)


def places_of_files(rng: random.Random) -> None:
    """Open a folder with a foreign or broken link, a folder, a FIFO or nothing in place of a file."""
    folder, name = copy_of("places"), rng.choice([CONFIG, WEIGHTS, "tokenizer.json", INDEX])
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


def header(rng: random.Random) -> None:
    folder, (data, found) = copy_of("header"), split(original(WEIGHTS))
    changed = mutated(rng, found)
    if isinstance(changed, dict) and changed and rng.random() < 0.3:
        entry = changed[rng.choice(sorted(changed))]
        if isinstance(entry, dict):
            entry["dtype"] = rng.choice(["F64", "F8_E4M3", "F8_E8M0", "F4", "BOOL", "U8", "I64", "C64", "", 3])
    (folder / WEIGHTS).write_bytes(join(data, mutated_json(rng, changed)))
    load_all(folder)


def weights(rng: random.Random) -> None:
    folder = copy_of("weights")
    content = original(WEIGHTS)
    (folder / WEIGHTS).write_bytes(mutated_bytes(rng, content[:4096]) + content[4096:])
    load_all(folder)


def side_file(rng: random.Random) -> None:
    folder, name = copy_of("side-files"), rng.choice(SIDE_FILES)
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
    for path in SIDE_FILES:
        (folder / path).unlink(missing_ok=True)
    (folder / name).write_bytes(mutated_json(rng, mutated(rng, usual[name])))
    made = Tokenizer.from_folder(folder)
    assert made is not None
    assert all(isinstance(number, int) for number in made.eos_ids)
    made.encode("The quick")


def tokenizer(rng: random.Random) -> None:
    folder = copy_of("tokenizer")
    (folder / "tokenizer.json").write_bytes(mutated_bytes(rng, original("tokenizer.json"), 3))
    made = Tokenizer.from_folder(folder)
    assert made is not None
    made.decode(made.encode("The quick"))


def tiktoken(rng: random.Random) -> None:
    """Load a tiktoken file in place of tokenizer.json, with a mutated tokenizer_config.json."""
    folder = copy_of("tiktoken")
    (folder / "tokenizer.json").unlink(missing_ok=True)
    tokens = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" the", "é".encode()]
    lines = "\n".join(f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)).encode()
    listed = {"260": {"content": "[BOS]", "special": True}, "262": {"content": "[EOS]", "special": True}}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": listed}
    if rng.random() < 0.5:
        lines = mutated_bytes(rng, lines, 2)
    else:
        config = mutated(rng, config)
    (folder / "tiktoken.model").write_bytes(lines)
    (folder / "tokenizer_config.json").write_bytes(mutated_json(rng, config))
    made = Tokenizer.from_folder(folder)
    assert made is not None
    made.decode(made.encode("The quick"))


ADAPTER = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "alpha_pattern": {"q_proj": 2, "layers.0.mlp": 3},
    "use_rslora": True,
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "target_modules": ["q_proj", "v_proj"],
}
PROJECTIONS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.layers.1.mlp.experts")


def adapter(rng: random.Random) -> None:
    """Read an adapter with a mutated config, or with mutated tensor names, dtypes and shapes."""
    folder = SCRATCH / "adapter"
    folder.mkdir(exist_ok=True)
    names = [f"base_model.model.{each}.lora_{part}.weight" for each in PROJECTIONS for part in "AB"]
    shapes = [[4, 16], [32, 4]] * len(PROJECTIONS)
    sizes = [4 * first * second for first, second in shapes]
    ends = list(accumulate(sizes))
    entries = zip(names, shapes, sizes, ends, strict=True)
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [end - size, end]} for name, shape, size, end in entries}
    in_config = rng.random() < 0.5
    (folder / "adapter_config.json").write_bytes(mutated_json(rng, mutated(rng, ADAPTER) if in_config else ADAPTER))
    found = header if in_config else mutated(rng, header)
    (folder / "adapter_model.safetensors").write_bytes(join(bytes(ends[-1]), mutated_json(rng, found)))
    read = read_adapter("fuzz", folder)
    layers = NamedWeights()
    for name in PROJECTIONS[:2]:
        layers.linears[name].append(NamedWeight(torch.zeros(32, 16), None))
    place([read], layers, lambda name: name, torch.device("cpu"), torch.float32)


TARGETS = [
    Target("adapter", adapter, 60),
    Target("config", config, 60),
    Target("families", families, 40),
    Target("index", index, 30),
    Target("header", header, 40),
    Target("places", places_of_files, 20),
    Target("weights", weights, 30),
    Target("side-files", side_file, 60),
    Target("tokenizer", tokenizer, 10),
    Target("tiktoken", tiktoken, 10),
]
