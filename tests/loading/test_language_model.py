"""LanguageModel: logits, text, conversations, batches, and refusals."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import auraflux
from auraflux.cache import Batch
from auraflux.engine.graph_runner import GraphRunner
from auraflux.errors import CacheFull, ContextError, FormatError, InputError, SettingsError
from auraflux.loading.language_model import LanguageModel
from auraflux.tokenizer.template_process import process
from tests.engine.tiny import tiny

IDS = [5, 80, 301, 17, 44, 120, 9]
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module", params=["synchronous", "ahead"])
def model(request: pytest.FixtureRequest) -> Iterator[LanguageModel]:
    """Load a model with synchronous steps, and one that runs steps ahead as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphRunner, "runs_ahead", request.param == "ahead")
        yield auraflux.load(tiny(), kv="k8v4", exact=True, context=256, device="cpu", sampling=GREEDY)


def test_logits_are_those_of_every_position(model: LanguageModel):
    scores = model.logits(IDS)
    assert scores.shape == (len(IDS), model.engine.model.config.vocab)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(model.logits(IDS[:3]), scores[:3], rtol=1e-4, atol=1e-4)


def test_greedy_tokens_are_the_likeliest(model: LanguageModel):
    found = list(model.tokens(IDS, max_tokens=6))
    text = [*IDS, *found]
    assert found == model.logits(text).argmax(-1).tolist()[len(IDS) - 1 : len(text) - 1]


def test_streamed_text_is_the_text_of_the_tokens(model: LanguageModel):
    tokens = list(model.tokens("The quick", max_tokens=12, temperature=1.0, seed=3))
    text = "".join(model.generate("The quick", max_tokens=12, temperature=1.0, seed=3))
    assert text == model.tokenizer.decode(tokens)


def test_a_seed_decides(model: LanguageModel):
    first, again, other = ("".join(model.generate("fox", max_tokens=12, temperature=1.5, seed=s)) for s in (1, 1, 2))
    assert first == again != other


def test_a_prefix_is_not_computed_again(model: LanguageModel):
    model.reset()
    wanted = list(model.tokens([*IDS, 7, 8], max_tokens=5))
    model.reset()
    list(model.tokens(IDS, max_tokens=5))
    assert list(model.tokens([*IDS, 7, 8], max_tokens=5)) == wanted
    assert model.stats.reused_tokens == len(IDS)
    assert model.stats.prompt_tokens == 2


def test_a_cancelled_generation_leaves_the_cache_valid(model: LanguageModel):
    wanted = list(model.tokens(IDS, max_tokens=8))
    for _ in zip(range(3), model.tokens(IDS, max_tokens=8), strict=False):
        pass
    assert list(model.tokens(IDS, max_tokens=8)) == wanted


def test_an_interrupted_step_is_rolled_back(model: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    wanted = list(model.tokens(IDS, max_tokens=8))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(model.engine.model.layers[1].mlp), "__call__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(model.tokens([*IDS, 3, 4], max_tokens=8))
    assert list(model.tokens(IDS, max_tokens=8)) == wanted


def test_interleaved_generations_are_independent(model: LanguageModel):
    prompts = [IDS, IDS[::-1], [9, 8, 7]]
    wanted = [list(model.tokens(prompt, max_tokens=8)) for prompt in prompts]
    model.reset()
    streams = [model.tokens(prompt, max_tokens=8) for prompt in prompts]
    found = [list(tokens) for tokens in zip(*streams, strict=True)]
    assert [list(text) for text in zip(*found, strict=True)] == wanted


def test_threads_get_their_own_sequences(model: LanguageModel):
    prompts = [[*IDS, number] for number in range(12)]
    wanted = [list(model.tokens(prompt, max_tokens=10)) for prompt in prompts]
    model.reset()
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda prompt: list(model.tokens(prompt, max_tokens=10)), prompts))
    assert found == wanted
    assert model.scheduler.idle


def test_chat_reuses_the_prefix_of_the_conversation(model: LanguageModel):
    messages = [{"role": "user", "content": "Hello fox"}]
    answer = "".join(model.chat(messages, max_tokens=6))
    more = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "and dog"}]
    "".join(model.chat(more, max_tokens=6))
    assert model.stats.reused_tokens >= len(model.chat_ids(messages)) - 1


