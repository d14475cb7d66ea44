"""The errors a caller may want to catch.

AurafluxError
├── InputError      a tensor or option does not fit what the operation needs (also a ValueError)
├── FormatError     a weight format that does not exist or cannot hold the given data (also a ValueError)
├── SettingsError   a setting that cannot be honoured (also a ValueError)
├── TemplateError   a chat template is missing, broken or refuses the messages (also a ValueError)
├── FetchError      a model could not be downloaded (also a RuntimeError)
├── ExpertError     an expert could not be read from disk, or its checksum is wrong (also a RuntimeError)
├── BusyError       the queue is full; a later request may be accepted (also a RuntimeError)
├── CacheError      the KV cache is full (also a RuntimeError)
│   ├── ContextError  a sequence would grow past the context limit
│   └── CacheFull     no page or no sequence slot is free
└── BackendError    the requested backend is not available on this machine or installation (also a RuntimeError)
    ├── DeviceMemoryError  a GPU has no memory left
    └── RankError          a rank of a distributed model is gone or does not answer

The command line prints each of them as one sentence and exits with code 1.
"""


class AurafluxError(Exception):
    """Base class of all errors of this package."""


class InputError(AurafluxError, ValueError):
    """An argument does not fit."""


class FormatError(AurafluxError, ValueError):
    """A weight format cannot be honoured."""


class SettingsError(AurafluxError, ValueError):
    """A setting cannot be honoured."""


class TemplateError(AurafluxError, ValueError):
    """A chat template cannot turn the messages into text."""


class FetchError(AurafluxError, RuntimeError):
    """A model could not be downloaded."""


class ExpertError(AurafluxError, RuntimeError):
    """An expert could not be read."""


class BusyError(AurafluxError, RuntimeError):
    """The queue is full."""


class CacheError(AurafluxError, RuntimeError):
    """The KV cache is full."""


class ContextError(CacheError):
    """A sequence would grow past the context limit."""


class CacheFull(CacheError):
    """No page or sequence slot is free."""


class BackendError(AurafluxError, RuntimeError):
    """A backend is not available."""


class DeviceMemoryError(BackendError):
    """A GPU has no memory left."""


class RankError(BackendError):
    """A rank is gone or does not answer."""
