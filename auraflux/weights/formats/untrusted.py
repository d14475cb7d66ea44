"""Validation of model files, which are untrusted input.

`regular_file` resolves a path within a model's folder, `read_text` and `read_json` read one. A `Kind` describes the values a
key accepts, and `Fields` (fields.py) reads keys by kind. Anything else raises one FormatError that names the file, the key, the
value and the expected kind.
"""

import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from auraflux.errors import FormatError

LARGEST_JSON = 64 << 20  # bytes
DEEPEST = 32  # nesting depth of objects and lists
SHOWN = 80  # characters of a value in an error message
LONGEST = 300  # characters of another package's message
LISTED = 1200  # characters of a list of names

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")
Value = TypeVar("Value", covariant=True)


def regular_file(path: Path, home: Path | None = None) -> Path:
    """Resolve the path of a regular file; with `home`, require it within that folder or its hub cache repository."""
    try:
        real = path.resolve(strict=True)
        mode = real.stat().st_mode
    # a symlink loop is a RuntimeError before Python 3.13; a null character in the name is a ValueError
    except (OSError, RuntimeError, ValueError) as err:
        raise FormatError(f"{named(path)} cannot be read: {getattr(err, 'strerror', None) or err}.") from err
    if not stat.S_ISREG(mode):
        raise FormatError(f"{named(path)} is not a regular file.")
    if home is not None and not any(real.is_relative_to(root) for root in _roots(home.resolve())):
        raise FormatError(f"{named(path)} is a link to {named(real)}, which lies outside of the model's folder.")
    return real


def _roots(home: Path) -> list[Path]:
    # layout of the Hugging Face cache: models--org--name/{snapshots/revision,blobs}
    return [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]


