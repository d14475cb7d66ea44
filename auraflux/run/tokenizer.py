"""Text to tokens and back, from tokenizer.json, tiktoken.model or the vocabulary in a GGUF file. All are data, never run."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from auraflux.errors import FormatError, InputError, TemplateError
from auraflux.run.detokenize import Detokenizer
from auraflux.run.panics import cause, unprinted
from auraflux.run.pieces import Pieces
from auraflux.run.template import render
from auraflux.run.tiktoken_file import NAME as RANKS
from auraflux.run.tiktoken_file import read_tiktoken
from auraflux.run.vocabulary import adds_bos, read_vocabulary
from auraflux.weights.boundary import Kind, check, read_json, read_text, regular, shown
from auraflux.weights.model_keys import CONFIG, GENERATION, TOKENIZER, check_added_tokens

# stands for a reply when looking what a template puts after one
REPLY = "a-reply-of-its-own"
# special tokens that end a document in every vocabulary that has them, named as its end or not
DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>")
LARGEST_TOKENIZER = 256 << 20  # bytes
LARGEST_TEMPLATE = 1 << 22


class Tokenizer:
    """Turns text into tokens, tokens into text, and messages into the text of a chat.

    bos          the token a text begins with, or None
    special_ids  tokens that are no text: turns, beginnings, ends
    names        what templates call them: {"bos_token": "<s>", ...}
    templates    sources of the chat templates by name; the usual one is "default"
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        names: Mapping[str, str] | None = None,
        ends: Iterable[int] = (),
        first: int | None = None,
        last: int | None = None,
        templates: Mapping[str, str] | None = None,
    ):
        self._inner = inner
        # a tokenizer.json may say that texts are cut or filled up to some length
        inner.no_truncation()
        inner.no_padding()
        self.names, self.templates = dict(names or {}), dict(templates or {})
        self.bos = self.token_id(self.names.get("bos_token", ""))
        self._ends = set(ends)
        # added to every text that has them not, after what the post-processor in tokenizer.json does
        self._first, self._last = first, last
        added = inner.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self._added = {token.content: number for number, token in added.items()}
        self._pieces = Pieces(inner)

    @classmethod
    def from_folder(cls, path: Path | str) -> "Tokenizer | None":
        """Read the tokenizer of a model folder; None if it has none."""
        folder = Path(path)
        whole = (folder / "tokenizer.json").exists()
        if not whole and not (folder / RANKS).exists():
            return None
        config = _optional(folder, "tokenizer_config.json", TOKENIZER)
        inner = _read_tokenizer(folder) if whole else read_tiktoken(folder, config)
        _add_missing(inner, folder, config)
        names = _names(_optional(folder, "special_tokens_map.json", {})) | _names(config)
        bos, eos = inner.token_to_id(names.get("bos_token", "")), inner.token_to_id(names.get("eos_token", ""))
        ends = _end_ids(folder)
        return cls(
            inner,
            names=names,
            ends=ends if eos is None else ends | {eos},
            first=bos if config.get("add_bos_token") else None,
            last=eos if config.get("add_eos_token") else None,
            templates=_templates(folder, config),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Build the tokenizer that the metadata of a GGUF file describes."""
        found = dict(metadata)
        inner = read_vocabulary(found)
        ids = {key: _gguf_id(found, key) for key in ("bos", "eos", "unknown", "padding", "eot", "eom")}
        called = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        tokens = found["tokenizer.ggml.tokens"]
        templates = {
            key.removeprefix("tokenizer.chat_template").strip(".") or "default": source
            for key, source in found.items()
            if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")
        }
        return cls(
            inner,
            names={name: tokens[number] for key, name in called.items() if (number := ids[key]) is not None},
            ends={number for key in ("eos", "eot", "eom") if (number := ids[key]) is not None},
            first=ids["bos"] if adds_bos(found) else None,
            last=ids["eos"] if found.get("tokenizer.ggml.add_eos_token") else None,
            templates=templates,
        )

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token."""
        return 1 + max(self._inner.get_vocab().values(), default=-1)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token's number."""
        return self._inner.get_vocab()

    @property
    def json(self) -> str:
        """The text of its tokenizer.json."""
        return self._inner.to_str()

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end any text: those the files name, and those that end a document wherever they exist."""
        found = {self.token_id(token) for token in DOCUMENT_ENDS}
        return frozenset(self._ends | {number for number in found if number is not None} & self.special_ids)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Give the tokens of a text; special tokens in it are found.

        With `special`, it begins and ends as the model knows texts. The text of a chat template does so already.
        """
        try:
            ids = self._inner.encode(text, add_special_tokens=special).ids
        except (TypeError, UnicodeError) as err:
            # characters of this range stand for bytes that were no UTF-8, or for half a character
            lone = re.search("[\ud800-\udfff]", text) if isinstance(text, str) else None
            reason = f"it is not UTF-8 at character {lone.start()}" if lone else err
            raise InputError(f"This is not a text that can be made into tokens: {reason}.") from err
        if special and self._first is not None and ids[:1] != [self._first]:
            ids.insert(0, self._first)
        if special and self._last is not None and ids[-1:] != [self._last]:
            ids.append(self._last)
        return ids

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Give the text of tokens, with `special` also of those that are no text."""
        return Detokenizer(self, special=special).whole(ids)

    def token_id(self, token: str) -> int | None:
        """Give the number of a token as it is spelled in the vocabulary."""
        return self._inner.token_to_id(token)

    def piece(self, token: int) -> bytes:
        """Give the bytes of one token; none for a number that is no token."""
        return self._pieces[token]

    def is_special(self, token: int) -> bool:
        return token in self.special_ids

    @property
    def starts_with_space(self) -> bool:
        """Whether the first word of every text is given a space that is not part of it."""
        return self._pieces.strips

    def apply_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        template: str | None = None,
        **values: Any,
    ) -> str:
        """Give the text of a chat; `template` names one of several, `values` (tools, ...) are what it may ask for."""
        if template is None:
            template = "tool_use" if values.get("tools") and "tool_use" in self.templates else "default"
        if template not in self.templates:
            there = f"It has: {', '.join(sorted(self.templates))}." if self.templates else "Give it a plain prompt instead."
            raise TemplateError(f"The model has no chat template{f' {template!r}' if self.templates else ''}. {there}")
        given = {**self.names, **values, "add_generation_prompt": add_generation_prompt}
        return render(self.templates[template], messages, **given)

    @cached_property
    def turn_ends(self) -> frozenset[int]:
        """The token that the chat template puts after a reply, if it is one: it ends an answer in a chat."""
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": REPLY}]
        try:
            rest = self.apply_template(chat, add_generation_prompt=False).rpartition(REPLY)[2].lstrip()
        except TemplateError:
            return frozenset()
        found = max((token for token in self._added if rest.startswith(token)), key=len, default=None)
        return frozenset() if found is None else frozenset({self._added[found]})


def _read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    path = regular(folder / "tokenizer.json", folder)
    if (nbytes := path.stat().st_size) > LARGEST_TOKENIZER:
        raise FormatError(f"{path} has {nbytes:,} bytes; at most {LARGEST_TOKENIZER:,} are read.")
    try:
        with unprinted():
            return tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    # a panic in the tokenizers package is a BaseException
    except BaseException as err:
        raise FormatError(f"{path} is not a tokenizer that can be read: {cause(path, err)}.") from err


def _optional(folder: Path, name: str, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """What a file of a folder says; nothing where there is none."""
    path = folder / name
    if not path.exists():
        return {}
    found = read_json(path, folder)
    check(path, found, kinds)
    return found


def _content(value: Any) -> str | None:
    """A token in a configuration is a string, or an object that holds one."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) and found else None


def _names(config: dict[str, Any]) -> dict[str, str]:
    found = {name: _content(value) for name, value in config.items() if name.endswith("_token")}
    return {name: content for name, content in found.items() if content is not None}


def _add_missing(inner: tokenizers.Tokenizer, folder: Path, config: dict[str, Any]) -> None:
    """Add the tokens that only tokenizer_config.json knows; their numbers must follow those there are."""
    listed = config.get("added_tokens_decoder") or {}
    check_added_tokens(folder / "tokenizer_config.json", listed)
    flags = ("special", "lstrip", "rstrip", "single_word", "normalized")
    for number, about in sorted((int(number), about) for number, about in listed.items()):
        if inner.token_to_id(about["content"]) is None:
            token = tokenizers.AddedToken(about["content"], **{flag: bool(about[flag]) for flag in flags if flag in about})
            inner.add_tokens([token])
            if inner.token_to_id(token.content) != number:
                there = inner.token_to_id(token.content)
                raise FormatError(
                    f"tokenizer_config.json has {shown(token.content)} as token {number}, here it would be {there}."
                )


def _end_ids(folder: Path) -> set[int]:
    """The tokens that generation_config.json, or else config.json, says end a text."""
    config = _optional(folder, "config.json", CONFIG)
    inner = config.get("text_config") or {}
    check(folder / "config.json", inner, GENERATION)
    for found in (_optional(folder, "generation_config.json", GENERATION), config, inner):
        if (ids := found.get("eos_token_id")) is not None:
            return set(ids) if isinstance(ids, list) else {ids}
    return set()


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Sources by name; a file of its own goes before what tokenizer_config.json says."""
    listed = config.get("chat_template") or _optional(folder, "chat_template.json", TOKENIZER).get("chat_template") or {}
    if isinstance(listed, str):
        listed = {"default": listed}
    elif isinstance(listed, list):
        listed = {one.get("name"): one.get("template") for one in listed if isinstance(one, dict)}
    if not isinstance(listed, dict) or not all(isinstance(part, str) for pair in listed.items() for part in pair):
        raise FormatError(f"The chat_template of {folder} is neither a text nor a list of named texts.")
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    return listed | {name: read_text(path, folder, LARGEST_TEMPLATE) for name, path in files.items()}


def _gguf_id(metadata: dict[str, Any], key: str) -> int | None:
    number = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if number is None or (isinstance(number, int) and 0 <= number < len(metadata["tokenizer.ggml.tokens"])):
        return number
    raise FormatError(f"The GGUF file has tokenizer.ggml.{key}_token_id = {number!r}, which is none of its tokens.")
