"""Continuous batching: each sequence generates the same tokens in any batch, as others start, end, or run out of pages."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import pytest
import torch

from auraflux.cache import Batch, Cache, CacheSettings
from auraflux.cache.key_calibration import ModelCalibration
from auraflux.engine.calibrate import calibrate_keys, random_tokens
from auraflux.engine.engine import Engine
from auraflux.engine.graph_runner import GraphRunner
from auraflux.engine.request import Request
from auraflux.engine.sampler import Sampler
from auraflux.engine.sampling import Sampling
from auraflux.errors import BusyError, CacheFull
from auraflux.models import family
from auraflux.scheduler.scheduler import Scheduler
from auraflux.scheduler.sequence import Sequence
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.loader import Weights
from tests.models.oracles import save, tokens
from tests.models.test_graphs import MODELS, WITHOUT_GRAPHS

KV = ["k8v4", *(pytest.param(kv, marks=pytest.mark.slow) for kv in ("none", "k4v4", "k3v3"))]
# one of every kind of cache; the others are made of the same layers
KINDS = ("llama", "qwen3_5_moe", "gpt_oss", "gemma3", "deepseek_v3", "gemma4_moe")


def named(*quick: str) -> list:
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in MODELS | WITHOUT_GRAPHS]


CALIBRATED = "k4v4 calibrated"  # with some positions as they are
SETTINGS = Sampling(max_tokens=12)
CONTEXT = 512


@cache
def model_of(name: str):
    """A tiny model of a family, the shapes of its layers, and a text for it."""
    torch.manual_seed(0)
    source = (MODELS | WITHOUT_GRAPHS)[name]()
    checkpoint = open_checkpoint(save(source, Path(mkdtemp(prefix="auraflux-tiny-"))))
    module = family(checkpoint.config)
    config = module.Config.from_hf(checkpoint.config)
    weights = Weights(checkpoint, module.rename)
    model = module.Model(config, weights)
    weights.check_loaded()
    return model, module.make_caches(config), tokens(source, 400)


@cache
def vectors_of(name: str) -> ModelCalibration:
    model, shapes, _ = model_of(name)
    return calibrate_keys(model, shapes, random_tokens(64, model.config.vocab), torch.float32, "cpu")


def scheduler_for(
    name: str, kv: str = "k8v4", parallel: int = 4, waiting: int | None = None, itl_s: float | None = None, **options
) -> Scheduler:
    model, shapes, _ = model_of(name)
    sizes = {"context": CONTEXT, "sequences": parallel, "cached_sequences": 4, "chunk": 64, "exact": True, **options}
    settings = CacheSettings(kv[:4])
    if kv == CALIBRATED:
        settings, sizes["key_calibration"] = CacheSettings("k4v4", sink_tokens=1, recent_window=32), vectors_of(name)
    engine = Engine(model, shapes, settings, **sizes)
    return Scheduler(engine, None, frozenset(), max_sequences=parallel, max_queue=waiting, target_itl_s=itl_s)


def prompts_of(name: str) -> list[list[int]]:
    """Of several lengths: a page, less, more than two; the first and the third begin alike."""
    text = model_of(name)[2]
    return [text[:150], text[200:230], text[:100] + text[300:320], text[250:315]]


@cache
def alone(name: str, kv: str, prompt: tuple[int, ...], count: int = 12) -> list[int]:
    made = scheduler_for(name, kv, parallel=1)
    return finish(made, [made.submit(Request(prompt, Sampling(max_tokens=count)))])[0]


def finish(scheduler: Scheduler, jobs: list[Sequence]) -> list[list[int]]:
    scheduler.wait(lambda: all(job.finish_reason for job in jobs))
    for job in jobs:
        if job.failure is not None:
            raise job.failure
    return [job.generated.tokens for job in jobs]


def submit(scheduler: Scheduler, prompts: list[list[int]], settings: Sampling = SETTINGS) -> list[Sequence]:
    return [scheduler.submit(Request(tuple(prompt), settings)) for prompt in prompts]


def wanted(name: str, kv: str, prompts: list[list[int]]) -> list[list[int]]:
    return [alone(name, kv, tuple(prompt)) for prompt in prompts]


def nothing_leaks(scheduler: Scheduler) -> bool:
    """Return whether all pages and states are free once the prefix cache is empty."""
    scheduler.prefix_cache.clear()
    cache: Cache = scheduler.engine.cache
    return scheduler.idle and cache.nbytes == 0 and all(part.free == _all(part) for part in cache.groups)


def _all(part) -> int:
    return part.pool.count if hasattr(part, "pool") else part.slots


@pytest.fixture(params=["in order", "ahead", "mixed"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run steps after their tokens are known; before, as on a GPU; and as mixed batches."""
    monkeypatch.setattr(GraphRunner, "runs_ahead", request.param != "in order")
    if request.param == "mixed":
        prefill_mixed(monkeypatch)