def test_chat_batch_equals_single_chats(model: LanguageModel):
    chats = [[{"role": "user", "content": text}] for text in ("Hello fox", "dog")]
    alone = ["".join(model.chat(chat, max_tokens=6)) for chat in chats]
    assert model.chat_batch(chats, max_tokens=6) == alone


def test_a_reply_stops_at_the_end_of_turn_token(model: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    chat = [{"role": "user", "content": "Hello fox"}]
    ids = model.chat_ids(chat)
    whole = list(model.tokens(ids, max_tokens=6, ignore_eos=True))
    monkeypatch.setattr(model.tokenizer, "end_of_turn_ids", frozenset([whole[2]]))
    cut = model.tokenizer.decode(whole[: whole.index(whole[2])])
    assert "".join(model.chat(chat, max_tokens=6)) == cut
    assert model.chat_batch([chat], max_tokens=6) == [cut]


def test_the_template_is_rendered_on_first_use_only(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_):
        raise AssertionError("a template was rendered")

    monkeypatch.setattr(process, "render", refuse)
    model = auraflux.load(tiny(), context=64, device="cpu", sampling=GREEDY)
    "".join(model.generate("The quick", max_tokens=2))


def test_generate_batch_equals_single_generations(model: LanguageModel):
    prompts = ["The quick brown", [3, 4, 5, 6], "x"]
    alone = ["".join(model.generate(prompt, max_tokens=10)) for prompt in prompts]
    assert model.generate_batch(prompts, max_tokens=10) == alone
    assert model.generate_batch([]) == []


def test_sequences_of_a_batch_end_independently(model: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    prompts = [IDS, IDS[:4], IDS[2:], IDS[3:]]
    settings = {"max_tokens": 12, "temperature": 1.0, "seed": 5}
    monkeypatch.setattr(model.scheduler.builder, "stop_token_ids", frozenset())
    endless = [list(model.tokens(prompt, **settings)) for prompt in prompts]
    monkeypatch.setattr(model.scheduler.builder, "stop_token_ids", frozenset([endless[0][1], endless[1][4], endless[2][8]]))
    alone = ["".join(model.generate(prompt, **settings)) for prompt in prompts]
    assert len({len(text) for text in alone}) > 1
    assert model.generate_batch(prompts, **settings) == alone


def test_the_stop_token_is_cached(model: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    whole = list(model.tokens(IDS, max_tokens=8))
    again = [*IDS, *whole[:5], 7]
    wanted = list(model.tokens(again, max_tokens=4))
    model.reset()
    end = whole.index(whole[4])
    monkeypatch.setattr(model.scheduler.builder, "stop_token_ids", frozenset([whole[4]]))
    assert list(model.tokens(IDS, max_tokens=8)) == whole[:end]
    monkeypatch.setattr(model.scheduler.builder, "stop_token_ids", frozenset())
    assert list(model.tokens(again, max_tokens=4)) == wanted
    begun = model.engine.graphs.runs_ahead
    assert model.stats.reused_tokens == len(IDS) + end + begun


def test_tokens_are_output_before_the_cache_is_full(model: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    wanted, extend, steps = list(model.tokens(IDS, max_tokens=8)), Batch.extend, []
    # a fully prefilled prompt needs no decode step for its first token
    room = 3 - model.engine.supports_last_logits(1)

    def full(self: Batch, counts: list[int]) -> None:
        if counts == [1]:
            steps.append(self)
            if len(steps) > room:
                raise CacheFull("there is no page left.")
        extend(self, counts)

    model.reset()
    monkeypatch.setattr(Batch, "extend", full)
    tokens = model.tokens(IDS, max_tokens=8)
    assert [next(tokens) for _ in range(3)] == wanted[:3]
    with pytest.raises(CacheFull, match="no page"):
        next(tokens)


def test_stop_strings_end_the_sequence(model: LanguageModel):
    whole = "".join(model.generate("The", max_tokens=20))
    stop = whole[3:5]
    assert "".join(model.generate("The", max_tokens=20, stop=(stop,))) == whole[: whole.index(stop)]


def test_stats_compare_with_an_uncompressed_cache(model: LanguageModel):
    list(model.tokens(IDS, max_tokens=4))
    assert model.stats.tokens == 4
    # width 16: 8 + 4 bits per coordinate and two 4-byte norms, against 2 * 16 * 2 bytes; one page of each
    cache, length = model.engine.cache, len(IDS) + 3
    coded = sum(group.page_nbytes // group.size * length for group in cache.page_groups if group.grows)
    # in float32, as with kv="none" on this device
    assert model.stats.uncompressed_nbytes / coded == pytest.approx(2 * 64 / (16 + 8 + 8))
    # the sink token, and all tokens as recent ones, are also stored in bf16: half of float32
    recent = model.stats.uncompressed_nbytes / 2
    assert model.stats.full_precision_nbytes == model.stats.cache_nbytes - coded == recent + recent / length
    # one page of each
    assert model.stats.allocated_nbytes == sum(group.page_nbytes for group in cache.page_groups)


def test_generation_ends_at_the_context_limit():
    model = auraflux.load(tiny(), context=16, kv="none", device="cpu", sampling=GREEDY)
    assert len(list(model.tokens(IDS))) == 16 - len(IDS) + 1


def test_a_context_beyond_the_trained_one_is_noted():
    trained = auraflux.load(tiny(), kv="none", device="cpu").engine.model.config.context
    notes = {more: auraflux.load(tiny(), kv="none", context=trained + more, device="cpu").notes for more in (0, 1)}
    assert notes[0] == []
    assert notes[1] == [f"the model was trained on sequences of {trained:,} tokens; output beyond that may be nonsense."]


def test_without_a_tokenizer_it_runs_on_ids():
    model = auraflux.load(tiny(text=False), context=64, device="cpu", sampling=GREEDY)
    assert model.tokenizer is None
    assert "".join(model.generate(IDS, max_tokens=3)).split() == [str(token) for token in model.tokens(IDS, max_tokens=3)]
    with pytest.raises(InputError, match="has no tokenizer files, so a string cannot be tokenized"):
        model.generate("hello")
    with pytest.raises(InputError, match="so a conversation cannot be tokenized"):
        model.chat([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("prompt", "settings", "error", "message"),
    [
        ([], {}, InputError, "the prompt is empty"),
        ([5, 100_000], {}, InputError, "token 100000 is not in the model's vocabulary"),
        ([5, -1], {}, InputError, "token -1 is not"),
        ([5] * 300, {}, ContextError, r"the prompt has 300 tokens.*limited to 256.*context=301"),
        (IDS, {"heat": 1}, InputError, "unknown sampling settings: heat"),
        (IDS, {"temperature": -1.0}, InputError, "temperature=-1.0 must be from 0 to"),
    ],
)
def test_requests_that_do_not_fit_are_refused(
    model: LanguageModel, prompt: list[int], settings: dict, error: type, message: str
):
    with pytest.raises(error, match=message):
        model.generate(prompt, **settings)


def test_settings_are_refused_before_anything_is_loaded():
    with pytest.raises(SettingsError, match="kv='k5v5' is not supported"):
        auraflux.load(tiny(), kv="k5v5")
    with pytest.raises(SettingsError, match="context=0 must be an integer from 1"):
        auraflux.load(tiny(), context=0)
    with pytest.raises(InputError, match="there is no device 'gpu'"):
        auraflux.load(tiny(), device="gpu")
    with pytest.raises(FormatError, match="there is no model"):
        auraflux.load("no such model")


@pytest.mark.parametrize("kv", ["none", "k8v4", "k4v2"])
def test_replayed_steps_are_the_same_steps(kv: str):
    """Run beyond a page, and beyond a length bucket, where the step is recorded again."""
    options = {"kv": kv, "quantize": 4, "context": 256, "device": "cpu"}
    loaded = {graphs: auraflux.load(tiny(), graphs=graphs, sampling=GREEDY, **options) for graphs in (True, False)}
    tokens = {graphs: list(model.tokens(IDS, max_tokens=150)) for graphs, model in loaded.items()}
    assert tokens[True] == tokens[False]
    assert loaded[True].engine.graphs.refused is None
    assert loaded[False].engine.graphs.refused == "graphs are switched off"
