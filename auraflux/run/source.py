"""What is to be loaded: a checkpoint, and what its family says of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auraflux.cache import CacheSettings
from auraflux.errors import SettingsError
from auraflux.models import family, family_name
from auraflux.run.ranks.parallel import Parallel
from auraflux.run.tokenizer import Tokenizer
from auraflux.weights.checkpoint import open_checkpoint
from auraflux.weights.stored import Checkpoint
from auraflux.weights.watch import Watch


@dataclass(frozen=True)
class Source:
    """A model's files, opened and understood; nothing is loaded.

    module    of the model's family
    settings  of the cache, as the family needs them
    shapes    of what its layers keep
    further   the shape of what its own layer keeps that predicts further tokens, where that is to guess
    """

    checkpoint: Checkpoint
    watch: Watch
    module: Any
    config: Any
    settings: CacheSettings
    shapes: list[Any]
    further: list[Any]

    @classmethod
    def open(cls, path: Path, settings: CacheSettings, mtp: bool, ranks: Parallel | None) -> "Source":
        """Open a folder or a file."""
        checkpoint = open_checkpoint(path)
        watch = Watch(checkpoint.files())
        module = family(checkpoint.config)
        settings = settings.for_family(family_name(checkpoint.config))
        config = module.Config.from_hf(checkpoint.config)
        shapes = module.make_caches(config)
        further = _further_shapes(checkpoint, module, config, shapes, ranks) if mtp else []
        return cls(checkpoint, watch, module, config, settings, shapes, further)

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def kind(self) -> str:
        return str(self.checkpoint.config.get("model_type", ""))

    @property
    def left_out(self) -> tuple[str, ...]:
        """Beginnings of names that nobody asks for: of the layer that predicts further tokens, unless it guesses."""
        place = None if self.further else self.module.Model.mtp_place(self.config)
        return () if place is None else place.beyond

    def tokenizer(self) -> Tokenizer | None:
        if self.path.is_dir():
            return Tokenizer.from_folder(self.path)
        return Tokenizer.from_gguf(self.checkpoint.metadata)  # type: ignore[attr-defined]

    def ends(self, tokenizer: Tokenizer | None) -> frozenset[int]:
        """Tokens that end a text."""
        found = self.checkpoint.config.get("eos_token_id")
        listed = found if isinstance(found, list) else [] if found is None else [found]
        return frozenset(listed) | frozenset(tokenizer.eos_ids if tokenizer is not None else ())


def _further_shapes(checkpoint: Checkpoint, module: Any, config: Any, shapes: list[Any], ranks: Parallel | None) -> list[Any]:
    """The shape of what a model's own layer keeps that predicts further tokens; refused where there is none."""
    place = module.Model.mtp_place(config)
    if place is None or not place.is_in(checkpoint, module.rename):
        raise SettingsError(
            f"{checkpoint.path} has no layer that predicts further tokens (MTP), or none that is known here. "
            "Give --speculate ngram or a smaller model."
        )
    if ranks is not None:
        raise SettingsError("a model that is divided among ranks cannot guess with its own layer: leave --speculate mtp out.")
    return [shapes[place.like]]
