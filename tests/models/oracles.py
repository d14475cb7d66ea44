"""Tiny random models of other people's making, and what this package makes of the same folders."""

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from auraflux.cache import CacheSettings, Sequence
from auraflux.models import family
from auraflux.run.engine import Engine
from auraflux.weights.checkpoint import open_checkpoint
from auraflux.weights.loader import Weights
from tests.tested import outside

TOKENS = 150  # past two pages
ALONE = (*range(5), *range(62, 67), *range(126, 131))  # where pieces end if some tokens are to come one by one


def save(model: Any, folder: Path) -> Path:
    """Write a transformers model with larger weights than at birth, uneven norms, and an opinion about the next token."""
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
            # the token before in the vocabulary comes next, more often than not
            head.add_(4 * table.roll(1, 0))
    model.save_pretrained(folder)
    return folder


def tokens(model: Any, count: int = TOKENS) -> list[int]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, model.config.get_text_config().vocab_size, (count,), generator=generator).tolist()


@outside("transformers")
def truth(model: Any, ids: list[int]) -> Tensor:
    """What transformers says, [T, V]."""
    with torch.no_grad():
        return model.eval()(torch.tensor([ids])).logits[0].float()


class Loaded(NamedTuple):
    """A model, and the shapes of its layers."""

    model: Any
    shapes: list[Any]


def loaded(folder: Path, **load: Any) -> Loaded:
    checkpoint = open_checkpoint(folder)
    module = family(checkpoint.config)
    config = module.Config.from_hf(checkpoint.config)
    weights = Weights(checkpoint, module.rename, **load)
    model = module.Model(config, weights)
    weights.done()
    return Loaded(model, module.make_caches(config))


def _engine(source: Path | Loaded, context: int, kv: str = "none", chunk: int = 512, exact: bool = True, **load: Any) -> Engine:
    model, shapes = source if isinstance(source, Loaded) else loaded(source, **load)
    return Engine(model, shapes, CacheSettings(kv), context=context, chunk=chunk, exact=exact)


def scores(source: Path | Loaded, ids: list[int], **options: Any) -> Tensor:
    """What this package says after every token, [T, V]; of a folder, or of what is loaded from it."""
    engine = _engine(source, len(ids), **options)
    return engine.all_scores(engine.cache.open(), ids)


def written_scores(source: Path | Loaded, ids: list[int], **options: Any) -> Tensor:
    """The same, where tokens come one by one at the beginning and around the ends of pages, and in pieces between these."""
    engine = _engine(source, len(ids), **options)
    sequence = engine.cache.open()
    ends = [*(end for end in ALONE if end < len(ids)), len(ids)]
    return torch.cat([engine.all_scores(sequence, ids[start:end]) for start, end in pairwise(ends)])


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def agreement(found: Tensor, wanted: Tensor) -> float:
    """The share of positions with the same top token."""
    return float((found.argmax(-1) == wanted.argmax(-1)).float().mean())


def check_family(model: Any, folder: Path) -> None:
    """Hold a family to transformers: in one piece, in chunks and token by token, and with 8-bit keys and values."""
    ids = tokens(model)
    wanted, mine = truth(model, ids), loaded(folder)
    for chunk in (512, 37):
        assert error(scores(mine, ids, chunk=chunk), wanted) < 2e-4
    assert error(written_scores(mine, ids), wanted) < 2e-4
    coded = scores(mine, ids, kv="k8v8")
    assert error(coded, wanted) < 0.02
    assert agreement(coded, wanted) >= 0.99


def prefill(engine: Engine, sequence: Sequence, ids: list[int]) -> Tensor:
    """Read a text in pieces and keep a checkpoint at its end: the scores of the token after it, [V]."""
    scores = engine.all_scores(sequence, ids)
    sequence.checkpoint()
    return scores[-1]
