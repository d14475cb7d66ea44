"""Speculative decoding: the output is that without draft tokens, whatever is drafted."""

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
from auraflux.cache.prefix.radix import common_length
from auraflux.engine.graph_runner import GraphRunner
from auraflux.engine.request import Output, Request
from auraflux.engine.sampler import Sampler
from auraflux.engine.sampling import Sampling
from auraflux.errors import AurafluxError, CacheFull, SettingsError
from auraflux.scheduler.scheduler import Scheduler
from auraflux.speculative.draft_state import Proposer
from auraflux.speculative.ngram import COPIED, NGramProposer
from auraflux.speculative.speculation import CAPTURE_AFTER, Speculation
from tests.engine.tiny import tiny
from tests.models.oracles import save
from tests.models.test_graphs import MODELS, WITHOUT_GRAPHS
from tests.scheduler.test_scheduler import CALIBRATED, finish, nothing_leaks, prompts_of, scheduler_for, submit

TOKENS = 40


class OracleProposer:
    """A proposer that knows the outputs and is right most of the time."""

    free, kind = True, 2

    def __init__(self, sequences: list[list[int]], share: float = 0.8, seed: int = 0):
        self.sequences, self.share, self.random = sequences, share, random.Random(seed)

    def propose(self, tokens: list[int], count: int) -> list[int]:
        sequence = next((each for each in self.sequences if each[: len(tokens)] == tokens), [])
        return [self._changed(token) for token in sequence[len(tokens) : len(tokens) + count]]

    def _changed(self, token: int) -> int:
        return token if self.random.random() < self.share else (token + 1) % 64

    def on_prefix_hit(self, tokens: list[int], kv_sequence: Any) -> None: ...

    def close(self, tokens: list[int] | None = None) -> None: ...


def eager(begin: Callable[[], Proposer]) -> Speculation:
    """Return a speculation that takes draft tokens for cheap, so that it drafts at every step."""
    made = Speculation(begin, 64)
    made.costs.max_draft_tokens = lambda sequences: 64  # type: ignore[method-assign]
    made.costs.relative = lambda sequences, draft_tokens: 0.5  # type: ignore[method-assign]
    return made


def with_drafts(scheduler: Scheduler, begin: Callable[[], Proposer]) -> Scheduler:
    scheduler.set_speculation(eager(begin))
    return scheduler


def settings_of(temperature: float) -> Sampling:
    return Sampling(max_tokens=TOKENS, temperature=temperature, seed=3)


@cache
def plain(name: str, kv: str, temperature: float = 0.0) -> list[list[int]]:
    made = scheduler_for(name, kv)
    return finish(made, submit(made, prompts_of(name), settings_of(temperature)))


def oracle(name: str, kv: str, temperature: float = 0.0, share: float = 0.8) -> Callable[[], Proposer]:
    sequences = [[*prompt, *output] for prompt, output in zip(prompts_of(name), plain(name, kv, temperature), strict=True)]
    return lambda: OracleProposer(sequences, share)


QUICK = [("llama", "k8v4", 0.0), ("qwen3_5_moe", "k8v4", 1.0), ("gpt_oss", CALIBRATED, 0.0)]
KV = ["none", "k8v4", "k4v4", "k3v2", CALIBRATED]
ALL = [each for each in product(MODELS, KV, [0.0, 1.0]) if each not in QUICK]
# has no full-precision window
ALL += product(WITHOUT_GRAPHS, KV[:-1], [0.0, 1.0])


@pytest.mark.parametrize(
    ("name", "kv", "temperature"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in ALL)]
)
def test_the_output_is_that_without_draft_tokens(name: str, kv: str, temperature: float):
    for begin in (oracle(name, kv, temperature), NGramProposer):
        made = with_drafts(scheduler_for(name, kv), begin)
        sequences = submit(made, prompts_of(name), settings_of(temperature))
        assert finish(made, sequences) == plain(name, kv, temperature)
        assert nothing_leaks(made)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe"])
