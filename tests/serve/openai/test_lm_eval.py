"""EleutherAI's lm-eval: a served model gets the numbers that transformers gets with the same weights."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from auraflux.weights.download.pull import locate
from tests.serve.server import NAME, Served, running

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
pytest.importorskip("datasets", reason="lm-eval's dependency datasets is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# of each task
ITEMS = 200
POINTS = 0.3
WORDS = ["apple", "river", "stone", "music", "horse", "paper", "light", "bread", "cloud", "tiger", "glass", "money", "table"]
TASKS = {
    # the likeliest of three endings, as in ARC or HellaSwag
    "counting": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "target_delimiter": "",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    # the last word of a list that was shown before, as in LAMBADA
    "recall": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{question}}",
        "target_delimiter": "",
        "doc_to_target": "{{target}}",
        "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
    },
    "capitals": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "target_delimiter": "",
        "doc_to_target": "{{target}}",
        "generation_kwargs": {"max_gen_toks": 12, "until": ["\n"], "do_sample": False, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    },
}
CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Spain": "Madrid", "Egypt": "Cairo", "Cuba": "Havana"}


def items(task: str) -> list[dict[str, Any]]:
    rng = random.Random(task)
    if task == "counting":
        starts = [(rng.randrange(2, 99), rng.randrange(2, 13)) for _ in range(ITEMS)]
        fourth = [first + 3 * step for first, step in starts]
        choices = [[f" {n}", f" {n + rng.choice((-2, -1, 1, 2))}", f" {n + rng.choice((-7, -5, 3, 5))}"] for n in fourth]
        orders = [rng.sample(range(3), 3) for _ in starts]
        return [
            {
                "question": f"{first}, {first + step}, {first + 2 * step},",
                "choices": [given[k] for k in order],
                "label": order.index(0),
            }
            for (first, step), given, order in zip(starts, choices, orders, strict=True)
        ]
    if task == "recall":
        lists = [rng.sample(WORDS, 6) for _ in range(ITEMS)]
        return [{"question": f"{' '.join(each)}. Again: {' '.join(each[:-1])}", "target": f" {each[-1]}"} for each in lists]
    return [{"question": f"The capital of {land} is", "target": f" {city}."} for land, city in CAPITALS.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks and data that need no download, and the built-in model as transformers loads it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("lm-eval")
    for name, settings in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(item) + "\n" for item in items(name)))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **source, **settings}))
    path = locate()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    # its weights are dequantized; it would refuse to store them as GGUF
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    # float32 products and an uncompressed cache, like transformers
    with running(locate(), kv="none", context=1024) as server:
        yield server


def evaluate(folder: Path, kind: str, tasks: list[str], chat: bool = False, **options: Any) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(
        kind, model_args=options, tasks=tasks, task_manager=manager, bootstrap_iters=0, apply_chat_template=chat
    )
    return found["results"]


def test_the_numbers_are_those_of_transformers(folder: Path, served: Served):
    tasks = ["counting", "recall"]
    theirs = evaluate(folder, "hf", tasks, pretrained=str(folder / "model"), dtype="float32", device="cpu", batch_size=8)
    url = f"{served.url}/v1/completions"
    # without a tokenizer of its own, lm-eval takes the server's
    ours = evaluate(folder, "local-completions", tasks, base_url=url, model=NAME, num_concurrent=4, max_retries=1)
    shown = {task: {"hf": theirs[task], "auraflux": ours[task]} for task in tasks}
    print(json.dumps(shown, indent=1, default=str))
    for task in tasks:
        for metric in ("acc", "acc_norm"):
            key = f"{metric},none"
            if key in theirs[task]:
                assert abs(ours[task][key] - theirs[task][key]) * 100 <= POINTS, shown
    assert ours["recall"]["perplexity,none"] == pytest.approx(theirs["recall"]["perplexity,none"], rel=1e-3)
    # a task that no model fails, or that all fail, would show nothing
    assert 0.4 < theirs["recall"]["acc,none"] < 1
    assert 0.4 < theirs["counting"]["acc,none"] < 1


def test_generation_through_both_endpoints(folder: Path, served: Served):
    theirs = evaluate(folder, "hf", ["capitals"], pretrained=str(folder / "model"), dtype="float32", device="cpu")
    base = served.url
    ours = evaluate(folder, "local-completions", ["capitals"], base_url=f"{base}/v1/completions", model=NAME)
    assert ours["capitals"]["exact_match,none"] == theirs["capitals"]["exact_match,none"]
    theirs = evaluate(folder, "hf", ["capitals"], True, pretrained=str(folder / "model"), dtype="float32", device="cpu")
    ours = evaluate(folder, "local-chat-completions", ["capitals"], True, base_url=f"{base}/v1/chat/completions", model=NAME)
    assert ours["capitals"]["exact_match,none"] == theirs["capitals"]["exact_match,none"]


def test_eval_runs_tasks(folder: Path):
    from click.testing import CliRunner

    from auraflux.cli import main

    words = ["eval", "--task", "capitals", "--task-folder", str(folder), "--limit", "4", "--kv", "none,k4v4", "--json"]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout[done.stdout.index("[\n") :])
    assert [(row["kv"], row["task"]) for row in rows] == [("none", "capitals"), ("k4v4", "capitals")]
    assert all(0 <= row["metrics"]["exact_match"] <= 1 for row in rows)
    unknown = CliRunner().invoke(main, ["eval", "--task", "no-such-task"])
    assert unknown.exit_code == 1
    assert "lm-eval has no task no-such-task" in unknown.stderr
