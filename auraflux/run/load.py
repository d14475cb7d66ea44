"""`load`: from a path or a name to a model that is ready to write."""

from pathlib import Path
from typing import Any

import torch

from auraflux.cache import Cache, CacheSettings
from auraflux.errors import BackendError, InputError, SettingsError
from auraflux.machine import free_nbytes
from auraflux.models import family
from auraflux.run.engine import Engine
from auraflux.run.language import LanguageModel
from auraflux.run.progress import Report, on_terminal
from auraflux.run.tokenizer import Tokenizer
from auraflux.weights.checkpoint import Checkpoint, open_checkpoint
from auraflux.weights.loader import Weights
from auraflux.weights.pull import locate

SHARE = 4  # unless a context is given, a sequence that fills it takes at most this part of the free memory


def load(
    path_or_name: str | Path | None = None,
    device: str = "auto",
    kv: str | CacheSettings = "k8v4",
    quantize: int | None = None,
    exact: bool = False,
    context: int | None = None,
    *,
    chunk: int = 512,
    report: Report | None = None,
) -> LanguageModel:
    """Load a model: a folder, a GGUF file, or a name that is fetched on first use; None for the built-in default.

    device    "auto" takes a GPU where there is one
    kv        how keys and values are kept: "none", "k8v4", "k4v4" or another pair of bits; or settings in full
    quantize  bits to which dense weights are rounded on the way
    exact     multiply float32 activations; otherwise CPU kernels round them to int8 per group
    context   most tokens of a text; by default the model's own, or what a quarter of the free memory holds
    chunk     tokens of a prompt that go through the model together
    report    called with what is done, and how many bytes of how many; by default a bar on a terminal
    """
    settings = kv if isinstance(kv, CacheSettings) else CacheSettings(kv)
    target = _device(device)
    with on_terminal(report) as tell:
        checkpoint = open_checkpoint(locate(None if path_or_name is None else str(path_or_name), tell))
        module = family(checkpoint.config)
        config = module.Config.from_hf(checkpoint.config)
        shapes = module.make_caches(config)
        dtype = _dtype(target, shapes)
        longest = _context(context, config.context, shapes, settings, dtype)
        tokenizer = _tokenizer(checkpoint)
        model = _model(module, config, checkpoint, quantize, dtype, target, tell)

    def make_engine(sequences: int) -> Engine:
        options: dict[str, Any] = {"chunk": chunk, "exact": exact, "dtype": dtype, "device": target}
        return Engine(model, shapes, settings, context=longest, sequences=sequences, **options)

    return LanguageModel(make_engine, tokenizer, checkpoint.path, _ends(checkpoint, tokenizer), checkpoint.notes)


def _model(
    module: Any,
    config: Any,
    checkpoint: Checkpoint,
    bits: int | None,
    dtype: torch.dtype,
    device: torch.device,
    report: Report,
) -> Any:
    total, done = sum(checkpoint.sizes().values()), 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        report("loading", done, total)

    weights = Weights(checkpoint, module.rename, bits=bits, dtype=dtype, device=device, advance=advance)
    model = module.Model(config, weights)
    weights.done()
    return model


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as err:
        raise InputError(f"there is no device {name!r}; auto, cpu and cuda are known.") from err
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"models do not run on {name!r}; auto, cpu and cuda are known.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendError("device 'cuda' was asked for, but torch finds no NVIDIA GPU.")
    return device


def _dtype(device: torch.device, shapes: list[Any]) -> torch.dtype:
    """Of activations. Recurrent layers get float32 on a GPU too: in bf16 their scores were off by half there (H200)."""
    if device.type == "cpu" or any(not shape.attends for shape in shapes):
        return torch.float32
    return torch.bfloat16


def _context(wanted: int | None, trained: int, shapes: list[Any], settings: CacheSettings, dtype: torch.dtype) -> int:
    """Most tokens of a sequence; refuses settings that the model's layers cannot have before anything is loaded."""
    per_token = Cache(shapes, settings, context=1, dtype=dtype).token_nbytes
    if wanted is not None:
        if wanted < 1:
            raise SettingsError(f"context={wanted} must be at least 1.")
        return wanted
    return max(1, min(trained, free_nbytes() // SHARE // max(per_token, 1)))


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    if checkpoint.path.is_dir():
        return Tokenizer.from_folder(checkpoint.path)
    return Tokenizer.from_gguf(checkpoint.metadata)  # type: ignore[attr-defined]


def _ends(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Tokens that end a text."""
    found = checkpoint.config.get("eos_token_id")
    listed = found if isinstance(found, list) else [] if found is None else [found]
    return frozenset(listed) | frozenset(tokenizer.eos_ids if tokenizer is not None else ())
