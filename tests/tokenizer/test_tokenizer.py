"""Tokenizers from folders and GGUF metadata: equal to transformers, end tokens, and refusals."""

import heapq
import json
import os
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, pre_tokenizers, processors
from transformers import AutoTokenizer

from auraflux.errors import FormatError, InputError, TemplateError
from auraflux.tokenizer.rust_panics import suppress_stderr
from auraflux.tokenizer.tokenizer import Tokenizer
from auraflux.tokenizer.vocabulary.gguf import SPLITS, read_vocabulary
from tests.tokenizer.toy_tokenizers import CHATML, LINES, all_toys, byte_level, folder, gguf_metadata, sentence_piece

CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|im_start|>",
    "eos_token": {"content": "<|im_end|>", "__type": "AddedToken", "special": True},
    "chat_template": CHATML,
}
BEGINNING = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
CHAT = [{"role": "user", "content": "Hi <|im_end|> 🦙"}]
PARTS = [*"ab1 \n\t'.é你²", "'ll", "  ", "<|im_end|>", *LINES]
TEXTS = st.text(max_size=40) | st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


def copy_of(model: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(model.to_str())


@pytest.mark.parametrize("begins", [False, True], ids=["plain", "with BOS"])
def test_a_folder_equals_transformers(tmp_path, begins):
    model = copy_of(byte_level())
    if begins:
        model.post_processor = BEGINNING
    folder(tmp_path, model, tokenizer_config=CONFIG)
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    for text in (*LINES, "", "<|im_start|>a<think>b 深い    x"):
        assert ours.encode(text) == theirs.encode(text)
        ids = ours.encode(text, special=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, special=True) == theirs.decode(ids, clean_up_tokenization_spaces=False) == text
    assert ours.apply_template(CHAT) == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos, ours.special_ids) == (theirs.bos_token_id, frozenset(theirs.all_special_ids) | {0})


@pytest.mark.parametrize("begins", [False, True], ids=["plain", "with BOS"])
def test_the_config_may_add_bos_and_eos(tmp_path, begins):
    model = copy_of(byte_level())
    if begins:
        model.post_processor = BEGINNING
    config = CONFIG | {"add_bos_token": True, "add_eos_token": True}
    tokenizer = Tokenizer.from_folder(folder(tmp_path, model, tokenizer_config=config))
    assert tokenizer is not None
    plain = tokenizer.encode("the", special=False)
    assert tokenizer.encode("the") == [1, *plain, 2]
    assert tokenizer.encode("") == [1, 2]
    assert tokenizer.encode("the<|im_end|>") == [1, *plain, 2]


def test_truncation_and_padding_are_disabled(tmp_path):
    model = copy_of(byte_level())
    model.enable_truncation(3)
    model.enable_padding(length=50)
    tokenizer = Tokenizer.from_folder(folder(tmp_path, model))
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode(LINES[0])) == LINES[0]


def test_tokens_of_the_config_only(tmp_path):
    model = byte_level()
    new = {"content": "<|tool|>", "special": True, "normalized": False}
    place = model.get_vocab_size()
    tokenizer = Tokenizer.from_folder(folder(tmp_path, model, tokenizer_config={"added_tokens_decoder": {place: new}}))
    assert tokenizer is not None
    assert tokenizer.encode("<|tool|>") == [place]
    assert tokenizer.is_special(place)
    folder(tmp_path, model, tokenizer_config={"added_tokens_decoder": {place + 7: new}})
    with pytest.raises(FormatError, match=f"has '<|tool|>' as token {place + 7}, here it would be {place}".replace("|", r"\|")):
        Tokenizer.from_folder(tmp_path)


def test_eos_ids(tmp_path):
    def ends(**files):
        tokenizer = Tokenizer.from_folder(folder(tmp_path, byte_level(), **files))
        assert tokenizer is not None
        return tokenizer.eos_ids

    # <|endoftext|> ends a document in any vocabulary that has it
    assert ends(tokenizer_config={"eos_token": "<|im_end|>"}) == {0, 2}
    assert ends(tokenizer_config={}, config={"text_config": {"eos_token_id": 5}}) == {0, 5}
    assert ends(tokenizer_config={}, generation_config={"eos_token_id": [7, 8]}) == {0, 7, 8}
    assert ends(tokenizer_config={"chat_template": CHATML}, generation_config={"eos_token_id": 0}) == {0}


