"""Guesses of a model's own further layer: the text is what it is without them, and they are what the layer would guess."""

from functools import cache
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

import auraflux
from auraflux.cache import Cache, CacheSettings
from auraflux.cache.prefix import PrefixStore
from auraflux.cli.generate import figures
from auraflux.errors import CacheFull, SettingsError
from auraflux.models import family
from auraflux.ops.simd.isa import ISA
from auraflux.run.engine import Engine
from auraflux.run.graph import Replayer
from auraflux.run.mtp_drafts import MTPDrafts
from auraflux.run.request import Request
from auraflux.run.sampler import Sampler
from auraflux.run.sampling import Sampling
from auraflux.run.scheduler import Scheduler
from auraflux.run.speculate import Speculation
from auraflux.weights.checkpoint import open_checkpoint
from auraflux.weights.convert import convert
from auraflux.weights.expert_settings import ExpertSettings
from auraflux.weights.pack import pack
from tests.models.oracles import save, tokens
from tests.models.test_mtp import MODELS, Both, family_of, with_mtp
from tests.run.test_scheduler import finish, nothing_leaks, submit
from tests.run.tiny import tiny

TOKENS = 30
GREEDY = Sampling(max_tokens=TOKENS)


@cache
def both(name: str, right: bool = True) -> Both:
    """A tiny model; where its layer is right now and then, it passes the next token on, whose neighbour both heads prefer."""
    torch.manual_seed(0)
    return with_mtp(MODELS[name](), Path(mkdtemp(prefix="auraflux-tiny-")), joined=_passing if right else None)


def _passing(matrix: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(5))
    return torch.eye(*matrix.shape) + 0.2 * noise


@cache
def loaded(name: str, right: bool = True) -> Any:
    return family_of(both(name, right).folder)


def scheduler_for(name: str, kv: str = "k8v4", *, right: bool = True, mtp: bool = True, **changes: Any) -> Scheduler:
    model, shapes, place = loaded(name, right)
    sizes = {"context": 256, "sequences": 4, "kept": 4, "chunk": 64, "exact": True, **changes}
    engine = Engine(model, shapes, CacheSettings(kv), **sizes, hidden=mtp)
    made = Scheduler(engine, None, frozenset(), parallel=4)
    if mtp:
        drafts = MTPDrafts.beside(engine, shapes[place.like])
        speculation = Speculation(drafts.begin, 64, drafts.propose, drafts.hear)
        speculation.costs.reach = lambda texts: 64  # type: ignore[method-assign]
        speculation.costs.ratio = lambda texts, more: 0.5  # type: ignore[method-assign]
        made.speculate(speculation)
    return made


def drafts_of(scheduler: Scheduler) -> MTPDrafts:
    return scheduler.speculation.begin().draft._drafts


def nothing_is_left(scheduler: Scheduler) -> bool:
    drafts = drafts_of(scheduler)
    drafts.prefixes.clear()
    return nothing_leaks(scheduler) and drafts.cache.nbytes == 0


def prompts_of(name: str) -> list[list[int]]:
    """Of several lengths, more than a page too; the first and the third begin alike."""
    text = tokens(both(name).model, 200)
    return [text[:90], text[100:103], text[:70] + text[150:160], text[120:150]]


@cache
def plain(name: str, kv: str = "k8v4", right: bool = True, heat: float = 0.0) -> list[list[int]]:
    made = scheduler_for(name, kv, right=right, mtp=False)
    return finish(made, submit(made, prompts_of(name), Sampling(max_tokens=TOKENS, temperature=heat, seed=3)))


NAMES, KV = ("qwen3_5_moe", "deepseek_v3"), ("none", "k8v4", "k4v4")
ONE_QUICK = [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.slow)]
QUICK = [("qwen3_5_moe", "k8v4", True, 0.0), ("deepseek_v3", "k8v4", True, 1.0)]
ALL = [each for each in product((*NAMES, "glm4_moe"), KV, (True, False), (0.0, 1.0)) if each not in QUICK]


