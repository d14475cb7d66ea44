"""`load`: from a path or a name to a model that is ready to generate."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from auraflux.adapters.peft_folder import read_adapter
from auraflux.cache import CacheSettings
from auraflux.cache.layer_shapes import is_bidirectional
from auraflux.cache.prefix.disk import check_folder
from auraflux.defaults import AUTO, CALIBRATE
from auraflux.distributed.leader import Leader
from auraflux.distributed.parallel import EXPERTS, TENSOR, Parallel
from auraflux.durations import parse_latency
from auraflux.engine.device import check_fp8, chunk_for, device_memory, find_device, free_device_nbytes
from auraflux.engine.early_compile import start_compiling, stop_compiling
from auraflux.engine.engine import Engine
from auraflux.errors import SettingsError
from auraflux.loading.default_sampling import default_sampling
from auraflux.loading.gpu_plan import plan_gpu_memory
from auraflux.loading.language_model import LanguageModel
from auraflux.loading.memory_budget import RequestedSizes, free_model_memory, plan_memory
from auraflux.loading.model_loader import ModelLoader
from auraflux.loading.model_source import ModelSource
from auraflux.loading.options import LoadOptions
from auraflux.machine import cache_folder
from auraflux.models.config import has_experts
from auraflux.progress import Report, on_terminal
from auraflux.renamed import renamed_arguments
from auraflux.scheduler.scheduler import Scheduler
from auraflux.speculative.draft_model import DraftModelProposer, check_vocabulary
from auraflux.speculative.mtp import MTPDrafter
from auraflux.speculative.ngram import NGramProposer
from auraflux.speculative.speculation import Speculation
from auraflux.vision.families import NoVision, Vision
from auraflux.weights.dense_modules import load_dense_modules
from auraflux.weights.download.pull import locate
from auraflux.weights.experts.row_table import loaded_nbytes
from auraflux.weights.experts.settings import ExpertSettings, parse_nbytes
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.parallel.tensor_slices import Slices

USABLE_SHARE = 0.97  # of free GPU memory: the rest is lost between blocks of the allocator
DRAFT_CACHE_NBYTES = 1 << 29  # KV cache and activations of a draft model, about


@renamed_arguments({"sequences": "max_sequences", "waiting": "max_queue"})
def load(
    path_or_name: str | Path | None = None,
    device: str = "auto",
    kv: str | CacheSettings = AUTO,
    quantize: int | None = None,
    exact: bool = False,
    context: int | None = None,
    *,
    invariant: bool = False,
    prefill: str = "auto",
    graphs: bool = True,
    calibrate: str | Path = CALIBRATE,
    expert_memory: str | int | ExpertSettings | None = None,
    gpu_memory: str | int | None = None,
    chunk: int | None = None,
    max_sequences: int = 8,
    cache_memory: str | int | None = None,
    max_queue: int | None = None,
    target_itl: str | float | None = None,
    prefix_disk: str | int | None = None,
    prefix_folder: str | Path | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    mmproj: str | Path | None = None,
    speculate: str | Path | None = None,
    sampling: Mapping[str, Any] | None = None,
    parallel: str | Parallel | None = None,
    report: Report | None = None,
) -> LanguageModel:
    """Load a model: a folder, a GGUF file, or a name that is downloaded on first use; None for the built-in model.

    device         "auto" uses a GPU where there is one
    kv             KV cache quantization: "none", "k4v4", "k8v4" or another pair of bits, or `CacheSettings`; "auto" is k4v4, or
                   the setting that the model's family needs
    quantize       bits to which dense weights are quantized while loading
    exact          use float32 activations; otherwise CPU kernels quantize activations to int8 per group
    context        maximum tokens of a sequence; by default the model's own limit, or what a quarter of the free memory holds
    invariant      make CUDA kernels batch-invariant, see docs/numerics.md; CPU kernels always are
    prefill        "fp8" rounds activations and weights of linear layers to FP8 in prefill chunks of 512 tokens and more, on
                   GPUs of compute capability 8.9 and newer: faster, and less accurate, see docs/numerics.md
    graphs         replay decode steps and prefill chunks; as CUDA graphs on a GPU
    calibrate      per-channel mean and scale that are removed from keys before quantization: "auto" measures them when a model
                   is first loaded and saves them; "off" uses none; or a file of saved ones
    expert_memory  memory for experts on the device, such as "4GB", or `ExpertSettings`; the others stay in host memory on a
                   GPU, or on disk, where a packed model has them
    gpu_memory     GPU memory for weights, KV cache, workspace and experts, such as "8GB", by default what is free; the CUDA
                   context is not part of it. Experts that do not fit stay in host memory
    chunk          prefill chunk in tokens; by default 512, or up to 4096 with experts on disk; on a GPU 8192, or 4096 with
                   experts in host memory and at most 16 GB
    max_sequences  sequences that decode in one batch; more wait in the queue
    cache_memory   memory for the KV cache, prefix cache included: "8GB", or "half" of the free memory; by default enough for
                   two sequences of full context
    max_queue      requests that may wait; None for no limit
    target_itl     inter-token latency, such as "50ms" or seconds, that prefill of new prompts should keep for sequences that
                   decode; by default prefill is spread over steps, without a target
    prefix_disk    disk space for prefix cache entries that memory has no room for, such as "20GB", below `prefix_folder`; by
                   default none
    adapters       folders of LoRA adapters (PEFT) by the names that requests give, see docs/adapters.md
    mmproj         file with the vision tower of a GGUF model; by default one beside the model, see docs/images.md
    speculate      speculative decoding: "ngram" drafts from the sequence so far, "mtp" with the model's MTP head, or a smaller
                   model with the same vocabulary drafts; the output does not change, see docs/speculation.md
    sampling       sampling settings of requests that leave them out, such as {"temperature": 0}; by default those that
                   the model recommends, see docs/sampling.md
    parallel       "pipeline=2", "tensor=2", "experts=2" or "context=2": run on several processes of this machine, each on its
                   own GPU where `device` is a GPU; or `Parallel`, which may name other machines. See docs/distributed.md
    report         called with a step's name, bytes done and bytes in total; by default a progress bar on a terminal
    """
    return load_with(
        path_or_name,
        LoadOptions(
            device=device,
            kv=kv,
            quantize=quantize,
            exact=exact,
            invariant=invariant,
            prefill=prefill,
            graphs=graphs,
            context=context,
            chunk=chunk,
            max_sequences=max_sequences,
            max_queue=max_queue,
            target_itl=target_itl,
            cache_memory=cache_memory,
            prefix_disk=prefix_disk,
            prefix_folder=prefix_folder,
            expert_memory=expert_memory,
            gpu_memory=gpu_memory,
            calibrate=calibrate,
            adapters=adapters or {},
            mmproj=mmproj,
            speculate=speculate,
            sampling=sampling or {},
            parallel=parallel,
            report=report,
        ),
    )


def load_with(path_or_name: str | Path | None, options: LoadOptions) -> LanguageModel:
    """Load a model with options, as `load` does."""
    device, settings, experts = find_device(options.device), options.cache_settings, options.expert_settings
    settings, ranks = settings.for_device(device.type), options.ranks
    options.check()
    if options.fp8_prefill:
        check_fp8(device)
    default_chunk = chunk_for(device, options.invariant)
    sizes = RequestedSizes(options.context, options.chunk, options.max_sequences, options.cache_memory, default_chunk)
    gpu_memory = _gpu_memory(options, device)
    disk = _disk(options)
    # if loading fails, stop compiling kernels and release the other ranks
    with on_terminal(options.report) as report, ExitStack() as cleanup:
        cleanup.callback(stop_compiling)
        path = locate(None if path_or_name is None else str(path_or_name), report)
        draft_path = None if options.speculate in (None, "ngram", "mtp") else locate(str(options.speculate), report)
        adapters = [read_adapter(name, Path(folder)) for name, folder in options.adapters.items()]
        if device.type == "cpu" and ranks is None:
            start_compiling(settings, options.exact)
        source = ModelSource.open(path, settings, options.speculate == "mtp", ranks)
        if device.type == "cuda" and ranks is None:
            leader, total = None, free_device_nbytes(device) - sum(adapter.nbytes for adapter in adapters)
            budget = plan_gpu_memory(
                source,
                device,
                int(USABLE_SHARE * total) if gpu_memory is None else min(gpu_memory, total),
                sizes,
                experts,
                bits=options.quantize,
                capped=gpu_memory is not None,
                other_models=0 if draft_path is None else _draft_nbytes(draft_path),
            )
        else:
            free = free_model_memory(source.checkpoint, device)
            leader = None if ranks is None else cleanup.enter_context(_start_leader(ranks, source, device, options.prefix_disk))
            budget = plan_memory(source, device, free, sizes, experts, leader)
        loader = ModelLoader(source, budget, leader, options, device, source.take_tokenizer())
        model, key_calibration = loader.run(report)
        cleanup.pop_all()
    engine = loader.engine(model, key_calibration, adapters)
    vision = loader.vision(engine.chunk)
    if isinstance(vision, Vision):
        engine.vision = vision
    engine.dense_modules = load_dense_modules(source.checkpoint, source.embedding, source.config.hidden, device)
    speculation = None if options.speculate is None else _speculation(draft_path, loader, engine)
    scheduler = Scheduler(
        engine,
        loader.tokenizer,
        source.ends(loader.tokenizer),
        max_sequences=options.max_sequences,
        max_queue=options.max_queue,
        disk=None if disk is None else loader.prefix_disk(engine, *disk),
        watch=source.watch,
        speculation=speculation,
        target_itl_s=None if options.target_itl is None else parse_latency(options.target_itl),
    )
    return LanguageModel(
        scheduler,
        source.path,
        loader.notes(),
        budget.pool or budget.experts,
        model_type=source.kind,
        default_sampling=default_sampling(source.checkpoint, options.sampling),
        no_images=vision.reason if isinstance(vision, NoVision) else "",
        embedding=source.embedding,
    )


def _gpu_memory(options: LoadOptions, device: torch.device) -> int | None:
    """Return the GPU memory that was requested, in bytes; None for all that is free."""
    if options.gpu_memory is None:
        return None
    if device.type != "cuda":
        raise SettingsError(f"--gpu-memory {options.gpu_memory} divides the memory of a GPU, and the model runs on {device}.")
    if options.ranks is not None:
        raise SettingsError("--gpu-memory is not supported for a model that runs on several ranks.")
    return parse_nbytes(options.gpu_memory)


def _draft_nbytes(path: Path) -> int:
    """Estimate the GPU memory of a draft model with its KV cache."""
    return loaded_nbytes(open_checkpoint(path).sizes()) * 5 // 4 + DRAFT_CACHE_NBYTES


def _disk(options: LoadOptions) -> tuple[int, Path] | None:
    """Return the size and the folder of the prefix cache on disk; None for none."""
    folder = Path(options.prefix_folder or cache_folder() / "prefixes").absolute()
    if options.prefix_disk is None:
        return None
    nbytes = parse_nbytes(options.prefix_disk)
    check_folder(folder)
    return nbytes, folder


def _start_leader(ranks: Parallel, source: ModelSource, device: torch.device, disk: str | int | None) -> Leader:
    """Form the group of ranks; refuse a layout that the model does not support."""
    mesh = ranks.mesh
    model, path = source.module.Model, source.path
    if is_bidirectional(source.shapes):
        raise SettingsError(f"{path} has bidirectional attention, which runs in one process. Leave out --parallel.")
    if TENSOR in mesh.modes:
        if (reason := model.no_tensor_parallel(source.config)) is not None:
            raise SettingsError(f"{path} does not support tensor parallelism: {reason} Give --parallel pipeline={ranks.size}.")
        for shape in source.shapes:
            shape.sliced(Slices(0, ranks.size, lambda mine: mine).heads)
    if not mesh.single_stage and (reason := model.no_pipeline_parallel(source.config)) is not None:
        raise SettingsError(f"{path} does not support pipeline parallelism: {reason}")
    if EXPERTS in mesh.modes and not has_experts(source.checkpoint.config):
        raise SettingsError(f"{path} has no experts to distribute. Give --parallel pipeline={mesh.size}.")
    if disk is not None:
        raise SettingsError("--prefix-disk is not supported for a model that runs on several ranks.")
    return Leader(ranks, source.checkpoint, device)


def _speculation(draft_path: Path | None, loader: ModelLoader, engine: Engine) -> Speculation:
    """Return the proposer of draft tokens: a draft model, the model's MTP head, or n-grams of the sequence so far."""
    if draft_path is not None:
        options = loader.options.for_draft(str(loader.device), loader.budget.sizes.context, loader.graphs)
        draft, vocab = load_with(draft_path, options), engine.model.config.vocab
        check_vocabulary(loader.tokenizer, draft.tokenizer, (vocab, draft.engine.model.config.vocab), str(draft_path))
        return Speculation(lambda: DraftModelProposer(draft.engine, vocab), engine.chunk)
    if not loader.source.mtp_shapes:
        return Speculation(NGramProposer, engine.chunk)
    with device_memory():
        drafter = MTPDrafter.for_engine(engine, loader.source.mtp_shapes[0])
    return Speculation(drafter.begin, engine.chunk, drafter.propose, drafter.observe_hidden)