def test_correct_drafts_take_fewer_steps(name: str):
    made = with_drafts(scheduler_for(name), oracle(name, "k8v4", share=1.0))
    sequences = submit(made, prompts_of(name), settings_of(0))
    assert finish(made, sequences) == plain(name, "k8v4")
    assert made.speculation.drafted == made.speculation.accepted > 0
    # four sequences share a step's token budget
    assert all(sequence.steps < TOKENS // 2 for sequence in sequences)


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.3}, {"logit_bias": {5: 3.0}, "logprobs": 2}])
def test_sampling_settings_hold_for_draft_tokens(settings: dict[str, Any]):
    sampling = Sampling(max_tokens=24, temperature=0.7, top_k=20, seed=1, **settings)
    prompts = prompts_of("llama")
    wanted = outputs_of(scheduler_for("llama"), prompts, sampling)
    sequences = [[*prompt, *(output.tokens[0] for output in outputs)] for prompt, outputs in zip(prompts, wanted, strict=True)]
    found = outputs_of(with_drafts(scheduler_for("llama"), lambda: OracleProposer(sequences)), prompts, sampling)
    for theirs, mine in zip(wanted, found, strict=True):
        assert [(output.tokens, output.finish_reason) for output in mine] == [
            (output.tokens, output.finish_reason) for output in theirs
        ]
        oracle = [[output.logprobs[0].logprob for output in outputs if output.logprobs] for outputs in (mine, theirs)]
        assert oracle[0] == oracle[1]


def outputs_of(scheduler: Scheduler, prompts: list[list[int]], sampling: Sampling) -> list[list[Output]]:
    found: list[list[Output]] = [[] for _ in prompts]
    pairs = zip(prompts, found, strict=True)
    finish(scheduler, [scheduler.submit(Request(tuple(prompt), sampling), outputs.append) for prompt, outputs in pairs])
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_a_sequence_may_end_within_its_draft(name: str):
    wanted = plain(name, "k8v4")
    stop = wanted[0][5]
    made = with_drafts(scheduler_for(name), oracle(name, "k8v4", share=1.0))
    request = Request(tuple(prompts_of(name)[0]), settings_of(0), stop_token_ids=frozenset([stop]))
    sequence = made.submit(request)
    assert finish(made, [sequence]) == [wanted[0][: wanted[0].index(stop)]]
    assert sequence.finish_reason == "stop"
    # the prefix cache has no token after the end
    again = submit(made, [[*prompts_of(name)[0], *sequence.generated.tokens, 7]])
    fresh = scheduler_for(name)
    assert finish(made, again) == finish(fresh, submit(fresh, [list(again[0].request.prompt)]))
    assert nothing_leaks(made)


STOPS = list(product(["llama", "qwen3_5_moe", "gpt_oss"], ["in the step", "after it"], [KeyboardInterrupt, CacheFull]))
QUICK_STOPS = [STOPS[0], STOPS[4], STOPS[7]]


