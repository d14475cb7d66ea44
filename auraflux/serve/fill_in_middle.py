"""Fill in the middle: prompts with text before and after the gap, in the tokens that each family was trained with."""

from dataclasses import dataclass

from auraflux.tokenizer.tokenizer import Tokenizer

# DeepSeek's tokens have wide bars
BAR = "\uff5c"
# spellings of the tokens before the prefix, before the suffix and before the middle
FAMILIES = (
    # Qwen Coder, CodeGemma, Granite 4
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # SantaCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # DeepSeek Coder
    (f"<{BAR}fim▁begin{BAR}>", f"<{BAR}fim▁hole{BAR}>", f"<{BAR}fim▁end{BAR}>"),
    # Code Llama, in the vocabulary and as an added token
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    # GLM 4.5
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)
# Codestral was trained with the suffix first, and without a token before the middle
SUFFIX_FIRST = ("[PREFIX]", "[SUFFIX]")
GGUF_NAMES = ("fim_pre_token", "fim_suf_token", "fim_mid_token")
# tokens that end the middle, besides those that end a sequence: the next file, padding, the next gap
ENDS = (
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|cursor|>", "<|file_separator|>"),
    *("<fim_pad>", "<file_sep>", "<reponame>", "<fim-pad>", "▁<EOT>", "<EOT>", "<|EOT|>", "[MIDDLE]"),
)
# a character that merges with no other, to encode text without the space that some vocabularies put first
ANCHOR = "☺"


@dataclass(frozen=True)
class FillTokens:
    """Tokens that surround the parts of a prompt.

    prefix, suffix  before the text of this name
    middle          after both; None if the prefix comes last
    stop_ids        tokens that end the middle
    """

    prefix: int
    suffix: int
    middle: int | None
    stop_ids: frozenset[int]

    def prompt(self, tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
        """Return the tokens of a prompt with a gap between prefix and suffix."""
        before, after = tokenizer.encode(prefix, special=False), _without_space(tokenizer, suffix)
        first = [tokenizer.bos] if tokenizer.bos is not None and tokenizer.encode("x")[:1] == [tokenizer.bos] else []
        if self.middle is None:
            return [*first, self.suffix, *after, self.prefix, *before]
        return [*first, self.prefix, *before, self.suffix, *after, self.middle]


def find_fill_tokens(tokenizer: Tokenizer) -> FillTokens | None:
    """Return the tokens of a vocabulary for filling in the middle: those that its file names, else those of a family."""
    named = tuple(tokenizer.names.get(name, "") for name in GGUF_NAMES)
    for prefix, suffix, middle in (named, *FAMILIES):
        ids = tuple(tokenizer.token_id(token) for token in (prefix, suffix, middle))
        if None not in ids:
            return _found(tokenizer, *ids)
    ids = tuple(tokenizer.token_id(token) for token in SUFFIX_FIRST)
    return None if None in ids else _found(tokenizer, *ids, None)


def _found(tokenizer: Tokenizer, *ids: int | None) -> FillTokens:
    prefix, suffix, middle = ids
    assert prefix is not None, "every family has it"
    assert suffix is not None, "every family has it"
    ends = {tokenizer.token_id(token) for token in ENDS} | {prefix, suffix, middle}
    return FillTokens(prefix, suffix, middle, frozenset(number for number in ends if number is not None))


def _without_space(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode text without a space before its first word."""
    if not tokenizer.starts_with_space:
        return tokenizer.encode(text, special=False)
    anchor, whole = tokenizer.encode(ANCHOR, special=False), tokenizer.encode(ANCHOR + text, special=False)
    if whole[: len(anchor)] != anchor:
        return tokenizer.encode(text, special=False)
    return whole[len(anchor) :]