def prefill_mixed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Prefill as on a GPU, in steps of few sizes and in mixed batches; list the prompt tokens of each."""
    sizes: list[int] = []
    taken = GraphRunner.decode_mixed
    monkeypatch.setattr(GraphRunner, "runs_ahead", True)
    monkeypatch.setattr(GraphRunner, "supports_prefill", True)
    monkeypatch.setattr("auraflux.engine.engine.MIXED_SIZES", (8, 24))
    monkeypatch.setattr("auraflux.engine.engine.MIN_MIXED_CHUNK", 4)
    monkeypatch.setattr(
        GraphRunner, "decode_mixed", lambda self, batch, *rest: sizes.append(batch.prefill.tokens) or taken(self, batch, *rest)
    )
    return sizes


@pytest.mark.parametrize("name", named("llama", "qwen3_5_moe", "deepseek_v3"))
def test_prefill_chunks_share_mixed_batches_with_decode(name: str, monkeypatch: pytest.MonkeyPatch):
    scheduler, prompts = scheduler_for(name), prompts_of(name)
    served, sizes = scheduler.engine.model.supports_mixed_batch, prefill_mixed(monkeypatch)
    assert finish(scheduler, submit(scheduler, prompts)) == wanted(name, "k8v4", prompts)
    assert bool(sizes) == served
    assert set(sizes) <= {total - sequences for total in (8, 24) for sequences in (2, 3, 4)}
    assert nothing_leaks(scheduler)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("name", named(*KINDS))
def test_a_text_is_what_it_is_alone(name: str, kv: str):
    made, prompts = scheduler_for(name, kv), prompts_of(name)
    assert finish(made, submit(made, prompts)) == wanted(name, kv, prompts)
    # again: all but the last token of each prompt is found
    before = made.counts.hit_tokens
    assert finish(made, submit(made, prompts)) == wanted(name, kv, prompts)
    assert made.counts.hit_tokens - before == sum(len(prompt) - 1 for prompt in prompts)
    assert nothing_leaks(made)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe"])
def test_prompts_may_be_read_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch):
    """As on a GPU, where steps of one prompt are replayed and those of several are not."""
    steps: list[int] = []
    read = Engine.prefill
    monkeypatch.setattr(Engine, "prefers_separate_steps", lambda self, tokens: True)
    monkeypatch.setattr(
        Engine, "prefill", lambda self, some, pieces, **options: steps.append(len(some)) or read(self, some, pieces, **options)
    )
    scheduler, prompts = scheduler_for(name), prompts_of(name)
    assert finish(scheduler, submit(scheduler, prompts)) == wanted(name, "k8v4", prompts)
    assert set(steps) == {1}
    assert nothing_leaks(scheduler)


@pytest.mark.parametrize("full", [False, True])
def test_a_gpu_prefills_on_while_sequences_end(full: bool, monkeypatch: pytest.MonkeyPatch):
    """With one output token each, the next prompt is prefilled before the first output is delivered, if there is room."""
    happened: list[str] = []
    monkeypatch.setattr(GraphRunner, "runs_ahead", True)
    scheduler, (first, second, *_) = scheduler_for("llama"), [prompt[:30] for prompt in prompts_of("llama")]
    step = scheduler.engine.step

    def reading(batch: Batch, pieces: list[list[int]]) -> torch.Tensor:
        happened.append("prefill")
        if full and happened.count("prefill") == 2:
            raise CacheFull("no page is free.")
        return step(batch, pieces)

    monkeypatch.setattr(scheduler.engine, "step", reading)
    monkeypatch.setattr(scheduler._prefill.budget, "split", lambda wanted, *_: [wanted[0]] + [0] * (len(wanted) - 1))
    requests = [Request(tuple(prompt), replace(SETTINGS, max_tokens=1)) for prompt in (first, second)]
    jobs = [scheduler.submit(request, lambda event: happened.append("output")) for request in requests]
    assert finish(scheduler, jobs) == [tokens[:1] for tokens in wanted("llama", "k8v4", [first, second])]
    assert happened == ["prefill", "prefill", "output", *["prefill"] * full, "output"]
    assert nothing_leaks(scheduler)


def test_tokens_are_sampled_before_prefill_is_queued_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """A GPU runs its queue in order: tokens of a finished step would wait for the prefill."""
    happened: list[str] = []
    monkeypatch.setattr(GraphRunner, "runs_ahead", True)
    prefill, sample, decode = Engine.prefill, Sampler.__call__, Engine.decode
    monkeypatch.setattr(
        Engine, "prefill", lambda self, *given, **options: happened.append("prefill") or prefill(self, *given, **options)
    )
    monkeypatch.setattr(Engine, "decode", lambda self, *given: happened.append("decode") or decode(self, *given))
    monkeypatch.setattr(Sampler, "__call__", lambda self, scores: happened.append("sample") or sample(self, scores))
    scheduler, prompts = scheduler_for("llama"), [prompt[:30] for prompt in prompts_of("llama")[:2]]
    (first,) = submit(scheduler, prompts[:1])
    scheduler.wait(lambda: len(first.generated.tokens) > 2)
    happened.clear()
    assert finish(scheduler, [first, *submit(scheduler, prompts[1:])]) == wanted("llama", "k8v4", prompts)
    assert happened[:3] == ["sample", "prefill", "decode"]
    assert nothing_leaks(scheduler)


@pytest.mark.usefixtures("order")
def test_a_fault_in_choosing_ends_what_is_written_and_no_more(monkeypatch: pytest.MonkeyPatch):
    scheduler, prompts = scheduler_for("llama"), prompts_of("llama")
    first, second = submit(scheduler, prompts[:2], replace(SETTINGS, max_tokens=12))
    scheduler.wait(lambda: len(first.generated.tokens) > 2 and len(second.generated.tokens) > 2)
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "__call__", lambda self, scores: 1 / 0)
        scheduler.wait(lambda: first.finish_reason is not None)
    assert (first.finish_reason, second.finish_reason) == ("error", "error")
    assert finish(scheduler, submit(scheduler, prompts[2:3])) == wanted("llama", "k8v4", prompts[2:3])
    assert nothing_leaks(scheduler)


def test_last_prompt_tokens_are_prefilled_with_the_others(monkeypatch: pytest.MonkeyPatch):
    """On a GPU, prefill ends with the prompts' last tokens: sequences of one output token need no decode step."""
    monkeypatch.setattr(GraphRunner, "runs_ahead", True)
    scheduler, prompts = scheduler_for("llama"), [model_of("llama")[2][at : at + 20] for at in (0, 50)]
    expected = [tokens[:1] for tokens in wanted("llama", "k8v4", prompts)]
    monkeypatch.delattr(Engine, "decode")
    assert finish(scheduler, submit(scheduler, prompts, replace(SETTINGS, max_tokens=1))) == expected
    assert nothing_leaks(scheduler)


