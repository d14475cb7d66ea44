"""Division of a GPU's memory in `auraflux inspect` and `auraflux plan`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from auraflux.cli.output.units import memory_size
from auraflux.errors import SettingsError

if TYPE_CHECKING:
    from auraflux.loading.gpu_plan import GpuPlan

SEQUENCES = 8  # that the default KV cache serves


def collect(
    path: Path,
    gpu_memory: str | None,
    *,
    bits: int | None = None,
    kv: str = "auto",
    context: int | None = None,
    expert_memory: str | None = None,
) -> dict[str, Any] | None:
    """Divide the GPU memory given, or what is free on this machine's GPU; None where there is none."""
    import torch

    from auraflux.cache import CacheSettings
    from auraflux.engine.device import chunk_for, free_device_nbytes
    from auraflux.loading.gpu_plan import plan_gpu
    from auraflux.loading.memory_budget import RequestedSizes
    from auraflux.loading.model_source import ModelSource
    from auraflux.weights.experts.settings import ExpertSettings, parse_nbytes

    if gpu_memory is not None:
        total = parse_nbytes(gpu_memory)
    elif torch.cuda.is_available():
        total = free_device_nbytes(torch.device("cuda"))
    else:
        return None
    chunk = chunk_for(torch.device("cuda"), False)
    requested = RequestedSizes(context, None, SEQUENCES, None, chunk)
    try:
        source = ModelSource.open(path, CacheSettings(kv), mtp=False, ranks=None)
        plan = plan_gpu(source, total, requested, ExpertSettings(expert_memory), bits=bits)
    except SettingsError as err:
        return {"total_nbytes": total, "refused": str(err)}
    return {"refused": None, **_document(plan)}


def _document(plan: "GpuPlan") -> dict[str, Any]:
    division, experts = plan.division, plan.sizes.experts
    return {
        "total_nbytes": division.total,
        "weights_nbytes": division.weights,
        "cache_nbytes": division.cache,
        "context": plan.engine.context,
        "cache_tokens": plan.engine.tokens,
        "workspace_nbytes": division.workspace,
        "chunk": division.chunk,
        "slots_nbytes": division.slots,
        "slots": plan.slots,
        "experts": None if experts is None else experts.layers * experts.count,
        "experts_nbytes": None if experts is None else experts.total,
        "host_nbytes": None if plan.slots is None or experts is None else experts.host_nbytes,
        "host_free_nbytes": plan.host,
    }


def show(console: Any, found: dict[str, Any]) -> None:
    """Print the result of `collect`."""
    from rich.markup import escape
    from rich.table import Table

    title = f"division of {memory_size(found['total_nbytes'])} of GPU memory, besides the CUDA context"
    if found["refused"] is not None:
        console.print(f"{title}: [red]refused[/red]. {escape(found['refused'])}")
        return
    table = Table("part", title=title, title_justify="left")
    table.add_column("size", justify="right")
    table.add_column("")
    pooled = found["slots"] is not None
    table.add_row("weights", memory_size(found["weights_nbytes"]), "all but experts" if pooled else "all, experts included")
    cached = f"{found['context']:,} tokens a sequence, {found['cache_tokens']:,} in all"
    table.add_row("KV cache", memory_size(found["cache_nbytes"]), cached)
    table.add_row("workspace", memory_size(found["workspace_nbytes"]), f"prefill chunks of {found['chunk']:,} tokens")
    if pooled:
        table.add_row("expert slots", memory_size(found["slots_nbytes"]), f"{found['slots']:,} of {found['experts']:,} experts")
        there = memory_size(max(0, found["host_free_nbytes"]))
        fits = found["host_nbytes"] <= found["host_free_nbytes"]
        note = f"all experts; {there} can be used" if fits else f"[red]too little[/red]: {there} can be used"
        table.add_row("host memory", memory_size(found["host_nbytes"]), note)
    console.print(table)
