"""`load`: from a path or a name to a model that is ready to write."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from auraflux.cache import Cache, CacheSettings
from auraflux.cache.deal import ALONE, Deal
from auraflux.cache.prefix_disk import PrefixDisk
from auraflux.defaults import AUTO, CALIBRATE
from auraflux.errors import SettingsError
from auraflux.machine import cache_folder, free_nbytes, this_machine
from auraflux.models import family, family_name
from auraflux.models.config import experts_per_token, has_experts
from auraflux.quant import check_format
from auraflux.run import calibration
from auraflux.run.device import activation_dtype, chunk_for, device_memory, fetch_kernels, find_device, free_device_nbytes
from auraflux.run.draft_model import ModelDraft, check_tokens
from auraflux.run.engine import Engine
from auraflux.run.language import LanguageModel
from auraflux.run.mtp_drafts import MTPDrafts
from auraflux.run.ngrams import NGrams
from auraflux.run.prepare import compile_kernels
from auraflux.run.progress import Report, on_terminal
from auraflux.run.ranks.lead import Lead
from auraflux.run.ranks.parallel import EXPERTS, PIPELINE, TENSOR, Parallel, parse_parallel
from auraflux.run.ranks.share import Share
from auraflux.run.ranks.split import sizes_of
from auraflux.run.scheduler import Scheduler
from auraflux.run.speculate import Speculation
from auraflux.run.tokenizer import Tokenizer
from auraflux.weights.checkpoint import open_checkpoint
from auraflux.weights.expert_settings import ExpertSettings, parse_nbytes, share_out
from auraflux.weights.expert_store import ExpertStore
from auraflux.weights.fingerprint import fingerprint
from auraflux.weights.loader import Weights
from auraflux.weights.pull import locate
from auraflux.weights.row_table import loaded_nbytes
from auraflux.weights.slices import Slices
from auraflux.weights.stored import Checkpoint
from auraflux.weights.watch import Watch

GROUP = 64  # of weights that are rounded on the way
SHARE = 4  # unless a context is given, a sequence that fills it takes at most this part of the free memory


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
    for name, size, most in (("context", context, 1 << 40), ("chunk", chunk, 1 << 20), ("sequences", sequences, 1 << 16)):
        if size is not None and (type(size) is not int or not 1 <= size <= most):
            raise SettingsError(f"{name}={size!r:.80} must be a whole number from 1 to {most:,}.")
    # ranks that were called are let go if anything fails
    with on_terminal(report) as tell, ExitStack() as callers:
        checkpoint = open_checkpoint(locate(None if path_or_name is None else str(path_or_name), tell))
        watch = Watch(checkpoint.files())
        module = family(checkpoint.config)
        settings = settings.for_family(family_name(checkpoint.config))
        config = module.Config.from_hf(checkpoint.config)
        shapes = module.make_caches(config)
        further = _further_shapes(checkpoint, module, config, shapes, ranks) if speculate == "mtp" else []
        dtype = activation_dtype(target)
        free = free_nbytes() if target.type == "cpu" else free_device_nbytes(target) - loaded_nbytes(checkpoint.sizes())
        lead = None if ranks is None else callers.enter_context(_lead(ranks, checkpoint, config, target, free, prefix_disk))
        rooms: list[tuple[range | None, int, list[Any]]] = [(None, free, [*shapes, *further])]
        if lead is not None:
            rooms = [*lead.share(sizes_of(checkpoint, module.rename, config.layers), shapes)]
        deal, here = (ALONE, shapes) if lead is None else (lead.deal, rooms[0][2])
        left_out = () if further or (place := module.Model.mtp_place(config)) is None else place.beyond
        experts = keep_experts(checkpoint, expert_settings, target, free, rooms[0][0], left_out)
        if experts is not None:
            rooms = [(held, max(each - experts.share.nbytes, each // 2), kept) for held, each, kept in rooms]
        asked = context, config.context
        longest = min(_context(*asked, kept, settings, dtype, each, held, deal) for held, each, kept in rooms)
        options: dict[str, Any] = {"context": longest, "chunk": chunk or chunk_for(target, invariant), "dtype": dtype}
        # one place more is for scores of whole texts
        options |= {"sequences": sequences + 1, "kept": sequences}
        limits = [(kept, settings, _cache_nbytes(cache_memory, each), held, deal) for held, each, kept in rooms]
        tokens = min(pool_tokens(*limit, **options) for limit in limits)
        wanted = calibration.is_wanted(calibrate, shapes, settings)
        # what is read depends on the tokens, so their steps cannot be repeated blindly
        graphs = graphs and (experts is None or experts.share.mapped) and (lead is None or not lead.whole)
        if lead is not None:
            sizes = {name: value for name, value in options.items() if name != "dtype"} | {"tokens": tokens}
            terms = {"quantize": quantize, "exact": exact, "graphs": graphs, "device": target.type}
            lead.agree(settings, expert_settings, **terms, sizes=sizes, calibrate=wanted)
        tokenizer = _tokenizer(checkpoint)
        fetch_kernels(target)
        with device_memory():
            part = rooms[0][0], None if lead is None else lead.own()
            model = make_model(module, config, checkpoint, quantize, dtype, target, experts, tell, *part, mtp=bool(further))
            # steps of a part of a model, or that read experts from disk, say nothing before they are taken
            if target.type == "cpu" and lead is None and experts is None:
                compile_kernels(model, shapes, settings, exact=exact, calibrate=wanted, dtype=dtype, report=tell)
            vectors = None
            if wanted:
                nbytes = loaded_nbytes(checkpoint.sizes())
                count = calibration.enough_tokens(nbytes, target, experts is not None and not experts.share.mapped)
                about: dict[str, Any] = {"dtype": dtype, "device": target, "nbytes": nbytes, "report": tell}
                run = model if lead is None else lead.passing(model)
                where = checkpoint.path, tokenizer, count
                vectors = calibration.vectors_for(calibrate, run, shapes, *where, **about, others=lead)
        watch.check()
        if lead is not None:
            lead.ready(vectors)
            vectors = lead.own().vectors(vectors)
        callers.pop_all()

    how: dict[str, Any] = {
        "exact": exact,
        "invariant": invariant,
        "graphs": graphs,
        "vectors": vectors,
        "ranks": lead,
        "hidden": bool(further),
    }
    with device_memory():
        engine = Engine(model, here, settings, **options, tokens=tokens, **how, device=target)
        if engine.alike:
            engine.try_token()
        drafts = MTPDrafts.beside(engine, further[0]) if further else None
    notes = checkpoint.notes if experts is None else [*checkpoint.notes, *experts.notes]
    ends = _ends(checkpoint, tokenizer)
    kind = str(checkpoint.config.get("model_type", ""))
    disk = None
    if prefix_disk is not None:
        name = fingerprint(checkpoint.path, quantize, exact, engine.cache.format, *["invariant"] * engine.alike)
        folder = Path(prefix_folder) if prefix_folder is not None else cache_folder() / "prefixes"
        disk = PrefixDisk(folder / name, parse_nbytes(prefix_disk), name)
    speculation = None
    if speculate is not None:
        same: dict[str, Any] = {"device": str(target), "kv": kv, "exact": exact, "graphs": graphs, "calibrate": calibrate}
        same |= {"invariant": invariant}
        same |= {"context": longest, "sequences": sequences, "chunk": chunk, "report": report}
        speculation = _speculation(speculate, engine, drafts, tokenizer, same)
    how = {"parallel": sequences, "waiting": waiting, "disk": disk, "watch": watch, "speculation": speculation}
    scheduler = Scheduler(engine, tokenizer, ends, **how)
    return LanguageModel(scheduler, checkpoint.path, notes, experts, model_type=kind)


def _further_shapes(checkpoint: Checkpoint, module: Any, config: Any, shapes: list[Any], ranks: Parallel | None) -> list[Any]:
    """The shape of what a model's own layer keeps that predicts further tokens; refused where there is none."""
    place = module.Model.mtp_place(config)
    if place is None or not place.is_in(checkpoint, module.rename):
        raise SettingsError(
            f"{checkpoint.path} has no layer that predicts further tokens (MTP), or none that is known here. "
            "Give --speculate ngram or a smaller model."
        )
    if ranks is not None:
        raise SettingsError("a model that is divided among ranks cannot guess with its own layer: leave --speculate mtp out.")
    return [shapes[place.like]]


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


