"""`auraflux bench model`: prefill and decode throughput of a whole model."""

import json
import resource
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.bench.model_tables import show
from auraflux.cli.options.command import Command
from auraflux.cli.options.early_checks import check_loading
from auraflux.cli.options.model import LOADING, load_model, model_argument, options
from auraflux.cli.options.settings import cache_settings, expert_settings
from auraflux.cli.output.phases import phases
from auraflux.errors import SettingsError

if TYPE_CHECKING:
    import torch

    from auraflux.bench.model import Ours, Speed
    from auraflux.bench.random_weights import RandomExperts
    from auraflux.bench.routing import RandomRouting
    from auraflux.bench.whole_model import Share
    from auraflux.engine.engine import Engine
    from auraflux.loading.gpu_division import GpuRequest
    from auraflux.loading.language_model import LanguageModel
    from auraflux.weights.experts.pool.gpu_pool import GpuExpertPool

BITS = 4  # of random weights, unless --quantize says otherwise


EVERYDAY = (
    "--at",
    "--batch",
    "--tokens",
    "--repeat",
    "--random",
    "--shape",
    "--layers",
    "--device",
    "--kv",
    "--quantize",
    "--gpu-memory",
    "--expert-memory",
    "--json",
)
EXAMPLES = (
    "auraflux bench model model.gguf --at 1024",
    "auraflux bench model --random --shape llama-8b --layers 4",
)


