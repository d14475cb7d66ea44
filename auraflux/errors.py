"""The errors a caller may want to catch.

AurafluxError
├── InputError      a tensor or option does not fit what the operation needs (also a ValueError)
├── FormatError     a weight format that does not exist or cannot hold the given data (also a ValueError)
├── SettingsError   a setting that cannot be honoured (also a ValueError)
├── TemplateError   a chat template is missing, broken or refuses the messages (also a ValueError)
├── FetchError      a model could not be fetched (also a RuntimeError)
├── ExpertError     an expert could not be read from disk, or is not what was written there (also a RuntimeError)
├── BusyError       so many requests wait that another is refused; later it may be taken (also a RuntimeError)
├── CacheError      a cache has no room (also a RuntimeError)
│   ├── ContextError  a sequence would grow past the context limit
│   └── CacheFull     no page or no place for a sequence is free
└── BackendError    a backend was asked for that this machine or installation does not have (also a RuntimeError)
    ├── DeviceMemoryError  a GPU has no memory left
    └── RankError          one of the processes that run a model together is gone, or does not answer

The command line turns each of them into one sentence and exit code 1.
"""


class AurafluxError(Exception):
    """Anything this package refuses to do."""


class InputError(AurafluxError, ValueError):
    """An argument does not fit."""


class FormatError(AurafluxError, ValueError):
    """A weight format cannot be honoured."""


class SettingsError(AurafluxError, ValueError):
    """A setting cannot be honoured."""


class TemplateError(AurafluxError, ValueError):
    """A chat template cannot turn the messages into text."""


class FetchError(AurafluxError, RuntimeError):
    """A model could not be fetched."""


class ExpertError(AurafluxError, RuntimeError):
    """An expert could not be read."""


class BusyError(AurafluxError, RuntimeError):
    """The queue is full."""


class CacheError(AurafluxError, RuntimeError):
    """A cache has no room."""


class ContextError(CacheError):
    """A sequence would grow past the context limit."""


class CacheFull(CacheError):
    """Nothing is free in the cache."""


class BackendError(AurafluxError, RuntimeError):
    """A backend is not there."""


class DeviceMemoryError(BackendError):
    """A GPU has no memory left."""


class RankError(BackendError):
    """A rank is gone, or does not answer."""
