"""The parts of a model that fit into a GPU: the table of `auraflux inspect` and `auraflux plan`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from auraflux.cli.output.units import size
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
        "disk_cache_nbytes": plan.disk,
    }


def show(console: Any, found: dict[str, Any], model: str) -> None:
    """Print the result of `collect` for a model: one table, and a sentence on what it means."""
    from rich.markup import escape
    from rich.table import Table

    total = found["total_nbytes"]
    title = f"{escape(model)} in {size(total)} of GPU memory; the CUDA context comes on top"
    if found["refused"] is not None:
        console.print(f"{title}\n[red]does not run[/red]: {escape(found['refused'])}", soft_wrap=True)
        return
    table = Table("where", "what", title=title, title_justify="left")
    for name in ("size", "share"):
        table.add_column(name, justify="right")
    table.add_column("")
    where = "GPU"
    for what, nbytes, note in _gpu_rows(found):
        table.add_row(where, what, size(nbytes), f"{nbytes / total:.0%}", note)
        where = ""
    fits = True
    if found["slots"] is not None and found["disk_cache_nbytes"] is not None:
        cached = found["disk_cache_nbytes"] / max(1, found["experts_nbytes"])
        table.add_row("host", "expert cache", size(found["disk_cache_nbytes"]), "", f"{min(1.0, cached):.0%} of all experts")
        table.add_row("disk", "all experts", size(found["experts_nbytes"]), "", "")
    elif found["slots"] is not None:
        fits = found["host_nbytes"] <= found["host_free_nbytes"]
        usable = size(max(0, found["host_free_nbytes"]))
        share = f"{found['host_nbytes'] / max(1, found['host_free_nbytes']):.0%}"
        table.add_row("host", "all experts", size(found["host_nbytes"]), share, f"{usable} can be used")
    console.print(table)
    verdict, options = _verdict(found, fits)
    console.print(verdict, soft_wrap=True)
    if options is not None:
        console.print(f"  auraflux chat {escape(model)} {options}", soft_wrap=True)


def _gpu_rows(found: dict[str, Any]) -> list[tuple[str, int, str]]:
    """Return the parts of a GPU's memory: name, bytes, note."""
    pooled = found["slots"] is not None
    tokens = f"{found['context']:,} tokens a sequence, {found['cache_tokens']:,} in all"
    rows = [
        ("weights but experts" if pooled else "all weights", found["weights_nbytes"], ""),
        ("KV cache", found["cache_nbytes"], tokens),
        ("workspace", found["workspace_nbytes"], f"prefill of {found['chunk']:,} tokens at a time"),
    ]
    if pooled:
        share = found["slots"] / max(1, found["experts"])
        rows.append(
            ("expert slots", found["slots_nbytes"], f"{found['slots']:,} of {found['experts']:,} experts ({share:.0%})")
        )
    free = found["total_nbytes"] - sum(nbytes for _, nbytes, _ in rows)
    return [*rows, ("free", free, "")] if free > 0 else rows


def _verdict(found: dict[str, Any], fits: bool) -> tuple[str, str | None]:
    """Return what the table means, and the options of a command that does it; None for a model that does not fit."""
    if found["slots"] is None:
        return "[green]fits[/green]: the whole model runs on the GPU.", "--device cuda"
    if found["disk_cache_nbytes"] is not None:
        return (
            "[green]runs[/green] with experts on disk: experts of a token that neither the GPU nor host memory has are read "
            "from disk.",
            f"--gpu-memory {found['total_nbytes'] / 1e9:g}GB",
        )
    if not fits:
        return (
            "[red]does not fit[/red]: the experts exceed the host memory that can be used. Run 'auraflux pack' on the model: a "
            "packed one also reads experts from disk.",
            None,
        )
    return (
        "[green]fits[/green] with experts in host memory: experts of a token without a slot are copied to the GPU, or computed "
        "by the CPU.",
        f"--gpu-memory {found['total_nbytes'] / 1e9:g}GB",
    )
