"""Very large mixture-of-experts language models on modest machines.

The public API is `__all__`:

__version__     version of this package
AurafluxError   base class of this package's errors; the next three are subclasses
BackendError    the machine or the installation lacks the requested backend
FormatError     a file or weight format is unknown or broken
InputError      an argument, tensor or request is invalid
QTensor         a quantized weight
CacheSettings   settings of the KV cache; `load(kv=…)` takes them or a name such as "k4v4"
ExpertSettings  settings of the expert cache; `load(expert_memory=…)` takes them or a size such as "4GB"
LanguageModel   a loaded model: generate, chat, tokens, logits
exact           context manager: kernels use float32 activations instead of int8 ones
invariant       context manager: CUDA kernels are batch-invariant; CPU kernels always are
load            load a model from a folder, a GGUF file or a name
quantize        quantize a dense weight to a QTensor
use_backend     context manager: run ops on a backend, such as "reference"

Names that need torch are imported on first use, so that `import auraflux` and the command line start fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

from auraflux.errors import AurafluxError, BackendError, FormatError, InputError

if TYPE_CHECKING:
    from auraflux.cache import CacheSettings
    from auraflux.loading.language_model import LanguageModel
    from auraflux.loading.load import load
    from auraflux.ops._dispatch import exact, invariant, use_backend
    from auraflux.quant import QTensor, quantize
    from auraflux.weights.experts.settings import ExpertSettings

__version__ = "0.2.0"

__all__ = [
    "AurafluxError",
    "BackendError",
    "CacheSettings",
    "ExpertSettings",
    "FormatError",
    "InputError",
    "LanguageModel",
    "QTensor",
    "__version__",
    "exact",
    "invariant",
    "load",
    "quantize",
    "use_backend",
]

_HOMES = {
    "CacheSettings": "auraflux.cache",
    "ExpertSettings": "auraflux.weights.experts.settings",
    "LanguageModel": "auraflux.loading.language_model",
    "QTensor": "auraflux.quant",
    "exact": "auraflux.ops._dispatch",
    "invariant": "auraflux.ops._dispatch",
    "load": "auraflux.loading.load",
    "quantize": "auraflux.quant",
    "use_backend": "auraflux.ops._dispatch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'auraflux' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
