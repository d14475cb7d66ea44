"""Draft tokens of an MTP head: the output is that without them, and they are those of transformers' layers."""

from functools import cache
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

import auraflux
from auraflux.cache import Cache, CacheSettings
from auraflux.cache.prefix.prefix_cache import PrefixCache
from auraflux.cli.generate import figures
from auraflux.engine.engine import Engine
from auraflux.engine.graph_runner import GraphRunner
from auraflux.engine.request import Request
from auraflux.engine.sampler import Sampler
from auraflux.engine.sampling import Sampling
from auraflux.errors import CacheFull, SettingsError
from auraflux.models import family
from auraflux.ops.simd.isa import ISA
from auraflux.scheduler.scheduler import Scheduler
from auraflux.speculative.mtp import MTPDrafter
from auraflux.speculative.speculation import Speculation
from auraflux.weights.convert.mlx_folder import convert
from auraflux.weights.convert.pack import pack
from auraflux.weights.experts.settings import ExpertSettings
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.engine.tiny import tiny
from tests.models.oracles import save, tokens
from tests.models.test_mtp import MODELS, ModelWithMtp, family_of, with_mtp
from tests.scheduler.test_scheduler import finish, nothing_leaks, submit

TOKENS = 30
GREEDY = Sampling(max_tokens=TOKENS)


@cache
def both(name: str, right: bool = True) -> ModelWithMtp:
    """Return a tiny model; with `right` its MTP head passes the next token on, whose neighbour both LM heads prefer."""
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
    sizes = {"context": 256, "sequences": 4, "cached_sequences": 4, "chunk": 64, "exact": True, **changes}
    engine = Engine(model, shapes, CacheSettings(kv), **sizes, hidden=mtp)
    made = Scheduler(engine, None, frozenset(), max_sequences=4)
    if mtp:
        drafter = MTPDrafter.for_engine(engine, shapes[place.like])
        speculation = Speculation(drafter.begin, 64, drafter.propose, drafter.observe_hidden)
        speculation.costs.max_draft_tokens = lambda sequences: 64  # type: ignore[method-assign]
        speculation.costs.relative = lambda sequences, draft_tokens: 0.5  # type: ignore[method-assign]
        made.set_speculation(speculation)
    return made


def drafter_of(scheduler: Scheduler) -> MTPDrafter:
    return scheduler.speculation.begin().proposer._drafter


def nothing_is_leaked(scheduler: Scheduler) -> bool:
    drafter = drafter_of(scheduler)
    drafter.prefixes.clear()
    return nothing_leaks(scheduler) and drafter.cache.nbytes == 0


def prompts_of(name: str) -> list[list[int]]:
    """Return prompts of several lengths, also longer than a page; the first and the third share a prefix."""
    text = tokens(both(name).model, 200)
    return [text[:90], text[100:103], text[:70] + text[150:160], text[120:150]]


@cache
def plain(name: str, kv: str = "k8v4", right: bool = True, temperature: float = 0.0) -> list[list[int]]:
    made = scheduler_for(name, kv, right=right, mtp=False)
    return finish(made, submit(made, prompts_of(name), Sampling(max_tokens=TOKENS, temperature=temperature, seed=3)))


NAMES, KV = ("qwen3_5_moe", "deepseek_v3"), ("none", "k8v4", "k4v4")
ONE_QUICK = [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.slow)]
QUICK = [("qwen3_5_moe", "k8v4", True, 0.0), ("deepseek_v3", "k8v4", True, 1.0)]
ALL = [each for each in product((*NAMES, "glm4_moe"), KV, (True, False), (0.0, 1.0)) if each not in QUICK]