@pytest.mark.parametrize(
    ("name", "when", "failure"),
    [each if each in QUICK_STOPS else pytest.param(*each, marks=pytest.mark.slow) for each in STOPS],
)
def test_an_interrupted_verify_step_rolls_sequences_back(
    name: str, when: str, failure: type[BaseException], monkeypatch: pytest.MonkeyPatch
):
    made = with_drafts(scheduler_for(name), oracle(name, "k8v4"))
    sequences = submit(made, prompts_of(name), settings_of(0))
    made.wait(lambda: any(len(sequence.generated.tokens) > 4 for sequence in sequences))
    decoding = [sequence for sequence in sequences if sequence.kv_sequence is not None and sequence.uncomputed == 0]
    held = [(sequence.ids[:], sequence.kv.length) for sequence in decoding]
    assert held

    def fail(*_: Any) -> Any:
        raise failure("stopped")

    with monkeypatch.context() as patch:
        if when == "in the step":
            patch.setattr(made.engine.runner, "compute_logits", fail)
        else:
            patch.setattr(Sampler, "__call__", fail)
        if failure is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                made.step()
            assert [(sequence.ids, sequence.kv.length) for sequence in decoding] == held
    assert finish(made, sequences) == plain(name, "k8v4")
    assert nothing_leaks(made)


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_a_failed_verify_step_ends_its_sequences_and_no_others(name: str, monkeypatch: pytest.MonkeyPatch):
    made = with_drafts(scheduler_for(name, parallel=2), oracle(name, "k8v4"))
    sequences = submit(made, prompts_of(name), settings_of(0))
    made.wait(lambda: any(len(sequence.generated.tokens) > 4 for sequence in sequences))
    decoding = [sequence for sequence in sequences if sequence.kv_sequence is not None and sequence.uncomputed == 0]
    with monkeypatch.context() as patch:
        patch.setattr(made.engine, "verify", lambda *_: 1 / 0)
        made.step()
    assert decoding
    assert all(sequence.finish_reason == "error" for sequence in decoding)
    wanted = dict(zip(sequences, plain(name, "k8v4"), strict=True))
    assert all(sequence.generated.tokens == wanted[sequence][: len(sequence.generated.tokens)] for sequence in decoding)
    others = [sequence for sequence in sequences if sequence not in decoding]
    assert finish(made, others) == [wanted[sequence] for sequence in others]
    # and the prefix cache has nothing wrong
    assert finish(made, submit(made, prompts_of(name), settings_of(0))) == plain(name, "k8v4")
    assert nothing_leaks(made)


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_a_sequence_may_be_cancelled_during_its_verify_step(name: str, monkeypatch: pytest.MonkeyPatch):
    made = with_drafts(scheduler_for(name), oracle(name, "k8v4"))
    gone, *sequences = submit(made, prompts_of(name), settings_of(0))
    made.wait(lambda: len(gone.generated.tokens) > 4)
    verify = made.engine.verify

    def cancelling(*args: Any) -> Any:
        found = verify(*args)
        made.cancel(gone)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(made.engine, "verify", cancelling)
        made.wait(lambda: gone.finish_reason is not None)
    assert gone.finish_reason == "cancelled"
    assert gone.generated.tokens == plain(name, "k8v4")[0][: len(gone.generated.tokens)]
    assert finish(made, sequences) == plain(name, "k8v4")[1:]
    assert finish(made, submit(made, prompts_of(name), settings_of(0))) == plain(name, "k8v4")
    assert nothing_leaks(made)


def test_a_cancelled_sequence_leaves_the_others():
    made = with_drafts(scheduler_for("qwen3_5_moe"), oracle("qwen3_5_moe", "k8v4"))
    gone, *sequences = submit(made, prompts_of("qwen3_5_moe"), settings_of(0))
    made.wait(lambda: len(gone.generated.tokens) > 4)
    made.cancel(gone)
    assert finish(made, sequences) == plain("qwen3_5_moe", "k8v4")[1:]
    assert nothing_leaks(made)


def test_a_gpu_does_not_run_ahead_of_drafts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(GraphRunner, "runs_ahead", True)
    made = with_drafts(scheduler_for("llama"), oracle("llama", "k8v4"))
    assert finish(made, submit(made, prompts_of("llama"), settings_of(0))) == plain("llama", "k8v4")
    assert made.speculation.accepted > 0


def test_without_pages_for_drafts_sequences_go_on():
    prompts = [prompt[:40] for prompt in prompts_of("llama")]
    wanted = finish(made := scheduler_for("llama"), submit(made, prompts, settings_of(0)))
    sequences = [[*prompt, *output] for prompt, output in zip(prompts, wanted, strict=True)]
    made = with_drafts(scheduler_for("llama", tokens=256, context=192), lambda: OracleProposer(sequences))
    assert finish(made, submit(made, prompts, settings_of(0))) == wanted


