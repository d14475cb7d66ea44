"""The shape of the house: imports go one way, every module says what it holds, and the public names are those documented."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

import auraflux

ROOT = Path(auraflux.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
LEVELS = {"ops": 0, "quant": 0, "cache": 1, "weights": 1, "models": 2, "run": 3, "serve": 4, "bench": 4, "eval": 4, "cli": 5}
# `ops` may use the weight formats; the formats know nothing of ops
SAME_LEVEL = {("ops", "quant"), ("cache", "weights"), ("weights", "cache")}
BACKENDS = {"cpu": {"cpu", "simd"}, "cuda": {"cuda", "hopper"}}
DRAWERS = {"utils", "util", "common", "helpers", "misc"}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All of a module's syntax tree, the module first."""
    return list(ast.walk(ast.parse(path.read_text())))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT.parent))


def imported(path: Path) -> set[str]:
    """The parts of the package a module imports from, wherever in it the import stands."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} imports relatively; name the module in full"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("auraflux.")} & set(LEVELS)


def test_imports_go_one_way():
    wrong = []
    for path in MODULES:
        part = path.relative_to(ROOT).parts[0]
        for other in imported(path) if part in LEVELS else ():
            if part != other and (
                LEVELS[other] > LEVELS[part] or (LEVELS[other] == LEVELS[part] and (part, other) not in SAME_LEVEL)
            ):
                wrong.append(f"{name_of(path)} imports from {other}")
    assert wrong == []


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: Iterable[ast.AST], modules: set[str]) -> set[str]:
    """Those of some modules that one imports: at its top, in functions, and for type checkers only."""
    found = set()
    for node in tree:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # `from package import name` means the module of that name where there is one
            full = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in full.values()}
    return found & modules


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules each of which leads to all others of its group (Tarjan's strongly connected components)."""
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


@pytest.mark.parametrize(
    ("graph", "wanted"),
    [
        ({"a": "bc", "b": "c", "c": ""}, []),
        ({"a": "a"}, [["a"]]),
        ({"a": "b", "b": "a", "c": "ab"}, [["a", "b"]]),
        ({"a": "b", "b": "cd", "c": "a", "d": "e", "e": "fd", "f": ""}, [["a", "b", "c"], ["d", "e"]]),
    ],
)
def test_circles_are_found(graph: dict[str, str], wanted: list[list[str]]):
    assert circles({module: set(others) for module, others in graph.items()}) == wanted


def test_imports_are_found_wherever_they_stand():
    modules = {"p", "p.a", "p.b", "p.c", "p.d", "p.e"}
    source = """
from p import a, name
import p.b
from p.c import thing
if TYPE_CHECKING:
    from p.d import Thing
def late():
    from p import e
    import numpy
"""
    assert imported_modules(ast.walk(ast.parse(source)), modules) == modules


def test_no_modules_import_each_other_in_a_circle():
    modules = {module_name(path): path for path in MODULES}
    graph = {name: imported_modules(nodes(path), set(modules)) for name, path in modules.items()}
    assert circles(graph) == []


def test_every_part_has_a_level():
    assert {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()} <= set(LEVELS)


def test_every_module_says_what_it_holds():
    written = [path for path in MODULES if path.read_text().strip()]
    assert [name_of(path) for path in written if not ast.get_docstring(nodes(path)[0])] == []


def test_no_drawers():
    assert [name_of(path) for path in MODULES if path.stem in DRAWERS] == []