@click.command("model", cls=Command, everyday=EVERYDAY, examples=EXAMPLES)
@model_argument
@click.option("--shape", metavar="NAME", help="With --random: the shape of a known model, such as qwen3-30b-a3b.")
@click.option("--random", "invented", is_flag=True, help="Fill --shape with random weights; no checkpoint is needed.")
@click.option("--layers", type=click.IntRange(min=1), metavar="N", help="With --random: number of layers instead of all.")
@click.option(
    "--routing",
    metavar="uniform|zipf|FILE",
    help="With --random: how tokens choose experts: evenly, some more often, or as in a recorded trace; by default uniform "
    "with --gpu-memory or --expert-memory.",
)
@click.option(
    "--skew",
    type=click.FloatRange(0, 4),
    default=0.6,
    show_default=True,
    help="With --routing zipf: spread of the routers' rows, as a standard deviation of their logarithm.",
)
@click.option("--at", "lengths", multiple=True, type=int, metavar="N", help="Prompt length; may be given several times.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences at once.")
@click.option("--tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Tokens to decode at each length.")
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Rounds; the best counts.")
@click.option("--profile/--no-profile", default=True, help="With --random: also show the time of a decode step by op.")
@click.option(
    "--peers/--no-peers",
    default=True,
    show_default=True,
    help="Also time llama.cpp on a GGUF file, if the package xllamacpp is installed.",
)
@options(LOADING)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_model(
    model: str | None,
    shape: str | None,
    invented: bool,
    layers: int | None,
    lengths: tuple[int, ...],
    batch: int,
    tokens: int,
    repeat: int,
    profile: bool,
    peers: bool,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Time prefill and decode.

    Prompts are random tokens. Contenders alternate, so that other load on the machine affects all of them.
    """
    if not invented and shape is None:
        if chosen["routing"] is not None:
            raise SettingsError("--routing needs --random: a real model has its own router.")
        check_loading(model, chosen)
    from auraflux.bench.model import Ours, check_lengths, measure
    from auraflux.bench.routing import TracedRouting

    contenders: list[Any]
    whole = None
    with phases() as progress:
        if invented or shape is not None:
            at = list(lengths) or [1024]
            progress(f"making random weights of {shape}")
            routing = _routing(chosen)
            if shape is not None and layers is not None:
                whole = _whole_share(shape, batch, max(at) + 2 * tokens, chosen)
            loaded = random_loaded(model, shape, invented, layers, batch, max(at) + 2 * tokens, chosen, routing)
            trace = routing if isinstance(routing, TracedRouting) else None
            name, contenders = f"{shape}, random weights", [Ours(loaded.scheduler, batch, _pool(loaded), trace)]
        else:
            loaded = load_model(model, chosen, sequences=batch)
            at = list(lengths) or [n for n in (128, 512, 2048) if n + tokens <= loaded.context]
            check_lengths(at, tokens, loaded.context)
            name = loaded.path.name
            contenders = [
                Ours(loaded.scheduler, batch, _pool(loaded)),
                *(_llama_cpp(loaded, max(at) + tokens) if peers and batch == 1 else []),
            ]
        found = list(measure(contenders, at, loaded.engine.model.config.vocab, tokens, repeat, progress))
    document = _document(name, contenders[0], found, profile and invented)
    if whole is not None:
        document["whole_model"] = _whole_model(contenders[0], found, whole, batch)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        show(document, found)


def _pool(loaded: "LanguageModel") -> "GpuExpertPool | None":
    """Return the experts whose cache is measured; None if all are resident, or read from disk."""
    from auraflux.weights.experts.pool.gpu_pool import GpuExpertPool

    return loaded.experts if isinstance(loaded.experts, GpuExpertPool) else None


def random_loaded(
    model: str | None,
    shape: str | None,
    invented: bool,
    layers: int | None,
    batch: int,
    context: int,
    chosen: dict[str, Any],
    routing: "RandomRouting | None" = None,
) -> "LanguageModel":
    """Make the model of --random and --shape."""
    from auraflux.bench.random_weights import Numerics, random_language
    from auraflux.bench.shapes import shape_of
    from auraflux.engine.device import find_device
    from auraflux.weights.experts.settings import parse_nbytes

    if shape is None or not invented or model is not None:
        raise SettingsError("random weights need --random and --shape NAME, and no MODEL.")
    if chosen["speculate"] is not None:
        raise SettingsError("--speculate needs a real model: the tokens of random weights cannot be predicted.")
    memory, device = chosen.get("cache_memory"), find_device(chosen["device"])
    return random_language(
        shape_of(shape, layers),
        cache_settings(chosen),
        device,
        bits=chosen["quantize"] or BITS,
        context=max(context, chosen["context"] or 0),
        sequences=batch,
        cache_nbytes=None if memory is None else parse_nbytes(memory),
        calibrate=chosen["calibrate"],
        numerics=Numerics(chosen["exact"], chosen["invariant"], chosen["prefill"] == "fp8"),
        graphs=chosen["graphs"],
        experts=_random_experts(chosen, device, routing),
    )


def _routing(chosen: dict[str, Any]) -> "RandomRouting | None":
    """Return how the tokens of random weights choose experts; None if the option is not given."""
    from auraflux.bench.routing import SkewedRouting, TracedRouting

    given = chosen.get("routing")
    if given in (None, "uniform", "zipf"):
        return None if given is None else SkewedRouting(0.0 if given == "uniform" else chosen["skew"])
    return TracedRouting.load(Path(given))


def _random_experts(chosen: dict[str, Any], device: "torch.device", routing: "RandomRouting | None") -> "RandomExperts":
    """Return the routing and the memory of random experts."""
    from auraflux.bench.random_weights import RandomExperts
    from auraflux.bench.routing import SkewedRouting

    gpu = _gpu_request(chosen, device)
    if routing is None and gpu is not None:
        # routing of the usual random weights, where attention chooses, repeats experts: a cache would look too good
        routing = SkewedRouting()
    return RandomExperts(routing, gpu, chosen["experts"])


def _gpu_request(chosen: dict[str, Any], device: "torch.device") -> "GpuRequest | None":
    """Return the GPU memory that --gpu-memory and --expert-memory request; refuse options of packed experts."""
    from auraflux.engine.device import free_device_nbytes
    from auraflux.loading.gpu_division import GpuRequest
    from auraflux.weights.experts.settings import ExpertSettings, parse_nbytes

    settings, given = expert_settings(chosen), chosen.get("gpu_memory")
    if replace(settings, memory=None, compute="auto") != ExpertSettings():
        raise SettingsError(
            "random weights are not packed: of the options for experts only --experts and --expert-memory apply to them."
        )
    if given is None and settings.memory is None:
        return None
    if device.type != "cuda":
        raise SettingsError(f"--gpu-memory and --expert-memory of random weights need a GPU, and the model runs on {device}.")
    free = free_device_nbytes(device)
    total = free if given is None else min(free, parse_nbytes(given))
    # the chunk is that of the device
    return GpuRequest(total, True, 1, slots=None if settings.memory is None else parse_nbytes(settings.memory))


def _llama_cpp(loaded: "LanguageModel", context: int) -> list[Any]:
    from auraflux.bench.model import LlamaCpp
    from auraflux.ops.simd.threads import threads

    if loaded.path.suffix != ".gguf":
        return []
    try:
        return [LlamaCpp(loaded.path, context, threads())]
    except ImportError:
        click.echo("note: the package xllamacpp (llama.cpp) is not installed, so there is nothing to compare with.", err=True)
        return []


def _document(name: str, ours: "Ours", found: "list[Speed]", profile: bool) -> dict[str, Any]:
    from auraflux.bench.model import copy_bandwidth
    from auraflux.bench.profile import kernels_per_layer
    from auraflux.bench.report import commit
    from auraflux.engine.engine import nbytes
    from auraflux.machine import load, this_machine

    engine = ours.engine
    document = {
        "machine": asdict(this_machine()),
        "device": _device_name(engine),
        "command": shlex.join(["auraflux", *sys.argv[1:]]),
        "commit": commit(),
        "load": round(load(), 2),
        "model": name,
        "weights_nbytes": nbytes(engine.model),
        "peak_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "invariant": engine.runner.invariant,
        "fp8_prefill": engine.runner.fp8_prefill,
        "not_replayed_because": engine.graphs.refused,
        "results": [asdict(speed) for speed in found],
    }
    if ours.experts is not None:
        document["expert_slots"] = len(ours.experts.pool.memory)
        document["experts"] = ours.experts.pool.slots.numel()
        document["copy_nbytes_per_s"] = copy_bandwidth(engine.device) if engine.device.type == "cuda" else None
    if profile:
        costs = ours.costs()
        document["ops_of_a_step"] = {op: asdict(cost) for op, cost in costs.items()}
        if engine.device.type == "cuda":
            document["kernels_per_layer"] = round(kernels_per_layer(costs, len(engine.cache.layers)), 2)
    return document


def _whole_share(shape: str, batch: int, context: int, chosen: dict[str, Any]) -> "Share | str | None":
    """Divide the GPU for all layers of a mixture; return why that is not possible, and None without a request for it."""
    from auraflux.bench.shapes import shape_of
    from auraflux.bench.whole_model import whole_share
    from auraflux.engine.device import find_device
    from auraflux.models.config import has_experts

    device, config = find_device(chosen["device"]), shape_of(shape)
    if (request := _gpu_request(chosen, device)) is None or not has_experts(config):
        return None
    rest = cache_settings(chosen), device, max(context, chosen["context"] or 0), batch
    try:
        return whole_share(config, chosen["quantize"] or BITS, request, *rest)
    except SettingsError as err:
        return str(err)


def _whole_model(ours: "Ours", found: "list[Speed]", whole: "Share | str", batch: int) -> list[dict[str, Any]] | str:
    """Predict the decode rate of all layers, one for each prompt length; or return why that is not possible."""
    from auraflux.bench.model import copy_bandwidth
    from auraflux.bench.whole_model import Share, predict

    if isinstance(whole, str):
        return whole
    if ours.experts is None:
        return "the layers have no experts, or all of them are on the GPU."
    pool = ours.experts.pool
    measured = Share(pool.slots.shape[0], len(pool.memory) / pool.slots.numel())
    copy_s, made = pool.nbytes[0] / copy_bandwidth(ours.engine.device), []
    for speed in found:
        misses = 0.0 if speed.experts is None else speed.experts.misses_per_token
        made.append(asdict(predict(measured, whole, 1 / speed.decode_rate, misses, copy_s)))
    return made


def _device_name(engine: "Engine") -> str:
    import torch

    return torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "cpu"
