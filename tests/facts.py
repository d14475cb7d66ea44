"""Print statistics of the source: `python -m tests.facts`.

They cover sizes of folders, files, functions and kernels, imports between op families, and counts that the style limits.
"""

import ast
from collections import Counter
from pathlib import Path
from statistics import median

from tests import test_words
from tests.source_tree import (
    MODULES,
    MOST_FILES,
    MOST_PARAMETERS,
    ROOT,
    Function,
    cycles,
    functions,
    import_graph,
    indirect_docstrings,
    large_folders,
    line_count,
    lines_of,
    long_signatures,
    longest_function,
    module_name,
    name_of,
    nodes,
    sizes_by_folder,
)

JIT = {"triton.jit", "gluon.jit", "Kernel"}
OPS = ROOT / "ops"


def is_compiled(node: Function) -> bool:
    return any(ast.unparse(each).partition("(")[0] in JIT for each in node.decorator_list)


def longest(paths: list[Path], compiled: bool) -> str:
    found = [(lines_of(node), path, node) for path in paths for node in functions(path) if is_compiled(node) == compiled]
    lines, path, node = max(found, key=lambda each: each[0])
    return f"{lines} lines, {node.name} in {name_of(path)}"


def called(paths: list[Path]) -> set[tuple[str, str]]:
    """Return the functions that compiled functions call, by module and name."""
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
    """List the kernels of a module: compiled functions that no other compiled function calls."""
    names = [node.name for node in functions(path) if is_compiled(node)]
    return [name for name in names if (module_name(path), name) not in inner]


def print_lengths(title: str, paths: list[Path]) -> None:
    lengths = {path: line_count(path) for path in paths}
    most = max(paths, key=lambda path: lengths[path])
    print(f"{title}: {len(paths)} files, {sum(lengths.values())} lines, median {median(lengths.values()):.0f}")
    print(f"  longest file      {lengths[most]} lines, {name_of(most)}")
    print(f"  longest function  {longest(paths, False)}")


def print_folders() -> None:
    print(f"{'folder':12} {'files':>6} {'lines':>7}")
    for name, (files, lines) in sizes_by_folder().items():
        print(f"{name:12} {files:6} {lines:7}")


def print_bounds() -> None:
    large = large_folders()
    lines, name = longest_function()
    print(f"folders over {MOST_FILES} files: {len(large)}")
    for folder, count in sorted(large.items(), key=lambda item: -item[1]):
        print(f"  {folder}: {count}")
    print(f"circles of imports, importlib counted: {len(cycles(import_graph()))}")
    print(f"docstrings that open with What, Whether, Who, How, Where or Which: {len(indirect_docstrings())}")
    print(f"functions with more than {MOST_PARAMETERS} parameters: {len(long_signatures())}")
    print(f"retired words in identifiers and pages: {retired_words()}")
    print(f"longest function: {lines} lines, {name}")


def retired_words() -> int:
    """Count identifiers and pages that use a retired word."""
    identifiers = sum(len(test_words.retired_in(path)) for path in test_words.SOURCES)
    return identifiers + sum(len(test_words.retired_in_page(page)) for page in test_words.PAGES)


def main() -> None:
    ops = [path for path in MODULES if path.is_relative_to(OPS)]
    print_lengths("auraflux", MODULES)
    print_lengths("auraflux/ops", ops)
    print(f"  longest kernel    {longest(ops, True)}")
    print_folders()
    print_bounds()
    graph = import_graph()
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
            counts.append(f"{backend} {count} kernels in {len(mine)} files of {sum(map(line_count, mine))} lines")
        print(f"{family}: {'; '.join(counts)}")


if __name__ == "__main__":
    main()
