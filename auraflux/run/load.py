"""`load`: from a path or a name to a model that is ready to write."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from auraflux.cache import CacheSettings
from auraflux.cache.calibration import ModelVectors
from auraflux.cache.prefix_disk import PrefixDisk
from auraflux.defaults import AUTO, CALIBRATE
from auraflux.errors import SettingsError
from auraflux.machine import cache_folder
from auraflux.models.config import has_experts
from auraflux.quant import check_format
from auraflux.run import calibration
from auraflux.run.begin import begin_compiling
from auraflux.run.device import chunk_for, device_memory, fetch_kernels, find_device
from auraflux.run.draft_model import ModelDraft, check_tokens
from auraflux.run.engine import Engine
from auraflux.run.fit import Fit, Sizes, fitted, free_for
from auraflux.run.language import LanguageModel
from auraflux.run.mtp_drafts import MTPDrafts
from auraflux.run.ngrams import NGrams
from auraflux.run.progress import Report, on_terminal
from auraflux.run.ranks.lead import Lead
from auraflux.run.ranks.parallel import EXPERTS, TENSOR, Parallel, parse_parallel
from auraflux.run.ranks.share import Share
from auraflux.run.scheduler import Scheduler
from auraflux.run.source import Source
from auraflux.run.speculate import Speculation
from auraflux.run.tokenizer import Tokenizer
from auraflux.weights.expert_settings import ExpertSettings, parse_nbytes
from auraflux.weights.expert_store import ExpertStore
from auraflux.weights.fingerprint import fingerprint
from auraflux.weights.loader import Weights
from auraflux.weights.pull import locate
from auraflux.weights.row_table import loaded_nbytes
from auraflux.weights.slices import Slices
from auraflux.weights.stored import Checkpoint

GROUP = 64  # of weights that are rounded on the way
MOST = {"context": 1 << 40, "chunk": 1 << 20, "sequences": 1 << 16}


def load(
    path_or_name: str | Path | None = None,
    device: str = "auto",
    kv: str | CacheSettings = AUTO,
    quantize: int | None = None,
    exact: bool = False,
    context: int | None = None,
    *,
    invariant: bool = False,
    graphs: bool = True,
    calibrate: str | Path = CALIBRATE,
    expert_memory: str | int | ExpertSettings | None = None,
    chunk: int | None = None,
    sequences: int = 8,
    cache_memory: str | int | None = None,
    waiting: int | None = None,
    prefix_disk: str | int | None = None,
    prefix_folder: str | Path | None = None,
    speculate: str | Path | None = None,
    parallel: str | Parallel | None = None,
    report: Report | None = None,
) -> LanguageModel:
    """Load a model: a folder, a GGUF file, or a name that is fetched on first use; None for the built-in default.

    device    "auto" takes a GPU where there is one
    kv        how keys and values are kept: "none", "k4v4", "k8v4" or another pair of bits; or settings in full; "auto" takes
              k4v4, or what a family of models needs that bears less
    quantize  bits to which dense weights are rounded on the way
    exact     multiply float32 activations; otherwise CPU kernels round them to int8 per group
    invariant have a GPU give a token the same bits however many others are read or written with it, see docs/numerics.md; on a
              CPU it is always so
    context   most tokens of a text; by default the model's own, or what a quarter of the free memory holds
    graphs    replay steps of decoding: on a GPU as CUDA graphs, and pieces of long prompts too
    calibrate what codes leave out of keys: "auto" runs some tokens when a model is first loaded, and keeps what that tells
              of its keys; "off" codes them as they are; or a file that was kept
    expert_memory  "4GB": that the experts of a packed model may take, or settings in full; others are read as they are chosen
    chunk     tokens of prompts that go through the model together; by default 512, on a GPU 8192
    sequences     texts that are written at once; more wait
    cache_memory  "8GB", or "half" of what is free: for keys and values of all texts and of those kept; by default what two
                  texts of full context need
    waiting       most texts that wait; None for any number
    prefix_disk   "20GB": for texts on disk that memory has no room for, below `prefix_folder`; by default none
    speculate     what guesses at the next tokens, which are then checked together: "ngram" for the text so far, "mtp" for
                  the model's own further layer, or a smaller model with the same tokens; the text is the same without, see
                  docs/speculation.md
    parallel      "pipeline=2": that many processes of this machine have a part of the layers each, with "tensor=2" a part of
                  each, on a GPU of its own where `device` is one; or settings in full,
                  which may name other machines. See docs/distributed.md
    report    called with what is done, and how many bytes of how many; by default a bar on a terminal
    """
    ranks = parse_parallel(parallel) if isinstance(parallel, str) else parallel
    settings = kv if isinstance(kv, CacheSettings) else CacheSettings(kv)
    expert_settings = expert_memory if isinstance(expert_memory, ExpertSettings) else ExpertSettings(expert_memory)
    target = find_device(device)
    if quantize is not None:
        check_format(quantize, GROUP)
    _check_counts(context=context, chunk=chunk, sequences=sequences)
    sizes = Sizes(context, chunk or chunk_for(target, invariant), sequences, cache_memory)
    # ranks that were called are let go if anything fails
    with on_terminal(report) as tell, ExitStack() as callers:
        path = locate(None if path_or_name is None else str(path_or_name), tell)
        if target.type == "cpu" and ranks is None:
            begin_compiling(settings, exact)
        source = Source.open(path, settings, speculate == "mtp", ranks)
        free = free_for(source.checkpoint, target)
        lead = None if ranks is None else callers.enter_context(_lead(ranks, source, target, prefix_disk))
        fit = fitted(source, target, free, sizes, expert_settings, lead)
        wanted = calibration.is_wanted(calibrate, source.shapes, source.settings)
        # what is read depends on the tokens, so their steps cannot be repeated blindly
        graphs = graphs and (fit.experts is None or fit.experts.share.mapped)
        if lead is not None:
            terms = {"quantize": quantize, "exact": exact, "invariant": invariant, "graphs": graphs}
            lead.agree(source.settings, fit.settings, **terms, sizes=fit.sizes, calibrate=wanted)
        tokenizer = source.tokenizer()
        fetch_kernels(target)
        with device_memory():
            files = source.module, source.config, source.checkpoint
            form: dict[str, Any] = {"layers": fit.held, "share": None if lead is None else lead.own()}
            form["mtp"] = bool(source.further)
            model = make_model(*files, quantize, fit.dtype, target, fit.experts, tell, **form)
            # steps of a part of a model, or that read experts from disk, say nothing before they are taken
            compiles = target.type == "cpu" and lead is None and fit.experts is None
            find = partial(_vectors, calibrate, source, model, fit, tokenizer, target, lead) if wanted else None
            vectors = None
            if compiles:
                vectors = _compile(model, source, fit, exact, find, tell)
            elif find is not None:
                vectors = find(tell)
        source.watch.check()
        if lead is not None:
            lead.ready(vectors)
            vectors = lead.own().vectors(vectors)
        callers.pop_all()

    how: dict[str, Any] = {"exact": exact, "invariant": invariant, "graphs": graphs, "vectors": vectors, "ranks": lead}
    with device_memory():
        how["hidden"] = bool(source.further)
        engine = Engine(model, fit.shapes, source.settings, **fit.options, **how, device=target)
        if engine.alike:
            engine.try_token()
        drafts = MTPDrafts.beside(engine, source.further[0]) if source.further else None
    disk = None
    if prefix_disk is not None:
        name = fingerprint(source.path, quantize, exact, engine.cache.format, *["invariant"] * engine.alike)
        disk = PrefixDisk(Path(prefix_folder or cache_folder() / "prefixes") / name, parse_nbytes(prefix_disk), name)
    speculation = None
    if speculate is not None:
        same: dict[str, Any] = {"device": str(target), "kv": kv, "exact": exact, "graphs": graphs, "calibrate": calibrate}
        same |= {"invariant": invariant, "context": fit.sizes["context"], "sequences": sequences, "chunk": chunk}
        same["report"] = report
        speculation = _speculation(speculate, engine, drafts, tokenizer, same)
    queue: dict[str, Any] = {"parallel": sequences, "waiting": waiting, "disk": disk, "watch": source.watch}
    scheduler = Scheduler(engine, tokenizer, source.ends(tokenizer), **queue, speculation=speculation)
    return LanguageModel(scheduler, source.path, _notes(source, fit, lead), fit.experts, model_type=source.kind)


def _notes(source: Source, fit: Fit, lead: Lead | None) -> list[str]:
    """What a user should know of a model that is loaded."""
    notes = [*source.checkpoint.notes, *(fit.experts.notes if fit.experts is not None else ())]
    notes += lead.notes if lead is not None else ()
    if fit.sizes["context"] > source.config.context:
        notes.append(f"the model was made for texts of {source.config.context:,} tokens, and may write nonsense beyond.")
    return notes


def _check_counts(**given: int | None) -> None:
    """Refuse what is no number of tokens or of texts."""
    for name, count in given.items():
        if count is not None and (type(count) is not int or not 1 <= count <= MOST[name]):
            raise SettingsError(f"{name}={count!r:.80} must be a whole number from 1 to {MOST[name]:,}.")


def _compile(
    model: Any, source: Source, fit: Fit, exact: bool, find: Callable[[Report], ModelVectors | None] | None, report: Report
) -> ModelVectors | None:
    """Compile the kernels that a CPU will need, and find what is known of keys meanwhile."""
    from auraflux.run.prepare import compile_kernels

    how: dict[str, Any] = {"exact": exact, "calibrate": find, "dtype": fit.dtype}
    return compile_kernels(model, source.shapes, source.settings, **how, report=report)


def _vectors(
    calibrate: str | Path,
    source: Source,
    model: Any,
    fit: Fit,
    tokenizer: Tokenizer | None,
    device: torch.device,
    lead: Lead | None,
    report: Report,
) -> ModelVectors | None:
    """What is known of a model's keys: kept from before, or found now."""
    nbytes = loaded_nbytes(source.checkpoint.sizes())
    count = calibration.enough_tokens(nbytes, device, fit.experts is not None and not fit.experts.share.mapped)
    run = model if lead is None else lead.passing(model)
    about: dict[str, Any] = {"dtype": fit.dtype, "device": device, "nbytes": nbytes, "report": report, "others": lead}
    return calibration.vectors_for(calibrate, run, source.shapes, source.path, tokenizer, count, **about)