def test_end_of_turn_ids(tmp_path):
    def ends(template):
        tokenizer = Tokenizer.from_folder(folder(tmp_path, byte_level(), tokenizer_config={"chat_template": template}))
        assert tokenizer is not None
        return tokenizer.end_of_turn_ids

    # the template ends a turn with this token, which no config names
    assert ends(CHATML) == {2}
    assert ends("{{ raise_exception('no') }}") == ends("{{ messages[1].content }} no token") == frozenset()


def test_templates(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    tokenizer = Tokenizer.from_folder(folder(tmp_path, byte_level(), tokenizer_config={"chat_template": named}))
    assert tokenizer is not None
    assert tokenizer.apply_template(CHAT) == "plain"
    assert tokenizer.apply_template(CHAT, tools=[{}, {}]) == "2 tools"
    assert tokenizer.apply_template(CHAT, template="default", tools=[{}]) == "plain"
    with pytest.raises(TemplateError, match=r"no chat template 'rag'. It has: default, tool_use\."):
        tokenizer.apply_template(CHAT, template="rag")
    (tmp_path / "chat_template.jinja").write_text("from a file: {{ add_generation_prompt }}")
    again = Tokenizer.from_folder(tmp_path)
    assert again is not None
    assert again.apply_template(CHAT, add_generation_prompt=False) == "from a file: False"
    with pytest.raises(TemplateError, match=r"has no chat template\. Use a plain prompt"):
        all_toys()["bytes"].apply_template(CHAT)


def test_a_folder_without_tokenizer_files_has_none(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "not json",
        "[]",
        "{}",
        '{"model": {"type": "Magic"}}',
        "\x80\x00",
        "[" * 100_000,
        '{"version": "1.0", "model": null}',
    ],
    ids=repr,
)
def test_a_broken_tokenizer_file_is_one_error(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content[:200_000], encoding="latin-1")
    with pytest.raises(FormatError, match=r"tokenizer.json is not a valid tokenizer") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}, "it merges 'a' and 'b', but has no token 'ab'"),
        ({"vocab": {"a": 0, "b": 1}, "merges": ["a b"]}, "it merges 'a' and 'b', but has no token 'ab'"),
        ({"vocab": {"a": 0, "b": 1}, "merges": [["a", "c"]]}, "it merges 'a' and 'c', but has no token 'c'"),
        (
            {"vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]], "continuing_subword_prefix": "##"},
            "it merges 'a' and 'b', which does not begin with '##'",
        ),
    ],
)
def test_merges_without_a_token_are_named_and_no_panic_is_printed(tmp_path, capfd, model, said):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", **model}}))
    with pytest.raises(FormatError, match=rf"tokenizer.json is not a valid tokenizer: {said}\.$"):
        Tokenizer.from_folder(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_buffered_stderr_is_printed_afterwards(capfd):
    with suppress_stderr():
        os.write(2, b"from another thread")
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "from another thread"


def test_stderr_is_not_buffered_without_a_temporary_file(monkeypatch, capfd):
    def full():
        raise OSError("no space left")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with suppress_stderr():
        os.write(2, b"unbuffered")
        assert capfd.readouterr().err == "unbuffered"


def test_invalid_configs(tmp_path):
    for config, said in (
        ({"chat_template": 3}, "tokenizer_config.json has chat_template = 3; a string of"),
        ({"chat_template": [{"name": 1, "template": "x"}]}, "neither a string nor a list of named strings"),
        ({"added_tokens_decoder": [1]}, r"has added_tokens_decoder = \[1\]; an object"),
        ({"added_tokens_decoder": {"x": {}}}, "has a token under 'x' in added_tokens_decoder; the key must be a number"),
        ({"added_tokens_decoder": {"7": {"special": True}}}, "token 7 has no content; a string"),
        ({"added_tokens_decoder": {"7": {"content": "<x>", "special": "yes"}}}, "has special = 'yes'; true or false"),
        ({"add_bos_token": 1}, "has add_bos_token = 1; true or false"),
    ):
        folder(tmp_path, byte_level(), tokenizer_config=config)
        with pytest.raises(FormatError, match=said):
            Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(FormatError, match=r"tokenizer_config.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_decoders_with_context_are_refused(tmp_path):
    model = copy_of(byte_level())
    model.decoder = decoders.WordPiece()
    with pytest.raises(FormatError, match=r"cannot decode token by token: .*WordPiece"):
        Tokenizer.from_folder(folder(tmp_path, model))


def test_invalid_text_is_refused():
    for wrong in ("\ud800", 3, None):
        with pytest.raises(InputError, match="text cannot be tokenized"):
            all_toys()["bytes"].encode(wrong)


@settings(deadline=None, max_examples=150)
@given(text=TEXTS)
def test_gguf_metadata_equals_its_tokenizer(text):
    """The pre-tokenizer "smollm" is that of SmolLM2's tokenizer.json: single digits, then GPT-2's."""
    ids = all_toys()["gguf"].encode(text)
    assert ids == byte_level().encode(text).ids
    assert all_toys()["gguf"].decode(ids, special=True) == text


@settings(deadline=None, max_examples=100)
@given(text=TEXTS)
def test_the_gpt2_pre_tokenizer_equals_the_tokenizers_package(text):
    ours = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS["gpt-2"]])
    theirs = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert [span for _, span in ours.pre_tokenize_str(text)] == [span for _, span in theirs.pre_tokenize_str(text)]


