"""The table of operations: docs/ops.md."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from auraflux.ops import Op

HEAD = """\
# Operations

Every op, as `auraflux.ops.all_ops()` has them. Written by `make docs`.

The meaning of an op is its reference, in torch, with its shapes: `auraflux/ops/<family>/reference*.py`. A kernel is the
function of the same name in `auraflux/ops/<family>/cpu` or `cuda`, a file or a package. "Stands for" names kernels of moeflux,
metaltile and mlx-native that do the same. `auraflux ops --check` holds every kernel to its reference on the machine it runs on.
"""


def ops_page() -> str:
    """The whole page, the same on every machine: kernels are looked for in the sources."""
    from auraflux.ops import all_ops

    families: dict[str, list[Op]] = {}
    for op in all_ops():
        families.setdefault(op.family, []).append(op)
    return "\n".join([HEAD, *(_section(family, ops) for family, ops in families.items())])


def _section(family: str, ops: "list[Op]") -> str:
    rows = [f"| `{op.name}` | {_sentence(op)} | {' '.join(_backends(op))} | {', '.join(op.origins)} |" for op in ops]
    return "\n".join([f"## {family}\n", "| op | what it does | backends | stands for |", "|---|---|---|---|", *rows, ""])


def _sentence(op: "Op") -> str:
    """The first sentence of the op's docstring: all of its first paragraph, as a cell of a table."""
    return " ".join((op.__doc__ or "").strip().split("\n\n")[0].split()).replace("|", r"\|")


def _backends(op: "Op") -> Iterator[str]:
    yield "reference"
    family = Path(__file__).parent.parent / "ops" / op.family
    for backend in ("cpu", "cuda"):
        if any(
            path.exists() and op.name in _names(path) for path in (family / f"{backend}.py", family / backend / "__init__.py")
        ):
            yield backend


def _names(path: Path) -> set[str]:
    """What a module defines or imports, without importing it: compilers need not be installed."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found
