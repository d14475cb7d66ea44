"""Guesses that are checked several at a time: the text is what it is without them, whatever is guessed."""

import json
import random
import shutil
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import auraflux
from auraflux.cache.radix import common_length
from auraflux.errors import AurafluxError, CacheFull, SettingsError
from auraflux.run.graph import Replayer
from auraflux.run.ngrams import COPIED, NGrams
from auraflux.run.request import Event, Request
from auraflux.run.sampler import Sampler
from auraflux.run.sampling import Sampling
from auraflux.run.scheduler import Scheduler
from auraflux.run.speculate import RENT, Draft, Speculation
from tests.models.oracles import save
from tests.models.test_replay import MODELS, UNREPLAYED
from tests.run.test_scheduler import CALIBRATED, finish, nothing_leaks, prompts_of, scheduler_for, submit
from tests.run.tiny import tiny

TOKENS = 40


class Told:
    """Guesses from somebody who knows the texts, and is right most of the time."""

    free, kind = True, 2

    def __init__(self, texts: list[list[int]], share: float = 0.8, seed: int = 0):
        self.texts, self.share, self.random = texts, share, random.Random(seed)

    def propose(self, tokens: list[int], count: int) -> list[int]:
        text = next((text for text in self.texts if text[: len(tokens)] == tokens), [])
        return [self._changed(token) for token in text[len(tokens) : len(tokens) + count]]

    def _changed(self, token: int) -> int:
        return token if self.random.random() < self.share else (token + 1) % 64

    def found(self, tokens: list[int], held: Any) -> None: ...

    def close(self, tokens: list[int] | None = None) -> None: ...


def eager(begin: Callable[[], Draft]) -> Speculation:
    """Speculation that thinks tokens are cheap, so that it guesses at every step."""
    made = Speculation(begin, 64)
    made.costs.reach = lambda texts: 64  # type: ignore[method-assign]
    made.costs.ratio = lambda texts, more: 0.5  # type: ignore[method-assign]
    return made


def with_guesses(scheduler: Scheduler, begin: Callable[[], Draft]) -> Scheduler:
    scheduler.speculate(eager(begin))
    return scheduler


def settings_of(temperature: float) -> Sampling:
    return Sampling(max_tokens=TOKENS, temperature=temperature, seed=3)


@cache
def plain(name: str, kv: str, temperature: float = 0.0) -> list[list[int]]:
    made = scheduler_for(name, kv)
    return finish(made, submit(made, prompts_of(name), settings_of(temperature)))


def told(name: str, kv: str, temperature: float = 0.0, share: float = 0.8) -> Callable[[], Draft]:
    texts = [[*prompt, *text] for prompt, text in zip(prompts_of(name), plain(name, kv, temperature), strict=True)]
    return lambda: Told(texts, share)


QUICK = [("llama", "k8v4", 0.0), ("qwen3_5_moe", "k8v4", 1.0), ("gpt_oss", CALIBRATED, 0.0)]
KV = ["none", "k8v4", "k4v4", "k3v2", CALIBRATED]
ALL = [each for each in product(MODELS, KV, [0.0, 1.0]) if each not in QUICK]
# keeps no positions as they are beside codes
ALL += product(UNREPLAYED, KV[:-1], [0.0, 1.0])


@pytest.mark.parametrize(
    ("name", "kv", "temperature"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in ALL)]
)
def test_a_text_is_what_it_is_without_guesses(name: str, kv: str, temperature: float):
    for begin in (told(name, kv, temperature), NGrams):
        made = with_guesses(scheduler_for(name, kv), begin)
        jobs = submit(made, prompts_of(name), settings_of(temperature))
        assert finish(made, jobs) == plain(name, kv, temperature)
        assert nothing_leaks(made)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe"])
def test_right_guesses_take_fewer_steps(name: str):
    made = with_guesses(scheduler_for(name), told(name, "k8v4", share=1.0))
    jobs = submit(made, prompts_of(name), settings_of(0))
    assert finish(made, jobs) == plain(name, "k8v4")
    assert made.speculation.drafted == made.speculation.accepted > 0
    # four texts share a step's tokens
    assert all(job.steps < TOKENS // 2 for job in jobs)


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.3}, {"logit_bias": {5: 3.0}, "logprobs": 2}])
def test_settings_hold_for_guessed_tokens(settings: dict[str, Any]):
    sampling = Sampling(max_tokens=24, temperature=0.7, top_k=20, seed=1, **settings)
    prompts = prompts_of("llama")
    wanted = events_of(scheduler_for("llama"), prompts, sampling)
    texts = [[*prompt, *(event.tokens[0] for event in events)] for prompt, events in zip(prompts, wanted, strict=True)]
    found = events_of(with_guesses(scheduler_for("llama"), lambda: Told(texts)), prompts, sampling)
    for theirs, mine in zip(wanted, found, strict=True):
        assert [(event.tokens, event.finish) for event in mine] == [(event.tokens, event.finish) for event in theirs]
        told = [[event.scored[0].logprob for event in events if event.scored] for events in (mine, theirs)]
        assert told[0] == told[1]


