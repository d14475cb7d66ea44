"""Tokenizers from the vocabulary in a GGUF file, built with the `tokenizers` package.

"gpt2" is byte-level BPE: tokens and merges are in the file, and `tokenizer.ggml.pre` names the pre-tokenizer's expressions.
"llama" is SentencePiece's BPE: a token's score is its merge priority, and unknown characters become bytes. "gemma4" is the same
with its merges in the file.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from auraflux.errors import FormatError
from auraflux.tokenizer.vocabulary.scored_merges import scored_merges
from auraflux.weights.fields import NAME, TOKEN, Fields, fields_of
from auraflux.weights.formats.untrusted import FLAG, integer, list_of, number, string

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"


def _cased(suffix: str = "", excluded: str = "") -> str:
    """Return the expression of words that end where an upper-case letter follows lower-case ones, less `excluded` ones."""
    first, upper, lower = r"[^\r\n\p{L}\p{N}]?", f"[{_UPPER}{excluded}]", f"[{_LOWER}{excluded}]"
    return f"{first}{upper}*{lower}+{suffix}|{first}{upper}+{lower}*{suffix}"


GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
DIGITS_GPT2 = (r"\p{N}", *GPT2)
LLAMA3 = (rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_REST}",)
QWEN2 = (rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION}|{_REST}",)
QWEN35 = (rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}",)
GPT4O = (_cased(f"{_SUFFIX}?") + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}",)
TEKKEN = (_cased() + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}",)
KIMI = (r"\p{Han}+|" + _cased(f"{_SUFFIX}?", r"&&[^\p{Han}]") + rf"|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_REST}",)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _REST,
)
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", *GPT2, "[0-9][0-9][0-9]")
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", *GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

# pre-tokenizers: each expression splits the pieces of the one before
SPLITS: dict[str, tuple[str, ...]] = {
    "default": DEFAULT,
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), LLAMA3),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), DIGITS_GPT2),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4", "trillion", "gigachat"), GPT2),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "grok-2", "solar-open"), QWEN2),
    "qwen35": QWEN35,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), GPT4O),
    "kimi-k2": KIMI,
    "tekken": TEKKEN,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), DEEPSEEK3),
    "falcon": FALCON,
}
GGML, FILE = "tokenizer.ggml", "the GGUF file"
MAX_TOKENS = 1 << 24
# a word in the vocabulary is one token, whatever its merges
IGNORE_MERGES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2", "glm4", "tekken", "kimi-k2")
BOS_FIRST = ("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2", "tekken")


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Return whether a prompt begins with the BOS token."""
    fields = fields_of(metadata, FILE)
    kind, pre = fields.get(f"{GGML}.model", NAME, None), fields.get(f"{GGML}.pre", NAME, None)
    return fields.get(f"{GGML}.add_bos_token", FLAG, kind in ("llama", "gemma4") or pre in BOS_FIRST)


def read_vocabulary(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes."""
    fields = fields_of(metadata, FILE)
    kind, tokens = fields.get(f"{GGML}.model", NAME, None), _strings(fields, "tokens")
    if len(set(tokens)) != len(tokens):
        raise FormatError(f"The GGUF file lists the token {_repeated(tokens)!r} more than once.")
    types = fields.get(f"{GGML}.token_type", list_of(integer(0, 255), MAX_TOKENS), []) or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise FormatError(f"The GGUF file has {len(tokens)} tokens, but {len(types)} token types.")
    if kind == "gpt2":
        built = _byte_level(fields, tokens)
    elif kind == "llama":
        built = _sentence_piece(fields, tokens, _scored(fields, tokens, types), prefix=True)
    elif kind == "gemma4":
        built = _sentence_piece(fields, tokens, _listed(fields, tokens), prefix=False)
    else:
        raise FormatError(f"The GGUF file has a tokenizer of type {kind!r}; supported: gpt2, llama, gemma4.")
    _add_tokens(built, tokens, types)
    return built


def _byte_level(fields: Fields, tokens: list[str]) -> Tokenizer:
    pre = fields.get(f"{GGML}.pre", NAME, None)
    if pre is None or pre not in SPLITS:
        known = ", ".join(sorted(SPLITS))
        raise FormatError(f"The GGUF file has the pre-tokenizer {pre!r}, which is not supported; supported: {known}.")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = _listed(fields, tokens)
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in IGNORE_MERGES))
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[pre]]
    built.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    built.decoder = decoders.ByteLevel()
    return built


def _listed(fields: Fields, tokens: list[str]) -> list[tuple[str, str]]:
    vocabulary, merges = set(tokens), _strings(fields, "merges")
    pairs = [(left, right) for left, _, right in [merge.partition(" ") for merge in merges]]
    if not (vocabulary.issuperset(chain.from_iterable(pairs)) and vocabulary.issuperset(map("".join, pairs))):
        _refuse_unknown(merges, pairs, vocabulary)
    return pairs


def _refuse_unknown(merges: list[str], pairs: list[tuple[str, str]], vocabulary: set[str]) -> None:
    """Raise for the first merge of something that is no token."""
    for merge, (left, right) in zip(merges, pairs, strict=True):
        for part in (left, right, left + right):
            if part not in vocabulary:
                raise FormatError(f"The GGUF file merges {merge!r}, but has no token {part!r}.")


def _scored(fields: Fields, tokens: list[str], types: list[int]) -> list[tuple[str, str]]:
    scores = fields.get(f"{GGML}.scores", list_of(number(-3.5e38, 3.5e38), MAX_TOKENS), None)
    if scores is None or len(scores) != len(tokens):
        raise FormatError(f"The GGUF file has {len(tokens)} tokens, but not as many scores (tokenizer.ggml.scores).")
    merging = [i for i, kind in enumerate(types) if kind in (NORMAL, UNUSED)]
    return scored_merges([tokens[i] for i in merging], [scores[i] for i in merging])


def _sentence_piece(fields: Fields, tokens: list[str], merges: list[tuple[str, str]], prefix: bool) -> Tokenizer:
    """Build a SentencePiece tokenizer; `prefix` is the default of add_space_prefix."""
    unknown = fields.get(f"{GGML}.unknown_token_id", TOKEN, 0)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    bytewise = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if not bytewise and not 0 <= unknown < len(tokens):
        raise FormatError(f"The GGUF file has neither byte tokens nor an unknown token (id {unknown}).")
    built = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=None if bytewise else tokens[unknown],
            byte_fallback=bytewise,
            fuse_unk=not bytewise,
        )
    )
    first = fields.get(f"{GGML}.add_space_prefix", FLAG, prefix)
    steps = [normalizers.Prepend("▁")] if first else []
    built.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    steps_back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*steps_back, decoders.Strip(" ", 1, 0)] if first else steps_back)
    return built


def _add_tokens(built: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Register control tokens as special and user-defined tokens as added tokens, matched before pre-tokenization."""
    found = [(token, kind) for token, kind in zip(tokens, types, strict=True) if token and kind in (CONTROL, USER_DEFINED)]
    built.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL) for token, kind in found])


def _strings(fields: Fields, name: str) -> list[str]:
    found = fields.get(f"{GGML}.{name}", list_of(string(1 << 16), MAX_TOKENS), None)
    if not found:
        raise FormatError(f"The GGUF file has no list of strings tokenizer.ggml.{name}.")
    return found


def _repeated(tokens: Iterable[str]) -> str:
    seen: set[str] = set()
    return next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
