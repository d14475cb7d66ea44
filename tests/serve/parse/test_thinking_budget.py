"""Thinking budgets in every syntax: never more reasoning than the budget, and the answer follows."""

import random
from dataclasses import replace

import pytest
import tokenizers
import torch

from auraflux.engine.thinking import ThinkingMatcher
from auraflux.serve.chat.conversation import Conversation, Format
from auraflux.serve.chat.deltas import Content, Reasoning
from auraflux.serve.chat.structured_output import grammar_for
from auraflux.serve.parse.find import BY_TEMPLATE, PLAIN
from auraflux.serve.parse.syntax import Syntax
from auraflux.tokenizer.grammar import GrammarCompiler
from auraflux.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.toy_tokenizers import byte_level

SYNTAXES = [*dict.fromkeys(syntax for _, syntax in BY_TEMPLATE), PLAIN]
BUDGET = 64
WORDS = ["so", " the", " sky", " is", " 4", "\n", ".", " größe", "<", " x </thin", "深い"]


def tokenizer_of(syntax: Syntax, special: bool) -> Tokenizer:
    """Return a tokenizer in which the syntax's markers are special tokens, or text of several tokens."""
    # a copy: the trained one is shared
    built = tokenizers.Tokenizer.from_str(byte_level().to_str())
    if special:
        built.add_special_tokens([token for token in syntax.visible_tokens if built.token_to_id(token) is None])
    return Tokenizer(built, names={"eos_token": "<|im_end|>"}, ends=[2])


def opening_of(syntax: Syntax) -> str:
    return syntax.reply_channels[0] if syntax.reply_channels else syntax.think_tags[-1][0]