def _lead(
    ranks: Parallel, checkpoint: Checkpoint, config: Any, device: torch.device, free: int, disk: str | int | None
) -> Lead:
    """Call the other ranks; what they cannot do is refused."""
    if device.type != "cpu" and ranks.mode != TENSOR:
        raise SettingsError(
            f"a model is divided so among ranks on CPUs only, and this one is to run on {device}. Give --device cpu, or "
            f"--parallel {TENSOR}={ranks.size}."
        )
    if device.type != "cpu" and (ranks.hosts or torch.cuda.device_count() < ranks.size):
        raise SettingsError(
            f"{TENSOR}={ranks.size} wants as many GPUs of this machine, and there are {torch.cuda.device_count()}; "
            "other hosts cannot be named. Give --device cpu, or fewer ranks."
        )
    module = family(checkpoint.config)
    whole = module.Model.whole
    if ranks.mode == TENSOR:
        if (reason := module.Model.unsliced(config)) is not None:
            raise SettingsError(
                f"{checkpoint.path} cannot be divided by heads: {reason} Give --parallel pipeline={ranks.size}."
            )
        for shape in module.make_caches(config):
            shape.sliced(Slices(0, ranks.size, lambda mine: mine).heads)
    if ranks.mode == PIPELINE and whole:
        raise SettingsError(f"{checkpoint.path} cannot be divided by layers: {whole}")
    if ranks.mode == EXPERTS and not has_experts(checkpoint.config):
        raise SettingsError(f"{checkpoint.path} has no experts to divide. Give --parallel pipeline={ranks.size}.")
    if disk is not None:
        raise SettingsError("prefixes of a model that is divided among ranks cannot be kept on disk: leave --prefix-disk out.")
    return Lead(ranks, checkpoint, free)


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