@pytest.mark.parametrize(
    ("name", "kv", "right", "temperature"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in ALL)]
)
def test_the_output_is_that_without_draft_tokens(name: str, kv: str, right: bool, temperature: float):
    made = scheduler_for(name, kv, right=right)
    sequences = submit(made, prompts_of(name), Sampling(max_tokens=TOKENS, temperature=temperature, seed=3))
    assert finish(made, sequences) == plain(name, kv, right, temperature)
    assert made.speculation.drafted > 0
    if right and not temperature:
        assert made.speculation.drafted > made.speculation.accepted > 40
        assert all(sequence.steps < TOKENS for sequence in sequences)
    # again, with prefix hits
    again = submit(made, prompts_of(name), Sampling(max_tokens=TOKENS, temperature=temperature, seed=3))
    assert finish(made, again) == plain(name, kv, right, temperature)
    assert nothing_is_leaked(made)


def expected_drafts(found: ModelWithMtp, ids: list[int], count: int) -> list[int]:
    """Return the draft tokens of an MTP head in transformers, fed with its own drafts and outputs."""
    hidden, following, drafts = found.hidden(ids[:-1]), ids[1:], list[int]()
    for _ in range(count):
        results = found.predicted(following, hidden)
        drafts.append(int(found.logits(results[-1]).argmax()))
        hidden, following = torch.cat([hidden, results[-1:]]), [*following, drafts[-1]]
    return drafts


@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_those_of_the_reference(name: str):
    """With hidden states in chunks or at once, for one sequence or several, and after rejected drafts."""
    source, made = both(name, False), scheduler_for(name, "none", right=False)
    drafter, engine = drafter_of(made), made.engine
    prompts = prompts_of(name)
    wanted = [expected_drafts(source, ids, 4) for ids in prompts]
    observed = []
    for ids, chunk in zip(prompts, (90, 1, 37, 7), strict=True):
        draft, sequence = drafter.begin(), engine.cache.open()
        for start in range(0, len(ids) - 1, chunk):
            rows = engine.prefill([sequence], [ids[start : min(start + chunk, len(ids) - 1)]])
            drafter.observe_hidden([(draft, ids, start, rows)])
            # repeated steps return the same again
            drafter.observe_hidden([(draft, ids, start, rows)])
        observed.append((draft, ids, 4))
        sequence.close()
    for _ in range(2):
        assert drafter.propose(observed) == wanted
    alone = [drafter.propose([each])[0] for each in observed]
    assert alone == wanted
    # the hidden state of one more token is not known
    assert drafter.propose([(observed[0][0], [*prompts[0], 1], 4)]) == [[]]


def run_sequence(scheduler: Scheduler, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[int, list[int]]]:
    """Return a finished sequence, and its drafts by the length at which they were made."""
    drafts: dict[int, list[int]] = {}
    plain_propose = scheduler.speculation._propose

    def propose(requests: list[Any]) -> list[list[int]]:
        found = plain_propose(requests)
        drafts.update({len(tokens): draft for (_, tokens, _), draft in zip(requests, found, strict=True) if draft})
        return found

    with monkeypatch.context() as patch:
        patch.setattr(scheduler.speculation, "_propose", propose)
        (sequence,) = submit(scheduler, [prompt], GREEDY)
        finish(scheduler, [sequence])
    return sequence, drafts


FOUND = [
    ("deepseek_v3", "k8v4"),
    ("qwen3_5_moe", "k8v4"),
    ("deepseek_v3", "none"),
    ("qwen3_5_moe", "k4v4"),
    ("glm4_moe", "k4v4"),
]


