"""Tokenizer, from tokenizer.json, tiktoken.model or the vocabulary in a GGUF file. All are read as data, never executed."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from auraflux.errors import FormatError, InputError, TemplateError
from auraflux.tokenizer.chat_template import render
from auraflux.tokenizer.detokenizer import Detokenizer
from auraflux.tokenizer.rust_panics import load_failure, suppress_stderr
from auraflux.tokenizer.token_bytes import TokenBytes
from auraflux.tokenizer.tokenizer_config import CONFIG, CONTENT, SOURCE, TEMPLATES, added_tokens, read_fields, token_names
from auraflux.tokenizer.vocabulary.gguf import adds_bos, read_vocabulary
from auraflux.tokenizer.vocabulary.tiktoken_file import NAME as RANKS
from auraflux.tokenizer.vocabulary.tiktoken_file import read_tiktoken
from auraflux.weights.fields import TOKEN, Fields, end_tokens, fields_of
from auraflux.weights.formats.untrusted import FLAG, read_text, regular_file, shown

# placeholder reply, to find the token that a template puts after one
REPLY = "placeholder-reply"
# special tokens that end a document in every vocabulary that has them, even if its config names others
DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>")
# placeholders of images and audio, which no text has, even if a file lists them as ordinary tokens
MEDIA = tuple(f"<{part}_{kind}>" for kind in ("image", "audio", "video") for part in ("start_of", "end_of"))
MEDIA += ("<image_soft_token>", "<audio_soft_token>", "<video_soft_token>")
MAX_TOKENIZER_NBYTES = 256 << 20
MAX_TEMPLATE_NBYTES = 1 << 22


class Tokenizer:
    """Tokenizer and chat templates of one model.

    bos          token id that begins a sequence, or None
    special_ids  ids of special tokens
    names        special tokens by their names in templates: {"bos_token": "<s>", ...}
    templates    sources of the chat templates by name; the main one is "default"
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
        # a tokenizer.json may enable truncation or padding
        inner.no_truncation()
        inner.no_padding()
        self.names, self.templates = dict(names or {}), dict(templates or {})
        self.bos = self.token_id(self.names.get("bos_token", ""))
        self._ends = set(ends)
        # added where the post-processor of tokenizer.json has not done so
        self._first, self._last = first, last
        added = inner.get_added_tokens_decoder()
        media = {number for each in MEDIA if (number := inner.token_to_id(each)) is not None}
        self.special_ids = frozenset(number for number, token in added.items() if token.special) | media
        self._added = {token.content: number for number, token in added.items()}
        self._pieces = TokenBytes(inner)

    @classmethod
    def from_folder(cls, path: Path | str) -> "Tokenizer | None":
        """Read the tokenizer of a model folder; return None if it has none."""
        folder = Path(path)
        has_json = (folder / "tokenizer.json").exists()
        if not has_json and not (folder / RANKS).exists():
            return None
        config = read_fields(folder, CONFIG)
        inner = _read_tokenizer(folder) if has_json else read_tiktoken(folder, config)
        _add_missing(inner, config)
        names = token_names(read_fields(folder, "special_tokens_map.json")) | token_names(config)
        bos, eos = inner.token_to_id(names.get("bos_token", "")), inner.token_to_id(names.get("eos_token", ""))
        ends = _end_ids(folder)
        return cls(
            inner,
            names=names,
            ends=ends if eos is None else ends | {eos},
            first=bos if config.get("add_bos_token", FLAG, False) else None,
            last=eos if config.get("add_eos_token", FLAG, False) else None,
            templates=_templates(folder, config),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Build the tokenizer from the metadata of a GGUF file."""
        inner, fields = read_vocabulary(metadata), fields_of(metadata, "the GGUF file")
        tokens = metadata["tokenizer.ggml.tokens"]
        fill = {f"fim_{part}": f"fim_{part}_token" for part in ("pre", "suf", "mid")}
        called = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", **fill}
        ids = {key: _gguf_id(fields, key, len(tokens)) for key in (*called, "eot", "eom")}
        templates = {
            key.removeprefix("tokenizer.chat_template").strip(".") or "default": fields.read(key, SOURCE)
            for key in fields
            if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")
        }
        return cls(
            inner,
            names={name: tokens[number] for key, name in called.items() if (number := ids[key]) is not None},
            ends={number for key in ("eos", "eot", "eom") if (number := ids[key]) is not None},
            first=ids["bos"] if adds_bos(metadata) else None,
            last=ids["eos"] if fields.get("tokenizer.ggml.add_eos_token", FLAG, False) else None,
            templates=templates,
        )

    @cached_property
    def vocab_size(self) -> int:
        """Highest token id plus one."""
        return 1 + max(self._inner.get_vocab().values(), default=-1)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Ids by token."""
        return self._inner.get_vocab()

    @property
    def json(self) -> str:
        """Content of its tokenizer.json."""
        return self._inner.to_str()

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a sequence: those the files name, and those that end a document in every vocabulary."""
        found = {self.token_id(token) for token in DOCUMENT_ENDS}
        return frozenset(self._ends | {number for number in found if number is not None} & self.special_ids)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Encode text as token ids; special tokens in the text are recognized.

        `special` adds BOS and EOS as the model expects them; rendered chat templates contain them already.
        """
        try:
            ids = self._inner.encode(text, add_special_tokens=special).ids
        except (TypeError, UnicodeError) as err:
            # surrogates stand for invalid UTF-8 bytes or for half a character
            lone = re.search("[\ud800-\udfff]", text) if isinstance(text, str) else None
            reason = f"invalid UTF-8 at character {lone.start()}" if lone else err
            raise InputError(f"The text cannot be tokenized: {reason}.") from err
        if special and self._first is not None and ids[:1] != [self._first]:
            ids.insert(0, self._first)
        if special and self._last is not None and ids[-1:] != [self._last]:
            ids.append(self._last)
        return ids

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Decode token ids into text; `special` includes special tokens."""
        return Detokenizer(self, special=special).decode_all(ids)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as spelled in the vocabulary, or None."""
        return self._inner.token_to_id(token)

    def piece(self, token: int) -> bytes:
        """Return the bytes of one token; empty for an unknown id."""
        return self._pieces[token]

    def is_special(self, token: int) -> bool:
        return token in self.special_ids

    @property
    def starts_with_space(self) -> bool:
        """True if encoding adds a space before the first word."""
        return self._pieces.strips

    def apply_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        template: str | None = None,
        **values: Any,
    ) -> str:
        """Render a chat as prompt text; `template` selects one by name, `values` are variables such as tools."""
        if template is None:
            template = "tool_use" if values.get("tools") and "tool_use" in self.templates else "default"
        if template not in self.templates:
            hint = f"It has: {', '.join(sorted(self.templates))}." if self.templates else "Use a plain prompt instead."
            raise TemplateError(f"The model has no chat template{f' {template!r}' if self.templates else ''}. {hint}")
        given = {**self.names, **values, "add_generation_prompt": add_generation_prompt}
        return render(self.templates[template], messages, **given)

    @cached_property
    def end_of_turn_ids(self) -> frozenset[int]:
        """Token that the chat template puts after a reply, which ends a chat reply; empty if there is none."""
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": REPLY}]
        try:
            rest = self.apply_template(chat, add_generation_prompt=False).rpartition(REPLY)[2].lstrip()
        except TemplateError:
            return frozenset()
        found = max((token for token in self._added if rest.startswith(token)), key=len, default=None)
        return frozenset() if found is None else frozenset({self._added[found]})


