"""Read the package's source: modules, imports, functions and docstrings, as syntax trees."""

import ast
import gc
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import auraflux

ROOT = Path(auraflux.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
MOST_FILES = 15  # of a folder
FREE_FOLDERS = {ROOT / "models"}  # one file per family
MOST_PARAMETERS = 12
OPENINGS = re.compile(r"(What|Whether|Who|How|Where|Which)\b")
IMPORTERS = {"importlib.import_module", "import_module", "__import__"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def nodes(path: Path) -> list[ast.AST]:
    """List all nodes of a module's syntax tree, the module first."""
    # looking for garbage among a million nodes would take half of the time
    gc.disable()
    try:
        return list(ast.walk(ast.parse(path.read_text())))
    finally:
        gc.enable()


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT.parent))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def line_count(path: Path) -> int:
    return len(path.read_text().splitlines())


def hidden_imports(tree: Iterable[ast.AST]) -> set[str]:
    """Find the modules that `importlib.import_module` imports: literals, and names and dicts of literals in the module.

    An f-string is a search by name, such as for the families of ops, and not counted.
    """
    tree = list(tree)
    literals: dict[str | None, set[str]] = {}
    for node in tree:
        # a tuple: a union takes three times as long, and there are a million nodes
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            values = node.value.values if isinstance(node.value, ast.Dict) else [node.value]
            for target in targets:
                literals.setdefault(_dotted(target), set()).update(_strings(values))
    found = set()
    for node in tree:
        if isinstance(node, ast.Call) and node.args and _dotted(node.func) in IMPORTERS:
            given = node.args[0].value if isinstance(node.args[0], ast.Subscript) else node.args[0]
            found |= _strings([given]) | (literals.get(_dotted(given), set()) if _dotted(given) else set())
    return found


def _dotted(node: ast.expr) -> str | None:
    """Return a name such as `a.b.c`; None for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)) is not None:
        return f"{before}.{node.attr}"
    return None


def _strings(values: Iterable[ast.expr | None]) -> set[str]:
    return {value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)}


def imported_modules(tree: Iterable[ast.AST], modules: set[str]) -> set[str]:
    """Find those of some modules that one imports: at its top, in functions, for type checkers and through importlib."""
    tree = list(tree)
    found = hidden_imports(tree)
    for node in tree:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # `from package import name` means the module of that name where there is one
            full = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in full.values()}
    return found & modules


def import_graph() -> dict[str, set[str]]:
    """Map each module of the package to those it imports."""
    modules = {module_name(path): path for path in MODULES}
    return {name: imported_modules(nodes(path), set(modules)) for name, path in modules.items()}


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Find the groups of modules that import each other (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in order:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], order[other])
        if lowest[module] == order[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1 or module in graph[module]:
                found.append(sorted(group))

    for module in sorted(graph):
        if module not in order:
            visit(module)
    return sorted(found)


def functions(path: Path) -> list[Function]:
    return [node for node in nodes(path) if isinstance(node, Function)]


def lines_of(node: Function) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def parameters_of(node: Function) -> int:
    """Count a function's parameters, `self` and constants of kernels included, `*args` and `**kwargs` as one each."""
    given = node.args
    return len(given.posonlyargs + given.args + given.kwonlyargs) + sum(
        each is not None for each in (given.vararg, given.kwarg)
    )


def large_folders() -> dict[str, int]:
    """Map the folders with more than MOST_FILES modules to their number; models/ is exempt."""
    counts = Counter(path.parent for path in MODULES)
    return {
        name_of(folder): count for folder, count in sorted(counts.items()) if count > MOST_FILES and folder not in FREE_FOLDERS
    }


def indirect_docstrings() -> list[str]:
    """List the docstrings that open with What, Whether, Who, How, Where or Which."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for path in MODULES:
        for node in nodes(path):
            if isinstance(node, kinds) and OPENINGS.match(ast.get_docstring(node) or ""):
                found.append(f"{name_of(path)} {getattr(node, 'name', 'module')}")
    return found


def long_signatures() -> dict[str, int]:
    """Map the functions with more than MOST_PARAMETERS parameters, kernels included, to their number."""
    return {
        f"{name_of(path)}:{node.lineno} {node.name}": parameters_of(node)
        for path in MODULES
        for node in functions(path)
        if parameters_of(node) > MOST_PARAMETERS
    }


def longest_function() -> tuple[int, str]:
    """Return the lines and the name of the longest function, kernels included."""
    return max((lines_of(node), f"{node.name} in {name_of(path)}") for path in MODULES for node in functions(path))


def sizes_by_folder() -> dict[str, tuple[int, int]]:
    """Map each top-level folder of the package to its files and lines; modules outside of them are `(top level)`."""
    found: dict[str, tuple[int, int]] = {}
    for path in MODULES:
        parts = path.relative_to(ROOT).parts
        name = parts[0] if len(parts) > 1 else "(top level)"
        files, lines = found.get(name, (0, 0))
        found[name] = files + 1, lines + line_count(path)
    return dict(sorted(found.items()))