def _speculation(
    what: str | Path, engine: Engine, drafts: MTPDrafts | None, tokenizer: Tokenizer | None, same: dict[str, Any]
) -> Speculation:
    """What guesses at texts; `same` is how a second model is loaded."""
    if what == "ngram":
        return Speculation(NGrams, engine.chunk)
    if drafts is not None:
        return Speculation(drafts.begin, engine.chunk, drafts.propose, drafts.hear)
    small, vocab = load(what, **same), engine.model.config.vocab
    check_tokens(tokenizer, small.tokenizer, (vocab, small.engine.model.config.vocab), str(what))
    return Speculation(lambda: ModelDraft(small.engine, vocab), engine.chunk)


def _lead(ranks: Parallel, source: Source, device: torch.device, disk: str | int | None) -> Lead:
    """Call the other ranks; what they cannot do is refused."""
    mesh = ranks.mesh
    model, path = source.module.Model, source.path
    if TENSOR in mesh.modes:
        if (reason := model.unsliced(source.config)) is not None:
            raise SettingsError(f"{path} cannot be divided by heads: {reason} Give --parallel pipeline={ranks.size}.")
        for shape in source.shapes:
            shape.sliced(Slices(0, ranks.size, lambda mine: mine).heads)
    if not mesh.whole and model.whole:
        raise SettingsError(f"{path} cannot be divided by layers: {model.whole}")
    if EXPERTS in mesh.modes and not has_experts(source.checkpoint.config):
        raise SettingsError(f"{path} has no experts to divide. Give --parallel pipeline={mesh.size}.")
    if disk is not None:
        raise SettingsError("prefixes of a model that is divided among ranks cannot be kept on disk: leave --prefix-disk out.")
    return Lead(ranks, source.checkpoint, device)


def make_model(
    module: Any,
    config: Any,
    checkpoint: Checkpoint,
    bits: int | None,
    dtype: torch.dtype,
    device: torch.device,
    experts: ExpertStore | None,
    report: Report,
    layers: range | None = None,
    share: Share | None = None,
    mtp: bool = False,
) -> Any:
    """Load a model, or some of its layers, or a share of each; `mtp` with the layer that predicts further tokens."""
    total, done = sum(checkpoint.sizes().values()), 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        report("loading", done, total)

    form: dict[str, Any] = {"bits": bits, "dtype": dtype, "device": device, "span": layers, "mtp": mtp}
    if share is not None:
        form |= {"division": share.division, "slices": share.slices}
    weights = Weights(checkpoint, module.rename, **form, experts=experts, advance=advance)
    model = module.Model(config, weights)
    weights.done()
    return model
