"""Calls of functions after a long text: is the right one still called, and with the right arguments?

A conversation begins with functions in JSON, then comes text, then a question that one of them answers. Scored is the right
call, token by token against the uncompressed run, and its name by likelihood beside the names of all functions there are, so
that models can be judged that would not have found the call by themselves. Several questions share a conversation's beginning.

Questions are those of the Berkeley Function-Calling Leaderboard (PyPI bfcl-eval), in its files' format.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from auraflux.errors import InputError
from auraflux.eval.metrics import NONE, Differences, compare, share, summary
from auraflux.eval.reader import Reader
from auraflux.eval.text import Text, decoded, shared_tokens
from auraflux.run.tokenizer import Tokenizer

TOGETHER = 4  # questions of one conversation
SHIPPED = "bfcl.jsonl"
ANSWERS = "possible_answer"  # the folder beside BFCL's questions that has their answers
INSTRUCTION = (
    "Answer with one call of a function, in JSON, such as "
    '{"name": "get_weather", "arguments": {"city": "Rome"}}. These functions can be called:'
)
PLACE = "\x1fhere\x1f"  # stands for the text while a chat template is filled in


@dataclass(frozen=True)
class Question:
    """What is asked, what may be called, and what should be.

    functions  by name, as JSON
    """

    asked: str
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
    first    of those that are the call
    names    the question and each function's name, the right one first
    shared   tokens that all of `names` begin with
    """

    ids: tuple[int, ...]
    first: int
    names: tuple[tuple[int, ...], ...]
    shared: int


@dataclass(frozen=True)
class Conversation:
    """Functions and a text, and questions of which each may come next."""

    prompt: tuple[int, ...]
    calls: tuple[Call, ...]

    @property
    def longest(self) -> int:
        """Tokens that may come after the prompt."""
        return max(len(ids) for call in self.calls for ids in (call.ids, *call.names))


def read_questions(path: Path | None) -> list[Question]:
    """Read a file of BFCL's with its answers; without a path, the questions that come along."""
    if path is None:
        content, name = (resources.files("auraflux.eval") / "questions" / SHIPPED).read_text("utf-8"), SHIPPED
    else:
        content, name = decoded(path), str(path)
    beside = None if path is None else path.parent / ANSWERS / path.name
    answers = {} if beside is None or not beside.is_file() else _answers(beside)
    found = [_question(name, line, answers) for line in _lines(name, content)]
    usable = [question for question in found if question is not None]
    if not usable:
        raise InputError(
            f"{name} has no question that one call with plain arguments answers. Answers are read from "
            f"'ground_truth' beside each question or from {ANSWERS}/ beside the file."
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
            raise InputError(f"{name} is no list of questions: line {number} is not JSON.") from err
        if record is not None and not isinstance(record, dict):
            raise InputError(f"{name} is no list of questions: line {number} is not an object.")
        found += [] if record is None else [record]
    return found


def _question(file: str, record: dict[str, Any], answers: dict[Any, Any]) -> Question | None:
    """A record's question; None where more than one call is wanted, or one that has no single spelling."""
    try:
        turns, functions = record["question"], record["function"]
        wanted = record.get("ground_truth", answers.get(record.get("id")))
        listed = {each["name"]: json.dumps(each, ensure_ascii=False) for each in functions}
        said = [message["content"] for turn in turns for message in turn]
        if not wanted or len(wanted) != 1 or len(said) != 1 or len(listed) < 2:
            return None
        ((name, allowed),) = wanted[0].items()
        arguments = {key: values[0] for key, values in allowed.items() if "" not in values}
        if name not in listed or not all(_is_plain(value) for value in arguments.values()):
            return None
        return Question(str(said[0]), listed, name, arguments)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as err:
        raise InputError(f"{file} has a question that is not as BFCL's are: {record.get('id', 'without an id')!r}.") from err


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) or (isinstance(value, list) and all(map(_is_plain, value)))


