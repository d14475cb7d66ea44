"""The structure of the package: one-way imports, module docstrings, public names, sizes and signatures."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import auraflux
from tests.source_tree import (
    MODULES,
    ROOT,
    cycles,
    hidden_imports,
    import_graph,
    imported_modules,
    indirect_docstrings,
    large_folders,
    long_signatures,
    module_name,
    name_of,
    nodes,
)

LEVELS = {
    "ops": 0,
    "quant": 0,
    "cache": 1,
    "weights": 1,
    "adapters": 2,
    "models": 2,
    "tokenizer": 2,
    "vision": 2,
    "engine": 3,
    "speculative": 4,
    "scheduler": 5,
    "distributed": 6,
    "loading": 6,
    "serve": 7,
    "bench": 7,
    "eval": 7,
    "integrations": 7,
    "cli": 8,
}
# `ops` may use the weight formats; the formats know nothing of ops
SAME_LEVEL = {
    ("ops", "quant"),
    ("models", "adapters"),
    ("cache", "weights"),
    ("weights", "cache"),
    ("distributed", "loading"),
    ("vision", "models"),
    ("loading", "distributed"),
}
BACKENDS = {"cpu": {"cpu", "simd"}, "cuda": {"cuda", "gpu", "hopper"}}
DRAWERS = {"utils", "util", "common", "helpers", "misc"}


def imported(path: Path) -> set[str]:
    """Return the folders of the package that a module imports from, at any level of nesting."""
    names = hidden_imports(nodes(path))
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


@pytest.mark.parametrize(
    ("graph", "wanted"),
    [
        ({"a": "bc", "b": "c", "c": ""}, []),
        ({"a": "a"}, [["a"]]),
        ({"a": "b", "b": "a", "c": "ab"}, [["a", "b"]]),
        ({"a": "b", "b": "cd", "c": "a", "d": "e", "e": "fd", "f": ""}, [["a", "b", "c"], ["d", "e"]]),
    ],
)
def test_cycles_are_found(graph: dict[str, str], wanted: list[list[str]]):
    assert cycles({module: set(others) for module, others in graph.items()}) == wanted


def test_imports_in_functions_are_found():
    modules = {"p", "p.a", "p.b", "p.c", "p.d", "p.e", "p.f", "p.g", "p.h", "p.i"}
    source = """
from p import a, name
import p.b
from p.c import thing
if TYPE_CHECKING:
    from p.d import Thing
def late():
    from p import e
    import numpy
    importlib.import_module("p.f").thing
G = "p.g"
HOMES: dict[str, str] = {"thing": "p.h", "other": "p.i"}
import_module(G)
__import__(HOMES[name])
importlib.import_module(f"p.{name}")
"""
    assert imported_modules(ast.walk(ast.parse(source)), modules) == modules


def test_there_are_no_import_cycles():
    assert cycles(import_graph()) == []


def test_every_folder_has_a_level():
    assert {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()} <= set(LEVELS)


def test_every_module_has_a_docstring():
    nonempty = [path for path in MODULES if path.read_text().strip()]
    assert [name_of(path) for path in nonempty if not ast.get_docstring(nodes(path)[0])] == []


def test_there_are_no_utility_modules():
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
    """Return the backend of an op module, from its folder or its name."""
    parts = {*path.relative_to(ROOT / "ops").parts[:-1], path.stem}
    return next((backend for backend, names in BACKENDS.items() if parts & names), None)


def op_modules(path: Path) -> set[str]:
    """Return the op modules that a module imports, at any level of nesting."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("auraflux.ops"):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_cpu_and_cuda_kernels_do_not_import_each_other():
    wrong = []
    for path in [path for path in MODULES if path.is_relative_to(ROOT / "ops")]:
        mine = backend_of(path)
        for module in op_modules(path) if mine else ():
            named = set(module.split(".")[2:])
            wrong += [f"{name_of(path)} imports {module}" for other in BACKENDS if other != mine and named & BACKENDS[other]]
    assert wrong == []


