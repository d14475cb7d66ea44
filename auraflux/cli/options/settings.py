"""Settings of the KV cache and the expert cache, made from a command's options."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from auraflux.cache import CacheSettings
    from auraflux.weights.experts.settings import ExpertSettings

CACHE_NAMES = ("skip_first_layers", "skip_last_layers", "sink_tokens", "recent_window", "sparse_v")


def cache_settings(chosen: dict[str, Any]) -> "CacheSettings":
    """Return the KV cache settings of the options."""
    from auraflux.cache import CacheSettings

    return CacheSettings(chosen["kv"], **{name: chosen[name] for name in CACHE_NAMES})


def expert_settings(chosen: dict[str, Any]) -> "ExpertSettings":
    """Return the expert cache settings of the options."""
    from auraflux.weights.experts.settings import ExpertSettings

    memory, io, host_memory = (chosen[f"expert_{name}"] for name in ("memory", "io", "host_memory"))
    return ExpertSettings(
        memory,
        io,
        host_memory,
        prefetch=chosen["expert_prefetch"],
        verify=chosen["verify"],
        balance=chosen["expert_balance"],
        compute=chosen["experts"],
    )