def _context(
    wanted: int | None,
    trained: int,
    shapes: list[Any],
    settings: CacheSettings,
    dtype: torch.dtype,
    free: int,
    held: range | None = None,
    deal: Deal = ALONE,
) -> int:
    """Most tokens of a sequence; refuses settings that the model's layers cannot have before anything is loaded."""
    # the meta device makes stores without their memory
    per_token = Cache(shapes, settings, context=1, held=held, deal=deal, dtype=dtype, device="meta").held_token_nbytes
    if wanted is not None:
        there = this_machine().memory_nbytes
        if wanted * max(per_token, 1) > there:
            raise SettingsError(
                f"context={wanted} would take {wanted * max(per_token, 1) / 1e9:,.0f} GB of a machine that has "
                f"{there / 1e9:,.0f} GB. Ask for less."
            )
        return wanted
    return max(1, min(trained, free // SHARE // max(per_token, 1)))


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    if checkpoint.path.is_dir():
        return Tokenizer.from_folder(checkpoint.path)
    return Tokenizer.from_gguf(checkpoint.metadata)  # type: ignore[attr-defined]


def _ends(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Tokens that end a text."""
    found = checkpoint.config.get("eos_token_id")
    listed = found if isinstance(found, list) else [] if found is None else [found]
    return frozenset(listed) | frozenset(tokenizer.eos_ids if tokenizer is not None else ())