def read_text(path: Path, home: Path | None = None, limit: int = LARGEST_JSON) -> str:
    """Return the text of a file, refusing one above the limit."""
    try:
        # the file may have been replaced by a pipe since the check: opening must not block
        number = os.open(regular_file(path, home), os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(number, "rb") as file:
            found = file.read(limit + 1)
        if len(found) > limit:
            raise FormatError(f"{named(path)} has more than {limit:,} bytes.")
        return found.decode("utf-8")
    except UnicodeDecodeError as err:
        raise FormatError(f"{named(path)} is not text: {brief(err)}.") from err
    except OSError as err:
        raise FormatError(f"{named(path)} cannot be read: {err.strerror}.") from err


def read_json(path: Path, home: Path | None = None, limit: int = LARGEST_JSON) -> dict[str, Any]:
    """Return the JSON object in a file."""
    content = read_text(path, home, limit)
    try:
        found = json.loads(content)
        if "\\ud" in content.lower():
            # JSON can escape lone surrogates, which are not valid text
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        found = None
    except ValueError as err:
        raise FormatError(f"{named(path)} cannot be read as JSON: {brief(err)}.") from err
    if found is None or _depth_exceeds(found, DEEPEST):
        raise FormatError(f"{named(path)} has objects or lists nested deeper than {DEEPEST}.")
    if not isinstance(found, dict):
        raise FormatError(f"{named(path)} holds {type(found).__name__}, not an object.")
    return found


def _depth_exceeds(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most + 1):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [each for group in inner for each in group if isinstance(each, dict | list)]
        if not level:
            return False
    return True


@dataclass(frozen=True)
class Kind(Generic[Value]):
    """Values that a key accepts.

    expected     description for error messages
    accepts      predicate on a value
    accepts_all  predicate on a list of values, faster than one by one; it may be False where they are accepted
    """

    expected: str
    accepts: Callable[[Any], bool]
    accepts_all: Callable[[list[Any]], bool] = lambda values: False


def integer(least: int, most: int) -> Kind[int]:
    # not isinstance: True is an int too
    return Kind(
        f"an integer from {least:,} to {most:,}",
        lambda value: type(value) is int and least <= value <= most,
        lambda values: {*map(type, values)} == {int} and least <= min(values) and max(values) <= most,
    )


def number(least: float, most: float) -> Kind[float]:
    return Kind(
        f"a number from {least:g} to {most:g}",
        lambda value: type(value) in (int, float) and least <= value <= most,
        # a sum with NaN is not equal to itself
        lambda values: (
            {*map(type, values)} in ({int}, {float})
            and least <= min(values)
            and max(values) <= most
            and (total := sum(values)) == total
        ),
    )


def string(most: int) -> Kind[str]:
    return Kind(
        f"a string of at most {most:,} characters",
        lambda value: isinstance(value, str) and len(value) <= most,
        lambda values: {*map(type, values)} == {str} and max(map(len, values)) <= most,
    )


def list_of(kind: Kind[T], most: int) -> Kind[list[T]]:
    def accepts(value: Any) -> bool:
        return isinstance(value, list) and len(value) <= most and (kind.accepts_all(value) or all(map(kind.accepts, value)))

    return Kind(f"a list of at most {most:,}, each {kind.expected}", accepts)


def mapping_of(kind: Kind[T], most: int) -> Kind[dict[str, T]]:
    def accepts(value: Any) -> bool:
        return isinstance(value, dict) and len(value) <= most and all(map(kind.accepts, value.values()))

    return Kind(f"an object of at most {most:,} keys, each {kind.expected}", accepts)


@overload
def either(first: Kind[T], second: Kind[U], /) -> Kind[T | U]: ...
@overload
def either(first: Kind[T], second: Kind[U], third: Kind[V], /) -> Kind[T | U | V]: ...
def either(*kinds: Kind[Any]) -> Kind[Any]:
    return Kind(" or ".join(kind.expected for kind in kinds), lambda value: any(kind.accepts(value) for kind in kinds))


FLAG: Kind[bool] = Kind("true or false", lambda value: isinstance(value, bool))
OBJECT: Kind[dict[str, Any]] = Kind("an object", lambda value: isinstance(value, dict))


def check(where: str | Path, found: Mapping[str, Any], kinds: Mapping[str, Kind[Any]], needed: Sequence[str] = ()) -> None:
    """Raise if a value is not of its kind or a needed key is missing; null counts as missing."""
    required = set(needed)
    for key, kind in kinds.items():
        value = found.get(key)
        if value is not None and not kind.accepts(value):
            raise FormatError(f"{named(where)} has {named(key)} = {shown(value)}; {kind.expected} is needed.")
        if value is None and key in required:
            raise FormatError(f"{named(where)} has no {named(key)}; {kind.expected} is needed.")


def read_index(path: Path, home: Path) -> dict[str, str]:
    """Return the file of each tensor from an index, which may only name files in its folder."""
    found, name = read_json(path, home), string(256)
    check(path, found, {"weight_map": OBJECT}, ("weight_map",))
    files = found["weight_map"]
    check(f"{path}: weight_map", files, dict.fromkeys(files, name), tuple(files))
    for each in set(files.values()):
        if each in ("", ".", "..") or "/" in each or "\\" in each or "\0" in each:
            raise FormatError(f"{named(path)} names {shown(each)}; the name of a file in its folder is needed.")
    return files


def shown(value: Any) -> str:
    """Return a shortened representation of a value for error messages."""
    line = named(repr(value))
    return line if len(line) <= SHOWN else line[:SHOWN] + "..."


def named(what: Any) -> str:
    """Return a path or string as one printable line for error messages."""
    return "".join(each if each.isprintable() else " " if each.isspace() else "?" for each in str(what))


def brief(err: BaseException) -> str:
    """Return another package's error message as one shortened line."""
    return " ".join(named(err).split())[:LONGEST].rstrip(".")


def listed(names: Sequence[str], most: int = 24, width: int = SHOWN) -> str:
    """Return a comma-separated list of names for error messages, shortened to a limit."""
    few: list[str] = []
    for name in map(named, names[:most]):
        few.append(name if len(name) <= width else f"{name[:width]}...")
        if sum(map(len, few)) > LISTED:
            break
    rest = f" and {len(names) - len(few):,} more" if len(names) > len(few) else ""
    return ", ".join(few) + rest