def events_of(scheduler: Scheduler, prompts: list[list[int]], sampling: Sampling) -> list[list[Event]]:
    found: list[list[Event]] = [[] for _ in prompts]
    pairs = zip(prompts, found, strict=True)
    finish(scheduler, [scheduler.submit(Request(tuple(prompt), sampling), events.append) for prompt, events in pairs])
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_a_text_may_end_in_the_middle_of_its_guesses(name: str):
    wanted = plain(name, "k8v4")
    stop = wanted[0][5]
    made = with_guesses(scheduler_for(name), told(name, "k8v4", share=1.0))
    request = Request(tuple(prompts_of(name)[0]), settings_of(0), ends=frozenset([stop]))
    job = made.submit(request)
    assert finish(made, [job]) == [wanted[0][: wanted[0].index(stop)]]
    assert job.finish == "stop"
    # what is kept of the text has no token that is not part of it
    again = submit(made, [[*prompts_of(name)[0], *job.stream.tokens, 7]])
    fresh = scheduler_for(name)
    assert finish(made, again) == finish(fresh, submit(fresh, [list(again[0].request.prompt)]))
    assert nothing_leaks(made)


STOPS = list(product(["llama", "qwen3_5_moe", "gpt_oss"], ["in the step", "after it"], [KeyboardInterrupt, CacheFull]))
QUICK_STOPS = [STOPS[0], STOPS[4], STOPS[7]]


@pytest.mark.parametrize(
    ("name", "when", "failure"),
    [each if each in QUICK_STOPS else pytest.param(*each, marks=pytest.mark.slow) for each in STOPS],
)
def test_what_stops_a_step_of_guesses_leaves_texts_as_they_were(
    name: str, when: str, failure: type[BaseException], monkeypatch: pytest.MonkeyPatch
):
    made = with_guesses(scheduler_for(name), told(name, "k8v4"))
    jobs = submit(made, prompts_of(name), settings_of(0))
    made.wait(lambda: any(len(job.stream.tokens) > 4 for job in jobs))
    writing = [job for job in jobs if job.sequence is not None and job.unread == 0]
    held = [(job.ids[:], job.held.length) for job in writing]
    assert held

    def fail(*_: Any) -> Any:
        raise failure("stopped")

    with monkeypatch.context() as patch:
        if when == "in the step":
            patch.setattr(made.engine.runner, "score", fail)
        else:
            patch.setattr(Sampler, "__call__", fail)
        if failure is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                made.turn()
            assert [(job.ids, job.held.length) for job in writing] == held
    assert finish(made, jobs) == plain(name, "k8v4")
    assert nothing_leaks(made)


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_a_step_of_guesses_that_fails_ends_its_texts_and_no_others(name: str, monkeypatch: pytest.MonkeyPatch):
    made = with_guesses(scheduler_for(name, parallel=2), told(name, "k8v4"))
    jobs = submit(made, prompts_of(name), settings_of(0))
    made.wait(lambda: any(len(job.stream.tokens) > 4 for job in jobs))
    writing = [job for job in jobs if job.sequence is not None and job.unread == 0]
    with monkeypatch.context() as patch:
        patch.setattr(made.engine, "verify", lambda *_: 1 / 0)
        made.turn()
    assert writing
    assert all(job.finish == "error" for job in writing)
    wanted = dict(zip(jobs, plain(name, "k8v4"), strict=True))
    assert all(job.stream.tokens == wanted[job][: len(job.stream.tokens)] for job in writing)
    others = [job for job in jobs if job not in writing]
    assert finish(made, others) == [wanted[job] for job in others]
    # and nothing wrong is kept
    assert finish(made, submit(made, prompts_of(name), settings_of(0))) == plain(name, "k8v4")
    assert nothing_leaks(made)


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_a_text_that_is_cancelled_while_its_guesses_are_checked(name: str, monkeypatch: pytest.MonkeyPatch):
    made = with_guesses(scheduler_for(name), told(name, "k8v4"))
    gone, *jobs = submit(made, prompts_of(name), settings_of(0))
    made.wait(lambda: len(gone.stream.tokens) > 4)
    verify = made.engine.verify

    def cancelling(*args: Any) -> Any:
        found = verify(*args)
        made.cancel(gone)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(made.engine, "verify", cancelling)
        made.wait(lambda: gone.finish is not None)
    assert gone.finish == "cancelled"
    assert gone.stream.tokens == plain(name, "k8v4")[0][: len(gone.stream.tokens)]
    assert finish(made, jobs) == plain(name, "k8v4")[1:]
    assert finish(made, submit(made, prompts_of(name), settings_of(0))) == plain(name, "k8v4")
    assert nothing_leaks(made)