def test_sampled_tokens_have_the_model_s_distribution():
    """The second tokens of 800 seeds after the commonest first, drafted: each as often as its probability."""
    prompt, temperature = prompts_of("llama")[1], 1.5
    greedy = finish(made := scheduler_for("llama"), submit(made, [prompt], settings_of(0)))[0]
    made = with_drafts(scheduler_for("llama", parallel=8), lambda: OracleProposer([[*prompt, *greedy]], share=1.0))
    requests = [Request(tuple(prompt), Sampling(max_tokens=3, temperature=temperature, seed=seed)) for seed in range(800)]
    found = [text[1] for text in finish(made, [made.submit(request) for request in requests]) if text[0] == greedy[0]]
    assert made.speculation.drafted > made.speculation.accepted > 100
    scores = made.engine.all_logits(made.engine.cache.open(), [*prompt, greedy[0]])[-1]
    expected = scores.div(temperature).softmax(-1) * len(found)
    often = expected >= 5
    counts = torch.bincount(torch.tensor(found), minlength=len(scores))
    both = [torch.cat([each[often], each[~often].sum()[None]]) for each in (counts, expected)]
    squares = ((both[0] - both[1]).square() / both[1]).sum()
    # chi squared: its mean and variance are the degrees of freedom, and twice those
    assert squares < often.sum() + 4 * (2 * often.sum()).sqrt()


