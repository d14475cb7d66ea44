"""The page about kernels: which routes each op has on CUDA, and which of them its cases take on an H200."""

from collections.abc import Mapping

from auraflux.ops._cases import Case
from auraflux.ops._dispatch import Op
from auraflux.ops.routes import Verdict, routes_of

HEAD = """\
# Which kernel runs

Where an op has several CUDA kernels, one table says which of them a call takes: the first that does not refuse
(`ops/<family>/cuda/routes.py`). `auraflux ops --explain OP CASE` shows the reasons for one case; no GPU is needed for that.
Below are the routes of every such op in their order, and the quick cases of the test suite that take them on an H200. A route
in brackets is one that another asks in its turn. Written by `make docs`.
"""


def kernels_page(ops: list[Op], verdicts: Mapping[Case, Verdict]) -> str:
    parts = [HEAD]
    for op in ops:
        table = routes_of(op, "cuda")
        assert table is not None
        parts.append(f"## {op.name}\n")
        parts.append("\n".join(f"{number}. {route.name}" for number, route in enumerate(table, 1)) + "\n")
        paths: dict[str, list[str]] = {}
        for case, verdict in verdicts.items():
            if case.op is op:
                paths.setdefault(verdict.path, []).append(case.name)
        rows = [f"| {path} | {', '.join(names)} |" for path, names in paths.items()]
        parts.append("\n".join(["| taken | cases |", "| --- | --- |", *rows]) + "\n")
    return "\n".join(parts)