def test_a_cancelled_text_leaves_the_others():
    made = with_guesses(scheduler_for("qwen3_5_moe"), told("qwen3_5_moe", "k8v4"))
    gone, *jobs = submit(made, prompts_of("qwen3_5_moe"), settings_of(0))
    made.wait(lambda: len(gone.stream.tokens) > 4)
    made.cancel(gone)
    assert finish(made, jobs) == plain("qwen3_5_moe", "k8v4")[1:]
    assert nothing_leaks(made)


def test_a_gpu_is_not_ahead_of_guesses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Replayer, "ahead", True)
    made = with_guesses(scheduler_for("llama"), told("llama", "k8v4"))
    assert finish(made, submit(made, prompts_of("llama"), settings_of(0))) == plain("llama", "k8v4")
    assert made.speculation.accepted > 0


def test_without_pages_for_guesses_the_texts_go_on():
    prompts = [prompt[:40] for prompt in prompts_of("llama")]
    wanted = finish(made := scheduler_for("llama"), submit(made, prompts, settings_of(0)))
    texts = [[*prompt, *text] for prompt, text in zip(prompts, wanted, strict=True)]
    made = with_guesses(scheduler_for("llama", tokens=256, context=192), lambda: Told(texts))
    assert finish(made, submit(made, prompts, settings_of(0))) == wanted


def test_drawn_tokens_have_the_model_s_distribution():
    """The second tokens of 800 seeds after the commonest first: guessed, and as often each as its probability says."""
    prompt, heat = prompts_of("llama")[1], 1.5
    greedy = finish(made := scheduler_for("llama"), submit(made, [prompt], settings_of(0)))[0]
    made = with_guesses(scheduler_for("llama", parallel=8), lambda: Told([[*prompt, *greedy]], share=1.0))
    requests = [Request(tuple(prompt), Sampling(max_tokens=3, temperature=heat, seed=seed)) for seed in range(800)]
    found = [text[1] for text in finish(made, [made.submit(request) for request in requests]) if text[0] == greedy[0]]
    assert made.speculation.drafted > made.speculation.accepted > 100
    scores = made.engine.all_scores(made.engine.cache.open(), [*prompt, greedy[0]])[-1]
    expected = scores.div(heat).softmax(-1) * len(found)
    often = expected >= 5
    counts = torch.bincount(torch.tensor(found), minlength=len(scores))
    both = [torch.cat([each[often], each[~often].sum()[None]]) for each in (counts, expected)]
    squares = ((both[0] - both[1]).square() / both[1]).sum()
    # chi squared: its mean and variance are the degrees of freedom, and twice those
    assert squares < often.sum() + 4 * (2 * often.sum()).sqrt()


