"""A model on its way into memory: its weights, what is known of its keys, and the engine that runs it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from auraflux.cache.calibration import ModelVectors
from auraflux.cache.prefix_disk import PrefixDisk
from auraflux.run import calibration
from auraflux.run.device import device_memory, fetch_kernels
from auraflux.run.engine import Engine
from auraflux.run.fit import Fit
from auraflux.run.progress import Report
from auraflux.run.ranks.lead import Lead
from auraflux.run.ranks.share import Share
from auraflux.run.source import Source
from auraflux.run.tokenizer import Tokenizer
from auraflux.weights.expert_store import ExpertStore
from auraflux.weights.fingerprint import fingerprint
from auraflux.weights.loader import Weights
from auraflux.weights.row_table import loaded_nbytes
from auraflux.weights.stored import Checkpoint


@dataclass(frozen=True)
class How:
    """How a model shall run, see `load`."""

    device: torch.device
    quantize: int | None
    exact: bool
    invariant: bool
    graphs: bool
    calibrate: str | Path


@dataclass(frozen=True)
class Loading:
    """A model that is known to fit, before its weights are read.

    lead  who speaks with other ranks; None where all of the model is here
    """

    source: Source
    fit: Fit
    lead: Lead | None
    how: How
    tokenizer: Tokenizer | None

    @property
    def graphs(self) -> bool:
        """Whether steps are replayed: where experts are read as tokens choose them, steps cannot be repeated blindly."""
        return self.how.graphs and (self.fit.experts is None or self.fit.experts.share.mapped)

    @property
    def calibrates(self) -> bool:
        """Whether it is asked what is known of keys."""
        return calibration.is_wanted(self.how.calibrate, self.source.shapes, self.source.settings)

    def run(self, report: Report) -> tuple[Any, ModelVectors | None]:
        """Read the weights, and find what is known of keys, with all ranks where there are others."""
        source, fit, lead = self.source, self.fit, self.lead
        if lead is not None:
            asked = {"quantize": self.how.quantize, "exact": self.how.exact, "invariant": self.how.invariant}
            lead.agree(source.settings, fit.settings, **asked, graphs=self.graphs, sizes=fit.sizes, calibrate=self.calibrates)
        fetch_kernels(self.how.device)
        with device_memory():
            model = self._model(report)
            vectors = self._prepare(model, report)
        source.watch.check()
        if lead is not None:
            lead.ready(vectors)
            vectors = lead.own().vectors(vectors)
        return model, vectors

    def _model(self, report: Report) -> Any:
        source, fit, how = self.source, self.fit, self.how
        form: dict[str, Any] = {"bits": how.quantize, "dtype": fit.dtype, "device": how.device, "experts": fit.experts}
        form |= {"layers": fit.held, "share": None if self.lead is None else self.lead.own(), "mtp": bool(source.further)}
        return make_model(source.module, source.config, source.checkpoint, **form, report=report)

    def _prepare(self, model: Any, report: Report) -> ModelVectors | None:
        """Give what is known of keys; on a CPU, compile meanwhile what the model needs."""

        def find(heard: Report) -> ModelVectors:
            return self._vectors(model, heard)

        # steps of a part of a model, or that read experts from disk, say nothing before they are taken
        if self.how.device.type != "cpu" or self.lead is not None or self.fit.experts is not None:
            return find(report) if self.calibrates else None
        # it needs Numba, which a GPU does without
        from auraflux.run.prepare import compile_kernels

        how: dict[str, Any] = {"exact": self.how.exact, "calibrate": find if self.calibrates else None, "dtype": self.fit.dtype}
        return compile_kernels(model, self.source.shapes, self.source.settings, **how, report=report)

    def _vectors(self, model: Any, report: Report) -> ModelVectors:
        """What is known of a model's keys: kept from before, or found now."""
        source, experts, device, lead = self.source, self.fit.experts, self.how.device, self.lead
        nbytes = loaded_nbytes(source.checkpoint.sizes())
        count = calibration.enough_tokens(nbytes, device, experts is not None and not experts.share.mapped)
        run = model if lead is None else lead.passing(model)
        about: dict[str, Any] = {"dtype": self.fit.dtype, "device": device, "nbytes": nbytes, "report": report, "others": lead}
        return calibration.vectors_for(self.how.calibrate, run, source.shapes, source.path, self.tokenizer, count, **about)

    def engine(self, model: Any, vectors: ModelVectors | None) -> Engine:
        how: dict[str, Any] = {"exact": self.how.exact, "invariant": self.how.invariant, "graphs": self.graphs}
        how |= {"vectors": vectors, "ranks": self.lead, "hidden": bool(self.source.further), "device": self.how.device}
        with device_memory():
            engine = Engine(model, self.fit.shapes, self.source.settings, **self.fit.options, **how)
            if engine.alike:
                engine.try_token()
        return engine

    def prefix_disk(self, engine: Engine, nbytes: int, folder: Path) -> PrefixDisk:
        """Where texts are kept on disk: none of another model, or of this one run otherwise."""
        alike = ["invariant"] if engine.alike else []
        name = fingerprint(self.source.path, self.how.quantize, self.how.exact, engine.cache.format, *alike)
        return PrefixDisk(folder / name, nbytes, name)

    def notes(self) -> list[str]:
        """What a user should know of the model."""
        experts, trained = self.fit.experts, self.source.config.context
        notes = [*self.source.checkpoint.notes, *(experts.notes if experts is not None else ())]
        notes += self.lead.notes if self.lead is not None else ()
        if self.fit.sizes["context"] > trained:
            notes.append(f"the model was made for texts of {trained:,} tokens, and may write nonsense beyond.")
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
