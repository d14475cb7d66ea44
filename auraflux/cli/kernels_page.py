"""The page about kernels: which routes each op has, which of them its cases take, and which the steps of known models."""

from collections.abc import Iterator, Mapping
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
models take. A route in brackets is one that another asks in its turn. Written by `make docs`.
"""
MODELS = """\
## Models

What a step of known models takes on an H200, with weights of 4 bits and the usual cache: when a token is written after 1024,
and when a prompt of 1024 tokens is read. Ops with one kernel are left out.
"""


def kernels_page(verdicts: Mapping[Case, Verdict]) -> str:
    """The page; `verdicts` on the cases of ops on an H200."""
    return "\n".join([HEAD, "## On an H200\n", *_on_cuda(verdicts), "## On a CPU\n", *_on_cpu(), MODELS, *_models()])


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
    return "\n".join(f"{number}. {route.name}" for number, route in enumerate(table or (), 1)) + "\n"


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