# of another family a kernel may import modules that hold no kernels (pages, references), its ops, and these modules
SHARED_BY_FAMILIES = {
    # experts are batched linear products, and a shared expert is one of them
    ("moe", "linear.cpu.products"),
    ("moe", "linear.cpu.routes"),
    ("moe", "linear.cuda.call"),
    ("moe", "linear.cuda.routes"),
    # adapters run in the launches of products
    ("lora", "linear.cuda.adapted"),
    ("lora", "linear.cuda.call"),
    ("lora", "linear.cuda.limits"),
    ("lora", "linear.cuda.matvec"),
    ("lora", "linear.cuda.routes"),
    # latents are multiplied by slices of a weight, which cuBLAS needs dequantized
    ("attention", "linear.cuda.dequantize"),
    # attention on a quantized KV cache dequantizes keys on the way: launch arguments, work items, tiles and pages are the same
    ("turboquant", "attention.cpu.dtypes"),
    ("turboquant", "attention.cpu.launch_args"),
    ("turboquant", "attention.cpu.mla_panels"),
    ("turboquant", "attention.cpu.page_index"),
    ("turboquant", "attention.cpu.panel_tiles"),
    ("turboquant", "attention.cpu.row_blocks"),
    ("turboquant", "attention.cpu.row_tiles"),
    ("turboquant", "attention.cpu.token_selection"),
    ("turboquant", "attention.cpu.work_items"),
    # compressed entries are rows in pages with the dtypes and page tables of keys
    ("compress", "attention.cpu.dtypes"),
    ("compress", "attention.cpu.page_index"),
    # a head of a latent's weight is dense once unpacked
    ("attention", "linear.cpu.dense"),
    ("turboquant", "attention.cuda.mla_rope_append"),
}


def borrowed(tree: Iterable[ast.AST], family: str, modules: set[str]) -> set[str]:
    """Return the imports of a kernel module from kernels of other families: modules, or names of a family's `cpu` or `cuda`."""
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


def test_borrowed_imports_are_found():
    modules = {"auraflux.ops.a.cuda.flash"}
    source = """
from auraflux.ops.a.cuda import flash, attention
from auraflux.ops.a.cpu.jobs import run
from auraflux.ops.a.pages import Pages
from auraflux.ops.hopper.copy import fetch
from auraflux.ops.b.cuda.own import mine
"""
    assert borrowed(ast.walk(ast.parse(source)), "b", modules) == {"a.cuda.flash", "a.cuda.attention", "a.cpu.jobs"}


def test_families_do_not_import_each_others_kernels():
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


def test_shared_modules_do_not_import_families():
    from auraflux.ops._dispatch import families

    folders = [ROOT / "ops" / name for name in ("gpu", "hopper", "simd")]
    shared = [path for path in MODULES if any(path.is_relative_to(folder) for folder in folders)]
    known = {f"{name_of(path)} imports {module}" for path in shared for module in op_modules(path)}
    assert [text for text in known if set(text.split(".")) & set(families())] == []


def test_kernel_modules_are_not_named_like_ops():
    from auraflux.ops import all_ops

    # importing it would shadow the op
    taken = {ROOT / "ops" / op.family / backend / f"{op.name}.py" for op in all_ops() for backend in BACKENDS}
    assert sorted(name_of(path) for path in taken & set(MODULES)) == []


def test_compiled_cpu_code_does_not_depend_on_cuda_sources():
    from auraflux.ops.simd.compile.cache_folder import cpu_sources

    sources = cpu_sources()
    assert [name_of(path) for path in sources if backend_of(path) == "cuda"] == []
    used = {path for path in MODULES if path.is_relative_to(ROOT / "ops") and backend_of(path) == "cpu"}
    assert used <= set(sources)


MOST_PARAMETERS = 20  # of a CUDA kernel function; related arguments form a named tuple


def long_parameter_lists(tree: Iterable[ast.AST]) -> set[str]:
    """Return the @triton.jit and @gluon.jit functions with more parameters than allowed, constants included."""
    found = set()
    for node in tree:
        if isinstance(node, ast.FunctionDef) and {"triton.jit", "gluon.jit"} & {ast.unparse(d) for d in node.decorator_list}:
            count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
            found |= {node.name} if count > MOST_PARAMETERS else set()
    return found


def test_long_parameter_lists_are_found():
    names = ", ".join(f"a{i}" for i in range(MOST_PARAMETERS))
    source = f"""
@triton.jit
def enough({names}): ...
@gluon.jit
def many({names}, B: gl.constexpr): ...
def host({names}, b): ...
"""
    assert long_parameter_lists(ast.walk(ast.parse(source))) == {"many"}


def test_kernels_have_few_parameters():
    paths = [path for path in MODULES if path.is_relative_to(ROOT / "ops") and backend_of(path) == "cuda"]
    found = {f"{path.relative_to(ROOT / 'ops')} {name}" for path in paths for name in long_parameter_lists(nodes(path))}
    assert found == set(), "join related parameters into a NamedTuple: see docs/adding-an-op.md"


MOST_LONG_SIGNATURES = 40  # in the package; most are kernels and the ops they serve


def test_folders_are_small():
    assert large_folders() == {}, "split the folder by concept"


def test_docstrings_are_imperative():
    assert indirect_docstrings() == [], "say what the function does: Return …, Split …"


def test_few_functions_have_many_parameters():
    assert len(long_signatures()) < MOST_LONG_SIGNATURES, "join what belongs together into a NamedTuple"