@pytest.mark.parametrize(("name", "kv"), [*FOUND[:1], *(pytest.param(*each, marks=pytest.mark.slow) for each in FOUND[1:])])
def test_a_prefix_hit_serves_the_head_too(name: str, kv: str, monkeypatch: pytest.MonkeyPatch):
    """The same prompt, a branch and a continuation: output and drafts as without prefix cache."""
    text = tokens(both(name).model, 200)
    made = scheduler_for(name, kv, right=False)
    first, _ = run_sequence(made, text[:90], monkeypatch)
    parting = [*first.ids[:-3], *text[160:180]]
    for prompt in (text[:90], parting, [*first.ids, *text[150:160]]):
        wanted, expected = run_sequence(scheduler_for(name, kv, right=False), prompt, monkeypatch)
        found, drafts = run_sequence(made, prompt, monkeypatch)
        assert found.cached_tokens > 0
        assert found.generated.tokens == wanted.generated.tokens
        both_drafted = drafts.keys() & expected.keys()
        assert len(both_drafted) > 5
        same = sum(a == b for n in both_drafted for a, b in zip(drafts[n], expected[n], strict=False))
        all_ = sum(min(len(drafts[n]), len(expected[n])) for n in both_drafted)
        # at a branch, a recurrent state that cannot go back by a token leaves a pair out
        assert same == all_ or (prompt is parting and made.engine.cache.has_states and same > 0.4 * all_)
    assert nothing_is_leaked(made)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kv", ["k8v4", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [NAMES[1], *(pytest.param(name, marks=pytest.mark.slow) for name in (NAMES[0], "glm4_moe"))])
def test_steps_of_the_head_are_replayed(name: str, kv: str, device: str):
    """Drafts for two sequences and for one: the first step compiles kernels, the second captures them."""
    model, shapes, place = family_of(both(name).folder, bits=4, group=32, device=device)
    ids = tokens(both(name).model, 90)
    found = {}
    for graphs in (True, False):
        sizes = {"context": 256, "sequences": 2, "chunk": 64, "exact": True, "hidden": True}
        engine = Engine(model, shapes, CacheSettings(kv), **sizes, graphs=graphs, device=device)
        drafter, requests = MTPDrafter.for_engine(engine, shapes[place.like]), []
        for length in (60, 33):
            draft, sequence = drafter.begin(), engine.cache.open()
            drafter.observe_hidden([(draft, ids[:length], 0, engine.prefill([sequence], [ids[: length - 1]]))])
            requests.append((draft, ids[:length], 5))
        found[graphs] = [(drafter.propose(requests), drafter.propose(requests[:1])) for _ in range(4)]
        steps = drafter.graphs._steps.values()
        assert [step.recording is not None for step in steps] == [graphs] * 2, drafter.graphs.refused
    assert found[True] == found[False]


STOPS = list(product(NAMES, ["in the step", "after it", "in the head", "while it observes"], [KeyboardInterrupt, CacheFull]))
QUICK_STOPS = [STOPS[0], STOPS[4], STOPS[11], STOPS[14]]


