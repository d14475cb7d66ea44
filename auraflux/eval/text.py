"""Evaluation text: read from files or from the package, and cut into passages of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from auraflux.errors import InputError
from auraflux.tokenizer.tokenizer import Tokenizer

REQUEST = "Write the next part of a speech."  # the user message before the text, in chat format
LEAD = 8  # tokens that identify a second copy; they are not measured


@dataclass(frozen=True)
class Passage:
    """Tokens of which those from `first` on are predicted and measured.

    name  unique within a run
    """

    name: str
    ids: tuple[int, ...]
    first: int

    @property
    def measured(self) -> int:
        return len(self.ids) - self.first


@dataclass(frozen=True)
class Text:
    """The tokens of one text.

    prefix  tokens before every passage: the BOS token, or a user message in chat format
    """

    name: str
    ids: tuple[int, ...]
    prefix: tuple[int, ...]


def read_files(paths: list[Path]) -> dict[str, str]:
    """Read text files by name; without paths, those of the package."""
    if not paths:
        folder = resources.files("auraflux.eval") / "texts"
        return {path.name: path.read_text("utf-8") for path in _sorted(folder) if path.name.endswith(".txt")}
    return {str(path): decoded(path) for path in paths}


def _sorted(folder: resources.abc.Traversable) -> list[resources.abc.Traversable]:
    return sorted(folder.iterdir(), key=lambda path: path.name)


def decoded(path: Path) -> str:
    """Read a file that must be UTF-8 text."""
    try:
        found = path.read_bytes().decode("utf-8")
    except OSError as err:
        raise InputError(f"{path} cannot be read: {err.strerror or err}.") from err
    except UnicodeDecodeError as err:
        raise InputError(f"{path} is no text: byte {err.start} is not UTF-8.") from err
    if "\0" in found:
        raise InputError(f"{path} is no text: it has zero bytes.")
    if not found.strip():
        raise InputError(f"{path} is empty.")
    return found


def tokenized(files: dict[str, str], tokenizer: Tokenizer, chat: bool) -> list[Text]:
    """Tokenize files, each with the prefix of its passages."""
    prefix = tokenizer.encode("")
    if chat:
        prefix = tokenizer.encode(tokenizer.apply_template([{"role": "user", "content": REQUEST}]), special=False)
    return [Text(name, tuple(tokenizer.encode(text, special=False)), tuple(prefix)) for name, text in files.items()]


def shared_tokens(endings: Sequence[Sequence[int]]) -> int:
    """Return the length of the common prefix of sequences, each of which has at least one more token."""
    most = min(len(ending) for ending in endings) - 1
    return next((i for i in range(most) if len({ending[i] for ending in endings}) > 1), most)


def windows(documents: list[Text], size: int, count: int | None) -> list[Passage]:
    """Cut documents into windows of `size` tokens; return `count` of them, evenly spread, or all."""
    every = []
    for text in documents:
        room = size - len(text.prefix)
        if room < 2:
            raise InputError(f"a window of {size} tokens is too short: {len(text.prefix)} tokens come before the text in each.")
        if len(text.ids) < room:
            raise InputError(
                f"{text.name} has {len(text.ids)} tokens, fewer than one window of {size}. Give --window or more text."
            )
        starts = range(0, len(text.ids) - room + 1, room)
        pieces = [(*text.prefix, *text.ids[start : start + room]) for start in starts]
        every += [Passage(f"{text.name}:{at}", ids, max(len(text.prefix), 1)) for at, ids in zip(starts, pieces, strict=True)]
    if count is None or count >= len(every):
        return every
    return [every[i * len(every) // count] for i in range(count)]


def copies(documents: list[Text], distances: list[int], size: int) -> dict[int, Passage]:
    """Make a passage for each distance: `size` tokens, other text, and the same tokens again, which are measured.

    A distance is the number of tokens between a token and its first copy.
    """
    found = {}
    for distance in distances:
        text = next((text for text in documents if len(text.ids) >= distance), None)
        if text is None:
            longest = max(len(text.ids) for text in documents)
            raise InputError(f"no text has the {distance} tokens that copying needs; the longest has {longest}.")
        if distance < size:
            raise InputError(f"a copy {distance} tokens away overlaps its passage of {size} tokens.")
        ids = (*text.prefix, *text.ids[:distance], *text.ids[:size])
        found[distance] = Passage(f"copy:{distance}", ids, len(text.prefix) + distance + LEAD)
    return found
