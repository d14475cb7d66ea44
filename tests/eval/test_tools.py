"""Function-calling test: questions, conversations and scores."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.eval.text import Text, tokenized
from auraflux.eval.tools import conversations, read_questions, score_calls, summarize_calls
from auraflux.tokenizer.tokenizer import Tokenizer
from tests.eval.test_run import scorer
from tests.eval.tiny_heads import loaded
from tests.tokenizer.toy_tokenizers import CHATML, byte_level

VOCAB = 1000


def record(number: int, **changes: Any) -> dict[str, Any]:
    functions = [{"name": f"{verb}.{number}", "description": verb} for verb in ("get", "set")]
    question = [[{"role": "user", "content": f"Set {number}."}]]
    right = [{f"set.{number}": {"to": [number, "x"], "in": ["cm", ""]}}]
    return {"id": f"q{number}", "question": question, "function": functions, "ground_truth": right} | changes


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def toy(chat: bool = True) -> Tokenizer:
    return Tokenizer(byte_level(), templates={"default": CHATML} if chat else {})


def padding_text(tokenizer: Tokenizer) -> Text:
    return tokenized({"dog": "The lazy dog sleeps. " * 400}, tokenizer, chat=False)[0]


class CertainScorer:
    """A scorer that finds every token of the right calls, which end with `last`, `sure` times as likely as any other."""

    def __init__(self, sure: float, last: int):
        self.sure, self.last = sure, last

    def after(self, prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
        rows = torch.zeros(len(ids), VOCAB)
        rows[torch.arange(len(ids)), torch.tensor([*ids[1:], self.last])] = math.log(self.sure)
        return rows

    def likelihoods(self, prompt: Sequence[int], endings: Sequence[Sequence[int]], shared: int) -> list[float]:
        return [math.log(self.sure), *(0.0 for _ in endings[1:])]


def test_packaged_questions_are_all_usable():
    found = read_questions(None)
    assert len(found) == 24
    assert found[0].call == '{"name": "country_info.capital", "arguments": {"country": "Brazil"}}'
    assert all(question.name in question.functions and len(question.functions) > 1 for question in found)


def test_answers_are_read_from_the_answer_folder(tmp_path: Path):
    plain = record(1)
    right = {"id": "q1", "ground_truth": plain.pop("ground_truth")}
    path = write_lines(tmp_path / "some.json", plain)
    with pytest.raises(InputError, match="has no question that a single call with plain arguments answers"):
        read_questions(path)
    (tmp_path / "possible_answer").mkdir()
    write_lines(tmp_path / "possible_answer" / "some.json", right)
    # optional arguments are omitted, and the first of several values is used
    assert [question.call for question in read_questions(path)] == ['{"name": "set.1", "arguments": {"to": 1}}']


@pytest.mark.parametrize(
    "change",
    [
        {"ground_truth": record(1)["ground_truth"] * 2},
        {"ground_truth": [{"set.1": {"to": [{"a": [1]}]}}]},
        {"ground_truth": [{"drop.1": {}}]},
        {"function": record(1)["function"][1:]},
        {"question": record(1)["question"] * 2},
    ],
    ids=["two-calls", "nested", "not-offered", "no-choice", "two-rounds"],
)
def test_questions_without_a_single_answer_are_skipped(tmp_path: Path, change: dict[str, Any]):
    path = write_lines(tmp_path / "q.json", record(1, **change), record(2))
    assert [question.name for question in read_questions(path)] == ["set.2"]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "is empty"),
        ("{", "line 1 is not JSON"),
        ("[]", "line 1 is not an object"),
        ('{"id": "a"}', "has a question that is not in BFCL's format: 'a'"),
        (json.dumps(record(1, ground_truth=[3])), "not in BFCL's format: 'q1'"),
    ],
)
def test_invalid_files_are_refused_in_one_sentence(tmp_path: Path, content: str, match: str):
    (tmp_path / "q.json").write_text(content)
    with pytest.raises(InputError, match=match):
        read_questions(tmp_path / "q.json")


@pytest.mark.parametrize("chat", [True, False])
def test_functions_come_first_and_the_question_last(tmp_path: Path, chat: bool):
    tokenizer = toy(chat)
    questions = read_questions(write_lines(tmp_path / "q.json", *map(record, range(6))))
    found = conversations(questions, padding_text(tokenizer), tokenizer, 1000)
    assert [len(each.calls) for each in found] == [4, 2]
    assert all(len(each.prompt) + each.longest == 1000 for each in found)
    begin = tokenizer.decode(found[0].prompt, special=True)
    assert begin.index('"name": "get.3"') < begin.index("The lazy dog")
    call = found[0].calls[2]
    question, right = (tokenizer.decode(part, special=True) for part in (call.ids[: call.first], call.ids[call.first :]))
    assert right == '{"name": "set.2", "arguments": {"to": 2}}'
    assert question.endswith("<|im_start|>assistant\n" if chat else "Question: Set 2.\nCall: ")
    names = [tokenizer.decode(ids, special=True).removeprefix(question) for ids in call.names]
    assert names[:2] == ['{"name": "set.2"', '{"name": "get.0"']
    assert len(names) == 8


def test_a_conversation_needs_room(tmp_path: Path):
    tokenizer = toy()
    questions = read_questions(write_lines(tmp_path / "q.json", record(1)))
    with pytest.raises(InputError, match="conversations of 100 tokens leave -"):
        conversations(questions, padding_text(tokenizer), tokenizer, 100)


def test_a_call_is_complete_if_every_top_token_is_equal(tmp_path: Path):
    tokenizer = toy()
    questions = read_questions(write_lines(tmp_path / "q.json", *map(record, range(4))))
    conversation = conversations(questions, padding_text(tokenizer), tokenizer, 1000)[0]
    last = conversation.calls[0].ids[-1]
    sure, unsure = CertainScorer(1e6, last), CertainScorer(0.5, last)
    found = {
        name: summarize_calls(each) for name, each in score_calls(sure, {"sure": sure, "unsure": unsure}, conversation).items()
    }
    assert found["sure"]["questions"] == 4
    assert found["sure"]["name"] == pytest.approx(1e6 / (1e6 + 7))
    assert found["unsure"]["name"] == pytest.approx(0.5 / 7.5)
    assert (found["sure"]["kl_mean"], found["sure"]["unbroken"], found["sure"]["same_top"]) == (0.0, 1.0, 1.0)
    assert (found["unsure"]["unbroken"], found["unsure"]["same_top"]) == (0.0, 0.0)
    p = 1e6 / (1e6 + VOCAB - 1)
    assert found["sure"]["perplexity"] == pytest.approx(1 / p, rel=1e-5)


def test_a_call_has_the_likelihood_of_the_forward_pass(tmp_path: Path):
    tokenizer = loaded().tokenizer
    assert tokenizer is not None
    questions = read_questions(write_lines(tmp_path / "q.json", *map(record, range(2))))
    conversation = conversations(questions, padding_text(tokenizer), tokenizer, 600)[0]
    call = conversation.calls[1]
    none = scorer("none")
    forward = loaded().logits([*conversation.prompt, *call.ids[:-1]])[len(conversation.prompt) :]
    assert torch.allclose(none.after(conversation.prompt, call.ids[:-1]), forward, rtol=1e-4, atol=1e-4)
    found = score_calls(none, {"none": none, "fp8": scorer("fp8")}, conversation)
    assert summarize_calls(found["none"])["kl_mean"] == 0
    assert 0 < summarize_calls(found["fp8"])["kl_mean"] < 0.01
    log = torch.log_softmax(forward.float(), -1)[call.first - 1 :]
    wanted = (-log.gather(1, torch.tensor(call.ids[call.first :])[:, None])).squeeze(1)
    assert found["none"][1].differences.nll == pytest.approx(wanted.tolist(), rel=1e-4, abs=1e-4)
