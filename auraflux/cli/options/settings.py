"""Settings of the KV cache, the expert cache and loading, made from a command's options."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from auraflux.cache import CacheSettings
    from auraflux.distributed.parallel import Parallel
    from auraflux.loading.options import LoadOptions
    from auraflux.progress import Report
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


def load_options(
    chosen: dict[str, Any], kv: "CacheSettings", parallel: "Parallel | None", report: "Report | None"
) -> "LoadOptions":
    """Return the load options; those that only a server has may be missing."""
    from auraflux.loading.options import LoadOptions

    return LoadOptions(
        device=chosen["device"],
        kv=kv,
        quantize=chosen["quantize"],
        exact=chosen["exact"],
        invariant=chosen["invariant"],
        graphs=chosen["graphs"],
        context=chosen["context"],
        cache_memory=chosen.get("cache_memory"),
        prefix_disk=chosen.get("prefix_disk"),
        prefix_folder=chosen.get("prefix_folder"),
        expert_memory=expert_settings(chosen),
        gpu_memory=chosen.get("gpu_memory"),
        calibrate=chosen["calibrate"],
        speculate=chosen["speculate"],
        parallel=parallel,
        report=report,
    )
