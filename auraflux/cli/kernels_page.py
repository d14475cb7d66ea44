"""The page about kernels: which routes each op has, which of them its cases and known models take, and what they are worth."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from auraflux.bench.explain import explain_model
from auraflux.bench.shapes import SHAPES
from auraflux.cache import CacheSettings
from auraflux.defaults import AUTO
from auraflux.models import family_name
from auraflux.ops._cases import Case
from auraflux.ops.explain import chosen_ops
from auraflux.ops.routes import Routes, Verdict, routes_of

HEAD = """\
# Which kernel runs

Where an op has several kernels, one table says which of them a call takes: the first that does not refuse
(`ops/<family>/cuda/routes.py`, `ops/<family>/cpu/routes.py`). `auraflux ops --explain OP CASE` shows the reasons for one case,
`auraflux ops --explain model SHAPE` those for all ops of a model's steps; no GPU is needed for that, and no weights.
Below are the routes of every such op in their order: on an H200, with the quick cases of the test suite that take them; on a
CPU, whose cases `auraflux ops --explain OP all --device cpu` shows, since they depend on its vectors; and those that known
models take. A route in brackets is one that another asks in its turn, and with `--invariant` only those with a star are taken.
Written by `make docs`.
"""
RESULTS = Path(__file__).parents[2] / "bench" / "results" / "routes-nvidia-h200.json"
WORTH = """\
## What they are worth

Where several routes serve a case of the benchmark on an H200: the one that is taken, and the one that would be without it.
`auraflux bench ops --device cuda --routes` measures it; `bench/results/routes-nvidia-h200.json` has this run. A route that is
not here serves what no other does, or no case of the benchmark takes it.
"""
MODELS = """\
## Models

What a step of known models takes on an H200, with weights of 4 bits and the usual cache: when a token is written after 1024,
and when a prompt of 1024 tokens is read. Ops with one kernel are left out.
"""


def kernels_page(verdicts: Mapping[Case, Verdict]) -> str:
    """The page; `verdicts` on the cases of ops on an H200."""
    routes = ["## On an H200\n", *_on_cuda(verdicts), "## On a CPU\n", *_on_cpu()]
    return "\n".join([HEAD, *routes, WORTH, _worth(), MODELS, *_models()])


def _on_cuda(verdicts: Mapping[Case, Verdict]) -> Iterator[str]:
    for op in chosen_ops("cuda"):
        yield f"### {op.name}\n"
        yield _listed(routes_of(op, "cuda"))
        paths: dict[str, list[str]] = {}
        for case, verdict in verdicts.items():
            if case.op is op:
                paths.setdefault(verdict.path, []).append(case.name)
        yield _table(("taken", "cases"), [[path, ", ".join(names)] for path, names in paths.items()])


def _on_cpu() -> Iterator[str]:
    named: dict[Routes[Any, Any], list[str]] = {}
    for op in chosen_ops("cpu"):
        if (table := routes_of(op, "cpu")) is not None:
            named.setdefault(table, []).append(op.name)
    for table, names in named.items():
        yield f"### {', '.join(names)}\n"
        yield _listed(table)


def _listed(table: Routes[Any, Any] | None) -> str:
    rows = [f"{number}. {route.name}" + " \\*" * route.alike for number, route in enumerate(table or (), 1)]
    return "\n".join(rows) + "\n"


def _worth() -> str:
    """Each route with the cases it is timed on and, of each, what takes how many times as long."""
    rows = [
        [*peer["name"].removeprefix("without ").split(": ", 1), f"{row['op']} {row['case']}", row["time_us"], peer["ratio"]]
        for row in json.loads(RESULTS.read_text())["results"]
        for peer in row["peers"]
    ]
    shown = [[route, case, f"{time:.1f}", other, f"{ratio:.2f} times"] for route, other, case, time, ratio in rows]
    return _table(("route", "case", "µs", "without it", "time"), shown)


def _models() -> Iterator[str]:
    for shape, config in SHAPES.items():
        yield f"### {shape}\n"
        rows = [
            [step, str(use.calls), use.op, use.shapes, use.verdict.path]
            for step, uses in explain_model(config, CacheSettings(AUTO).for_family(family_name(config)), "cuda").items()
            for use in uses
            if use.verdict is not None
        ]
        yield _table(("step", "calls", "op", "arguments", "taken"), rows)


def _table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