@pytest.mark.parametrize(
    ("name", "kv", "right", "heat"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in ALL)]
)
def test_a_text_is_what_it_is_without_guesses(name: str, kv: str, right: bool, heat: float):
    made = scheduler_for(name, kv, right=right)
    jobs = submit(made, prompts_of(name), Sampling(max_tokens=TOKENS, temperature=heat, seed=3))
    assert finish(made, jobs) == plain(name, kv, right, heat)
    assert made.speculation.drafted > 0
    if right and not heat:
        assert made.speculation.drafted > made.speculation.accepted > 40
        assert all(job.steps < TOKENS for job in jobs)
    # again, with prompts that are found
    again = submit(made, prompts_of(name), Sampling(max_tokens=TOKENS, temperature=heat, seed=3))
    assert finish(made, again) == plain(name, kv, right, heat)
    assert nothing_is_left(made)


def guessed(found: Both, ids: list[int], count: int) -> list[int]:
    """What a layer would guess that is given its own guesses and results, as transformers has it."""
    hidden, following, guess = found.hidden(ids[:-1]), ids[1:], list[int]()
    for _ in range(count):
        results = found.predicted(following, hidden)
        guess.append(int(found.scores(results[-1]).argmax()))
        hidden, following = torch.cat([hidden, results[-1:]]), [*following, guess[-1]]
    return guess


@pytest.mark.parametrize("name", NAMES)
def test_guesses_are_those_of_the_layer(name: str):
    """Heard in pieces or at once, of one text or of several together, and after guesses that were wrong."""
    source, made = both(name, False), scheduler_for(name, "none", right=False)
    drafts, engine = drafts_of(made), made.engine
    texts = prompts_of(name)
    wanted = [guessed(source, ids, 4) for ids in texts]
    told = []
    for ids, piece in zip(texts, (90, 1, 37, 7), strict=True):
        draft, sequence = drafts.begin(), engine.cache.open()
        for start in range(0, len(ids) - 1, piece):
            rows = engine.read([sequence], [ids[start : min(start + piece, len(ids) - 1)]])
            drafts.hear([(draft, ids, start, rows)])
            # repeated steps tell of the same again
            drafts.hear([(draft, ids, start, rows)])
        told.append((draft, ids, 4))
        sequence.close()
    for _ in range(2):
        assert drafts.propose(told) == wanted
    alone = [drafts.propose([each])[0] for each in told]
    assert alone == wanted
    # nothing is known of what a token further the model would make
    assert drafts.propose([(told[0][0], [*texts[0], 1], 4)]) == [[]]


def written(scheduler: Scheduler, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[int, list[int]]]:
    """A text's job when it has ended, and what was guessed after so many tokens of it."""
    guesses: dict[int, list[int]] = {}
    plain_propose = scheduler.speculation._propose

    def propose(asked: list[Any]) -> list[list[int]]:
        found = plain_propose(asked)
        guesses.update({len(tokens): guess for (_, tokens, _), guess in zip(asked, found, strict=True) if guess})
        return found

    with monkeypatch.context() as patch:
        patch.setattr(scheduler.speculation, "_propose", propose)
        (job,) = submit(scheduler, [prompt], GREEDY)
        finish(scheduler, [job])
    return job, guesses


FOUND = [
    ("deepseek_v3", "k8v4"),
    ("qwen3_5_moe", "k8v4"),
    ("deepseek_v3", "none"),
    ("qwen3_5_moe", "k4v4"),
    ("glm4_moe", "k4v4"),
]