class Model:
    """Writes what a matcher allows: reasoning of `length` words, then an answer."""

    def __init__(self, tokenizer: Tokenizer, syntax: Syntax, rng: random.Random, opened: bool, length: int | None):
        self.tokenizer, channels = tokenizer, syntax.reply_channels
        thought = "".join(rng.choice(WORDS) for _ in range(4 * BUDGET if length is None else length))
        closing = "" if length is None else (channels[1] if channels else f"\n{syntax.think_tags[-1][1]}\n\n")
        answer = "The answer." if length is not None or channels is None else f"{syntax.reply_channels[2]}The answer."
        self.planned = self._encode(("" if opened else opening_of(syntax)) + thought + closing)
        self.answer = self._encode("The answer." if length is not None else answer)
        self.tokens: list[int] = []

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, special=False)

    def run(self, matcher: ThinkingMatcher) -> str:
        """Return the text; once something else is forced, the model goes on with its answer."""
        forced = False
        while self.planned or self.answer:
            mask = matcher.mask()
            queue = self.answer if forced or not self.planned else self.planned
            token = queue[0]
            if not int(mask[token // 32]) >> token % 32 & 1:
                bits = (mask.view(torch.uint8)[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()
                [token] = bits.nonzero().flatten().tolist()
                forced, self.planned = True, []
            else:
                queue.pop(0)
            matcher.take(token)
            self.tokens.append(token)
        return self.tokenizer.decode(self.tokens, special=True)


def parsed(syntax: Syntax, tail: str, text: str) -> tuple[str, str]:
    parser = syntax.parser(tail)
    deltas = [*parser.feed(text), *parser.finish()]
    return tuple("".join(each.text for each in deltas if type(each) is kind) for kind in (Reasoning, Content))  # type: ignore


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.name)
def test_reasoning_never_exceeds_its_budget(syntax: Syntax, special: bool):
    tokenizer, syntax = tokenizer_of(syntax, special), replace(syntax, may_think=bool(syntax.think_tags))
    for number in range(10):
        rng = random.Random(number)
        opened = number % 2 == 0
        budget = rng.choice([0, 1, 7, BUDGET])
        tail = "<|im_start|>assistant\n" + (opening_of(syntax) if opened else "")
        limit = syntax.thinking_budget(budget, tail, lambda text: tokenizer.encode(text, special=False))
        assert limit is not None
        assert (limit.opened is not None) == opened
        matcher = ThinkingMatcher(limit, tokenizer.piece, tokenizer.vocab_size, None)
        text = Model(tokenizer, syntax, rng, opened, None).run(matcher)
        # the parser of channels reads a prompt's header with the answer
        header = opening_of(syntax) if opened and syntax.reply_channels else ""
        reasoning, content = parsed(syntax, "" if syntax.reply_channels else tail, header + text)
        assert content.strip() == "The answer."
        # text that is cut may tokenize otherwise at its end
        assert len(tokenizer.encode(reasoning, special=False)) <= budget + 1
        assert matcher._spent <= budget


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.name)
def test_reasoning_within_its_budget_is_left_alone(syntax: Syntax):
    tokenizer, syntax = tokenizer_of(syntax, True), replace(syntax, may_think=bool(syntax.think_tags))
    for opened in (True, False):
        tail = "<|im_start|>assistant\n" + (opening_of(syntax) if opened else "")
        limit = syntax.thinking_budget(1000, tail, lambda text: tokenizer.encode(text, special=False))
        assert limit is not None
        matcher = ThinkingMatcher(limit, tokenizer.piece, tokenizer.vocab_size, None)
        model = Model(tokenizer, syntax, random.Random(1), opened, 20)
        wanted = tokenizer.decode([*model.planned, *model.answer], special=True)
        assert model.run(matcher) == wanted
        assert matcher._inside is None


def test_an_answer_without_reasoning_is_free():
    tokenizer = tokenizer_of(PLAIN, True)
    limit = replace(PLAIN, may_think=True).thinking_budget(0, "assistant\n", lambda text: tokenizer.encode(text, special=False))
    assert limit is not None
    matcher = ThinkingMatcher(limit, tokenizer.piece, tokenizer.vocab_size, None)
    for token in tokenizer.encode("I say <think> is a tag.", special=False):
        assert int(matcher.mask()[token // 32]) >> token % 32 & 1
        matcher.take(token)
    # a model that cannot think has no budget, nor has a prompt that closed the reasoning
    assert PLAIN.thinking_budget(5, "assistant\n", tokenizer.encode) is None
    closed = replace(PLAIN, may_think=True).thinking_budget(5, "<think>\n\n</think>\n\n", tokenizer.encode)
    assert closed is not None
    assert closed.opened is None


def test_gpt_oss_may_call_after_its_budget_but_not_think_again():
    syntax = next(each for each in SYNTAXES if each.name == "harmony")
    tokenizer = tokenizer_of(syntax, True)

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, special=False)

    limit = syntax.thinking_budget(3, "<|start|>assistant", ids)
    assert limit is not None
    final = "<|end|><|start|>assistant<|channel|>final<|message|>"
    for next_channel, rest in (
        ("commentary to=functions.f<|message|>{}", ""),
        ("analysis<|message|>", final),
    ):
        matcher = ThinkingMatcher(limit, tokenizer.piece, tokenizer.vocab_size, None)
        written = [*ids("<|channel|>analysis<|message|>"), *ids("a b c")[:3]]
        for token in written:
            matcher.take(token)
        assert _forced(matcher) == ids("<|end|><|start|>assistant")
        for token in ids(f"<|channel|>{next_channel}"):
            matcher.take(token)
        assert _forced(matcher) == ids(rest)


def _forced(matcher: ThinkingMatcher) -> list[int]:
    found = []
    while (mask := matcher.mask()).ne(0).sum() == 1:
        bits = (mask.view(torch.uint8)[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()
        found += bits.nonzero().flatten().tolist()
        matcher.take(found[-1])
    return found


@pytest.mark.parametrize("name", ["hermes", "harmony", "mistral"])
def test_structured_output_stays_valid(name: str):
    """The grammar asks for reasoning, then the answer in its format: the forced end is a part of it."""
    syntax = next(each for each in SYNTAXES if each.name == name)
    syntax = replace(syntax, may_think=bool(syntax.think_tags))
    tokenizer = tokenizer_of(syntax, True)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (2,))
    conversation = Conversation([], format=Format("regex", "(yes|no)"))
    for number in range(5):
        rng = random.Random(number)
        tail = "<|start|>assistant" if syntax.reply_channels else f"assistant\n{opening_of(syntax)}"
        grammar = grammar_for(conversation, syntax, tail, tokenizer)
        assert grammar is not None
        limit = syntax.thinking_budget(9, tail, lambda text: tokenizer.encode(text, special=False))
        assert limit is not None
        matcher = ThinkingMatcher(limit, tokenizer.piece, tokenizer.vocab_size, compiler.matcher(grammar, frozenset({2})))
        letters = tokenizer.encode("abc xyz", special=False)
        written: list[int] = []
        while not matcher.done and len(written) < 300:
            bits = (matcher.mask().view(torch.uint8)[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()
            allowed = bits.nonzero().flatten().tolist()
            # a model that likes to think
            token = rng.choice([each for each in letters if each in allowed] or allowed)
            matcher.take(token)
            written.append(token)
        text = tokenizer.decode([token for token in written if token != 2], special=True)
        _, content = parsed(syntax, tail, text)
        assert content.strip() in ("yes", "no"), text
        assert matcher._spent <= 9


def test_a_budget_that_ends_within_a_character():
    """A grammar allows nothing but the rest of the character, then the reasoning is closed."""
    syntax = replace(next(each for each in SYNTAXES if each.name == "hermes"), may_think=True)
    tokenizer = tokenizer_of(syntax, True)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (2,))
    tail = f"assistant\n{opening_of(syntax)}"
    grammar = grammar_for(Conversation([], format=Format("regex", "(yes|no)")), syntax, tail, tokenizer)
    assert grammar is not None
    for character in ("Ú", "深", "🙂"):
        units = [token for token in range(tokenizer.vocab_size) if len(tokenizer.piece(token)) == 1]
        byte_tokens = [next(token for token in units if tokenizer.piece(token)[0] == byte) for byte in character.encode()]
        for spent in range(1, len(byte_tokens)):
            limit = syntax.thinking_budget(spent, tail, lambda text: tokenizer.encode(text, special=False))
            assert limit is not None
            matcher = ThinkingMatcher(limit, tokenizer.piece, tokenizer.vocab_size, compiler.matcher(grammar, frozenset({2})))
            for token in byte_tokens:
                assert int(matcher.mask()[token // 32]) >> token % 32 & 1
                matcher.take(token)
            assert _forced(matcher)[: len(limit.tags[0].close_ids)] == list(limit.tags[0].close_ids)
