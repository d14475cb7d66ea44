"""Tiny random transformers models, their logits, and the logits of this package for the same folders."""

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from auraflux.cache import CacheSettings, KVSequence
from auraflux.engine.engine import Engine
from auraflux.models import family
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.loader import Weights
from tests.tested import external_oracle

TOKENS = 150  # past two pages
CHUNK_ENDS = (*range(5), *range(62, 67), *range(126, 131))  # single-token steps at the start and around page ends


def save(model: Any, folder: Path) -> Path:
    """Save a transformers model with scaled weights, random norms, and a head that favours one next token."""
    generator = torch.Generator().manual_seed(1)
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                spread = 0.05 if "bias" in name else 0.2
                parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.mul_(4 if parameter is table else 2)
        if head is not table:
            # the preceding token of the vocabulary mostly gets the largest logit
            head.add_(4 * table.roll(1, 0))
    model.save_pretrained(folder)
    return folder


def tokens(model: Any, count: int = TOKENS) -> list[int]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, model.config.get_text_config().vocab_size, (count,), generator=generator).tolist()


@external_oracle("transformers")
def transformers_logits(model: Any, ids: list[int]) -> Tensor:
    """Return the logits of transformers after every token, [T, V]."""
    with torch.no_grad():
        return model.eval()(torch.tensor([ids])).logits[0].float()


class Loaded(NamedTuple):
    """A model and its cache shapes."""

    model: Any
    shapes: list[Any]


def loaded(folder: Path, **load: Any) -> Loaded:
    checkpoint = open_checkpoint(folder)
    module = family(checkpoint.config)
    config = module.Config.from_hf(checkpoint.config)
    weights = Weights(checkpoint, module.rename, **load)
    model = module.Model(config, weights)
    weights.check_loaded()
    return Loaded(model, module.make_caches(config))


def _engine(source: Path | Loaded, context: int, kv: str = "none", chunk: int = 512, exact: bool = True, **load: Any) -> Engine:
    model, shapes = source if isinstance(source, Loaded) else loaded(source, **load)
    return Engine(model, shapes, CacheSettings(kv), context=context, chunk=chunk, exact=exact)


def logits(source: Path | Loaded, ids: list[int], **options: Any) -> Tensor:
    """Return the logits of this package after every token, [T, V], for a folder or a loaded model."""
    engine = _engine(source, len(ids), **options)
    return engine.all_logits(engine.cache.open(), ids)


def chunked_logits(source: Path | Loaded, ids: list[int], **options: Any) -> Tensor:
    """Return the logits as `logits` does, with single-token steps at the start and around page ends and chunks between them."""
    engine = _engine(source, len(ids), **options)
    sequence = engine.cache.open()
    ends = [*(end for end in CHUNK_ENDS if end < len(ids)), len(ids)]
    return torch.cat([engine.all_logits(sequence, ids[start:end]) for start, end in pairwise(ends)])


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def agreement(found: Tensor, expected: Tensor) -> float:
    """Return the share of positions with the same top token."""
    return float((found.argmax(-1) == expected.argmax(-1)).float().mean())


def check_family(model: Any, folder: Path, quantizes: bool = True) -> None:
    """Compare a family with transformers: in one chunk, in several, token by token, and with an 8-bit KV cache.

    quantizes  the KV cache can be quantized
    """
    ids = tokens(model)
    expected, mine = transformers_logits(model, ids), loaded(folder)
    for chunk in (512, 37):
        assert error(logits(mine, ids, chunk=chunk), expected) < 1e-5
    assert error(chunked_logits(mine, ids), expected) < 1e-5
    if not quantizes:
        return
    quantized_kv = logits(mine, ids, kv="k8v8")
    assert error(quantized_kv, expected) < 0.02
    assert agreement(quantized_kv, expected) >= 0.99


def prefill(engine: Engine, sequence: KVSequence, ids: list[int]) -> Tensor:
    """Prefill tokens and take a checkpoint at the end; return the last-token logits, [V]."""
    found = engine.all_logits(sequence, ids)
    sequence.checkpoint()
    return found[-1]
