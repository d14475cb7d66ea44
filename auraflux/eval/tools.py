"""Function-calling test: the right call after a long context.

A conversation starts with functions in JSON, followed by text and a question that one of them answers. The right call is
compared token by token with the uncompressed run, and its name is compared by likelihood with the names of all functions, so
that models can be measured that would not find the call themselves. Several questions share the beginning of a conversation.

Questions are those of the Berkeley Function-Calling Leaderboard (PyPI bfcl-eval), in its file format.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from auraflux.errors import InputError
from auraflux.eval.metrics import NONE, Differences, compare, probability_among, summary
from auraflux.eval.scorer import Scorer
from auraflux.eval.text import Text, decoded, shared_tokens
from auraflux.tokenizer.tokenizer import Tokenizer

QUESTIONS_PER_CONVERSATION = 4
SHIPPED = "bfcl.jsonl"
ANSWERS = "possible_answer"  # folder next to BFCL's question files that holds the answers
INSTRUCTION = (
    "Answer with one call of a function, in JSON, such as "
    '{"name": "get_weather", "arguments": {"city": "Rome"}}. These functions can be called:'
)
PLACE = "\x1fhere\x1f"  # placeholder of the text while a chat template is rendered


@dataclass(frozen=True)
class ToolQuestion:
    """A question, the functions that can be called, and the right call.

    functions  by name, as JSON
    """

    prompt: str
    functions: dict[str, str]
    name: str
    arguments: dict[str, Any]

    @property
    def call(self) -> str:
        return json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)


@dataclass(frozen=True)
class Call:
    """A question as tokens after its conversation.

    ids      the question and the right call
    first    index of the first token of the call
    names    the question followed by each function's name, the right one first
    shared   number of leading tokens that all of `names` share
    """

    ids: tuple[int, ...]
    first: int
    names: tuple[tuple[int, ...], ...]
    shared: int


@dataclass(frozen=True)
class Conversation:
    """Functions and a text as prompt, and alternative questions after it."""

    prompt: tuple[int, ...]
    calls: tuple[Call, ...]

    @property
    def longest(self) -> int:
        """Largest number of tokens after the prompt."""
        return max(len(ids) for call in self.calls for ids in (call.ids, *call.names))


def read_questions(path: Path | None) -> list[ToolQuestion]:
    """Read a BFCL file with its answers; without a path, the questions in the package."""
    if path is None:
        content, name = (resources.files("auraflux.eval") / "questions" / SHIPPED).read_text("utf-8"), SHIPPED
    else:
        content, name = decoded(path), str(path)
    answer_file = None if path is None else path.parent / ANSWERS / path.name
    answers = {} if answer_file is None or not answer_file.is_file() else _answers(answer_file)
    found = [_question(name, line, answers) for line in _lines(name, content)]
    usable = [question for question in found if question is not None]
    if not usable:
        raise InputError(
            f"{name} has no question that a single call with plain arguments answers. Answers are read from "
            f"'ground_truth' of each question or from {ANSWERS}/ next to the file."
        )
    return usable


def _answers(path: Path) -> dict[Any, Any]:
    return {line.get("id"): line.get("ground_truth") for line in _lines(str(path), decoded(path))}


def _lines(name: str, content: str) -> list[dict[str, Any]]:
    found = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            record = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as err:
            raise InputError(f"{name} is not a list of questions: line {number} is not JSON.") from err
        if record is not None and not isinstance(record, dict):
            raise InputError(f"{name} is not a list of questions: line {number} is not an object.")
        found += [] if record is None else [record]
    return found


def _question(file: str, record: dict[str, Any], answers: dict[Any, Any]) -> ToolQuestion | None:
    """Parse a question; return None if it needs several calls, or one with more than one spelling."""
    try:
        rounds, functions = record["question"], record["function"]
        wanted = record.get("ground_truth", answers.get(record.get("id")))
        listed = {each["name"]: json.dumps(each, ensure_ascii=False) for each in functions}
        messages = [message["content"] for messages in rounds for message in messages]
        if not wanted or len(wanted) != 1 or len(messages) != 1 or len(listed) < 2:
            return None
        ((name, allowed),) = wanted[0].items()
        arguments = {key: values[0] for key, values in allowed.items() if "" not in values}
        if name not in listed or not all(_is_plain(value) for value in arguments.values()):
            return None
        return ToolQuestion(str(messages[0]), listed, name, arguments)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as err:
        raise InputError(f"{file} has a question that is not in BFCL's format: {record.get('id', 'without an id')!r}.") from err


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) or (isinstance(value, list) and all(map(_is_plain, value)))


def conversations(questions: list[ToolQuestion], text: Text, tokenizer: Tokenizer, length: int) -> list[Conversation]:
    """Build conversations of `length` tokens that end with the questions."""
    groups = [questions[at : at + QUESTIONS_PER_CONVERSATION] for at in range(0, len(questions), QUESTIONS_PER_CONVERSATION)]
    return [_conversation(group, text, tokenizer, length, number) for number, group in enumerate(groups)]


def _conversation(questions: list[ToolQuestion], text: Text, tokenizer: Tokenizer, length: int, number: int) -> Conversation:
    functions = {name: spelled for question in questions for name, spelled in question.functions.items()}
    head, tails = _framed(tokenizer, functions, [question.prompt for question in questions])
    calls = tuple(_call(tokenizer, *each, functions) for each in zip(tails, questions, strict=True))
    room = length - len(head) - max(len(ids) for call in calls for ids in (call.ids, *call.names))
    if not 0 < room <= len(text.ids):
        raise InputError(
            f"conversations of {length} tokens leave {room} tokens for text, and {text.name} has {len(text.ids)}. "
            f"Functions and questions need {length - room}."
        )
    # each conversation uses another part of the text where possible
    start = number * room % max(len(text.ids) - room, 1)
    return Conversation((*head, *text.ids[start : start + room]), calls)


def _framed(tokenizer: Tokenizer, functions: dict[str, str], prompts: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the tokens before the text and the strings between it and each call, in the chat template if there is one."""
    begin = "\n".join([INSTRUCTION, *functions.values()]) + "\n\n"
    if "default" not in tokenizer.templates:
        return tokenizer.encode(begin), [f"\n\nQuestion: {each}\nCall: " for each in prompts]
    chats = [tokenizer.apply_template([{"role": "user", "content": f"{begin}{PLACE}\n\n{each}"}]) for each in prompts]
    return tokenizer.encode(chats[0].partition(PLACE)[0], special=False), [chat.partition(PLACE)[2] for chat in chats]