@pytest.mark.parametrize(
    ("name", "when", "failure"),
    [each if each in QUICK_STOPS else pytest.param(*each, marks=pytest.mark.slow) for each in STOPS],
)
def test_an_interrupted_step_rolls_sequences_back(
    name: str, when: str, failure: type[BaseException], monkeypatch: pytest.MonkeyPatch
):
    made = scheduler_for(name)
    sequences = submit(made, prompts_of(name), GREEDY)
    made.wait(lambda: any(len(sequence.generated.tokens) > 4 for sequence in sequences))
    decoding = [sequence for sequence in sequences if sequence.kv_sequence is not None and sequence.uncomputed == 0]
    held = [(sequence.ids[:], sequence.kv.length) for sequence in decoding]
    assert held

    def fail(*_: Any) -> Any:
        raise failure("stopped")

    where: dict[str, tuple[Any, str]] = {
        "in the step": (made.engine.runner, "compute_logits"),
        "after it": (Sampler, "__call__"),
        "in the head": (MTPDrafter, "_step"),
        "while it observes": (made.speculation, "observe_hidden"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*where[when], fail)
        if failure is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                made.step()
            assert [(sequence.ids, sequence.kv.length) for sequence in decoding] == held
        elif when == "in the head":
            # the head has no pages: sequences go on without it
            made.step()
            assert all(len(sequence.ids) > len(ids) for sequence, (ids, _) in zip(decoding, held, strict=True))
    assert finish(made, sequences) == plain(name)
    assert nothing_is_leaked(made)


def test_a_cancelled_sequence_leaves_the_others():
    made = scheduler_for("qwen3_5_moe")
    gone, *sequences = submit(made, prompts_of("qwen3_5_moe"), GREEDY)
    made.wait(lambda: len(gone.generated.tokens) > 4)
    made.cancel(gone)
    assert finish(made, sequences) == plain("qwen3_5_moe")[1:]
    assert nothing_is_leaked(made)


@pytest.mark.parametrize("name", ONE_QUICK)
def test_preempted_sequences_go_on_with_drafts(name: str):
    """Preempted, and computed again where the prefix cache has less."""
    text = tokens(both(name).model, 180)
    prompts = [text[at : at + 60] for at in (0, 60, 120)]
    alone = scheduler_for(name, mtp=False)
    wanted = finish(alone, submit(alone, prompts, GREEDY))
    made = scheduler_for(name, tokens=256, context=128)
    assert finish(made, submit(made, prompts, GREEDY)) == wanted
    assert made.counts.preemptions > 0
    assert made.speculation.accepted > 20
    assert nothing_is_leaked(made)


@pytest.mark.parametrize("name", ONE_QUICK)
def test_a_head_without_pages_starts_again(name: str):
    made = scheduler_for(name)
    small = drafter_of(made)
    _, shapes, place = loaded(name)
    small.cache = Cache([shapes[place.like]], CacheSettings("k8v4"), context=300, sequences=4, tokens=128, chunk=64)
    small.prefixes = PrefixCache(small.cache)
    assert finish(made, submit(made, prompts_of(name), GREEDY)) == plain(name)
    assert made.speculation.accepted > 0
    assert nothing_is_leaked(made)


def test_a_gpu_does_not_run_ahead_of_drafts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(GraphRunner, "runs_ahead", True)
    made = scheduler_for("deepseek_v3")
    assert finish(made, submit(made, prompts_of("deepseek_v3"), GREEDY)) == plain("deepseek_v3")
    assert made.speculation.accepted > 20


def test_hidden_states_of_a_finished_sequence_are_dropped(monkeypatch: pytest.MonkeyPatch):
    """A GPU runs a step ahead of the stop token: its hidden states are of no use, and hold no pages."""
    monkeypatch.setattr(GraphRunner, "runs_ahead", True)
    monkeypatch.setattr("auraflux.speculative.mtp.MAX_PENDING", 1)
    made = scheduler_for("deepseek_v3")
    made.speculation.costs.relative = lambda sequences, draft_tokens: 9.0
    stop = plain("deepseek_v3")[0][5]
    ended = made.submit(Request(tuple(prompts_of("deepseek_v3")[0]), GREEDY, stop_token_ids=frozenset([stop])))
    sequences = submit(made, prompts_of("deepseek_v3")[1:], GREEDY)
    assert finish(made, [ended, *sequences])[1:] == plain("deepseek_v3")[1:]
    assert ended.finish_reason == "stop"
    assert nothing_is_leaked(made)


def test_a_step_ahead_is_observed_too(monkeypatch: pytest.MonkeyPatch):
    """While drafts do not pay, a GPU runs a step ahead; the head observes every token all the same."""
    monkeypatch.setattr(GraphRunner, "runs_ahead", True)
    made = scheduler_for("deepseek_v3")
    made.speculation.costs.relative = lambda sequences, draft_tokens: 9.0
    sequences = submit(made, prompts_of("deepseek_v3"), GREEDY)
    made.wait(lambda: all(len(sequence.generated.tokens) > 6 for sequence in sequences))
    assert made.speculation.drafted == 0
    made.speculation.costs.relative = lambda sequences, draft_tokens: 0.5
    assert finish(made, sequences) == plain("deepseek_v3")
    assert made.speculation.accepted > 10


@pytest.mark.parametrize("name", ONE_QUICK)
def test_a_loaded_model_drafts_with_its_head(name: str):
    prompt, settings = prompts_of(name)[0], {"max_tokens": 40, "temperature": 0.0}
    options = {"context": 160, "device": "cpu", "max_sequences": 2}
    wanted = list(auraflux.load(both(name).folder, **options).tokens(prompt, **settings))
    model = auraflux.load(both(name).folder, **options, speculate="mtp")
    speculation = model.scheduler.speculation
    speculation.costs.relative, speculation.costs.max_draft_tokens = lambda sequences, draft_tokens: 0.5, lambda sequences: 15
    assert list(model.tokens(prompt, **settings)) == wanted
    assert model.stats.drafted > model.stats.accepted > 10
    assert model.stats.steps == 40 - model.stats.accepted
    drafter_of(model.scheduler).prefixes.clear()
    assert drafter_of(model.scheduler).cache.nbytes == 0


def test_the_head_is_loaded_only_when_used():
    assert family_of(both("deepseek_v3").folder, mtp=False)[0].mtp is None
    assert auraflux.load(both("qwen3_5_moe").folder, context=64, device="cpu", speculate="ngram").engine.model.mtp is None


def test_a_model_without_head_is_refused(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"has no MTP head.*--speculate ngram"):
        auraflux.load(tiny(), context=64, device="cpu", speculate="mtp")
    # the config of a model that was published without it may still mention it
    bare = save(MODELS["deepseek_v3"](), tmp_path)
    with pytest.raises(SettingsError, match="has no MTP head"):
        auraflux.load(bare, context=64, device="cpu", speculate="mtp")


def test_ranks_do_not_draft_with_the_head():
    with pytest.raises(SettingsError, match="--speculate mtp is not supported"):
        auraflux.load(both("deepseek_v3").folder, context=64, device="cpu", speculate="mtp", parallel="pipeline=2")


@cache
def packed(name: str) -> tuple[Path, int]:
    """Return a packed model, and the bytes of half of its experts."""
    source = open_checkpoint(both(name).folder)
    folder, kind = Path(mkdtemp(prefix="auraflux-packed-")), family(source.config)
    convert(source, kind, folder / "whole", bits=4, group=32)
    pack(open_checkpoint(folder / "whole"), kind, folder / "packed", lanes=ISA.lanes)
    return folder / "packed", open_checkpoint(folder / "packed").experts.nbytes // 2


def streaming(name: str, **options: Any) -> Any:
    folder, nbytes = packed(name)
    settings = ExpertSettings(memory=nbytes, io="direct", disk=options.pop("disk", None))
    return auraflux.load(folder, context=256, device="cpu", max_sequences=2, expert_memory=settings, **options)


@pytest.mark.parametrize("name", ONE_QUICK)
def test_experts_read_for_draft_tokens_alone_are_counted(name: str):
    settings = {"max_tokens": 40, "temperature": 0.0}
    without, model = streaming(name), streaming(name, speculate="mtp")
    wanted = list(without.tokens(prompts_of(name)[0], **settings))
    assert without.stats.experts.total.draft_misses == 0
    speculation = model.scheduler.speculation
    speculation.costs.relative, speculation.costs.max_draft_tokens = lambda sequences, draft_tokens: 0.5, lambda sequences: 15
    assert list(model.tokens(prompts_of(name)[0], **settings)) == wanted
    found = model.stats.experts
    head = next(traffic for module, traffic in found.layers.items() if module.startswith(loaded(name)[2].prefixes))
    assert 0 < head.draft_misses == head.misses < found.total.draft_misses < found.total.misses
    assert f"{found.total.draft_misses} of {found.total.misses} misses for draft tokens" in figures(model.stats, "k4v4")


@pytest.mark.slow
def test_drafts_stop_where_reading_their_experts_is_too_slow():
    """A slow disk, and drafts that are accepted too seldom to be worth their experts."""
    settings = {"max_tokens": 100, "temperature": 0.0}
    model = streaming("deepseek_v3", speculate="mtp", disk="5MB")
    list(model.tokens(prompts_of("deepseek_v3")[0], **settings))
    assert 0 < model.stats.drafted < 60
