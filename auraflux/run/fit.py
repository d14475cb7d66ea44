"""What fits into memory: how long a text may be, how many tokens a cache holds, how many experts are kept."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from auraflux.cache import Cache, CacheSettings
from auraflux.cache.deal import ALONE, Deal
from auraflux.errors import SettingsError
from auraflux.machine import free_nbytes, this_machine
from auraflux.models.config import experts_per_token
from auraflux.run.device import activation_dtype, free_device_nbytes
from auraflux.run.ranks.lead import Lead
from auraflux.run.ranks.parallel import EXPERTS
from auraflux.run.ranks.split import Sizes as LayerSizes
from auraflux.run.ranks.split import sizes_of
from auraflux.run.source import Source
from auraflux.weights.expert_settings import ExpertSettings, parse_nbytes, share_out
from auraflux.weights.expert_store import ExpertStore
from auraflux.weights.row_table import loaded_nbytes
from auraflux.weights.stored import Checkpoint

SHARE = 4  # unless a context is given, a sequence that fills it takes at most this part of the free memory


@dataclass(frozen=True)
class Sizes:
    """The sizes that a user asks for.

    context       most tokens of a text; None for what fits
    chunk         tokens of prompts that go through the model together
    sequences     texts that are written at once
    cache_memory  for keys and values of all texts; None for what two of full context need
    """

    context: int | None
    chunk: int
    sequences: int
    cache_memory: str | int | None


@dataclass(frozen=True)
class Fit:
    """What the machine has room for.

    shapes   of what layers keep here
    held     the layers that are here; None for all
    experts  of a packed model, and how many are kept
    settings of experts, as all ranks have them
    dtype    of activations
    sizes    of the cache and of steps, as all ranks have them
    """

    shapes: list[Any]
    held: range | None
    experts: ExpertStore | None
    settings: ExpertSettings
    dtype: torch.dtype
    sizes: dict[str, int]

    @property
    def options(self) -> dict[str, Any]:
        return {**self.sizes, "dtype": self.dtype}


@dataclass(frozen=True)
class _Room:
    """A rank's layers (None for all), the memory that is free there, and what its layers keep."""

    held: range | None
    free: int
    shapes: list[Any]


def free_for(checkpoint: Checkpoint, device: torch.device) -> int:
    """Bytes that a model may take; on a GPU, that it leaves."""
    return free_nbytes() if device.type == "cpu" else free_device_nbytes(device) - loaded_nbytes(checkpoint.sizes())