def test_n_grams_continue_the_longest_match():
    text = [1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3]
    assert NGramProposer().propose(text, 3) == [4, 9, 2]
    assert NGramProposer().propose([7, 7], 3) == []
    grown = NGramProposer()
    for end in range(1, len(text)):
        grown.propose(text[:end], 3)
    assert grown.propose(text, 3) == [4, 9, 2]
    # a periodic sequence is drafted to stay so
    assert NGramProposer().propose([6, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_a_copy_resumes_after_an_edit():
    copied = list(range(100, 160))
    # one token differs, and the bigram after it has occurred elsewhere since
    text = [*copied, *copied[:20], 7, *copied[21:23], 9, 9, *copied[:20], 8, *copied[21:23]]
    proposer = NGramProposer()
    proposer.propose(text[:-3], 3)
    assert proposer.propose(text, 3)[0] == 9
    copying = [*copied, *copied[21:23], 9, 9, *copied[:20]]
    proposer = NGramProposer()
    proposer.propose(copying, 3)
    assert proposer.propose([*copying, 8, *copied[21:23]], 3) == copied[23:26]
    assert proposer.kind == COPIED


class FakeSequence:
    """A sequence of which only the tokens matter."""

    room = 100

    def __init__(self, speculation: Speculation, ids: list[int]):
        self.ids, self.draft_state = ids, speculation.begin()


def decode(speculation: Speculation, sequence: FakeSequence, tokens: list[int], seconds: Callable[[int], float]) -> float:
    """Decode tokens with a model whose steps take this long by their draft tokens; return the total time."""
    taken, at = 0.0, 0
    while at < len(tokens):
        (draft,) = speculation.plan_drafts([sequence])
        accepted = common_length(draft, tokens[at:])
        sequence.ids += tokens[at : at + accepted + 1]
        at += accepted + 1
        taken += seconds(len(draft))
        speculation.record([sequence], [draft], [accepted], seconds(len(draft)))
    return taken


def test_drafts_pay_for_repetitive_output_and_cost_nothing_otherwise():
    chance = random.Random(0)
    copied = [chance.randrange(1000) for _ in range(300)]
    new = [chance.randrange(12) for _ in range(300)]
    speculation = Speculation(NGramProposer, 64)

    def seconds(draft_tokens: int) -> float:
        return 0.01 * (1 + 0.3 * draft_tokens)

    assert decode(speculation, FakeSequence(speculation, list(copied)), copied[:250], seconds) < 0.01 * 250 / 1.6
    assert decode(speculation, FakeSequence(speculation, list(new)), new[::-1], seconds) < 0.01 * 300 / 0.95


def test_a_step_of_a_new_size_is_captured_only_after_correct_drafts():
    """Capturing takes as long as many decode steps: not for a sequence that hardly repeats itself."""
    copied, known, requested = list(range(100, 400)), set[int](), list[int]()
    speculation = Speculation(NGramProposer, 64)

    def is_captured(draft_tokens: int) -> bool:
        requested.append(draft_tokens)
        return draft_tokens in known

    sequence = FakeSequence(speculation, list(copied))
    at, draft = 0, list[int]()
    while at < 60 and not draft:
        (draft,) = speculation.plan_drafts([sequence], is_captured)
        if not draft:
            sequence.ids.append(copied[at])
            at += 1
            speculation.record([sequence], [[]], [0], 0.01)
    assert requested
    assert CAPTURE_AFTER <= at < 60
    # the count restarts: another size must wait again, this one need not
    sequence.ids += copied[at : at + 4]
    known.add(len(draft))
    speculation.record([sequence], [draft], [len(draft)], None)
    assert len(speculation.plan_drafts([sequence], is_captured)[0]) == len(draft)


def test_drafts_stop_where_verify_steps_are_too_slow():
    """As where every token of a step reads other experts from disk."""
    chance = random.Random(0)
    copied = [chance.randrange(1000) for _ in range(400)]
    speculation = Speculation(NGramProposer, 64)
    taken = decode(
        speculation, FakeSequence(speculation, list(copied)), copied, lambda draft_tokens: 0.01 * (1 + 1.2 * draft_tokens)
    )
    assert taken < 0.01 * 400 / 0.85
    assert speculation.drafted < 60


def test_a_single_draft_token_may_pay_where_several_do_not():
    """As of an MTP head whose first token is the best, with a mixture whose steps take longer with every token."""
    chance = random.Random(0)
    copied = [chance.randrange(64) for _ in range(800)]

    class Fading(OracleProposer):
        free, kind = False, 1

        def _changed(self, token: int) -> int:
            self.share = max(0.4, self.share - 0.25)
            return super()._changed(token)

        def propose(self, tokens: list[int], count: int) -> list[int]:
            self.share = 1.05
            return super().propose(tokens, count)

    speculation = Speculation(lambda: Fading([copied]), 64)
    taken = decode(
        speculation, FakeSequence(speculation, copied[:1]), copied[1:], lambda draft_tokens: 0.01 * (1 + 0.3 * draft_tokens)
    )
    assert taken < 0.01 * 799 / 1.2


@pytest.mark.parametrize("other", [False, True], ids=["itself", "another"])
def test_a_draft_model(other: bool):
    """The model itself is right about its greedy tokens; another is not about sampled tokens."""
    settings = {"max_tokens": 30, "temperature": 2.0 if other else 0.0, "seed": 1}
    wanted = list(auraflux.load(tiny(), context=128, device="cpu").tokens("the cat sat", **settings))
    model = auraflux.load(tiny(), context=128, device="cpu", speculate=another() if other else tiny())
    speculation = model.scheduler.speculation
    speculation.costs.relative, speculation.costs.max_draft_tokens = lambda sequences, draft_tokens: 0.5, lambda sequences: 15
    assert list(model.tokens("the cat sat", **settings)) == wanted
    assert model.stats.drafted > 0
    assert (model.stats.accepted == model.stats.drafted) is not other
    # the draft model's KV is released
    small = speculation.begin().proposer.engine
    assert small.cache.nbytes == 0
    assert small is not model.engine


def another() -> Path:
    torch.manual_seed(1)
    path = Path(mkdtemp(prefix="auraflux-tiny-"))
    shutil.copytree(tiny(), path, dirs_exist_ok=True)
    config = LlamaConfig.from_pretrained(path)
    save(LlamaForCausalLM(config), path)
    return path


def test_an_unknown_draft_model_is_refused():
    with pytest.raises(AurafluxError, match="nothing-like-it"):
        auraflux.load(tiny(), context=64, device="cpu", speculate="nothing-like-it")


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path):
    shutil.copytree(another(), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(SettingsError, match="its vocabulary differs"):
        auraflux.load(tiny(), context=64, device="cpu", speculate=tmp_path)