SENTENCE = "We'LL pay 12345€ in HelloWorld/\n\n  x=1 नमस्ते 世界"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("llama-bpe", "We|'LL| pay| |123|45|€| in| HelloWorld|/\n\n| | x|=|1| नमस"),
        ("qwen2", "We|'LL| pay| |1|2|3|4|5|€| in| HelloWorld|/\n\n| | x|=|1| नमस"),
        ("qwen35", "We|'LL| pay| |1|2|3|4|5|€| in| HelloWorld|/\n\n| | x|=|1| नमस्ते| 世界"),
        ("gpt-4o", "We'LL| pay| |123|45|€| in| Hello|World|/\n\n| | x|=|1| नमस्ते| 世界"),
        ("deepseek-v3", "We|'LL| pay| |123|45|€| in| HelloWorld|/\n\n| | x|=|1| नमस्ते| |世界"),
        ("smollm", "We|'|LL| pay| |1|2|3|4|5|€| in| HelloWorld|/|\n\n | x|=|1"),
        ("gpt-2", "We|'|LL| pay| 12345|€| in| HelloWorld|/|\n\n | x|=|1"),
        ("default", "We|'|LL| pay| |123|45|€| in| HelloWorld|/|\n\n | x|=|1"),
    ],
)
def test_words(pre, words):
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[pre]])
    assert [word for word, _ in split.pre_tokenize_str(SENTENCE)][: words.count("|") + 1] == words.split("|")


def test_gguf_special_tokens():
    tokenizer = Tokenizer.from_gguf(gguf_metadata(**{"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.eot_token_id": 9}))
    assert (tokenizer.bos, tokenizer.eos_ids) == (1, {0, 2, 9})
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.encode("the", special=False)[0] != 1
    assert tokenizer.names == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tokenizer.apply_template([{"role": "user", "content": "Hi"}]).endswith("<|im_start|>assistant\n")
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == len(gguf_metadata()["tokenizer.ggml.tokens"])


def spm_metadata(**more):
    """Return SentencePiece metadata: no merges, but a score per token, the earlier the higher."""
    model = sentence_piece()
    tokens = [model.id_to_token(number) for number in range(model.get_vocab_size())]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    scores = [0.0] * 259 + [float(259 - number) for number in range(259, len(tokens))]
    named = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, "bos_token_id": 1, "eos_token_id": 2}
    return {f"tokenizer.ggml.{name}": value for name, value in (named | more).items()}


