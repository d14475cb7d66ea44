"""The page docs/ops.md: a table of operations."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from auraflux.ops import Op

HEAD = """\
# Operations

Every op of `auraflux.ops.all_ops()`. Written by `make docs`.

The meaning of an op is its reference, in torch, with its shapes: `auraflux/ops/<family>/reference*.py`. A kernel is the
function of the same name in `auraflux/ops/<family>/cpu` or `cuda`, a file or a package. "Stands for" names kernels of moeflux,
metaltile and mlx-native that do the same. `auraflux ops --check` compares every kernel with its reference on this machine.
"""


def ops_page() -> str:
    """Return the page; kernels are found in the sources, so it is the same on every machine."""
    from auraflux.ops import all_ops

    families: dict[str, list[Op]] = {}
    for op in all_ops():
        families.setdefault(op.family, []).append(op)
    return "\n".join([HEAD, *(_section(family, ops) for family, ops in families.items())])


def _section(family: str, ops: "list[Op]") -> str:
    rows = [f"| `{op.name}` | {_sentence(op)} | {' '.join(_backends(op))} | {', '.join(op.origins)} |" for op in ops]
    return "\n".join([f"## {family}\n", "| op | what it does | backends | stands for |", "|---|---|---|---|", *rows, ""])


def _sentence(op: "Op") -> str:
    """Return the first paragraph of the op's docstring as a table cell."""
    return " ".join((op.__doc__ or "").strip().split("\n\n")[0].split()).replace("|", r"\|")


def _backends(op: "Op") -> Iterator[str]:
    yield "reference"
    family = Path(__file__).parents[2] / "ops" / op.family
    for backend in ("cpu", "cuda"):
        if any(
            path.exists() and op.name in _names(path) for path in (family / f"{backend}.py", family / backend / "__init__.py")
        ):
            yield backend


def _names(path: Path) -> set[str]:
    """Return the names that a module defines or imports, without importing it: compilers may be missing."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found