def _read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    path = regular_file(folder / "tokenizer.json", folder)
    if (nbytes := path.stat().st_size) > MAX_TOKENIZER_NBYTES:
        raise FormatError(f"{path} has {nbytes:,} bytes; the limit is {MAX_TOKENIZER_NBYTES:,}.")
    try:
        with suppress_stderr():
            return tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    # a panic in the tokenizers package is a BaseException
    except BaseException as err:
        raise FormatError(f"{path} is not a valid tokenizer: {load_failure(path, err)}.") from err


def _add_missing(inner: tokenizers.Tokenizer, config: Fields) -> None:
    """Add the tokens that only tokenizer_config.json has; their ids must follow the vocabulary."""
    flags = ("special", "lstrip", "rstrip", "single_word", "normalized")
    for number, about in sorted(added_tokens(config).items()):
        content = about.read("content", CONTENT)
        given = {flag: about.get(flag, FLAG, False) for flag in flags if flag in about}
        if inner.token_to_id(content) is None:
            token = tokenizers.AddedToken(content, **given)
            inner.add_tokens([token])
            if inner.token_to_id(token.content) != number:
                there = inner.token_to_id(token.content)
                raise FormatError(
                    f"tokenizer_config.json has {shown(token.content)} as token {number}, here it would be {there}."
                )


def _end_ids(folder: Path) -> set[int]:
    """Return the end-of-sequence ids of generation_config.json, or else of config.json."""
    config = read_fields(folder, "config.json")
    named = [
        end_tokens(each) for each in (read_fields(folder, "generation_config.json"), config, config.section("text_config"))
    ]
    return set(next((ids for ids in named if ids is not None), []))


def _templates(folder: Path, config: Fields) -> dict[str, str]:
    """Return template sources by name; template files override tokenizer_config.json."""
    given = config.get("chat_template", TEMPLATES, None)
    listed: Any = given or read_fields(folder, "chat_template.json").get("chat_template", TEMPLATES, {})
    if isinstance(listed, str):
        listed = {"default": listed}
    elif isinstance(listed, list):
        listed = {one.get("name"): one.get("template") for one in listed if isinstance(one, dict)}
    if not isinstance(listed, dict) or not all(isinstance(each, str) for pair in listed.items() for each in pair):
        raise FormatError(f"The chat_template of {folder} is neither a string nor a list of named strings.")
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    return listed | {name: read_text(path, folder, MAX_TEMPLATE_NBYTES) for name, path in files.items()}


def _gguf_id(fields: Fields, key: str, count: int) -> int | None:
    number = fields.get(f"tokenizer.ggml.{key}_token_id", TOKEN, None)
    if number is None or number < count:
        return number
    raise FormatError(f"The GGUF file has tokenizer.ggml.{key}_token_id = {number!r}, which is not one of its tokens.")
