"""Options that several commands share: the model, how it is loaded, and how tokens are sampled."""

import os
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from auraflux.adapters.names import parse_adapters
from auraflux.cli.options.early_checks import Bits, check_loading
from auraflux.cli.options.importing import importing
from auraflux.cli.options.renamed import Renamed
from auraflux.cli.options.settings import cache_settings, expert_settings
from auraflux.defaults import AUTO, CALIBRATE, CPU_RECENT_WINDOW, KV, KV_OF, RECENT_WINDOW, SINK_TOKENS, TEMPERATURE
from auraflux.errors import SettingsError

if TYPE_CHECKING:
    from auraflux.cache import CacheSettings
    from auraflux.distributed.parallel import Parallel
    from auraflux.loading.language_model import LanguageModel
    from auraflux.loading.options import LoadOptions
    from auraflux.progress import Report

Command = TypeVar("Command", bound=Callable[..., Any])


def _defaults_by_family() -> str:
    """List the model families whose default KV cache quantization differs."""
    families = {kv: [family for family, default in KV_OF.items() if default == kv] for kv in dict.fromkeys(KV_OF.values())}
    return ", ".join(f"{kv} for {', '.join(names)}" for kv, names in families.items())


model_argument = click.argument("model", required=False)

gpu_memory_option = click.option(
    "--gpu-memory",
    metavar="SIZE",
    help="GPU memory for weights, KV cache, workspace and experts, such as 8GB; by default what is free. Experts that do not "
    "fit stay in host memory.",
)
EXPERTS = [
    click.option(
        "--expert-memory",
        metavar="SIZE",
        help="Memory for experts on the device, such as 4GB; the others stay in host memory on a GPU, or on disk if packed.",
    ),
    click.option(
        "--experts",
        type=click.Choice(["auto", "gpu"]),
        default="auto",
        show_default=True,
        help="On a GPU: let CPU threads compute missing experts where that is faster (auto), or compute all on the GPU, for "
        "output that does not depend on what is cached (gpu).",
    ),
    click.option(
        "--expert-io",
        type=click.Choice(["auto", "mapped", "direct"]),
        default="auto",
        help="Memory-map the expert files, or read experts into the expert cache.",
    ),
    click.option(
        "--expert-host-memory",
        cls=Renamed,
        old="--expert-main-memory",
        metavar="SIZE",
        help="On a GPU: pinned host memory for experts that are not in GPU memory.",
    ),
    click.option(
        "--expert-prefetch",
        cls=Renamed,
        old="--expert-guess",
        is_flag=True,
        help="Run the next layer's router early and prefetch the experts it chooses.",
    ),
    click.option(
        "--expert-balance",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        help="With experts=N: spread expert reads evenly over the ranks' disks; auto does so where experts are on disk.",
    ),
    click.option("--verify/--no-verify", default=True, help="Check the checksum of each expert when it is first read."),
]
calibrate_option = click.option(
    "--calibrate",
    default=CALIBRATE,
    show_default=True,
    metavar="auto|off|FILE",
    help="Per-channel mean and scale removed from keys before quantization: auto measures them when a model is first loaded, "
    "off uses none, FILE holds saved ones.",
)
LOADING = [
    click.option("--device", default="auto", show_default=True, metavar="DEVICE", help="auto, cpu or cuda."),
    click.option(
        "--kv",
        default=AUTO,
        show_default=True,
        metavar="KXVY",
        help=f"KV cache quantization: bits of keys and values, or none. auto is {KV}, {_defaults_by_family()}.",
    ),
    click.option(
        "--kv-skip-first-layers",
        "skip_first_layers",
        cls=Renamed,
        old="--protect-first",
        type=int,
        default=0,
        metavar="N",
        help="Keep the KV cache of the first N attention layers in full precision.",
    ),
    click.option(
        "--kv-skip-last-layers",
        "skip_last_layers",
        cls=Renamed,
        old="--protect-last",
        type=int,
        default=0,
        metavar="N",
        help="Keep the KV cache of the last N attention layers in full precision.",
    ),
    click.option(
        "--sink-tokens",
        cls=Renamed,
        old="--first",
        type=int,
        metavar="N",
        help=f"Keep the first N tokens of a sequence in full precision; by default {SINK_TOKENS} with a quantized KV cache.",
    ),
    click.option(
        "--recent-window",
        cls=Renamed,
        old="--newest",
        type=int,
        metavar="N",
        help="Keep the most recent N tokens in full precision; with a quantized KV cache by default "
        f"{CPU_RECENT_WINDOW} on a CPU, {RECENT_WINDOW} on a GPU.",
    ),
    calibrate_option,
    click.option(
        "--sparse-v", type=float, default=0.0, metavar="W", help="Skip quantized values whose attention weight is below W."
    ),
    click.option(
        "--context", type=int, metavar="N", help="Maximum tokens of a sequence; by default as many as model and memory allow."
    ),
    click.option("--quantize", type=Bits(), metavar="BITS", help="Quantize dense weights to this many bits while loading."),
    click.option(
        "--graph/--no-graph",
        "graphs",
        default=True,
        help="Replay recorded decode steps and prefill chunks; as CUDA graphs on a GPU.",
    ),
    click.option("--exact", is_flag=True, help="Use float32 activations instead of rounded ones."),
    click.option("--invariant", is_flag=True, help="Make CUDA kernels batch-invariant; CPU kernels always are."),
    click.option(
        "--prefill",
        type=click.Choice(["auto", "fp8"]),
        default="auto",
        show_default=True,
        help="fp8: multiply long prefill chunks in FP8 (GPUs from RTX 40 and H100 on): faster, less accurate.",
    ),
    click.option(
        "--adapter",
        "adapters",
        multiple=True,
        metavar="NAME=FOLDER",
        help="LoRA adapter (PEFT) that requests choose by NAME; may be given several times. generate and chat use the first.",
    ),
    click.option(
        "--speculate",
        metavar="ngram|mtp|MODEL",
        help="Speculative decoding: take draft tokens from n-grams of the sequence, the model's MTP head, or a smaller MODEL.",
    ),
    click.option(
        "--mmproj",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Vision tower of a GGUF model; by default an mmproj file in its folder.",
    ),
    gpu_memory_option,
    *EXPERTS,
]
timeout_option = click.option(
    "--rank-timeout",
    type=float,
    default=15.0,
    show_default=True,
    metavar="S",
    help="Seconds without a heartbeat after which a rank counts as lost.",
)
parallel_help = (
    "Split the model over N ranks: pipeline=N, tensor=N, experts=N or context=N, or several such as pipeline=2,experts=2. "
    "See docs/distributed.md."
)
HOSTS = [
    click.option(
        "--hosts",
        "rank_hosts",
        metavar="A,B",
        help="Hosts of the ranks in order, this machine first, such as 10.0.0.1,10.0.0.2; by default all ranks run here.",
    ),
    click.option(
        "--expert-counts",
        "expert_counts",
        cls=Renamed,
        old="--expert-use",
        default="auto",
        show_default=True,
        metavar="auto|off|FILE",
        help="With experts=N: place experts by how often each was chosen; auto uses the counts of earlier runs.",
    ),
    timeout_option,
]
RANKS = [click.option("--parallel", "ranks", metavar="MODE=N", help=parallel_help), *HOSTS]
DEFAULT_SAMPLING = [
    click.option(
        "--temperature",
        "-t",
        type=float,
        help="Sampling temperature; 0 is greedy. This and the next six are by default what the model recommends "
        f"(generation_config.json, GGUF metadata, docs/sampling.md), else temperature {TEMPERATURE}.",
    ),
    click.option("--top-k", type=int, help="Sample from the K most likely tokens; 0 for all."),
    click.option("--top-p", type=float, help="Sample from the most likely tokens that together have probability P; 1 for all."),
    click.option(
        "--min-p",
        type=float,
        help="Sample from tokens with at least P times the probability of the most likely one; 0 for all.",
    ),
    click.option("--repetition-penalty", type=float, help="Divide logits of tokens in the prompt or the output; 1 is off."),
    click.option("--presence-penalty", type=float, help="Subtract from logits of tokens in the output; 0 is off."),
    click.option("--frequency-penalty", type=float, help="Subtract once per occurrence in the output; 0 is off."),
]
SAMPLING = [
    click.option(
        "--max-tokens", "-n", type=int, metavar="N", help="Maximum tokens to generate; by default until the end token."
    ),
    *DEFAULT_SAMPLING,
    click.option("--seed", type=int, help="Seed of the sampler; the same seed gives the same output."),
    click.option("--stop", multiple=True, metavar="TEXT", help="Stop string; may be given several times."),
]