@pytest.mark.parametrize(("name", "kv"), [*FOUND[:1], *(pytest.param(*each, marks=pytest.mark.slow) for each in FOUND[1:])])
def test_a_found_prefix_is_one_for_the_layer_too(name: str, kv: str, monkeypatch: pytest.MonkeyPatch):
    """The same prompt, one that parts from the text, and one that goes on after it: text and guesses as if nothing was kept."""
    text = tokens(both(name).model, 200)
    made = scheduler_for(name, kv, right=False)
    first, _ = written(made, text[:90], monkeypatch)
    parting = [*first.ids[:-3], *text[160:180]]
    for prompt in (text[:90], parting, [*first.ids, *text[150:160]]):
        wanted, expected = written(scheduler_for(name, kv, right=False), prompt, monkeypatch)
        found, guesses = written(made, prompt, monkeypatch)
        assert found.cached > 0
        assert found.stream.tokens == wanted.stream.tokens
        both_guessed = guesses.keys() & expected.keys()
        assert len(both_guessed) > 5
        same = sum(a == b for n in both_guessed for a, b in zip(guesses[n], expected[n], strict=False))
        all_ = sum(min(len(guesses[n]), len(expected[n])) for n in both_guessed)
        # where texts part, a state that cannot go back by a token leaves a pair out
        assert same == all_ or (prompt is parting and made.engine.cache.moves and same > 0.4 * all_)
    assert nothing_is_left(made)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kv", ["k8v4", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [NAMES[1], *(pytest.param(name, marks=pytest.mark.slow) for name in (NAMES[0], "glm4_moe"))])
def test_steps_of_the_layer_are_replayed(name: str, kv: str, device: str):
    """Guesses at two texts and at one: the first time kernels are compiled, the second they are recorded."""
    model, shapes, place = family_of(both(name).folder, bits=4, group=32, device=device)
    ids = tokens(both(name).model, 90)
    found = {}
    for graphs in (True, False):
        sizes = {"context": 256, "sequences": 2, "chunk": 64, "exact": True, "hidden": True}
        engine = Engine(model, shapes, CacheSettings(kv), **sizes, graphs=graphs, device=device)
        drafts, asked = MTPDrafts.beside(engine, shapes[place.like]), []
        for length in (60, 33):
            draft, sequence = drafts.begin(), engine.cache.open()
            drafts.hear([(draft, ids[:length], 0, engine.read([sequence], [ids[: length - 1]]))])
            asked.append((draft, ids[:length], 5))
        found[graphs] = [(drafts.propose(asked), drafts.propose(asked[:1])) for _ in range(4)]
        steps = drafts.replayer._steps.values()
        assert [step.recording is not None for step in steps] == [graphs] * 2, drafts.replayer.refused
    assert found[True] == found[False]


STOPS = list(product(NAMES, ["in the step", "after it", "in the layer", "while it hears"], [KeyboardInterrupt, CacheFull]))
QUICK_STOPS = [STOPS[0], STOPS[4], STOPS[11], STOPS[14]]