def test_public_names_are_the_documented_ones():
    documented = re.findall(r"^(\w+)  +\S", auraflux.__doc__ or "", re.MULTILINE)
    assert sorted(documented) == sorted(auraflux.__all__)
    for name in auraflux.__all__:
        assert getattr(auraflux, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = auraflux.nothing


def test_importing_the_package_does_not_import_torch():
    code = "import sys, auraflux; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def backend_of(path: Path) -> str | None:
    """The backend that a module of the ops belongs to: the folder it lies in, or its own name."""
    parts = {*path.relative_to(ROOT / "ops").parts[:-1], path.stem}
    return next((backend for backend, names in BACKENDS.items() if parts & names), None)


def op_modules(path: Path) -> set[str]:
    """The modules of the ops that one imports, wherever in it the import stands."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("auraflux.ops"):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_cpu_and_cuda_kernels_do_not_know_each_other():
    wrong = []
    for path in [path for path in MODULES if path.is_relative_to(ROOT / "ops")]:
        mine = backend_of(path)
        for module in op_modules(path) if mine else ():
            named = set(module.split(".")[2:])
            wrong += [f"{name_of(path)} imports {module}" for other in BACKENDS if other != mine and named & BACKENDS[other]]
    assert wrong == []


# of another family a kernel may import what is no kernel (pages, references), the functions of its ops, and these modules
SHARED_BY_FAMILIES = {
    # experts are a longer list of a linear's products, and a shared expert is a call of them
    ("moe", "linear.cpu.products"),
    ("moe", "linear.cpu.routes"),
    ("moe", "linear.cuda.call"),
    ("moe", "linear.cuda.routes"),
    # latents are multiplied by parts of a weight, which cuBLAS wants written out
    ("attention", "linear.cuda.dequantize"),
    # attention over codes is attention whose keys are decoded on the way: its jobs, tiles and pages are the same
    ("turboquant", "attention.cpu.append"),
    ("turboquant", "attention.cpu.choice"),
    ("turboquant", "attention.cpu.decode_tiles"),
    ("turboquant", "attention.cpu.jobs"),
    ("turboquant", "attention.cpu.page_index"),
    ("turboquant", "attention.cpu.prefill"),
    ("turboquant", "attention.cpu.prefill_tiles"),
    ("turboquant", "attention.cpu.row_blocks"),
    ("turboquant", "attention.cpu.row_tiles"),
    # a head of a latent's weight is a dense one once it is unpacked
    ("attention", "linear.cpu.dense"),
    ("turboquant", "attention.cuda.mla_rope_append"),
}


def borrowed(tree: Iterable[ast.AST], family: str, modules: set[str]) -> set[str]:
    """What a kernel module imports of the kernels of other families: modules, or names of a family's `cpu` or `cuda`."""
    found = set()
    for node in tree:
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            parts = (full if full in modules else str(node.module)).split(".")[2:]
            if full.startswith("auraflux.ops.") and len(parts) > 1 and parts[1] in BACKENDS and parts[0] != family:
                found.add(".".join([*parts, alias.name][:3]))
    return found


def test_borrowed_names_are_found():
    modules = {"auraflux.ops.a.cuda.flash"}
    source = """
from auraflux.ops.a.cuda import flash, attention
from auraflux.ops.a.cpu.jobs import run
from auraflux.ops.a.pages import Pages
from auraflux.ops.hopper.copy import fetch
from auraflux.ops.b.cuda.own import mine
"""
    assert borrowed(ast.walk(ast.parse(source)), "b", modules) == {"a.cuda.flash", "a.cuda.attention", "a.cpu.jobs"}


def test_families_do_not_borrow_each_others_kernels():
    from auraflux.ops import all_ops

    ops = {f"{op.family}.{backend}.{op.name}" for op in all_ops() for backend in BACKENDS}
    modules, used, wrong = {module_name(path) for path in MODULES}, set(), []
    for path in [path for path in MODULES if path.is_relative_to(ROOT / "ops") and backend_of(path)]:
        family = path.relative_to(ROOT / "ops").parts[0]
        for name in borrowed(nodes(path), family, modules) - ops:
            used.add((family, name))
            if (family, name) not in SHARED_BY_FAMILIES:
                wrong.append(f"{name_of(path)} imports {name}: put what both need into ops/hopper or ops/simd")
    assert wrong == []
    assert used == SHARED_BY_FAMILIES, f"not imported any more: {SHARED_BY_FAMILIES - used}"


def test_what_families_share_knows_no_family():
    from auraflux.ops._dispatch import families

    shared = [path for path in MODULES if path.parent in (ROOT / "ops" / "hopper", ROOT / "ops" / "simd")]
    known = {f"{name_of(path)} imports {module}" for path in shared for module in op_modules(path)}
    assert [text for text in known if set(text.split(".")) & set(families())] == []


def test_no_kernel_module_has_the_name_of_an_op():
    from auraflux.ops import all_ops

    # importing it would put the module in the op's place
    taken = {ROOT / "ops" / op.family / backend / f"{op.name}.py" for op in all_ops() for backend in BACKENDS}
    assert sorted(name_of(path) for path in taken & set(MODULES)) == []


def test_compiled_cpu_code_does_not_depend_on_cuda_sources():
    from auraflux.ops.simd.folder import cpu_sources

    sources = cpu_sources()
    assert [name_of(path) for path in sources if backend_of(path) == "cuda"] == []
    used = {path for path in MODULES if path.is_relative_to(ROOT / "ops") and backend_of(path) == "cpu"}
    assert used <= set(sources)


MOST_PARAMETERS = 20  # of a function of a CUDA kernel; what belongs together is one argument, a named tuple


def long_lists(tree: Iterable[ast.AST]) -> set[str]:
    """The functions under @triton.jit or @gluon.jit that take more parameters than that, constants included."""
    found = set()
    for node in tree:
        if isinstance(node, ast.FunctionDef) and {"triton.jit", "gluon.jit"} & {ast.unparse(d) for d in node.decorator_list}:
            count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
            found |= {node.name} if count > MOST_PARAMETERS else set()
    return found


def test_long_lists_are_found():
    names = ", ".join(f"a{i}" for i in range(MOST_PARAMETERS))
    source = f"""
@triton.jit
def enough({names}): ...
@gluon.jit
def many({names}, B: gl.constexpr): ...
def host({names}, b): ...
"""
    assert long_lists(ast.walk(ast.parse(source))) == {"many"}


def test_kernels_take_named_tuples_for_what_belongs_together():
    paths = [path for path in MODULES if path.is_relative_to(ROOT / "ops") and backend_of(path) == "cuda"]
    found = {f"{path.relative_to(ROOT / 'ops')} {name}" for path in paths for name in long_lists(nodes(path))}
    assert found == set(), "join what belongs together into a NamedTuple: see docs/adding-an-op.md"
