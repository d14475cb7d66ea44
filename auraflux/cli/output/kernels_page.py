"""The page docs/kernels.md: the routes of each op, the cases and models that use them, and their speedups."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from auraflux.bench.model_kernels import explain_model
from auraflux.bench.shapes import MAIN_SHAPES, shape_of
from auraflux.cache import CacheSettings
from auraflux.defaults import AUTO
from auraflux.models import family_name
from auraflux.ops._cases import Case
from auraflux.ops.explain import routed_ops
from auraflux.ops.routes import Explanation, Routes, routes_of

HEAD = """\
# Which kernel runs

An op with several kernels has a route table: a call runs on the first kernel that does not decline it
(`ops/<family>/cuda/routes.py`, `ops/<family>/cpu/routes.py`). `auraflux ops --explain OP CASE` shows the reasons for one case,
`auraflux ops --explain model SHAPE` those for all ops of a model's steps, without a GPU or weights.
Below are the routes of every such op in order: on an H200, with the quick cases of the test suite that use them; on a CPU,
where `auraflux ops --explain OP all --device cpu` shows the cases, which depend on its instruction set; and the routes of known
models. A route in brackets is chosen by another route's table. With `--invariant`, only routes with a star are used.
Written by `make docs`.
"""
RESULTS = Path(__file__).parents[3] / "bench" / "results" / "routes-nvidia-h200.json"
SPEEDUPS = """\
## Speedups

Benchmark cases on an H200 that several routes support: the chosen route, and the one that would run without it.
`auraflux bench ops --device cuda --routes` measures them; `bench/results/routes-nvidia-h200.json` has this run. A route that is
not listed has no alternative, or no benchmark case uses it.
"""
MODELS = """\
## Models

Routes of known models on an H200, with 4-bit weights and the default KV cache: decode after 1024 tokens, and prefill of 1024
tokens. Ops with one kernel are omitted.
"""


def kernels_page(verdicts: Mapping[Case, Explanation]) -> str:
    """Return the page; `verdicts` are the routes of cases on an H200."""
    routes = ["## On an H200\n", *_on_cuda(verdicts), "## On a CPU\n", *_on_cpu()]
    return "\n".join([HEAD, *routes, SPEEDUPS, _speedups(), MODELS, *_models()])


def _on_cuda(verdicts: Mapping[Case, Explanation]) -> Iterator[str]:
    for op in routed_ops("cuda"):
        yield f"### {op.name}\n"
        yield _listed(routes_of(op, "cuda"))
        paths: dict[str, list[str]] = {}
        for case, verdict in verdicts.items():
            if case.op is op:
                paths.setdefault(verdict.path, []).append(case.name)
        yield _table(("route", "cases"), [[path, ", ".join(names)] for path, names in paths.items()])


def _on_cpu() -> Iterator[str]:
    named: dict[Routes[Any, Any], list[str]] = {}
    for op in routed_ops("cpu"):
        if (table := routes_of(op, "cpu")) is not None:
            named.setdefault(table, []).append(op.name)
    for table, names in named.items():
        yield f"### {', '.join(names)}\n"
        yield _listed(table)


def _listed(table: Routes[Any, Any] | None) -> str:
    rows = [f"{number}. {route.name}" + " \\*" * route.invariant for number, route in enumerate(table or (), 1)]
    return "\n".join(rows) + "\n"


def _speedups() -> str:
    """Return each route with its timed cases and, for each, the slower alternative and its relative time."""
    rows = [
        [*peer["name"].removeprefix("without ").split(": ", 1), f"{row['op']} {row['case']}", row["time_us"], peer["ratio"]]
        for row in json.loads(RESULTS.read_text())["results"]
        for peer in row["peers"]
    ]
    shown = [[route, case, f"{time:.1f}", other, f"{ratio:.2f} times"] for route, other, case, time, ratio in rows]
    return _table(("route", "case", "µs", "without it", "time"), shown)


def _models() -> Iterator[str]:
    for shape in MAIN_SHAPES:
        config = shape_of(shape)
        yield f"### {shape}\n"
        rows = [
            [step, str(use.calls), use.op, use.shapes, use.verdict.path]
            for step, uses in explain_model(config, CacheSettings(AUTO).for_family(family_name(config)), "cuda").items()
            for use in uses
            if use.verdict is not None
        ]
        yield _table(("step", "calls", "op", "arguments", "route"), rows)


def _table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
