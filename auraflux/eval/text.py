"""The texts that are measured: read from files or from those that come with the package, and cut into passages of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from auraflux.errors import InputError
from auraflux.run.tokenizer import Tokenizer

REQUEST = "Write the next part of a speech."  # that the text answers, in chat format
LEAD = 8  # tokens of a second copy that show that it is one; they are not measured


@dataclass(frozen=True)
class Passage:
    """Tokens of which those from `first` on are predicted and measured.

    name  tells it from others of a run
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

    prefix  tokens before every passage of it: the beginning of a text as the model knows it, or a question in chat format
    """

    name: str
    ids: tuple[int, ...]
    prefix: tuple[int, ...]


def read_files(paths: list[Path]) -> dict[str, str]:
    """Read texts by their names; without paths, those of the package."""
    if not paths:
        folder = resources.files("auraflux.eval") / "texts"
        return {path.name: path.read_text("utf-8") for path in _sorted(folder) if path.name.endswith(".txt")}
    return {str(path): decoded(path) for path in paths}


def _sorted(folder: resources.abc.Traversable) -> list[resources.abc.Traversable]:
    return sorted(folder.iterdir(), key=lambda path: path.name)


def decoded(path: Path) -> str:
    """Read a file that must be a text."""
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


def tokenized(texts: dict[str, str], tokenizer: Tokenizer, chat: bool) -> list[Text]:
    """Give the tokens of texts, each with what comes before a passage of it."""
    prefix = tokenizer.encode("")
    if chat:
        prefix = tokenizer.encode(tokenizer.apply_template([{"role": "user", "content": REQUEST}]), special=False)
    return [Text(name, tuple(tokenizer.encode(text, special=False)), tuple(prefix)) for name, text in texts.items()]


def shared_tokens(endings: Sequence[Sequence[int]]) -> int:
    """How many tokens sequences have in common at their beginning; each has at least one more."""
    most = min(len(ending) for ending in endings) - 1
    return next((i for i in range(most) if len({ending[i] for ending in endings}) > 1), most)


def windows(texts: list[Text], size: int, count: int | None) -> list[Passage]:
    """Cut texts into windows of `size` tokens, and take `count` of them evenly spread; None for all."""
    every = []
    for text in texts:
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


def copies(texts: list[Text], distances: list[int], size: int) -> dict[int, Passage]:
    """Make, for each distance, a passage of `size` tokens, other text, and the passage again; the second copy is measured.

    A distance is that of a token from its first copy.
    """
    found = {}
    for distance in distances:
        text = next((text for text in texts if len(text.ids) >= distance), None)
        if text is None:
            longest = max(len(text.ids) for text in texts)
            raise InputError(f"no text has the {distance} tokens that copying needs; the longest has {longest}.")
        if distance < size:
            raise InputError(f"a copy {distance} tokens away overlaps its passage of {size} tokens.")
        ids = (*text.prefix, *text.ids[:distance], *text.ids[:size])
        found[distance] = Passage(f"copy:{distance}", ids, len(text.prefix) + distance + LEAD)
    return found
