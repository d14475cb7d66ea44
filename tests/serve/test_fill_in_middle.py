"""Fill in the middle: the token sequences of each family, and the requests that use them."""

import contextlib

import openai
import pytest
import tokenizers
from ollama import Client
from starlette.testclient import TestClient

from auraflux.serve.app import make_app
from auraflux.serve.fill_in_middle import find_fill_tokens
from auraflux.serve.service import Service
from auraflux.tokenizer.tokenizer import Tokenizer
from tests.serve.fake_link import NAME, TEMPLATE, FakeLink, serving
from tests.tokenizer.toy_tokenizers import byte_level, sentence_piece

BAR = "\uff5c"
BEFORE, AFTER = "def f(x):\n    return ", "\n\nf(3)"
# the prompts in the documentation of each family, and the rule of llama.cpp's /infill
FAMILIES = {
    "Qwen Coder": "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    "StarCoder": "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
    "DeepSeek Coder": f"<{BAR}fim▁begin{BAR}>{{prefix}}<{BAR}fim▁hole{BAR}>{{suffix}}<{BAR}fim▁end{BAR}>",
    "GLM": "<|code_prefix|>{prefix}<|code_suffix|>{suffix}<|code_middle|>",
    "Codestral": "[SUFFIX]{suffix}[PREFIX]{prefix}",
}


def vocabulary(*special: str, base: tokenizers.Tokenizer | None = None) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_str((base or byte_level()).to_str())
    made.add_special_tokens(list(special))
    return made


def special_tokens(prompt: str) -> list[str]:
    return [part for part in prompt.replace("{prefix}", "\0").replace("{suffix}", "\0").split("\0") if part]


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_of_each_family(family: str):
    template = FAMILIES[family]
    tokenizer = Tokenizer(vocabulary(*special_tokens(template), "<|fim_pad|>"))
    fill = find_fill_tokens(tokenizer)
    assert fill is not None
    tokens = fill.prompt(tokenizer, BEFORE, AFTER)
    assert tokens == tokenizer.encode(template.format(prefix=BEFORE, suffix=AFTER), special=False)
    assert tokenizer.decode(tokens, special=True) == template.format(prefix=BEFORE, suffix=AFTER)
    assert fill.stop_ids >= {tokenizer.token_id(token) for token in (*special_tokens(template), "<|fim_pad|>")}


def test_sequence_begins_with_bos_where_the_model_has_one():
    inner = vocabulary("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<s>")
    bos = inner.token_to_id("<s>")
    plain, first = Tokenizer(inner), Tokenizer(inner, names={"bos_token": "<s>"}, first=bos)
    fill = find_fill_tokens(plain)
    assert fill is not None
    assert fill.prompt(first, BEFORE, AFTER) == [bos, *fill.prompt(plain, BEFORE, AFTER)]


def test_code_llama():
    """As Code Llama's `infilling_prompt_tokens`: a space before the prefix, as for any text, and none before the suffix."""
    inner = vocabulary("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>", base=sentence_piece())
    tokenizer = Tokenizer(inner, names={"bos_token": "<s>"}, first=inner.token_to_id("<s>"))
    fill = find_fill_tokens(tokenizer)
    assert fill is not None
    tokens = fill.prompt(tokenizer, "quick", "fox")
    spelled = [inner.id_to_token(token) for token in tokens]
    at = spelled.index("▁<SUF>")
    assert (spelled[:2], spelled[-1]) == (["<s>", "▁<PRE>"], "▁<MID>")
    assert "".join(spelled[2:at]) == "▁quick"
    assert "".join(spelled[at + 1 : -1]) == "fox"
    assert tokenizer.token_id("▁<EOT>") in fill.stop_ids


def test_tokens_that_a_gguf_file_names_come_first():
    inner = vocabulary("<a>", "<b>", "<c>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    names = {"fim_pre_token": "<a>", "fim_suf_token": "<b>", "fim_mid_token": "<c>"}
    fill = find_fill_tokens(Tokenizer(inner, names=names))
    assert fill is not None
    assert (fill.prefix, fill.suffix, fill.middle) == tuple(map(inner.token_to_id, ("<a>", "<b>", "<c>")))
    assert find_fill_tokens(Tokenizer(byte_level())) is None


@pytest.fixture
def link() -> FakeLink:
    """A model of the Qwen Coder kind."""
    link = FakeLink("x + 1")
    inner = vocabulary("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    link.tokenizer = Tokenizer(inner, names={"eos_token": "<|im_end|>"}, ends=[2], templates={"default": TEMPLATE})
    assert link.facts is not None
    object.__setattr__(link.facts, "vocab", link.tokenizer.vocab_size)
    return link


def test_clients(link: FakeLink):
    expected = f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"
    with serving(make_app(Service(link))) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            answer = client.completions.create(model=NAME, prompt=BEFORE, suffix=AFTER, max_tokens=8)
        assert (answer.choices[0].text, link.prompt) == ("x + 1", expected)
        assert link.tokenizer.token_id("<|fim_prefix|>") in link.requests[-1].stop_token_ids
        with contextlib.closing(Client(host=url)) as ollama:
            assert ollama.generate(NAME, BEFORE, suffix=AFTER).response == "x + 1"
            assert link.prompt == expected
            assert "insert" in ollama.show(NAME).capabilities


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": [5, 6]}, "suffix needs a prompt of text"),
        ({"prompt": "a", "echo": True}, "not supported together with suffix"),
        ({"prompt": "a", "prompt_logprobs": 1}, "not supported together with suffix"),
    ],
)
def test_invalid_requests_are_refused(link: FakeLink, body: dict, message: str):
    answer = TestClient(make_app(Service(link))).post("/v1/completions", json={"suffix": "end", **body})
    assert answer.status_code == 400
    assert message in answer.text


def test_models_without_such_tokens_refuse():
    client = TestClient(make_app(Service(FakeLink())))
    for path, body in (
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/api/generate", {"model": NAME, "prompt": "a", "suffix": "b"}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 400
        assert f"The model {NAME} cannot fill in the middle: its vocabulary has no tokens for that." in answer.text