@pytest.mark.parametrize(
    ("name", "when", "failure"),
    [each if each in QUICK_STOPS else pytest.param(*each, marks=pytest.mark.slow) for each in STOPS],
)
def test_what_stops_a_step_leaves_texts_as_they_were(
    name: str, when: str, failure: type[BaseException], monkeypatch: pytest.MonkeyPatch
):
    made = scheduler_for(name)
    jobs = submit(made, prompts_of(name), GREEDY)
    made.wait(lambda: any(len(job.stream.tokens) > 4 for job in jobs))
    writing = [job for job in jobs if job.sequence is not None and job.unread == 0]
    held = [(job.ids[:], job.held.length) for job in writing]
    assert held

    def fail(*_: Any) -> Any:
        raise failure("stopped")

    where: dict[str, tuple[Any, str]] = {
        "in the step": (made.engine.runner, "score"),
        "after it": (Sampler, "__call__"),
        "in the layer": (MTPDrafts, "_step"),
        "while it hears": (made.speculation, "hear"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*where[when], fail)
        if failure is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                made.turn()
            assert [(job.ids, job.held.length) for job in writing] == held
        elif when == "in the layer":
            # the layer has no room: texts go on without it
            made.turn()
            assert all(len(job.ids) > len(ids) for job, (ids, _) in zip(writing, held, strict=True))
    assert finish(made, jobs) == plain(name)
    assert nothing_is_left(made)


def test_a_cancelled_text_leaves_the_others():
    made = scheduler_for("qwen3_5_moe")
    gone, *jobs = submit(made, prompts_of("qwen3_5_moe"), GREEDY)
    made.wait(lambda: len(gone.stream.tokens) > 4)
    made.cancel(gone)
    assert finish(made, jobs) == plain("qwen3_5_moe")[1:]
    assert nothing_is_left(made)


@pytest.mark.parametrize("name", ONE_QUICK)
def test_texts_that_wait_for_pages_go_on_with_guesses(name: str):
    """Preempted, and read again as far as need be."""
    text = tokens(both(name).model, 180)
    prompts = [text[at : at + 60] for at in (0, 60, 120)]
    alone = scheduler_for(name, mtp=False)
    wanted = finish(alone, submit(alone, prompts, GREEDY))
    made = scheduler_for(name, tokens=256, context=128)
    assert finish(made, submit(made, prompts, GREEDY)) == wanted
    assert made.counts.preemptions > 0
    assert made.speculation.accepted > 20
    assert nothing_is_left(made)


@pytest.mark.parametrize("name", ONE_QUICK)
def test_a_layer_without_pages_begins_anew(name: str):
    made = scheduler_for(name)
    small = drafts_of(made)
    _, shapes, place = loaded(name)
    small.cache = Cache([shapes[place.like]], CacheSettings("k8v4"), context=300, sequences=4, tokens=128, chunk=64)
    small.prefixes = PrefixStore(small.cache)
    assert finish(made, submit(made, prompts_of(name), GREEDY)) == plain(name)
    assert made.speculation.accepted > 0
    assert nothing_is_left(made)


def test_a_gpu_is_not_ahead_of_guesses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Replayer, "ahead", True)
    made = scheduler_for("deepseek_v3")
    assert finish(made, submit(made, prompts_of("deepseek_v3"), GREEDY)) == plain("deepseek_v3")
    assert made.speculation.accepted > 20


def test_a_text_that_has_ended_is_not_heard_of(monkeypatch: pytest.MonkeyPatch):
    """A GPU is a step ahead of the token that ends a text: what the step makes of it is of no use, and holds no pages."""
    monkeypatch.setattr(Replayer, "ahead", True)
    monkeypatch.setattr("auraflux.run.mtp_drafts.WAITING", 1)
    made = scheduler_for("deepseek_v3")
    made.speculation.costs.ratio = lambda texts, more: 9.0
    stop = plain("deepseek_v3")[0][5]
    ended = made.submit(Request(tuple(prompts_of("deepseek_v3")[0]), GREEDY, ends=frozenset([stop])))
    jobs = submit(made, prompts_of("deepseek_v3")[1:], GREEDY)
    assert finish(made, [ended, *jobs])[1:] == plain("deepseek_v3")[1:]
    assert ended.finish == "stop"
    assert nothing_is_left(made)


def test_a_step_ahead_is_heard_too(monkeypatch: pytest.MonkeyPatch):
    """While guesses promise nothing, a GPU is a step ahead; the layer is given every token all the same."""
    monkeypatch.setattr(Replayer, "ahead", True)
    made = scheduler_for("deepseek_v3")
    made.speculation.costs.ratio = lambda texts, more: 9.0
    jobs = submit(made, prompts_of("deepseek_v3"), GREEDY)
    made.wait(lambda: all(len(job.stream.tokens) > 6 for job in jobs))
    assert made.speculation.drafted == 0
    made.speculation.costs.ratio = lambda texts, more: 0.5
    assert finish(made, jobs) == plain("deepseek_v3")
    assert made.speculation.accepted > 10


