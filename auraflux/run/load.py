"""`load`: from a path or a name to a model that is ready to write."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from auraflux.cache import CacheSettings
from auraflux.cache.prefix_disk import check_folder
from auraflux.defaults import AUTO, CALIBRATE
from auraflux.errors import SettingsError
from auraflux.machine import cache_folder
from auraflux.models.config import has_experts
from auraflux.quant import check_format
from auraflux.run import calibration
from auraflux.run.begin import begin_compiling, end_compiling
from auraflux.run.device import chunk_for, device_memory, find_device
from auraflux.run.draft_model import ModelDraft, check_tokens
from auraflux.run.engine import Engine
from auraflux.run.fit import Sizes, fitted, free_for
from auraflux.run.language import LanguageModel
from auraflux.run.loading import How, Loading
from auraflux.run.mtp_drafts import MTPDrafts
from auraflux.run.ngrams import NGrams
from auraflux.run.progress import Report, on_terminal
from auraflux.run.ranks.lead import Lead
from auraflux.run.ranks.parallel import EXPERTS, TENSOR, Parallel, parse_parallel
from auraflux.run.scheduler import Scheduler
from auraflux.run.source import Source
from auraflux.run.speculate import Speculation
from auraflux.weights.expert_settings import ExpertSettings, parse_nbytes
from auraflux.weights.pull import locate
from auraflux.weights.slices import Slices

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
    how = How(find_device(device), quantize, exact, invariant, graphs, calibrate)
    settings = kv if isinstance(kv, CacheSettings) else CacheSettings(kv)
    expert_settings = expert_memory if isinstance(expert_memory, ExpertSettings) else ExpertSettings(expert_memory)
    ranks = parse_parallel(parallel) if isinstance(parallel, str) else parallel
    _check_counts(context=context, chunk=chunk, sequences=sequences)
    if quantize is not None:
        check_format(quantize, GROUP)
    calibration.check(calibrate)
    sizes = Sizes(context, chunk or chunk_for(how.device, invariant), sequences, cache_memory)
    disk_nbytes = None if prefix_disk is None else parse_nbytes(prefix_disk)
    prefixes = Path(prefix_folder or cache_folder() / "prefixes").absolute()
    if disk_nbytes is not None:
        check_folder(prefixes)
    # who compiles for a model that cannot be loaded is stopped, and ranks that were called are let go
    with on_terminal(report) as tell, ExitStack() as begun:
        begun.callback(end_compiling)
        path = locate(None if path_or_name is None else str(path_or_name), tell)
        smaller = None if speculate in (None, "ngram", "mtp") else locate(str(speculate), tell)
        if how.device.type == "cpu" and ranks is None:
            begin_compiling(settings, exact)
        source = Source.open(path, settings, speculate == "mtp", ranks)
        free = free_for(source.checkpoint, how.device)
        lead = None if ranks is None else begun.enter_context(_lead(ranks, source, how.device, prefix_disk))
        fit = fitted(source, how.device, free, sizes, expert_settings, lead)
        loading = Loading(source, fit, lead, how, source.tokenizer())
        model, vectors = loading.run(tell)
        begun.pop_all()
    engine = loading.engine(model, vectors)
    speculation = None
    if speculate is not None:
        same: dict[str, Any] = {"device": str(how.device), "kv": kv, "exact": exact, "graphs": loading.graphs}
        same |= {"invariant": invariant, "calibrate": calibration.for_another(calibrate)}
        same |= {"context": fit.sizes["context"], "sequences": sequences}
        speculation = _speculation(smaller, loading, engine, {**same, "chunk": chunk, "report": report})
    disk = None if disk_nbytes is None else loading.prefix_disk(engine, disk_nbytes, prefixes)
    queue: dict[str, Any] = {"parallel": sequences, "waiting": waiting, "disk": disk, "watch": source.watch}
    scheduler = Scheduler(engine, loading.tokenizer, source.ends(loading.tokenizer), **queue, speculation=speculation)
    return LanguageModel(scheduler, source.path, loading.notes(), fit.experts, model_type=source.kind)


def _check_counts(**given: int | None) -> None:
    """Refuse what is no number of tokens or of texts."""
    for name, count in given.items():
        if count is not None and (type(count) is not int or not 1 <= count <= MOST[name]):
            raise SettingsError(f"{name}={count!r:.80} must be a whole number from 1 to {MOST[name]:,}.")


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


def _speculation(smaller: Path | None, loading: Loading, engine: Engine, same: dict[str, Any]) -> Speculation:
    """What guesses at texts: a smaller model, loaded as `same` says, the model's own further layer, or the text so far."""
    if smaller is not None:
        small, vocab = load(smaller, **same), engine.model.config.vocab
        check_tokens(loading.tokenizer, small.tokenizer, (vocab, small.engine.model.config.vocab), str(smaller))
        return Speculation(lambda: ModelDraft(small.engine, vocab), engine.chunk)
    if not loading.source.further:
        return Speculation(NGrams, engine.chunk)
    with device_memory():
        drafts = MTPDrafts.beside(engine, loading.source.further[0])
    return Speculation(drafts.begin, engine.chunk, drafts.propose, drafts.hear)