def options(group: list[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    """Give a command all options of a group."""

    def add(command: Command) -> Command:
        for option in reversed(group):
            command = option(command)
        return command

    return add


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
        prefill=chosen["prefill"],
        graphs=chosen["graphs"],
        context=chosen["context"],
        cache_memory=chosen.get("cache_memory"),
        target_itl=chosen.get("target_itl"),
        prefix_disk=chosen.get("prefix_disk"),
        prefix_folder=chosen.get("prefix_folder"),
        expert_memory=expert_settings(chosen),
        gpu_memory=chosen.get("gpu_memory"),
        calibrate=chosen["calibrate"],
        adapters=parse_adapters(chosen.get("adapters", ())),
        mmproj=chosen.get("mmproj"),
        speculate=chosen["speculate"],
        sampling=default_sampling(chosen),
        parallel=parallel,
        report=report,
    )


def load_model(
    model: str | None,
    chosen: dict[str, Any],
    *,
    chat: bool = False,
    sequences: int = 8,
    report: "Report | None" = None,
) -> "LanguageModel":
    """Load a model as the options say and print its notes; `chat` if chat templates are rendered."""
    check_loading(model, chosen)
    if chosen.get("ranks"):
        hush_torch()
    if chat:
        from auraflux.tokenizer.template_process import process

        # it starts while this process imports torch
        process.warm_up()
    with importing():
        settings = _start_compiling(chosen)
        from auraflux.engine.early_compile import stop_compiling
        from auraflux.loading.load import load_with
    try:
        wanted = load_options(chosen, settings, _parallel(model, chosen), report)
        loaded = load_with(model, replace(wanted, max_sequences=sequences))
    finally:
        stop_compiling()
    for note in loaded.notes:
        click.echo(f"note: {note}", err=True)
    return loaded


def _start_compiling(chosen: dict[str, Any]) -> "CacheSettings":
    """Start compiling CPU kernels before the rest is imported, and return the KV cache settings."""
    from auraflux.engine.device import find_device
    from auraflux.engine.early_compile import start_compiling
    from auraflux.ops.simd.compile.cache_folder import is_cache_empty

    settings = cache_settings(chosen)
    if find_device(chosen["device"]).type == "cpu":
        if not sys.stderr.isatty() and is_cache_empty():
            click.echo("note: kernels are compiled for this processor on first use, which takes some seconds.", err=True)
        if not chosen.get("ranks"):
            start_compiling(settings, chosen["exact"])
    return settings


def hush_torch() -> None:
    """Keep torch from logging stack traces when a rank is lost; call it before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _parallel(model: str | None, chosen: dict[str, Any]) -> "Parallel | None":
    """Return the parallelism of the options; a process that torchrun started as another rank serves it and exits."""
    text = chosen.get("ranks")
    if not text:
        return None
    from auraflux.distributed.comm.devices import under_torchrun
    from auraflux.distributed.parallel import parse_parallel

    settings = chosen["rank_hosts"], chosen["rank_timeout"], chosen.get("restart", False), chosen["expert_counts"]
    wanted = parse_parallel(text, *settings)
    if under_torchrun():
        _follow_launched(model, wanted)
    return wanted


def _follow_launched(model: str | None, wanted: "Parallel") -> None:
    from auraflux.distributed.follower import follow

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size != wanted.mesh.size:
        raise SettingsError(f"torchrun started {size} processes, but --parallel needs {wanted.mesh.size}.")
    if wanted.restart or wanted.hosts:
        raise SettingsError("torchrun knows the hosts and restarts ranks (--max-restarts): leave out --hosts and --restart.")
    if rank == 0:
        return
    if model is None:
        raise SettingsError("name the model: ranks do not agree on a default.")
    follow(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), model, rank=rank, timeout_s=wanted.timeout_s)
    # open connections would keep the process alive
    os._exit(0)


def first_adapter(chosen: dict[str, Any]) -> dict[str, str]:
    """Return the adapter that a command without requests uses, as a setting of a generation."""
    names = list(parse_adapters(chosen["adapters"]))
    return {"adapter": names[0]} if names else {}


def sampling(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the given sampling settings; refuse wrong ones before a model is loaded."""
    from auraflux.engine.sampling import Sampling

    found = {field.name: chosen[field.name] for field in fields(Sampling) if chosen.get(field.name) not in (None, ())}
    Sampling(**found)
    return found


def default_sampling(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the given sampling settings that a model has defaults for; commands that do not sample have none."""
    from auraflux.engine.sampling import DEFAULTED

    return {name: chosen[name] for name in DEFAULTED if chosen.get(name) is not None}
