"""Tokenizers from the vocabulary in a GGUF file, built onto the `tokenizers` package.

"gpt2" is byte-level BPE: tokens and merges are in the file, and `tokenizer.ggml.pre` names the expressions that cut a text into
words first. "llama" is SentencePiece's BPE: a score says how early two tokens merge, and unknown characters become bytes.
"gemma4" is the same with its merges in the file.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from auraflux.errors import FormatError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"


def _cased(suffix: str = "", but: str = "") -> str:
    """Words that end where a large letter follows small ones, without letters that `but` leaves out."""
    first, upper, lower = r"[^\r\n\p{L}\p{N}]?", f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
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

# what splits a text, one after the other; each piece of the one before is split by the next
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
# a word that is a token as a whole is not merged from its parts
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2", "glm4", "tekken", "kimi-k2")
BOS_FIRST = ("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2", "tekken")


def adds_bos(metadata: dict[str, Any]) -> bool:
    """Whether a text begins with the token for the beginning."""
    usual = metadata.get("tokenizer.ggml.model") in ("llama", "gemma4") or metadata.get("tokenizer.ggml.pre") in BOS_FIRST
    return bool(metadata.get("tokenizer.ggml.add_bos_token", usual))


def read_vocabulary(metadata: dict[str, Any]) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokens")
    if len(set(tokens)) != len(tokens):
        raise FormatError(f"The GGUF file lists the token {_repeated(tokens)!r} more than once.")
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise FormatError(f"The GGUF file has {len(tokens)} tokens, but types of {len(types)}.")
    if kind == "gpt2":
        built = _byte_level(metadata, tokens)
    elif kind == "llama":
        built = _sentence_piece(metadata, tokens, _scored(metadata, tokens, types), prefix=True)
    elif kind == "gemma4":
        built = _sentence_piece(metadata, tokens, _listed(metadata, tokens), prefix=False)
    else:
        raise FormatError(f"The GGUF file has a tokenizer of the kind {kind!r}; those that can be read: gpt2, llama, gemma4.")
    _add_tokens(built, tokens, types)
    return built


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in SPLITS:
        known = ", ".join(sorted(SPLITS))
        raise FormatError(f"The GGUF file wants its text split in the way {pre!r}, which is not known; known are {known}.")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = _listed(metadata, tokens)
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in WHOLE_WORDS))
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[pre]]
    built.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    built.decoder = decoders.ByteLevel()
    return built


def _listed(metadata: dict[str, Any], tokens: list[str]) -> list[tuple[str, str]]:
    vocabulary = set(tokens)
    return [_pair(merge, vocabulary) for merge in _strings(metadata, "merges")]


def _pair(merge: str, vocabulary: set[str]) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    for part in (left, right, left + right):
        if part not in vocabulary:
            raise FormatError(f"The GGUF file merges {merge!r}, but has no token {part!r}.")
    return left, right


def _scored(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> list[tuple[str, str]]:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise FormatError(f"The GGUF file has {len(tokens)} tokens, but no score for each of them (tokenizer.ggml.scores).")
    return _merges(tokens, types, scores)


def _sentence_piece(metadata: dict[str, Any], tokens: list[str], merges: list[tuple[str, str]], prefix: bool) -> Tokenizer:
    """Merge characters; `prefix` says whether a text begins with a space where the file does not."""
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    bytewise = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if not bytewise and not 0 <= unknown < len(tokens):
        raise FormatError(f"The GGUF file has neither tokens for single bytes nor one for what is unknown (id {unknown}).")
    built = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=None if bytewise else tokens[unknown],
            byte_fallback=bytewise,
            fuse_unk=not bytewise,
        )
    )
    first = metadata.get("tokenizer.ggml.add_space_prefix", prefix)
    steps = [normalizers.Prepend("▁")] if first else []
    built.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if first else parts)
    return built


def _merges(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Order the pairs of tokens that merge, the best score first."""
    merging = {token: score for token, kind, score in zip(tokens, types, scores, strict=True) if kind in (NORMAL, UNUSED)}
    ranked = sorted((token for token in merging if len(token) > 1), key=lambda token: -merging[token])
    pairs: list[tuple[str, str]] = []
    for score, group in groupby(ranked, key=merging.__getitem__):
        same = list(group)
        found = [pair for token in same for pair in _parts(token, merging)]
        if len(same) > 1 and found:
            if not _is_runs(same):
                raise FormatError(
                    f"The GGUF file gives {same[0]!r} and {same[1]!r} the same score {score}, "
                    "so it is not known which of the two merges first."
                )
            found.sort(key=lambda pair: (pair[0] != pair[1], len(pair[0] + pair[1])))
        pairs += found
    return pairs


def _is_runs(tokens: list[str]) -> bool:
    """Whether these are 2, 3, 4 ... 2**n times the same character, as Llama's spaces are.

    Of equal scores the leftmost pair merges first, so a run grows from the left until it is the longest there is. Merging
    equal halves first comes to the same where the longest is a power of two.
    """
    lengths, longest = sorted(map(len, tokens)), len(max(tokens, key=len))
    return len(set("".join(tokens))) == 1 and lengths == list(range(2, longest + 1)) and longest & (longest - 1) == 0


def _parts(token: str, merging: dict[str, float]) -> Iterator[tuple[str, str]]:
    for cut in range(1, len(token)):
        if token[:cut] in merging and token[cut:] in merging:
            yield token[:cut], token[cut:]


def _add_tokens(built: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Have tokens that are no words found in a text as they are: control tokens are special, the user's own are not."""
    found = [(token, kind) for token, kind in zip(tokens, types, strict=True) if token and kind in (CONTROL, USER_DEFINED)]
    built.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL) for token, kind in found])


def _strings(metadata: dict[str, Any], name: str) -> list[str]:
    found = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not found or not all(isinstance(each, str) for each in found):
        raise FormatError(f"The GGUF file has no list of strings under tokenizer.ggml.{name}, so its text cannot be read.")
    return found


def _repeated(tokens: Iterable[str]) -> str:
    seen: set[str] = set()
    return next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