def fitted(
    source: Source, device: torch.device, free: int, asked: Sizes, expert_settings: ExpertSettings, lead: Lead | None
) -> Fit:
    """Deal out the memory of all ranks; refuses what cannot be had before anything is loaded."""
    rooms, deal = [_Room(None, free, [*source.shapes, *source.further])], ALONE
    if lead is not None:
        sizes = sizes_of(source.checkpoint, source.module.rename, source.config.layers)
        rooms, deal = [_Room(*each) for each in lead.share(sizes, source.shapes)], lead.deal
        if device.type == "cuda":
            rooms = [_beside_weights(room, sizes, source.checkpoint, lead.mesh.width) for room in rooms]
        free = rooms[0].free
    settings, why = balanced(source.checkpoint, expert_settings, lead, device)
    # names of all layers need not be as many as these are
    layers = None if lead is None or lead.whole else lead.here
    experts = keep_experts(source.checkpoint, settings, device, free, layers, source.left_out)
    if experts is not None:
        experts.notes += why
        kept = experts.share.nbytes
        rooms = [_Room(room.held, max(room.free - kept, room.free // 2), room.shapes) for room in rooms]
    dtype = activation_dtype(device)
    longest = min(_context(asked.context, source.config.context, room, source.settings, dtype, deal) for room in rooms)
    # one place more is for scores of whole texts
    had: dict[str, Any] = {"context": longest, "chunk": asked.chunk, "sequences": asked.sequences + 1, "kept": asked.sequences}
    limits = [(room.shapes, source.settings, _cache_nbytes(asked.cache_memory, room.free), room.held, deal) for room in rooms]
    had["tokens"] = min(pool_tokens(*limit, **had, dtype=dtype) for limit in limits)
    return Fit(source.shapes if lead is None else rooms[0].shapes, rooms[0].held, experts, settings, dtype, had)


def _beside_weights(room: _Room, sizes: LayerSizes, checkpoint: Checkpoint, width: int) -> _Room:
    """What weights leave of a GPU's memory, of which those that divide a layer are taken to have equal parts."""
    assert room.held is not None
    # packed experts take what they are given
    loaded = loaded_nbytes(checkpoint.sizes()) / max(sizes.of(range(len(sizes.layers))), 1)
    return replace(room, free=room.free - int(sizes.of(room.held) * loaded) // width)


def _context(wanted: int | None, trained: int, room: _Room, settings: CacheSettings, dtype: torch.dtype, deal: Deal) -> int:
    """Most tokens of a sequence; refuses settings that the model's layers cannot have before anything is loaded."""
    # the meta device makes stores without their memory
    cache = Cache(room.shapes, settings, context=1, held=room.held, deal=deal, dtype=dtype, device="meta")
    per_token = cache.held_token_nbytes
    if wanted is not None:
        there = this_machine().memory_nbytes
        if wanted * max(per_token, 1) > there:
            raise SettingsError(
                f"context={wanted} would take {wanted * max(per_token, 1) / 1e9:,.0f} GB of a machine that has "
                f"{there / 1e9:,.0f} GB. Ask for less."
            )
        return wanted
    return max(1, min(trained, room.free // SHARE // max(per_token, 1)))


def _cache_nbytes(wanted: str | int | None, free: int) -> int | None:
    if wanted is None:
        return None
    return free // 2 if wanted == "half" else parse_nbytes(wanted)


def pool_tokens(
    shapes: list[Any],
    settings: CacheSettings,
    nbytes: int | None,
    held: range | None = None,
    deal: Deal = ALONE,
    *,
    context: int,
    **options: Any,
) -> int:
    """Tokens of all texts together for which a cache has room; without a limit as many as two of full context have."""
    if nbytes is None:
        return 2 * context
    # the meta device makes stores without their memory
    least = Cache(shapes, settings, context=context, tokens=1, held=held, deal=deal, **options, device="meta")
    most = max(1, (nbytes - least.reserved_nbytes) // max(least.page_nbytes, 1)) * least.page
    if most < context:
        raise SettingsError(
            f"cache_memory={nbytes} has room for {most} tokens beside the windows and states of {options['sequences']} texts, "
            f"and the context is {context}. Give more, fewer texts at once, or a shorter context."
        )
    return min(most, context * (options["sequences"] + options.get("kept", 0)))


def balanced(
    checkpoint: Checkpoint, settings: ExpertSettings, lead: Lead | None, device: torch.device
) -> tuple[ExpertSettings, list[str]]:
    """Decide whether ranks deal out experts as they are chosen, which wants reads from disk and the same rounding; and why."""
    files, asked = checkpoint.experts, settings.balance == "on"
    if lead is None or EXPERTS not in lead.mesh.modes:
        if asked:
            raise SettingsError(
                "--expert-balance on is for ranks that divide experts. Give --parallel experts=2, or leave it out."
            )
        return settings, []
    if files is None or settings.balance == "off":
        return settings, []
    k = experts_per_token(checkpoint.config)
    reason = None
    layers = [None] * lead.mesh.size if lead.whole else lead.held
    kept = [(files.within(some), settings.nbytes(free)) for some, free in zip(layers, lead.memory, strict=True)]
    if device.type == "cuda":
        reason = "rows of experts that are dealt out are added up by CPUs only"
    elif not asked and any(share_out(some, k, nbytes, settings.io).mapped for some, nbytes in kept if some.files):
        reason = "their files are mapped"
    elif lead.unequal is not None:
        reason = f"ranks round differently ({lead.unequal})"
    if reason is not None:
        if asked:
            raise SettingsError(f"--expert-balance on cannot be: {reason}. Leave it out.")
        return replace(settings, balance="off"), [f"experts: each rank has its own, since {reason}."]
    lead.balanced = True
    count = lead.mesh.width
    return replace(settings, io="direct", balance="on"), [f"experts: those that no rank holds are dealt out evenly to {count}."]


def keep_experts(
    checkpoint: Checkpoint,
    settings: ExpertSettings,
    device: torch.device,
    free: int,
    layers: range | None = None,
    left_out: tuple[str, ...] = (),
) -> ExpertStore | None:
    """How the experts of a packed model, or of some of its layers, are kept, where so much memory is free."""
    files = None if checkpoint.experts is None else checkpoint.experts.within(layers).without(left_out)
    if files is not None and not files.files:
        return None
    if files is None:
        if settings != ExpertSettings():
            raise SettingsError(
                f"{checkpoint.path} is not packed, so its experts are loaded with all else. To read them from disk as they are "
                f"chosen, run 'auraflux pack' on it first."
            )
        return None
    share = share_out(files, experts_per_token(checkpoint.config), settings.nbytes(free), settings.io)
    below = settings.main_nbytes(free_nbytes()) * files.count // files.nbytes
    return ExpertStore(files, share, settings, device=device, main_slots=below)
