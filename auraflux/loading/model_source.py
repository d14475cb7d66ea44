"""`ModelSource`: a checkpoint with the configuration of its model family."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auraflux.cache import CacheSettings
from auraflux.cache.layer_shapes import is_bidirectional
from auraflux.distributed.parallel import Parallel
from auraflux.errors import SettingsError
from auraflux.garbage import no_garbage_collection
from auraflux.machine import return_free_memory
from auraflux.models import family, family_name
from auraflux.tokenizer.tokenizer import Tokenizer
from auraflux.weights.fields import end_tokens, fields_of
from auraflux.weights.file_watch import FileWatch
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.formats.embedding import Embedding, gguf_embedding, read_embedding
from auraflux.weights.formats.stored import Checkpoint


@dataclass(frozen=True)
class ModelSource:
    """A model's files, opened and parsed; no weights are loaded.

    module      of the model's family
    settings    of the KV cache, adapted to the family
    shapes      cache shapes of its layers
    mtp_shapes  cache shapes of its MTP head, where that drafts tokens; else empty
    embedding   how it embeds inputs; None for a model whose files do not say
    """

    checkpoint: Checkpoint
    watch: FileWatch
    module: Any
    config: Any
    settings: CacheSettings
    shapes: list[Any]
    mtp_shapes: list[Any]
    embedding: Embedding | None

    # a vocabulary has a million objects
    @classmethod
    @no_garbage_collection()
    def open(cls, path: Path, settings: CacheSettings, mtp: bool, ranks: Parallel | None) -> "ModelSource":
        """Open a model folder or a GGUF file; `mtp` if its MTP head drafts tokens."""
        checkpoint = open_checkpoint(path)
        # before the weights: a model that is not supported is the better reason
        module = family(checkpoint.config)
        watch = FileWatch(checkpoint.files())
        settings = settings.for_family(family_name(checkpoint.config))
        config = module.Config.from_hf(checkpoint.config)
        shapes = module.make_caches(config)
        if is_bidirectional(shapes):
            # nothing is cached
            settings = CacheSettings("none", device=settings.device)
        mtp_shapes = _mtp_shapes(checkpoint, module, config, shapes, ranks) if mtp else []
        # a GGUF file's metadata, read again, takes half a second
        embedding = read_embedding(path) if path.is_dir() else gguf_embedding(checkpoint.pooling_type)  # type: ignore[attr-defined]
        return cls(checkpoint, watch, module, config, settings, shapes, mtp_shapes, embedding)

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def kind(self) -> str:
        return str(self.checkpoint.config.get("model_type", ""))

    @property
    def unused_prefixes(self) -> tuple[str, ...]:
        """Prefixes of tensor names that are not loaded: those of the MTP head, unless it drafts tokens."""
        names = None if self.mtp_shapes else self.module.Model.mtp_names(self.config)
        return () if names is None else names.prefixes

    @no_garbage_collection()
    def take_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer, once: a GGUF file's lists of tokens are then dropped, which take as much memory."""
        if self.path.is_dir():
            return Tokenizer.from_folder(self.path)
        made = Tokenizer.from_gguf(self.checkpoint.metadata)  # type: ignore[attr-defined]
        self.checkpoint.drop_vocabulary()  # type: ignore[attr-defined]
        # of the lists, and of what the tokenizers package needed
        return_free_memory()
        return made

    def ends(self, tokenizer: Tokenizer | None) -> frozenset[int]:
        """Return the ids of tokens that end a sequence."""
        found = end_tokens(fields_of(self.checkpoint.config, "config.json"))
        return frozenset(found or ()) | frozenset(tokenizer.eos_ids if tokenizer is not None else ())


def _mtp_shapes(checkpoint: Checkpoint, module: Any, config: Any, shapes: list[Any], ranks: Parallel | None) -> list[Any]:
    """Return the cache shapes of the model's MTP head; refuse a model without one."""
    names = module.Model.mtp_names(config)
    if names is None or not names.is_in(checkpoint, module.rename):
        raise SettingsError(
            f"{checkpoint.path} has no MTP head, or one that is not supported. Give --speculate ngram or a draft model."
        )
    if ranks is not None:
        raise SettingsError("--speculate mtp is not supported for a model that runs on several ranks.")
    return [shapes[names.like]]
