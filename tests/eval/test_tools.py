"""Calls of functions at the end of long conversations: how they are read, put, and scored."""

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
from auraflux.eval.tools import called, conversations, read_questions, summed
from auraflux.run.tokenizer import Tokenizer
from tests.eval.test_run import reader
from tests.eval.tiny_heads import loaded
from tests.run.toy_tokenizers import CHATML, byte_level

VOCAB = 1000


def record(number: int, **changes: Any) -> dict[str, Any]:
    functions = [{"name": f"{verb}.{number}", "description": verb} for verb in ("get", "set")]
    asked = [[{"role": "user", "content": f"Set {number}."}]]
    right = [{f"set.{number}": {"to": [number, "x"], "in": ["cm", ""]}}]
    return {"id": f"q{number}", "question": asked, "function": functions, "ground_truth": right} | changes


def written(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def toy(chat: bool = True) -> Tokenizer:
    return Tokenizer(byte_level(), templates={"default": CHATML} if chat else {})


def filler(tokenizer: Tokenizer) -> Text:
    return tokenized({"dog": "The lazy dog sleeps. " * 400}, tokenizer, chat=False)[0]


class Sure:
    """Thinks every token of the right calls, which end with `last`, `sure` times as likely as any other."""

    def __init__(self, sure: float, last: int):
        self.sure, self.last = sure, last

    def after(self, prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
        rows = torch.zeros(len(ids), VOCAB)
        rows[torch.arange(len(ids)), torch.tensor([*ids[1:], self.last])] = math.log(self.sure)
        return rows

    def likelihoods(self, prompt: Sequence[int], endings: Sequence[Sequence[int]], shared: int) -> list[float]:
        return [math.log(self.sure), *(0.0 for _ in endings[1:])]


def test_questions_that_come_along_are_all_usable():
    found = read_questions(None)
    assert len(found) == 24
    assert found[0].call == '{"name": "country_info.capital", "arguments": {"country": "Brazil"}}'
    assert all(question.name in question.functions and len(question.functions) > 1 for question in found)


def test_answers_may_stand_beside_the_file(tmp_path: Path):
    plain = record(1)
    right = {"id": "q1", "ground_truth": plain.pop("ground_truth")}
    path = written(tmp_path / "some.json", plain)
    with pytest.raises(InputError, match="has no question that one call with plain arguments answers"):
        read_questions(path)
    (tmp_path / "possible_answer").mkdir()
    written(tmp_path / "possible_answer" / "some.json", right)
    # an argument that may be left out is, and of several values the first is taken
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
    ids=["two-calls", "nested", "not-offered", "no-choice", "two-turns"],
)
def test_what_has_no_single_answer_is_left_out(tmp_path: Path, change: dict[str, Any]):
    path = written(tmp_path / "q.json", record(1, **change), record(2))
    assert [question.name for question in read_questions(path)] == ["set.2"]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "is empty"),
        ("{", "line 1 is not JSON"),
        ("[]", "line 1 is not an object"),
        ('{"id": "a"}', "has a question that is not as BFCL's are: 'a'"),
        (json.dumps(record(1, ground_truth=[3])), "not as BFCL's are: 'q1'"),
    ],
)
def test_other_files_are_one_sentence(tmp_path: Path, content: str, match: str):
    (tmp_path / "q.json").write_text(content)
    with pytest.raises(InputError, match=match):
        read_questions(tmp_path / "q.json")


@pytest.mark.parametrize("chat", [True, False])
def test_functions_come_first_and_the_question_last(tmp_path: Path, chat: bool):
    tokenizer = toy(chat)
    questions = read_questions(written(tmp_path / "q.json", *map(record, range(6))))
    found = conversations(questions, filler(tokenizer), tokenizer, 1000)
    assert [len(each.calls) for each in found] == [4, 2]
    assert all(len(each.prompt) + each.longest == 1000 for each in found)
    begin = tokenizer.decode(found[0].prompt, special=True)
    assert begin.index('"name": "get.3"') < begin.index("The lazy dog")
    call = found[0].calls[2]
    asked, right = (tokenizer.decode(part, special=True) for part in (call.ids[: call.first], call.ids[call.first :]))
    assert right == '{"name": "set.2", "arguments": {"to": 2}}'
    assert asked.endswith("<|im_start|>assistant\n" if chat else "Question: Set 2.\nCall: ")
    names = [tokenizer.decode(ids, special=True).removeprefix(asked) for ids in call.names]
    assert names[:2] == ['{"name": "set.2"', '{"name": "get.0"']
    assert len(names) == 8


def test_a_conversation_needs_room(tmp_path: Path):
    tokenizer = toy()
    questions = read_questions(written(tmp_path / "q.json", record(1)))
    with pytest.raises(InputError, match="calls in 100 tokens leave -"):
        conversations(questions, filler(tokenizer), tokenizer, 100)


def test_a_call_is_whole_where_every_token_is_the_same(tmp_path: Path):
    tokenizer = toy()
    questions = read_questions(written(tmp_path / "q.json", *map(record, range(4))))
    conversation = conversations(questions, filler(tokenizer), tokenizer, 1000)[0]
    last = conversation.calls[0].ids[-1]
    sure, unsure = Sure(1e6, last), Sure(0.5, last)
    found = {name: summed(each) for name, each in called(sure, {"sure": sure, "unsure": unsure}, conversation).items()}
    assert found["sure"]["questions"] == 4
    assert found["sure"]["name"] == pytest.approx(1e6 / (1e6 + 7))
    assert found["unsure"]["name"] == pytest.approx(0.5 / 7.5)
    assert (found["sure"]["kl_mean"], found["sure"]["unbroken"], found["sure"]["same_top"]) == (0.0, 1.0, 1.0)
    assert (found["unsure"]["unbroken"], found["unsure"]["same_top"]) == (0.0, 0.0)
    p = 1e6 / (1e6 + VOCAB - 1)
    assert found["sure"]["perplexity"] == pytest.approx(1 / p, rel=1e-5)


def test_a_call_is_scored_as_the_plain_forward_pass_scores_it(tmp_path: Path):
    tokenizer = loaded().tokenizer
    assert tokenizer is not None
    questions = read_questions(written(tmp_path / "q.json", *map(record, range(2))))
    conversation = conversations(questions, filler(tokenizer), tokenizer, 600)[0]
    call = conversation.calls[1]
    none = reader("none")
    plain = loaded().logits([*conversation.prompt, *call.ids[:-1]])[len(conversation.prompt) :]
    assert torch.allclose(none.after(conversation.prompt, call.ids[:-1]), plain, rtol=1e-4, atol=1e-4)
    found = called(none, {"none": none, "rounded": reader("fp8")}, conversation)
    assert summed(found["none"])["kl_mean"] == 0
    assert 0 < summed(found["rounded"])["kl_mean"] < 0.01
    log = torch.log_softmax(plain.float(), -1)[call.first - 1 :]
    wanted = (-log.gather(1, torch.tensor(call.ids[call.first :])[:, None])).squeeze(1)
    assert found["none"][1].differences.nll == pytest.approx(wanted.tolist(), rel=1e-4, abs=1e-4)
