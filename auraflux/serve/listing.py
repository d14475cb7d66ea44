"""`Listing`: what is known of a model that requests can name, before and after it is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from auraflux.engine.sampling import DefaultSampling
from auraflux.serve.fill_in_middle import find_fill_tokens
from auraflux.serve.transport.link import ModelFacts
from auraflux.tokenizer.tokenizer import Tokenizer
from auraflux.weights.formats.embedding import Embedding
from auraflux.weights.formats.headers import Headers

KeepAlive = float | str | None


@dataclass(frozen=True)
class Loaded:
    """Facts about a model that is loaded.

    kv, device, vocab  as in `ModelFacts`
    nbytes             of memory that was planned for it; None where it is the only model
    expires_at         when it is unloaded unless requests arrive, in seconds since 1970; None for never
    """

    kv: str
    device: str
    vocab: int
    nbytes: int | None = None
    expires_at: float | None = None


@dataclass(frozen=True)
class Listing:
    """A model that requests can name.

    name              its name in the API
    model_type        model family
    context           most tokens of prompt and answer; before it is loaded, those it was trained for, or None
    headers           facts of its files; None for a model without any
    path              of its files; clients never see it
    embedding         how it embeds inputs; None for a model whose files do not say
    templates         chat templates by name; None for a model without a tokenizer
    default_sampling  settings of requests that leave them out; None before it is loaded
    loaded            None while it is not
    aliases           other names
    adapters          names of its adapters
    fills_middle      whether it can fill in the middle
    takes_images      whether messages may have images
    """

    name: str
    model_type: str
    context: int | None
    headers: Headers | None = None
    path: Path | None = None
    embedding: Embedding | None = None
    templates: Mapping[str, str] | None = None
    default_sampling: DefaultSampling | None = None
    loaded: Loaded | None = None
    aliases: tuple[str, ...] = ()
    fills_middle: bool = False
    takes_images: bool = False
    adapters: tuple[str, ...] = ()

    @classmethod
    def of(cls, facts: ModelFacts, tokenizer: Tokenizer | None, aliases: tuple[str, ...] = ()) -> "Listing":
        """Return the listing of a loaded model."""
        return cls(
            facts.name,
            facts.model_type,
            facts.context,
            facts.headers,
            facts.path,
            facts.embedding,
            None if tokenizer is None else tokenizer.templates,
            facts.default_sampling,
            Loaded(facts.kv, facts.device, facts.vocab),
            aliases,
            tokenizer is not None and find_fill_tokens(tokenizer) is not None,
            facts.images is not None,
            facts.adapters,
        )
