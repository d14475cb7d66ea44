"""`describe_files`: what clients may know about a model that is not loaded, from its files. Imports torch."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from auraflux.errors import AurafluxError
from auraflux.loading.default_sampling import default_sampling
from auraflux.serve.fill_in_middle import find_fill_tokens
from auraflux.serve.listing import Listing
from auraflux.serve.several.catalog import Entry
from auraflux.tokenizer.tokenizer import Tokenizer
from auraflux.vision.families import takes_images
from auraflux.weights.download.local_models import find_downloaded
from auraflux.weights.download.pull import find_local
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.formats.embedding import read_embedding
from auraflux.weights.formats.headers import read_headers
from auraflux.weights.formats.stored import Checkpoint

log = logging.getLogger("auraflux.serve")
UNKNOWN = "unknown"


def describe_files(entry: Entry) -> Listing:
    """Return the facts about a model that its files tell; few for one that is not downloaded or cannot be read."""
    known = Listing(entry.name, UNKNOWN, None, aliases=entry.aliases)
    try:
        path = find_local(entry.model) or find_downloaded(entry.model)
        if path is None:
            return known
        headers, checkpoint = read_headers(path), open_checkpoint(path)
        tokenizer = _tokenizer(path, checkpoint)
        return replace(
            known,
            model_type=str(checkpoint.config.get("model_type", headers.model_type)),
            context=headers.context,
            headers=headers,
            path=path,
            embedding=read_embedding(path),
            templates=None if tokenizer is None else tokenizer.templates,
            fills_middle=tokenizer is not None and find_fill_tokens(tokenizer) is not None,
            takes_images=takes_images(checkpoint),
            default_sampling=default_sampling(checkpoint, {}),
        )
    except (AurafluxError, OSError) as err:
        log.warning("the model %s cannot be described: %s", entry.name, err)
        return known


def _tokenizer(path: Path, checkpoint: Checkpoint) -> Tokenizer | None:
    if path.is_dir():
        return Tokenizer.from_folder(path)
    metadata: Mapping[str, Any] = checkpoint.metadata  # type: ignore[attr-defined]
    return Tokenizer.from_gguf(metadata)