def _call(tokenizer: Tokenizer, tail: str, question: ToolQuestion, functions: dict[str, str]) -> Call:
    tail_ids, ids = (tokenizer.encode(each, special=False) for each in (tail, tail + question.call))
    others = [name for name in functions if name != question.name]
    names = [tokenizer.encode(f"{tail}{_beginning(name)}", special=False) for name in (question.name, *others)]
    # the last token before a call may merge with its beginning
    first = shared_tokens([[*tail_ids, -1], ids])
    return Call(tuple(ids), first, tuple(map(tuple, names)), shared_tokens(names))


def _beginning(name: str) -> str:
    """Return a call up to the end of its name."""
    return json.dumps({"name": name}, ensure_ascii=False).removesuffix("}")


@dataclass(frozen=True)
class CallResult:
    """Scores of one call.

    name         probability of the right function among all functions
    differences  of the tokens of the call
    """

    name: float
    differences: Differences


def score_calls(reference: Scorer, scorers: dict[str, Scorer], conversation: Conversation) -> dict[str, list[CallResult]]:
    """Score the calls of a conversation with all scorers and compare each with the reference, which may be among them."""
    found: dict[str, list[CallResult]] = {name: [] for name in scorers}
    for call in conversation.calls:
        targets = torch.tensor(call.ids[call.first :])
        wanted = reference.after(conversation.prompt, call.ids[:-1])[call.first - 1 :]
        for name, scorer in scorers.items():
            logits = wanted
            if scorer is not reference:
                logits = scorer.after(conversation.prompt, call.ids[:-1])[call.first - 1 :]
            likelihoods = scorer.likelihoods(conversation.prompt, call.names, call.shared)
            found[name].append(CallResult(probability_among(likelihoods, 0), compare(wanted, logits, targets)))
    return found


def summarize_calls(calls: list[CallResult]) -> dict[str, Any]:
    """Return means over calls: probability of the right name, divergence, equal top tokens, and calls with all tokens equal."""
    together = sum((call.differences for call in calls), NONE)
    return {
        "questions": len(calls),
        "name": sum(call.name for call in calls) / len(calls),
        "above_half": sum(call.name > 0.5 for call in calls) / len(calls),
        **summary(together),
        "unbroken": sum(all(call.differences.same) for call in calls) / len(calls),
    }
