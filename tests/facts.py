"""Print figures of the house: `python -m tests.facts`.

They are how long files, functions and kernels are, and what families of ops import from each other.
"""

import ast
from collections import Counter
from pathlib import Path
from statistics import median

from tests.test_house import MODULES, ROOT, circles, imported_modules, module_name, name_of, nodes

JIT = {"triton.jit", "gluon.jit", "Kernel"}
OPS = ROOT / "ops"


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in nodes(path) if isinstance(node, ast.FunctionDef)]


def is_compiled(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(each).partition("(")[0] in JIT for each in node.decorator_list)


def lines_of(node: ast.FunctionDef) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def longest(paths: list[Path], compiled: bool) -> str:
    found = [(lines_of(node), path, node) for path in paths for node in functions(path) if is_compiled(node) == compiled]
    lines, path, node = max(found, key=lambda each: each[0])
    return f"{lines} lines, {node.name} in {name_of(path)}"


def called(paths: list[Path]) -> set[tuple[str, str]]:
    """What compiled functions call, by module and name."""
    found = set()
    for path in paths:
        origins = {
            alias.asname or alias.name: (str(node.module), alias.name)
            for node in nodes(path)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for function in filter(is_compiled, functions(path)):
            names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            found |= {origins.get(name, (module_name(path), name)) for name in names}
    return found


def kernels(path: Path, inner: set[tuple[str, str]]) -> list[str]:
    """The functions of a module that are launched: compiled ones that no other compiled one calls."""
    names = [node.name for node in functions(path) if is_compiled(node)]
    return [name for name in names if (module_name(path), name) not in inner]


def length(path: Path) -> int:
    return len(path.read_text().splitlines())


def told(title: str, paths: list[Path]) -> None:
    lengths = {path: length(path) for path in paths}
    most = max(paths, key=lambda path: lengths[path])
    print(f"{title}: {len(paths)} files, {sum(lengths.values())} lines, median {median(lengths.values()):.0f}")
    print(f"  longest file      {lengths[most]} lines, {name_of(most)}")
    print(f"  longest function  {longest(paths, False)}")


def main() -> None:
    ops = [path for path in MODULES if path.is_relative_to(OPS)]
    told("auraflux", MODULES)
    told("auraflux/ops", ops)
    print(f"  longest kernel    {longest(ops, True)}")
    modules = {module_name(path): path for path in MODULES}
    graph = {name: imported_modules(nodes(path), set(modules)) for name, path in modules.items()}
    print(f"circles of imports: {len(circles(graph))}")
    families = sorted(path.name for path in OPS.iterdir() if (path / "reference.py").exists())
    edges = Counter(
        (name.split(".")[2], other.split(".")[2])
        for name, others in graph.items()
        for other in others
        if name.startswith("auraflux.ops.") and other.startswith("auraflux.ops.")
    )
    between = {pair: count for pair, count in edges.items() if pair[0] != pair[1] and set(pair) <= set(families)}
    print(f"imports between families: {sum(between.values())} of modules, {len(between)} pairs of families")
    for (mine, other), count in sorted(between.items(), key=lambda item: -item[1]):
        print(f"  {mine} -> {other}: {count}")
    inner = called(ops)
    for family in families:
        counts = []
        for backend in ("cpu", "cuda"):
            mine = [path for path in ops if path.is_relative_to(OPS / family) and backend in {path.stem, *path.parts}]
            count = sum(len(kernels(path, inner)) for path in mine)
            counts.append(f"{backend} {count} kernels in {len(mine)} files of {sum(map(length, mine))} lines")
        print(f"{family}: {'; '.join(counts)}")


if __name__ == "__main__":
    main()
