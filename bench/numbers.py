"""Write the README's table of numbers from `bench/results/`: `python -m bench.numbers`."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- numbers -->", "<!-- /numbers -->"
INTRODUCTION = """\
One NVIDIA H200, random weights at 4 bits, KV cache k8v4, 1,024 prompt tokens
(`auraflux bench model --random --device cuda`). Operations are from `auraflux bench ops --device cuda --peers`. A ratio
above 1 means auraflux is faster. Commits: {commits}."""
MODELS = {"llama-8b": (1, 32), "qwen3-30b-a3b": (1, 32, 128)}
# label, op, cases, peer
OPERATIONS = [
    ("linear 4 bits, 8192 × 8192, 1 / 2,048 tokens", "linear", ("4bit-8192x8192-1", "4bit-8192x8192-2048"), "cuBLAS bf16"),
    ("decode attention on k4v4 codes, 131,072 tokens", "turboquant_attention", ("k4v4-128k",), "cuDNN bf16"),
    ("experts, 8 of 128, 1 / 4,096 tokens", "expert_mlp", ("one-token", "4096-tokens"), "torch grouped bf16"),
    ("Gated DeltaNet prefill, 8,192 tokens", "gated_delta_prefill", ("32-heads-8k",), "fla"),
]


def table() -> str:
    """Return the table as markdown."""
    models = json.loads((ROOT / "bench/results/models-nvidia-h200.json").read_text())
    ops = json.loads((ROOT / "bench/results/nvidia-h200.json").read_text())
    commits = " and ".join(dict.fromkeys(f"`{each['commit'][:7]}`" for each in (*models, ops)))
    rows = [_model_row(models, shape, batches) for shape, batches in MODELS.items()]
    rows += [_op_row(ops["results"], *operation) for operation in OPERATIONS]
    lines = ["| | auraflux | peer |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([INTRODUCTION.format(commits=commits), "", *lines])


def _model_row(runs: list[dict[str, Any]], shape: str, batches: tuple[int, ...]) -> tuple[str, str, str]:
    rates = {
        result["batch"]: result["decode_rate"]
        for run in runs
        if run["model"].startswith(f"{shape},")
        for result in run["results"]
        if result["context"] == 1024
    }
    shown = " / ".join(f"{rates[batch]:,.0f}" for batch in batches)
    return f"{shape}, decode, {' / '.join(map(str, batches))} sequences", f"{shown} tokens/s", ""


def _op_row(results: list[dict[str, Any]], label: str, op: str, cases: tuple[str, ...], peer: str) -> tuple[str, str, str]:
    found = [next(row for row in results if (row["op"], row["case"]) == (op, case)) for case in cases]
    ratios = [next(each["ratio"] for each in row["peers"] if each["name"].startswith(peer)) for row in found]
    times = " / ".join(f"{row['time_us']:.3g}" for row in found)
    return label, f"{times} µs", f"{peer} {' / '.join(f'{ratio:.2f}' for ratio in ratios)}×"


def with_table(readme: str) -> str:
    """Return the README with the table in its place."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{table()}\n{END}", readme, flags=re.DOTALL)


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
