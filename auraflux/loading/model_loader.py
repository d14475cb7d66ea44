"""`ModelLoader`: loads weights, calibrates keys and builds the engine."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from auraflux.adapters.loaded import LoadedAdapters
from auraflux.adapters.peft_folder import Adapter
from auraflux.adapters.placement import place
from auraflux.cache.key_calibration import ModelCalibration
from auraflux.cache.prefix.disk import PrefixDisk
from auraflux.distributed.leader import Leader
from auraflux.distributed.shard import RankShard
from auraflux.engine import calibration
from auraflux.engine.compile_ahead import compile_ahead
from auraflux.engine.device import device_memory, preload_kernels
from auraflux.engine.engine import Engine
from auraflux.loading.memory_budget import MemoryBudget
from auraflux.loading.model_source import ModelSource
from auraflux.loading.options import LoadOptions
from auraflux.progress import Report
from auraflux.tokenizer.tokenizer import Tokenizer
from auraflux.vision.families import NoVision, Vision, open_vision
from auraflux.weights.experts.pool.gpu_pool import GpuExpertPool
from auraflux.weights.experts.row_table import loaded_nbytes
from auraflux.weights.experts.store import ExpertStore
from auraflux.weights.fingerprint import fingerprint
from auraflux.weights.formats.stored import Checkpoint
from auraflux.weights.loader import Weights
from auraflux.weights.parallel.tensor_slices import UNSLICED


@dataclass(frozen=True)
class ModelLoader:
    """A model whose memory is planned, before its weights are loaded.

    leader        communicates with the other ranks; None for a single process
    device        that `options` select
    weight_notes  remarks for the user on the weights, once they are loaded
    """

    source: ModelSource
    budget: MemoryBudget
    leader: Leader | None
    options: LoadOptions
    device: torch.device
    tokenizer: Tokenizer | None
    weight_notes: list[str] = field(default_factory=list)

    @property
    def graphs(self) -> bool:
        """True if steps are replayed as graphs, which is impossible where the host reads or copies the chosen experts."""
        experts, pool = self.budget.experts, self.budget.pool
        if pool is not None and not (pool.pinned or pool.resident):
            return False
        return self.options.graphs and (experts is None or experts.resident)

    @property
    def calibrates(self) -> bool:
        """True if the KV cache needs key calibration."""
        return calibration.is_needed(self.options.calibrate, self.source.shapes, self.source.settings)

    def run(self, report: Report) -> tuple[Any, ModelCalibration | None]:
        """Load the weights and calibrate keys, together with the other ranks."""
        source, budget, leader = self.source, self.budget, self.leader
        if leader is not None:
            leader.start_loading(
                source.settings,
                budget.settings,
                quantize=self.options.quantize,
                exact=self.options.exact,
                invariant=self.options.invariant,
                graphs=self.graphs,
                sizes=asdict(budget.sizes),
                calibrate=self.calibrates,
            )
        preload_kernels(self.device)
        with device_memory():
            model = self._model(report)
            key_calibration = self._prepare(model, report)
        source.watch.check()
        if leader is not None:
            leader.finish_loading(key_calibration)
            key_calibration = leader.shard().slice_calibration(key_calibration)
        return model, key_calibration

    def _model(self, report: Report) -> Any:
        source, budget = self.source, self.budget
        model = make_model(
            source.module,
            source.config,
            source.checkpoint,
            bits=self.options.quantize,
            dtype=budget.dtype,
            device=self.device,
            experts=budget.experts,
            pool=budget.pool,
            report=report,
            layers=budget.layers,
            shard=None if self.leader is None else self.leader.shard(),
            mtp=bool(source.mtp_shapes),
        )
        self.weight_notes.extend(model.notes)
        return model

    def _prepare(self, model: Any, report: Report) -> ModelCalibration | None:
        """Calibrate keys; on a CPU, compile the kernels of the model at the same time."""

        def calibrate(progress: Report) -> ModelCalibration:
            return self._calibration(model, progress)

        # a trial step would involve the other ranks, or read experts from disk
        offloaded = self.budget.experts is not None or self.budget.pool is not None
        if self.device.type != "cpu" or self.leader is not None or offloaded:
            return calibrate(report) if self.calibrates else None
        # imported here: it needs Numba, which GPU installations lack
        from auraflux.engine.compile_kernels import compile_kernels

        return compile_kernels(
            model,
            self.source.shapes,
            self.source.settings,
            exact=self.options.exact,
            calibrate=calibrate if self.calibrates else None,
            dtype=self.budget.dtype,
            report=report,
        )

    def _calibration(self, model: Any, report: Report) -> ModelCalibration:
        """Load the saved key calibration of the model, or measure it."""
        source, experts, device, leader = self.source, self.budget.experts, self.device, self.leader
        nbytes = loaded_nbytes(source.checkpoint.sizes())
        pool = self.budget.pool
        on_disk = (experts is not None and not experts.resident) or (pool is not None and pool.tier is not None)
        count = calibration.calibration_tokens(nbytes, device, on_disk)
        run = model if leader is None else leader.calibration_model(model)
        return calibration.load_or_calibrate(
            self.options.calibrate,
            run,
            source.shapes,
            source.path,
            self.tokenizer,
            count,
            dtype=self.budget.dtype,
            device=device,
            nbytes=nbytes,
            report=report,
            ranks=leader,
            ahead=leader is None,
        )

    def engine(self, model: Any, key_calibration: ModelCalibration | None, adapters: Sequence[Adapter] = ()) -> Engine:
        """Build the engine with its KV cache and the model's adapters."""
        sizes, pool = self.budget.sizes, self.budget.pool
        if pool is not None and self.device.type == "cuda":
            # calibration leaves blocks of other sizes than those of the KV cache
            torch.cuda.empty_cache()
        with device_memory():
            engine = Engine(
                model,
                self.budget.shapes,
                self.source.settings,
                context=sizes.context,
                sequences=sizes.sequences,
                tokens=sizes.tokens,
                cached_sequences=sizes.cached_sequences,
                chunk=sizes.chunk,
                key_calibration=key_calibration,
                exact=self.options.exact,
                invariant=self.options.invariant,
                fp8=self.options.fp8_prefill,
                graphs=self.graphs,
                ranks=self.leader,
                hidden=bool(self.source.mtp_shapes),
                dtype=self.budget.dtype,
                device=self.device,
            )
            if pool is not None:
                engine.use_pool(pool)
            if engine.batch_invariant:
                compile_ahead(engine.try_token, self.device)
                engine.try_token()
            if adapters:
                layers = place(adapters, model.named, self.source.module.rename, self.device, self.budget.dtype)
                engine.set_adapters(LoadedAdapters(adapters, layers))
        return engine

    def vision(self, chunk: int) -> Vision | NoVision:
        """Load the vision tower where the model has one; `chunk` are the tokens of a prefill chunk."""
        with device_memory():
            source, names = self.source, (lambda name: None) if self.tokenizer is None else self.tokenizer.token_id
            given = None if self.options.mmproj is None else Path(self.options.mmproj)
            return open_vision(source.checkpoint, source.config, self.device, self.budget.dtype, names, chunk, given)

    def prefix_disk(self, engine: Engine, nbytes: int, folder: Path) -> PrefixDisk:
        """Return the prefix cache on disk; entries of other models and of other settings have other folders."""
        variant = ["invariant"] if engine.batch_invariant else []
        variant += ["fp8 prefill"] if engine.runner.fp8_prefill else []
        variant += [f"context {engine.cache.context}"] if engine.model.by_context else []
        name = fingerprint(self.source.path, self.options.quantize, self.options.exact, engine.cache.format, *variant)
        return PrefixDisk(folder / name, nbytes, name)

    def notes(self) -> list[str]:
        """Return remarks for the user."""
        experts, trained = self.budget.experts, self.source.config.context
        pool_notes = () if self.budget.pool is None else self.budget.pool.notes
        notes = [
            *self.source.checkpoint.notes,
            *self.weight_notes,
            *(experts.notes if experts is not None else ()),
            *pool_notes,
        ]
        notes += self.leader.notes if self.leader is not None else ()
        if self.budget.sizes.context > trained:
            notes.append(f"the model was trained on sequences of {trained:,} tokens; output beyond that may be nonsense.")
        return notes


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
    shard: RankShard | None = None,
    mtp: bool = False,
    pool: GpuExpertPool | None = None,
) -> Any:
    """Load a model, or some of its layers, or a shard of each.

    mtp   include the MTP head
    pool  receives the experts
    """
    total, done = sum(checkpoint.sizes().values()), 0
    if pool is not None and checkpoint.experts is not None:
        total += checkpoint.experts.nbytes

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        report("loading", done, total)

    weights = Weights(
        checkpoint,
        module.rename,
        bits=bits,
        dtype=dtype,
        device=device,
        experts=experts,
        expert_pool=pool,
        span=layers,
        expert_sharding=None if shard is None else shard.expert_sharding,
        slices=UNSLICED if shard is None else shard.slices,
        mtp=mtp,
        advance=advance,
    )
    model = module.Model(config, weights)
    weights.check_loaded()
    model.notes, model.named = weights.notes(), weights.named
    for each in (pool, experts):
        if each is not None:
            each.finish()
    return model