def test_sequences_of_one_output_token_do_not_shrink_prefill_chunks(monkeypatch: pytest.MonkeyPatch):
    """Prompts that are only scored are prefilled in chunks as large as without decode."""
    steps: list[list[int]] = []
    monkeypatch.setattr(GraphRunner, "runs_ahead", True)
    text, read = model_of("llama")[2], Engine.prefill
    monkeypatch.setattr(
        Engine,
        "prefill",
        lambda self, some, pieces, **options: (
            steps.append([len(piece) for piece in pieces]) or read(self, some, pieces, **options)
        ),
    )
    scheduler, prompts = scheduler_for("llama", parallel=6, chunk=58), [text[at : at + 30] for at in range(0, 300, 50)]
    found = finish(scheduler, submit(scheduler, prompts, replace(SETTINGS, max_tokens=1)))
    assert steps == [[29, 29]] * 3
    assert found == [tokens[:1] for tokens in wanted("llama", "k8v4", prompts)]
    assert nothing_leaks(scheduler)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("kv", ["k8v4"])
@pytest.mark.parametrize("name", named("qwen3_5_moe", "gpt_oss", "deepseek_v3", "gemma4_moe"))
def test_neighbours_come_and_go(name: str, kv: str):
    made, prompts = scheduler_for(name, kv), prompts_of(name)
    first, gone = submit(made, [prompts[0], prompts[3]], replace(SETTINGS, max_tokens=12))
    made.wait(lambda: len(first.generated.tokens) > 2 and len(gone.generated.tokens) > 2)
    made.cancel(gone)
    later = submit(made, prompts[1:3])
    assert finish(made, [first, *later]) == wanted(name, kv, prompts[:3])
    assert gone.finish_reason == "cancelled"
    assert nothing_leaks(made)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("name", named("llama", "qwen3_5_moe", "gemma3"))