def by_score(metadata, text: str) -> list[int]:
    """Apply SentencePiece's BPE by its definition: merge the neighbours with the best score, the leftmost of equals."""
    number = {token: place for place, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        found = [
            (-metadata["tokenizer.ggml.scores"][number[left + right]], place)
            for place, (left, right) in enumerate(pairwise(parts))
            if number.get(left + right, 0) >= 259
        ]
        if not found:
            break
        _, place = heapq.nsmallest(1, found)[0]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    spelled = [[number[part]] if part in number else [3 + byte for byte in part.encode()] for part in parts]
    return [place for part in spelled for place in part]


RUNS = ["▁" * length for length in range(2, 17)]


@pytest.fixture(scope="module")
def with_runs():
    """Return metadata with runs of spaces of equal score, as in Llama's vocabulary."""
    plain = spm_metadata()
    tokens = [token for token in plain["tokenizer.ggml.tokens"] if token not in RUNS] + RUNS
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    scores = [0.0] * 259 + [float(259 - n) for n in range(259, len(tokens) - 15)] + [-1e9] * 15
    return spm_metadata(tokens=tokens, token_type=kinds, scores=scores)


@pytest.fixture(scope="module")
def runs_tokenizer(with_runs):
    return Tokenizer.from_gguf(with_runs)


@settings(deadline=None, max_examples=150)
@given(text=st.text("abdeortnh  .é\n", min_size=1, max_size=40) | TEXTS.filter(lambda text: "<" not in text and text))
def test_merges_by_score_equal_sentence_piece(with_runs, runs_tokenizer, text):
    ids = runs_tokenizer.encode(text)
    assert ids == [1, *by_score(with_runs, text)]
    assert runs_tokenizer.decode(ids) == text


@pytest.mark.parametrize("length", [1, 2, 3, 7, 15, 16, 17, 18, 31, 33, 50])
def test_runs_of_spaces(with_runs, runs_tokenizer, length):
    text = "the" + " " * length + "dog"
    assert runs_tokenizer.encode(text, special=False) == by_score(with_runs, text)


def test_no_prefix_space():
    tokenizer = Tokenizer.from_gguf(spm_metadata(add_space_prefix=False, add_bos_token=False))
    ids = tokenizer.encode("the dog")
    assert not tokenizer.piece(ids[0]).startswith(b" ")
    assert tokenizer.decode(ids) == "the dog"
    assert tokenizer.decode(tokenizer.encode(" dog")) == " dog"


def test_gemma4_lists_its_merges():
    """SentencePiece tokens with listed merges and without a prefix space."""
    listed = [f"{left} {right}" for left, right in json.loads(sentence_piece().to_str())["model"]["merges"]]
    ours = Tokenizer.from_gguf({**spm_metadata(model="gemma4", merges=listed), "tokenizer.ggml.scores": None})
    plain = Tokenizer.from_gguf(spm_metadata(add_space_prefix=False))
    for text in ("the dog", " the  dog", "the\n\n\ndog", "brown é 🙂 fox\n"):
        ids = ours.encode(text)
        assert ids == plain.encode(text)
        assert ids[0] == 1
        assert ours.decode(ids) == text


def test_equal_scores_are_refused():
    scores = spm_metadata()["tokenizer.ggml.scores"]
    with pytest.raises(FormatError, match=r"the same score -7.0, so their merge order is ambiguous"):
        read_vocabulary(spm_metadata(scores=[*scores[:300], *[-7.0] * (len(scores) - 300)]))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.pre": "made-up"}, "pre-tokenizer 'made-up', which is not supported; supported: .*llama-bpe.*qwen35"),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer None, which is not supported"),
        ({"tokenizer.ggml.model": "bert"}, "of type 'bert'; supported: gpt2, llama"),
        ({"tokenizer.ggml.model": None}, "of type None"),
        ({"tokenizer.ggml.tokens": None}, "no list of strings tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": ["a", 3]}, r"has tokenizer.ggml.tokens = \['a', 3\]; a list of .*, each a string"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "lists the token 'a' more than once"),
        ({"tokenizer.ggml.merges": []}, "no list of strings tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["a zzz"]}, "merges 'a zzz', but has no token 'zzz'"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges 'ab', but has no token"),
        ({"tokenizer.ggml.token_type": [1]}, r"tokens, but 1 token types\."),
        ({"tokenizer.ggml.eos_token_id": 99999}, "eos_token_id = 99999, which is not one of its tokens"),
        ({"tokenizer.ggml.bos_token_id": "x"}, "bos_token_id = 'x'"),
        ({"tokenizer.ggml.model": "llama"}, "but not as many scores"),
    ],
)
def test_invalid_metadata(changes, said):
    with pytest.raises(FormatError, match=said):
        Tokenizer.from_gguf(gguf_metadata(**changes))


def test_the_metadata_is_json():
    assert json.loads(json.dumps(gguf_metadata())) == gguf_metadata()