def test_n_grams_go_on_as_the_longest_end_did():
    text = [1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3]
    assert NGrams().propose(text, 3) == [4, 9, 2]
    assert NGrams().propose([7, 7], 3) == []
    grown = NGrams()
    for end in range(1, len(text)):
        grown.propose(text[:end], 3)
    assert grown.propose(text, 3) == [4, 9, 2]
    # a text that runs in a circle is guessed to stay there
    assert NGrams().propose([6, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_what_is_copied_goes_on_after_a_change():
    said = list(range(100, 160))
    # one token is another, and the pair after it has stood elsewhere since
    text = [*said, *said[:20], 7, *said[21:23], 9, 9, *said[:20], 8, *said[21:23]]
    draft = NGrams()
    draft.propose(text[:-3], 3)
    assert draft.propose(text, 3)[0] == 9
    copying = [*said, *said[21:23], 9, 9, *said[:20]]
    draft = NGrams()
    draft.propose(copying, 3)
    assert draft.propose([*copying, 8, *said[21:23]], 3) == said[23:26]
    assert draft.kind == COPIED


class Written:
    """A text of which only the tokens matter."""

    room = 100

    def __init__(self, speculation: Speculation, ids: list[int]):
        self.ids, self.guesses = ids, speculation.begin()


def write(speculation: Speculation, text: Written, tokens: list[int], seconds: Callable[[int], float]) -> float:
    """Write tokens as a model would that takes so long for steps of so many guesses; give how long it took in all."""
    taken, at = 0.0, 0
    while at < len(tokens):
        (draft,) = speculation.plan([text])
        kept = common_length(draft, tokens[at:])
        text.ids += tokens[at : at + kept + 1]
        at += kept + 1
        taken += seconds(len(draft))
        speculation.note([text], [draft], [kept], seconds(len(draft)))
    return taken


def test_guesses_pay_where_a_text_repeats_itself_and_cost_nothing_where_it_does_not():
    chance = random.Random(0)
    said = [chance.randrange(1000) for _ in range(300)]
    new = [chance.randrange(12) for _ in range(300)]
    speculation = Speculation(NGrams, 64)

    def seconds(guesses: int) -> float:
        return 0.01 * (1 + 0.3 * guesses)

    assert write(speculation, Written(speculation, list(said)), said[:250], seconds) < 0.01 * 250 / 1.6
    assert write(speculation, Written(speculation, list(new)), new[::-1], seconds) < 0.01 * 300 / 0.95


def test_a_step_of_a_new_size_is_recorded_only_after_guesses_were_right():
    """Recording takes as long as many plain steps: not for a text that hardly repeats itself."""
    said, known, asked = list(range(100, 400)), set[int](), list[int]()
    speculation = Speculation(NGrams, 64)

    def is_known(more: int) -> bool:
        asked.append(more)
        return more in known

    text = Written(speculation, list(said))
    at, draft = 0, list[int]()
    while at < 60 and not draft:
        (draft,) = speculation.plan([text], is_known)
        if not draft:
            text.ids.append(said[at])
            at += 1
            speculation.note([text], [[]], [0], 0.01)
    assert asked
    assert RENT <= at < 60
    # it is used up: another size must wait again, this one need not
    text.ids += said[at : at + 4]
    known.add(len(draft))
    speculation.note([text], [draft], [len(draft)], None)
    assert len(speculation.plan([text], is_known)[0]) == len(draft)


def test_guesses_stop_where_their_steps_take_too_long():
    """As where every token of a step reads other experts from disk."""
    chance = random.Random(0)
    said = [chance.randrange(1000) for _ in range(400)]
    speculation = Speculation(NGrams, 64)
    taken = write(speculation, Written(speculation, list(said)), said, lambda guesses: 0.01 * (1 + 1.2 * guesses))
    assert taken < 0.01 * 400 / 0.85
    assert speculation.drafted < 60


def test_a_single_guess_may_pay_where_several_do_not():
    """As of a layer whose first guess is the best, with a mixture whose steps take longer with every token."""
    chance = random.Random(0)
    said = [chance.randrange(64) for _ in range(800)]

    class Fading(Told):
        free, kind = False, 1

        def _changed(self, token: int) -> int:
            self.share = max(0.4, self.share - 0.25)
            return super()._changed(token)

        def propose(self, tokens: list[int], count: int) -> list[int]:
            self.share = 1.05
            return super().propose(tokens, count)

    speculation = Speculation(lambda: Fading([said]), 64)
    taken = write(speculation, Written(speculation, said[:1]), said[1:], lambda guesses: 0.01 * (1 + 0.3 * guesses))
    assert taken < 0.01 * 799 / 1.2


@pytest.mark.parametrize("other", [False, True], ids=["itself", "another"])
def test_a_second_model_guesses(other: bool):
    """The model itself is right about its likeliest tokens; another is not about tokens that are drawn."""
    settings = {"max_tokens": 30, "temperature": 2.0 if other else 0.0, "seed": 1}
    wanted = list(auraflux.load(tiny(), context=128, device="cpu").tokens("the cat sat", **settings))
    model = auraflux.load(tiny(), context=128, device="cpu", speculate=another() if other else tiny())
    speculation = model.scheduler.speculation
    speculation.costs.ratio, speculation.costs.reach = lambda texts, more: 0.5, lambda texts: 15
    assert list(model.tokens("the cat sat", **settings)) == wanted
    assert model.stats.drafted > 0
    assert (model.stats.accepted == model.stats.drafted) is not other
    # what the second model held for the text is given back
    small = speculation.begin().draft.engine
    assert small.cache.nbytes == 0
    assert small is not model.engine


def another() -> Path:
    torch.manual_seed(1)
    path = Path(mkdtemp(prefix="auraflux-tiny-"))
    shutil.copytree(tiny(), path, dirs_exist_ok=True)
    config = LlamaConfig.from_pretrained(path)
    save(LlamaForCausalLM(config), path)
    return path


def test_what_cannot_guess_is_refused():
    with pytest.raises(AurafluxError, match="nothing-like-it"):
        auraflux.load(tiny(), context=64, device="cpu", speculate="nothing-like-it")


def test_a_model_of_other_tokens_cannot_guess(tmp_path: Path):
    shutil.copytree(another(), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(SettingsError, match="it has other tokens"):
        auraflux.load(tiny(), context=64, device="cpu", speculate=tmp_path)