def test_when_pages_run_out_nothing_is_lost(name: str, kv: str):
    # each sequence begins in one page and ends in another, and there are as many pages as sequences
    made, prompts = scheduler_for(name, kv, tokens=256, context=192), [prompt[:40] for prompt in prompts_of(name)]
    found = finish(made, submit(made, prompts, replace(SETTINGS, max_tokens=32)))
    assert made.counts.preemptions > 0
    assert found == [alone(name, kv, tuple(prompt), 32) for prompt in prompts]
    assert nothing_leaks(made)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("name", named("llama", "gemma3"))
def test_when_experts_give_up_memory_no_sequence_loses_its_pages(name: str):
    made, prompts = scheduler_for(name, tokens=256, context=192, graphs=False), [prompt[:40] for prompt in prompts_of(name)]
    made.engine.take_memory = lambda nbytes: nbytes
    found = finish(made, submit(made, prompts, replace(SETTINGS, max_tokens=32)))
    assert made.counts.preemptions == 0
    assert made.engine.cache.tokens > 256
    assert found == [alone(name, "k8v4", tuple(prompt), 32) for prompt in prompts]
    assert nothing_leaks(made)


@pytest.mark.parametrize("order", ["in order", "ahead"], indirect=True)
@pytest.mark.usefixtures("order")
@pytest.mark.parametrize(
    ("name", "kv"),
    [
        *((name, "k8v4") for name in ("llama", "qwen3_5_moe", "gpt_oss", "gemma3", "deepseek_v3")),
        *((name, CALIBRATED) for name in ("llama", "qwen3_5_moe", "gpt_oss")),
    ],
)
def test_the_second_turn_of_a_chat_computes_only_what_is_new(name: str, kv: str, monkeypatch: pytest.MonkeyPatch):
    made, text = scheduler_for(name, kv), model_of(name)[2]
    computed: list[int] = []
    forward = made.engine.runner.forward
    monkeypatch.setattr(
        made.engine.runner, "forward", lambda flat, batch: [computed.append(len(flat)), forward(flat, batch)][1]
    )
    monkeypatch.setattr(made.engine.graphs, "refused", "counted")
    question = text[:140]
    (answer,) = finish(made, submit(made, [question]))
    again = [*question, *answer, *text[350:370]]
    computed.clear()
    (job,) = submit(made, [again])
    finish(made, [job])
    # the last token of the answer was chosen but never read; the new ones were neither; then each token but the last chosen
    assert job.cached_tokens == len(question) + len(answer) - 1
    assert sum(computed) == 1 + 20 + 12 - 1
    assert job.generated.tokens == alone(name, kv, tuple(again))


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_sequences_with_calibrated_keys_match_single_runs(name: str):
    made, prompts = scheduler_for(name, CALIBRATED), prompts_of(name)
    assert finish(made, submit(made, prompts)) == wanted(name, CALIBRATED, prompts)
    assert nothing_leaks(made)


@pytest.mark.parametrize("kv", ["none", CALIBRATED])
def test_sequences_that_share_a_prefix_compute_it_once(kv: str):
    made, text = scheduler_for("llama", kv), model_of("llama")[2]
    instructions, special = [token or 1 for token in text[:100]], 0
    spelling = {"starts_with_space": False, "piece": lambda token: b"x", "is_special": lambda token: token == special}
    made.builder.tokenizer = SimpleNamespace(special_ids=frozenset([special]), **spelling)
    jobs = []
    for number in range(3):
        (job,) = submit(made, [[*instructions, special, *text[100 + 90 * number : 190 + 90 * number]]])
        jobs.append(job)
        finish(made, [job])
    assert [job.cached_tokens for job in jobs] == [0, 100 if kv == CALIBRATED else 101, 101]


def test_a_prefix_that_is_being_read_is_waited_for():
    made, text = scheduler_for("llama"), model_of("llama")[2]
    prompts = [[*text[:200], number] for number in range(4)]
    jobs = submit(made, prompts)
    assert finish(made, jobs) == wanted("llama", "k8v4", prompts)
    assert [job.cached_tokens for job in jobs] == [0, 200, 200, 200]