def conversations(questions: list[Question], text: Text, tokenizer: Tokenizer, length: int) -> list[Conversation]:
    """Put questions to the end of conversations of `length` tokens."""
    groups = [questions[at : at + TOGETHER] for at in range(0, len(questions), TOGETHER)]
    return [_conversation(group, text, tokenizer, length, number) for number, group in enumerate(groups)]


def _conversation(questions: list[Question], text: Text, tokenizer: Tokenizer, length: int, number: int) -> Conversation:
    functions = {name: spelled for question in questions for name, spelled in question.functions.items()}
    head, tails = _framed(tokenizer, functions, [question.asked for question in questions])
    calls = tuple(_call(tokenizer, *each, functions) for each in zip(tails, questions, strict=True))
    room = length - len(head) - max(len(ids) for call in calls for ids in (call.ids, *call.names))
    if not 0 < room <= len(text.ids):
        raise InputError(
            f"calls in {length} tokens leave {room} of them to text, and {text.name} has {len(text.ids)}. "
            f"Functions and questions take {length - room}."
        )
    # other conversations have other text, as far as there is any
    start = number * room % max(len(text.ids) - room, 1)
    return Conversation((*head, *text.ids[start : start + room]), calls)


def _framed(tokenizer: Tokenizer, functions: dict[str, str], asked: Sequence[str]) -> tuple[list[int], list[str]]:
    """What comes before the text, and what comes after it up to each call: as a chat if the model has chats."""
    begin = "\n".join([INSTRUCTION, *functions.values()]) + "\n\n"
    if "default" not in tokenizer.templates:
        return tokenizer.encode(begin), [f"\n\nQuestion: {each}\nCall: " for each in asked]
    chats = [tokenizer.apply_template([{"role": "user", "content": f"{begin}{PLACE}\n\n{each}"}]) for each in asked]
    return tokenizer.encode(chats[0].partition(PLACE)[0], special=False), [chat.partition(PLACE)[2] for chat in chats]


def _call(tokenizer: Tokenizer, tail: str, question: Question, functions: dict[str, str]) -> Call:
    asked, ids = (tokenizer.encode(each, special=False) for each in (tail, tail + question.call))
    others = [name for name in functions if name != question.name]
    names = [tokenizer.encode(f"{tail}{_beginning(name)}", special=False) for name in (question.name, *others)]
    # the last token before a call may become another one with it
    first = shared_tokens([[*asked, -1], ids])
    return Call(tuple(ids), first, tuple(map(tuple, names)), shared_tokens(names))


def _beginning(name: str) -> str:
    """A call up to the end of its name."""
    return json.dumps({"name": name}, ensure_ascii=False).removesuffix("}")


@dataclass(frozen=True)
class Called:
    """What became of one call.

    name         the probability of its function among all that are there
    differences  of its tokens
    """

    name: float
    differences: Differences


def called(reference: Reader, readers: dict[str, Reader], conversation: Conversation) -> dict[str, list[Called]]:
    """Ask all readers a conversation's questions, and compare each with the reference, which may be among them."""
    found: dict[str, list[Called]] = {name: [] for name in readers}
    for call in conversation.calls:
        targets = torch.tensor(call.ids[call.first :])
        wanted = reference.after(conversation.prompt, call.ids[:-1])[call.first - 1 :]
        for name, reader in readers.items():
            scores = wanted
            if reader is not reference:
                scores = reader.after(conversation.prompt, call.ids[:-1])[call.first - 1 :]
            likelihoods = reader.likelihoods(conversation.prompt, call.names, call.shared)
            found[name].append(Called(share(likelihoods, 0), compare(wanted, scores, targets)))
    return found


def summed(calls: list[Called]) -> dict[str, Any]:
    """Means over calls: of the right name, of divergence and same top token, and how many calls have none but the same."""
    together = sum((call.differences for call in calls), NONE)
    return {
        "questions": len(calls),
        "name": sum(call.name for call in calls) / len(calls),
        "above_half": sum(call.name > 0.5 for call in calls) / len(calls),
        **summary(together),
        "unbroken": sum(all(call.differences.same) for call in calls) / len(calls),
    }
