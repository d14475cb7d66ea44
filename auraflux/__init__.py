"""Very large mixture-of-experts language models on modest machines.

What a program may use, and nothing else, is in `__all__`:

__version__     the version of this package
AurafluxError   anything this package refuses to do; the three below are kinds of it
BackendError    a backend was asked for that this machine or installation does not have
FormatError     a weight format that does not exist or cannot hold the given data
InputError      a tensor or option does not fit what the operation needs
QTensor         a quantized weight
CacheSettings   how keys and values are kept, in full; `kv=` takes it or a short name
ExpertSettings  how the experts of a packed model are kept, in full; `expert_memory=` takes it or a size
LanguageModel   what `load` gives: generate, chat, logits, tokens
exact           inside `with exact():` kernels multiply float32 activations, not int8 ones
invariant       inside `with invariant():` CUDA kernels give a token the same bits in any company, as CPU kernels always do
load            a model from a folder, a GGUF file or a name
quantize        a dense weight as codes
use_backend     inside `with use_backend("reference"):` ops run on that backend

Names that need torch are imported when they are first used, so that `import auraflux` and the command line start at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

from auraflux.errors import AurafluxError, BackendError, FormatError, InputError

if TYPE_CHECKING:
    from auraflux.cache import CacheSettings
    from auraflux.ops._dispatch import exact, invariant, use_backend
    from auraflux.quant import QTensor, quantize
    from auraflux.run.language import LanguageModel
    from auraflux.run.load import load
    from auraflux.weights.expert_settings import ExpertSettings

__version__ = "0.1.0"

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
    "ExpertSettings": "auraflux.weights.expert_settings",
    "LanguageModel": "auraflux.run.language",
    "QTensor": "auraflux.quant",
    "exact": "auraflux.ops._dispatch",
    "invariant": "auraflux.ops._dispatch",
    "load": "auraflux.run.load",
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