def test_a_long_prompt_does_not_stall_others(monkeypatch: pytest.MonkeyPatch):
    made, text = scheduler_for("llama"), model_of("llama")[2]
    (short,) = submit(made, [text[:10]], replace(SETTINGS, max_tokens=40))
    made.wait(lambda: len(short.generated.tokens) > 2)
    (long,) = submit(made, [text[20:380]])
    seen = [(len(short.generated.tokens), 0)]
    while long.finish_reason is None:
        made.step()
        seen.append((len(short.generated.tokens), long.kv.length if long.kv_sequence is not None else 0))
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(seen) if b[1]]
    # every step decodes a token, and none prefills more than its share
    assert all(written == 1 for written, _ in steps if short.finish_reason is None)
    assert max(read for _, read in steps) <= 64


@pytest.mark.parametrize(("itl_s", "tokens"), [(1e-6, 16), (60.0, 64)])
def test_a_latency_target_sets_the_size_of_prefill_chunks(itl_s: float, tokens: int):
    made, text = scheduler_for("llama", itl_s=itl_s), model_of("llama")[2]
    (short,) = submit(made, [text[:10]], replace(SETTINGS, max_tokens=60))
    made.wait(lambda: len(short.generated.tokens) > 2)
    (long,) = submit(made, [text[:380]])
    seen = []
    while long.finish_reason is None:
        made.step()
        seen.append(long.kv.length if long.kv_sequence is not None else 0)
    # no target allows less than 16 tokens, nor more than the largest chunk
    assert max(b - a for a, b in pairwise(seen) if b) == tokens
    assert long.generated.tokens == alone("llama", "k8v4", tuple(text[:380]))


def test_the_queue_is_fair_between_users():
    made, text = scheduler_for("llama", parallel=1), model_of("llama")[2]
    busy = [made.submit(Request(tuple(text[:5]), SETTINGS, user="busy")) for _ in range(3)]
    (other,) = [made.submit(Request(tuple(text[9:14]), SETTINGS, user="other"))]
    order: list[Sequence] = []
    for job in (*busy, other):
        job.on_output = lambda output, job=job: order.append(job) if output.finish_reason else None
    finish(made, [*busy, other])
    assert order.index(other) == 1


def test_a_full_queue_refuses():
    made, text = scheduler_for("llama", parallel=1, waiting=2), model_of("llama")[2]
    jobs = submit(made, [text[:5], text[5:10]])
    with pytest.raises(BusyError, match="2 requests are waiting already"):
        made.submit(Request(tuple(text[:5]), SETTINGS))
    finish(made, jobs)


def test_a_failed_step_ends_its_sequences_and_no_others(monkeypatch: pytest.MonkeyPatch):
    made, prompts = scheduler_for("llama"), prompts_of("llama")
    jobs = submit(made, prompts[:2])
    made.wait(lambda: all(len(job.generated.tokens) > 2 for job in jobs))
    with monkeypatch.context() as patch:
        patch.setattr(made.engine, "decode", lambda batch, ids: 1 / 0)
        made.step()
    assert [job.finish_reason for job in jobs] == ["error", "error"]
    assert finish(made, submit(made, prompts[2:])) == wanted("llama", "k8v4", prompts[2:])
    assert nothing_leaks(made)


def test_a_failed_step_ends_the_prompt_that_went_along(monkeypatch: pytest.MonkeyPatch):
    """It may be to blame, and would end others again and again."""
    scheduler, prompts = scheduler_for("llama"), prompts_of("llama")
    prefill_mixed(monkeypatch)
    writing = submit(scheduler, prompts[:2])
    scheduler.wait(lambda: all(len(job.generated.tokens) > 2 for job in writing))
    with monkeypatch.context() as patch:
        patch.setattr(GraphRunner, "decode_mixed", lambda *_: 1 / 0)
        (reading,) = submit(scheduler, prompts[2:3])
        scheduler.step()
    assert [job.finish_reason for job in (*writing, reading)] == ["error"] * 3
    assert finish(scheduler, submit(scheduler, prompts[2:])) == wanted("llama", "k8v4", prompts[2:])
    assert nothing_leaks(scheduler)


def test_a_sequence_that_can_never_fit_is_refused(monkeypatch: pytest.MonkeyPatch):
    made, text = scheduler_for("llama", tokens=64, context=CONTEXT), model_of("llama")[2]
    (job,) = submit(made, [text[:100]])
    with pytest.raises(CacheFull, match="35 new tokens need 1 pages"):
        finish(made, [job])
    assert nothing_leaks(made)
