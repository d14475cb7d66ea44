"""`Fields`: validated access to the keys of a JSON object.

Each read names the `Kind` of value it accepts, so there is no separate schema and no unchecked value. Limits are far above
those of any model, and low enough that an untrusted value cannot cause a large allocation before the weights confirm it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from auraflux.errors import FormatError
from auraflux.weights.formats.untrusted import OBJECT, Kind, either, integer, list_of, named, number, shown, string

T = TypeVar("T")
D = TypeVar("D")

MOST_LAYERS = 1024
NAME = string(256)
NAMES = list_of(NAME, MOST_LAYERS)  # one per layer
COUNT, WIDTH, HEAD = integer(1, 1 << 16), integer(1, 1 << 20), integer(1, 1024)
WIDTH_OR_NONE = integer(0, 1 << 20)  # 0: the model has no such module
LAYER_COUNT, LAYERS = integer(1, MOST_LAYERS), integer(0, MOST_LAYERS)
LAYER_INTERVAL = LAYER_COUNT  # every n-th layer
EXPERTS, SHARED_EXPERTS = integer(0, 1 << 16), integer(0, 256)
LATENT = integer(1, 4096)
TAPS = integer(1, 64)  # kernel size of a short convolution
STREAMS = integer(1, 64)  # residual streams per token
POSITIONS, TOKEN_COUNT = integer(1, 1 << 40), integer(1, 1 << 24)
EPS, THETA, FRACTION, FACTOR = number(0, 1), number(1, 1e12), number(0, 1), number(1e-6, 1e6)
TOKEN = integer(0, 1 << 31)
FACTORS = list_of(FACTOR, 1 << 10)
TOKENS = either(TOKEN, list_of(TOKEN, 1024))


class ConfigFile(dict[str, Any]):
    """Contents of a config.json, or metadata of a GGUF file.

    where  path of the file, for error messages
    """

    def __init__(self, found: Mapping[str, Any], where: str | Path):
        super().__init__(found)
        self.where = where


class Fields:
    """Keys of a JSON object; null counts as missing.

    where  path of the file and section within it, for error messages
    """

    def __init__(self, where: str | Path, found: Mapping[str, Any]):
        self.where, self._found = where, found

    def __contains__(self, key: str) -> bool:
        return self._value(key) is not None

    def __iter__(self) -> Iterator[str]:
        return (key for key in self._found if key in self)

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def _value(self, key: str) -> Any:
        return self._found.get(key)

    def is_null(self, key: str) -> bool:
        """Return whether a key is there with null, where that means something else than a missing key."""
        return key in self._found and self._found[key] is None

    def name_of(self, key: str) -> str:
        """Return the full name of a key in the file."""
        return key

    def read(self, key: str, kind: Kind[T]) -> T:
        """Return the value of a required key."""
        value = self.get(key, kind, None)
        if value is None:
            raise self.missing(key, kind)
        return value

    def get(self, key: str, kind: Kind[T], default: D) -> T | D:
        """Return the value of a key, or the default if it is missing or null."""
        value = self._value(key)
        if value is None:
            return default
        if not kind.accepts(value):
            raise FormatError(
                f"{named(self.where)} has {named(self.name_of(key))} = {shown(value)}; {kind.expected} is needed."
            )
        return value

    def only(self, key: str, *accepted: bool | int | str) -> None:
        """Raise unless the key is missing or has an accepted value."""
        value = self._value(key)
        # compare types too, since 1 == True == 1.0
        if value is not None and not any(type(value) is type(each) and value == each for each in accepted):
            expected = f"only {' or '.join(map(repr, accepted))} is supported" if accepted else "it is not supported"
            raise FormatError(f"{self.title} has {named(self.name_of(key))} {shown(value)}; {expected}.")

    def section(self, key: str) -> "Fields":
        """Return the object under a key, empty if it is missing."""
        return Fields(f"{self.where}: {self.name_of(key)}", self.get(key, OBJECT, {}))

    def sections(self) -> dict[str, "Fields"]:
        """Return all nested objects by key."""
        return {key: self.section(key) for key in self if isinstance(self._value(key), dict)}

    @property
    def title(self) -> str:
        """Name of the file for error messages."""
        return named(self.where)

    def missing(self, key: str, kind: Kind[Any]) -> FormatError:
        """Return the error for a missing required key."""
        return FormatError(f"{self.title} has no {named(self.name_of(key))}; {kind.expected} is needed.")


def fields_of(found: Mapping[str, Any], default: str) -> Fields:
    """Wrap an object in `Fields`, named after its file if it is a `ConfigFile`."""
    return Fields(found.where if isinstance(found, ConfigFile) else default, found)


def end_tokens(fields: Fields) -> list[int] | None:
    """Return the end-of-sequence tokens; None if the file names none."""
    found = fields.get("eos_token_id", TOKENS, None)
    return found if found is None or isinstance(found, list) else [found]
