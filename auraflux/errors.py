"""The errors a caller may want to catch.

AurafluxError
├── InputError      a tensor or option does not fit what the operation needs (also a ValueError)
├── FormatError     a weight format that does not exist or cannot hold the given data (also a ValueError)
└── BackendError    a backend was asked for that this machine or installation does not have (also a RuntimeError)

The command line turns each of them into one sentence and exit code 1.
"""


class AurafluxError(Exception):
    """Anything this package refuses to do."""


class InputError(AurafluxError, ValueError):
    """An argument does not fit."""


class FormatError(AurafluxError, ValueError):
    """A weight format cannot be honoured."""


class BackendError(AurafluxError, RuntimeError):
    """A backend is not there."""
