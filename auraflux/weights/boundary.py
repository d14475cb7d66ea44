"""The boundary to a model's files, which may come from anywhere: what is read through here is of the kind it should be.

`regular` finds a file within a model's folder, `read_text` and `read_json` read one, `check` holds keys against a table of
kinds (model_keys.py). What does not fit is one FormatError that names the file, the key, the value and what was expected.
"""

import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auraflux.errors import FormatError

LARGEST_JSON = 64 << 20  # bytes
DEEPEST = 32  # objects and lists within each other
SHOWN = 80  # characters of a value in an error
LONGEST = 300  # of what another package says
LISTED = 1200  # of names, after which no more are told


def regular(path: Path, home: Path | None = None) -> Path:
    """Give the path of a regular file without links; with `home`, one within that folder or its repository in a hub's cache."""
    try:
        real = path.resolve(strict=True)
        mode = real.stat().st_mode
    # a link to itself is a RuntimeError before Python 3.13; a name with a null character is a ValueError
    except (OSError, RuntimeError, ValueError) as err:
        raise FormatError(f"{named(path)} cannot be read: {getattr(err, 'strerror', None) or err}.") from err
    if not stat.S_ISREG(mode):
        raise FormatError(f"{named(path)} is not a regular file.")
    if home is not None and not any(real.is_relative_to(root) for root in _roots(home.resolve())):
        raise FormatError(f"{named(path)} is a link to {named(real)}, which lies outside of the model's folder.")
    return real


def _roots(home: Path) -> list[Path]:
    # a hub keeps the files of all revisions beside them: models--org--name/{snapshots/revision,blobs}
    return [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]


def read_text(path: Path, home: Path | None = None, most: int = LARGEST_JSON) -> str:
    """Give the text of a file of at most so many bytes."""
    try:
        # another kind of file may have taken its place: opening that must not wait
        number = os.open(regular(path, home), os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(number, "rb") as file:
            found = file.read(most + 1)
        if len(found) > most:
            raise FormatError(f"{named(path)} has more than {most:,} bytes.")
        return found.decode("utf-8")
    except UnicodeDecodeError as err:
        raise FormatError(f"{named(path)} is not text: {brief(err)}.") from err
    except OSError as err:
        raise FormatError(f"{named(path)} cannot be read: {err.strerror}.") from err


def read_json(path: Path, home: Path | None = None, most: int = LARGEST_JSON) -> dict[str, Any]:
    """Give the JSON object in a file."""
    text = read_text(path, home, most)
    try:
        found = json.loads(text)
        if "\\ud" in text.lower():
            # halves of characters, which JSON has escapes for, are no text
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        found = None
    except ValueError as err:
        raise FormatError(f"{named(path)} cannot be read as JSON: {brief(err)}.") from err
    if found is None or _depth_exceeds(found, DEEPEST):
        raise FormatError(f"{named(path)} has objects or lists within each other deeper than {DEEPEST}.")
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
class Kind:
    """What a value may be: in words, and as a test."""

    wanted: str
    fits: Callable[[Any], bool]


def whole(least: int, most: int) -> Kind:
    # True is an int too
    return Kind(f"a whole number from {least:,} to {most:,}", lambda value: type(value) is int and least <= value <= most)


def number(least: float, most: float) -> Kind:
    return Kind(f"a number from {least:g} to {most:g}", lambda value: type(value) in (int, float) and least <= value <= most)


def text(most: int) -> Kind:
    return Kind(f"a text of at most {most:,} characters", lambda value: isinstance(value, str) and len(value) <= most)


def list_of(kind: Kind, most: int) -> Kind:
    def fits(value: Any) -> bool:
        return isinstance(value, list) and len(value) <= most and all(map(kind.fits, value))

    return Kind(f"a list of at most {most:,}, each {kind.wanted}", fits)


def mapping_of(kind: Kind, most: int) -> Kind:
    def fits(value: Any) -> bool:
        return isinstance(value, dict) and len(value) <= most and all(map(kind.fits, value.values()))

    return Kind(f"an object of at most {most:,} keys, each {kind.wanted}", fits)


def either(*kinds: Kind) -> Kind:
    return Kind(" or ".join(kind.wanted for kind in kinds), lambda value: any(kind.fits(value) for kind in kinds))


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))


def check(where: str | Path, found: Mapping[str, Any], kinds: Mapping[str, Kind], needed: Sequence[str] = ()) -> None:
    """Refuse values that are not of their kind; null is as good as missing, which only keys that are needed may not be."""
    required = set(needed)
    for key, kind in kinds.items():
        value = found.get(key)
        if value is not None and not kind.fits(value):
            raise FormatError(f"{named(where)} has {named(key)} = {shown(value)}; {kind.wanted} is needed.")
        if value is None and key in required:
            raise FormatError(f"{named(where)} has no {named(key)}; {kind.wanted} is needed.")


def shown(value: Any) -> str:
    """A value as an error shows it: short."""
    line = named(repr(value))
    return line if len(line) <= SHOWN else line[:SHOWN] + "..."


def named(what: Any) -> str:
    """A path or text as an error shows it: in one line, whatever is in it."""
    return "".join(each if each.isprintable() else " " if each.isspace() else "?" for each in str(what))


def brief(err: BaseException) -> str:
    """What another package says of a file, in one line and cut."""
    return " ".join(named(err).split())[:LONGEST].rstrip(".")


def listed(names: Sequence[str], most: int = 24, width: int = SHOWN) -> str:
    """Names as an error lists them: as many as have room, and of each no more than a width."""
    few: list[str] = []
    for name in map(named, names[:most]):
        few.append(name if len(name) <= width else f"{name[:width]}...")
        if sum(map(len, few)) > LISTED:
            break
    rest = f" and {len(names) - len(few):,} more" if len(names) > len(few) else ""
    return ", ".join(few) + rest
