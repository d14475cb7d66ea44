"""`LoadOptions`: the options of loading a model, shared by `auraflux.load`, the command line, the server and benchmarks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from auraflux.adapters.names import check_names
from auraflux.cache import CacheSettings
from auraflux.defaults import AUTO, CALIBRATE
from auraflux.distributed.parallel import Parallel, parse_parallel
from auraflux.durations import parse_latency
from auraflux.engine import calibration
from auraflux.engine.sampling import DEFAULTED, Sampling
from auraflux.errors import SettingsError
from auraflux.progress import Report
from auraflux.quant import check_format
from auraflux.weights.experts.settings import ExpertSettings, parse_nbytes

GROUP = 64  # group size of weights that are quantized while loading
PREFILLS = ("auto", "fp8")
MAX = {"context": 1 << 40, "chunk": 1 << 20, "max_sequences": 1 << 16}


@dataclass(frozen=True)
class LoadOptions:
    """Options of one model; `auraflux.load` documents each in full.

    device         "auto", "cpu", "cuda" or "cuda:1"
    kv             format of the KV cache, or `CacheSettings`
    quantize       bits to which dense weights are quantized; None for their own format
    exact          use float32 activations on a CPU
    invariant      batch-invariant kernels on a GPU
    prefill        "fp8" to round the operands of long prefill chunks to FP8; "auto" not to
    graphs         replay decode steps
    context        maximum tokens of a sequence; None for the largest that fits
    chunk          tokens of a prefill chunk; None for the device's default
    max_sequences  maximum number of running sequences
    max_queue      maximum number of queued requests; None for no limit
    cache_memory   memory of the KV cache: "8GB", or "half" of the free memory; None for two sequences of full context
    target_itl     inter-token latency that prefill of other requests should not exceed: "20ms", or seconds; None for none
    prefix_disk    size of the prefix cache on disk, such as "20GB"; None for none
    prefix_folder  folder of the prefix cache; None for the user's cache folder
    expert_memory  memory for experts on the device, such as "4GB", or `ExpertSettings`
    gpu_memory     GPU memory for everything, such as "8GB"; None for what is free
    calibrate      key calibration: "auto", "off" or a file
    adapters       folders of LoRA adapters by name
    mmproj         vision tower of a GGUF model; None for one beside it
    speculate      draft tokens: "ngram", "mtp" or a draft model
    sampling       default sampling settings, over those that the model recommends
    parallel       "pipeline=2", or `Parallel`
    report         called with progress; None for a bar on a terminal
    """

    device: str = "auto"
    kv: str | CacheSettings = AUTO
    quantize: int | None = None
    exact: bool = False
    invariant: bool = False
    prefill: str = "auto"
    graphs: bool = True
    context: int | None = None
    chunk: int | None = None
    max_sequences: int = 8
    max_queue: int | None = None
    cache_memory: str | int | None = None
    target_itl: str | float | None = None
    prefix_disk: str | int | None = None
    prefix_folder: str | Path | None = None
    expert_memory: str | int | ExpertSettings | None = None
    gpu_memory: str | int | None = None
    calibrate: str | Path = CALIBRATE
    adapters: Mapping[str, str | Path] = field(default_factory=dict)
    mmproj: str | Path | None = None
    speculate: str | Path | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    parallel: str | Parallel | None = None
    report: Report | None = None

    def check(self) -> None:
        """Refuse values that no model supports."""
        for name, count in {"context": self.context, "chunk": self.chunk, "max_sequences": self.max_sequences}.items():
            if count is not None and (type(count) is not int or not 1 <= count <= MAX[name]):
                raise SettingsError(f"{name}={count!r:.80} must be an integer from 1 to {MAX[name]:,}.")
        if self.quantize is not None:
            check_format(self.quantize, GROUP)
        if self.prefill not in PREFILLS:
            raise SettingsError(f"prefill={self.prefill!r:.80} is not one of: {', '.join(PREFILLS)}.")
        if self.fp8_prefill and (self.invariant or self.parallel is not None):
            raise SettingsError("FP8 prefill is neither batch-invariant nor supported on several ranks.")
        if self.target_itl is not None:
            parse_latency(self.target_itl)
        if self.gpu_memory is not None:
            parse_nbytes(self.gpu_memory)
        calibration.check(self.calibrate)
        check_names(self.adapters)
        if self.adapters and self.parallel is not None:
            raise SettingsError("adapters are not supported for a model that runs on several ranks.")
        if unknown := sorted(set(self.sampling) - set(DEFAULTED)):
            raise SettingsError(f"sampling has {', '.join(unknown)}; a model's defaults may have {', '.join(DEFAULTED)}.")
        Sampling(**self.sampling)

    @property
    def cache_settings(self) -> CacheSettings:
        return self.kv if isinstance(self.kv, CacheSettings) else CacheSettings(self.kv)

    @property
    def expert_settings(self) -> ExpertSettings:
        given = self.expert_memory
        settings = given if isinstance(given, ExpertSettings) else ExpertSettings(given)
        # which experts the CPU computes depends on what is cached
        return replace(settings, compute="gpu") if self.invariant else settings

    @property
    def fp8_prefill(self) -> bool:
        return self.prefill == "fp8"

    @property
    def ranks(self) -> Parallel | None:
        return parse_parallel(self.parallel) if isinstance(self.parallel, str) else self.parallel

    def for_draft(self, device: str, context: int, graphs: bool) -> "LoadOptions":
        """Return the options of the draft model of a model that was loaded with these."""
        return replace(
            self,
            device=device,
            context=context,
            graphs=graphs,
            calibrate=calibration.for_second_model(self.calibrate),
            # the draft model is small: its weights are not quantized, and it has no queue
            quantize=None,
            prefill="auto",
            max_queue=None,
            target_itl=None,
            cache_memory=None,
            prefix_disk=None,
            prefix_folder=None,
            expert_memory=None,
            gpu_memory=None,
            adapters={},
            mmproj=None,
            speculate=None,
            parallel=None,
        )
