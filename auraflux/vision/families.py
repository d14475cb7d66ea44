"""The families with vision towers, and `open_vision`, which loads the tower of a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from auraflux.errors import FormatError, SettingsError
from auraflux.models.config import Keys
from auraflux.vision.encoder import ImageEncoder
from auraflux.vision.mmproj import MMProjFile
from auraflux.vision.processor import ImageProcessor
from auraflux.vision.prompt_images import BothWays, PromptImages
from auraflux.vision.settings import ImageSettings
from auraflux.vision.span import ImageSpan
from auraflux.vision.towers import gemma3, gemma4, kimi, pixtral, qwen
from auraflux.vision.towers.layers import Loader
from auraflux.weights.fields import Fields
from auraflux.weights.formats.model_files import check_gguf, find_projectors
from auraflux.weights.formats.stored import Checkpoint
from auraflux.weights.formats.untrusted import OBJECT
from auraflux.weights.loader import Weights


def one_position(keys: Keys, config: Any) -> np.ndarray | None:
    """Return None: tokens have one position each."""
    return None


def causal(keys: Keys, processor: ImageProcessor) -> BothWays | None:
    """Return None: the tokens of an image attend to those before them, as others do."""
    return None


@dataclass(frozen=True)
class Family:
    """A family of vision towers.

    towers         module with `processor`, `TowerConfig`, `rename` and `Tower`
    position_axes  which position each RoPE frequency of the language model takes
    both_ways      how the tokens of an image attend to each other
    """

    towers: ModuleType
    position_axes: Callable[[Keys, Any], np.ndarray | None] = one_position
    both_ways: Callable[[Keys, Any], BothWays | None] = causal


QWEN = Family(qwen, position_axes=qwen.position_axes)
FAMILIES = {
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "mistral3": Family(pixtral),
    "gemma3": Family(gemma3, both_ways=gemma3.both_ways),
    "gemma4": Family(gemma4, both_ways=gemma4.both_ways),
    "kimi_k25": Family(kimi),
}
CPU_PIXELS = 1 << 20  # of an image on a CPU, where a tower takes about a second per 100,000


@dataclass(frozen=True, eq=False)
class Vision:
    """The images of a model.

    axes, both_ways  see `PromptImages`
    """

    processor: ImageProcessor
    encoder: ImageEncoder
    axes: np.ndarray | None
    both_ways: BothWays | None

    def prompt_images(self, length: int, spans: tuple[ImageSpan, ...]) -> PromptImages:
        """Return the images of a prompt of so many tokens."""
        return PromptImages(length, spans, self.axes, self.both_ways)


@dataclass(frozen=True)
class NoVision:
    """A model that takes no images, and the reason."""

    reason: str


def takes_images(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint, or an mmproj file beside it, has a tower that is supported."""
    if checkpoint.form != "gguf":
        return _family(checkpoint) is not None
    # tokens, which loading needs, are not looked up
    return isinstance(_projector(checkpoint, None, lambda name: 0), MMProjFile)


def tower_names(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the tensors of a checkpoint's tower; none if it has no tower that is supported."""
    family = None if checkpoint.form == "gguf" else _family(checkpoint)
    return [] if family is None else [name for name in checkpoint.sizes() if family.towers.rename(name) is not None]


def notes_of_copy(checkpoint: Checkpoint) -> list[str]:
    """Return notes on a model that is written without its tower, which is in another file."""
    if checkpoint.form != "gguf" or not takes_images(checkpoint):
        return []
    return ["the vision tower in the mmproj file is left out: the model that is written takes no images."]


def open_vision(
    checkpoint: Checkpoint,
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    token_id: Callable[[str], int | None] = lambda name: None,
    chunk: int | None = None,
    projector: Path | None = None,
) -> Vision | NoVision:
    """Load a checkpoint's tower; a tower that is not supported does not keep its model from running without images.

    config     of the language model
    token_id   returns the id of a token as spelled in the vocabulary
    chunk      tokens of a prefill chunk; None for any number
    projector  mmproj file of a GGUF model, which must fit; None for one beside the model
    """
    source: Checkpoint | NoVision
    if checkpoint.form == "gguf":
        source = _projector(checkpoint, projector, token_id)
    elif projector is not None:
        raise SettingsError(f"{checkpoint.path} has its own tower, if it has one: an mmproj file belongs to a GGUF model.")
    else:
        source = checkpoint
    if isinstance(source, NoVision):
        return source
    if (family := _family(source)) is None:
        return NoVision("it has no vision tower that is supported")
    try:
        return _load(source, family, config, device, dtype, token_id, chunk)
    except FormatError as err:
        if projector is not None:
            raise
        return NoVision(f"its vision tower cannot be loaded: {err}")


def _load(
    source: Checkpoint,
    family: Family,
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    token_id: Callable[[str], int | None],
    chunk: int | None,
) -> Vision | NoVision:
    keys = Keys(source.config)
    vision = keys.section("vision_config")
    settings = ImageSettings(source.images) if isinstance(source, MMProjFile) else ImageSettings.read(source.path)
    processor = family.towers.processor(keys, vision, settings, token_id)
    sizes = family.towers.TowerConfig.read(keys, vision, config.hidden)
    weights = Weights(source, family.towers.rename, dtype=dtype, device=device)
    tower = family.towers.Tower(Loader(weights), sizes, processor)
    weights.check_loaded()
    if device.type == "cpu":
        processor = processor.limited(CPU_PIXELS)
    both_ways = family.both_ways(keys, processor)
    if both_ways is not None and chunk is not None and both_ways.most_tokens > chunk:
        return NoVision(f"an image may have {both_ways.most_tokens} tokens, and a prefill chunk has {chunk}: raise --chunk")
    return Vision(processor, ImageEncoder(tower), family.position_axes(keys, config), both_ways)


def _projector(checkpoint: Checkpoint, given: Path | None, token_id: Callable[[str], int | None]) -> MMProjFile | NoVision:
    """Open the mmproj file of a GGUF model: the one that is given, or the first beside it that fits."""
    if given is not None:
        check_gguf(given)
        return MMProjFile(given, checkpoint.config, token_id)
    reason = "GGUF files have their tower in an mmproj file, and there is none beside it; give --mmproj FILE"
    for path in find_projectors(checkpoint.path):
        try:
            return MMProjFile(path, checkpoint.config, token_id)
        except FormatError as err:
            reason = f"the mmproj file beside it cannot be used: {err}".removesuffix(".")
    return NoVision(reason)


def _family(checkpoint: Checkpoint) -> Family | None:
    kind = checkpoint.config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or not Fields("config.json", checkpoint.config).get("vision_config", OBJECT, None):
        return None
    return family if any(map(family.towers.rename, checkpoint.sizes())) else None
