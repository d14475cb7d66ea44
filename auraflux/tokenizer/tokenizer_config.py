"""Reader of tokenizer_config.json and related files: types of their keys, and the tokens they add."""

from pathlib import Path

from auraflux.errors import FormatError
from auraflux.weights.fields import Fields
from auraflux.weights.formats.untrusted import OBJECT, Kind, either, list_of, mapping_of, named, read_json, shown, string

CONFIG = "tokenizer_config.json"
CONTENT = string(1 << 12)
SOURCE = string(1 << 22)  # of a chat template
TEMPLATES = either(SOURCE, list_of(OBJECT, 64), mapping_of(SOURCE, 64))
ANYTHING: Kind[object] = Kind("anything", lambda value: True)


def read_fields(folder: Path, name: str) -> Fields:
    """Read a JSON file of a folder; return no keys if it is absent."""
    path = folder / name
    return Fields(path, read_json(path, folder) if path.exists() else {})


def added_tokens(config: Fields) -> dict[int, Fields]:
    """Return the added tokens of tokenizer_config.json by id; each has a content."""
    listed = config.get("added_tokens_decoder", OBJECT, {})
    found = {}
    for key, about in listed.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise FormatError(
                f"{named(config.where)} has a token under {shown(key)} in added_tokens_decoder; the key must be a number."
            )
        if not OBJECT.accepts(about):
            raise FormatError(
                f"{named(config.where)}: added_tokens_decoder has {key} = {shown(about)}; {OBJECT.expected} is needed."
            )
        found[int(key)] = Fields(f"{config.where}: token {key}", about)
        found[int(key)].read("content", CONTENT)
    return found


def token_names(config: Fields) -> dict[str, str]:
    """Return the special tokens by their names in templates: {"bos_token": "<s>", ...}."""
    found = {name: _content(config.get(name, ANYTHING, None)) for name in config if name.endswith("_token")}
    return {name: content for name, content in found.items() if content is not None}


def _content(value: object) -> str | None:
    """Return a token from a string or from an object with a content."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) and found else None