@pytest.mark.parametrize("name", ONE_QUICK)
def test_a_loaded_model_guesses_with_its_own_layer(name: str):
    prompt, settings = prompts_of(name)[0], {"max_tokens": 40, "temperature": 0.0}
    options = {"context": 160, "device": "cpu", "sequences": 2}
    wanted = list(auraflux.load(both(name).folder, **options).tokens(prompt, **settings))
    model = auraflux.load(both(name).folder, **options, speculate="mtp")
    speculation = model.scheduler.speculation
    speculation.costs.ratio, speculation.costs.reach = lambda texts, more: 0.5, lambda texts: 15
    assert list(model.tokens(prompt, **settings)) == wanted
    assert model.stats.drafted > model.stats.accepted > 10
    assert model.stats.steps == 40 - model.stats.accepted
    drafts_of(model.scheduler).prefixes.clear()
    assert drafts_of(model.scheduler).cache.nbytes == 0


def test_the_layer_is_loaded_only_where_it_is_wanted():
    assert family_of(both("deepseek_v3").folder, mtp=False)[0].mtp is None
    assert auraflux.load(both("qwen3_5_moe").folder, context=64, device="cpu", speculate="ngram").engine.model.mtp is None


def test_a_model_without_such_a_layer_is_refused(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"has no layer that predicts further tokens \(MTP\).*--speculate ngram"):
        auraflux.load(tiny(), context=64, device="cpu", speculate="mtp")
    # the config of a model that was published without it may still speak of it
    bare = save(MODELS["deepseek_v3"](), tmp_path)
    with pytest.raises(SettingsError, match="has no layer that predicts further tokens"):
        auraflux.load(bare, context=64, device="cpu", speculate="mtp")


def test_ranks_have_no_such_layer():
    with pytest.raises(SettingsError, match="cannot guess with its own layer"):
        auraflux.load(both("deepseek_v3").folder, context=64, device="cpu", speculate="mtp", parallel="pipeline=2")


@cache
def packed(name: str) -> tuple[Path, int]:
    """A model whose experts are in files, and the bytes of half of them."""
    source = open_checkpoint(both(name).folder)
    folder, kind = Path(mkdtemp(prefix="auraflux-packed-")), family(source.config)
    convert(source, kind, folder / "whole", bits=4, group=32)
    pack(open_checkpoint(folder / "whole"), kind, folder / "packed", lanes=ISA.lanes)
    return folder / "packed", open_checkpoint(folder / "packed").experts.nbytes // 2


def streaming(name: str, **options: Any) -> Any:
    folder, nbytes = packed(name)
    settings = ExpertSettings(memory=nbytes, io="direct", disk=options.pop("disk", None))
    return auraflux.load(folder, context=256, device="cpu", sequences=2, expert_memory=settings, **options)


@pytest.mark.parametrize("name", ONE_QUICK)
def test_experts_that_only_guesses_ask_for_are_counted(name: str):
    settings = {"max_tokens": 40, "temperature": 0.0}
    without, model = streaming(name), streaming(name, speculate="mtp")
    wanted = list(without.tokens(prompts_of(name)[0], **settings))
    assert without.stats.experts.total.guessed == 0
    speculation = model.scheduler.speculation
    speculation.costs.ratio, speculation.costs.reach = lambda texts, more: 0.5, lambda texts: 15
    assert list(model.tokens(prompts_of(name)[0], **settings)) == wanted
    found = model.stats.experts
    further = next(traffic for module, traffic in found.layers.items() if module.startswith(loaded(name)[2].beyond))
    assert 0 < further.guessed == further.misses < found.total.guessed < found.total.misses
    assert f"{found.total.guessed} of {found.total.misses} reads for guesses" in figures(model.stats, "k4v4")


@pytest.mark.slow
def test_guesses_stop_where_reading_their_experts_takes_too_long():
    """A slow disk, and guesses that are right too seldom to be worth their experts."""
    settings = {"max_tokens": 100, "temperature": 0.0}
    model = streaming("deepseek_v3", speculate="mtp", disk="5MB")
    list(model.tokens(prompts_of("deepseek_v3")[0], **settings))
    assert 0 < model.stats.drafted < 60
