"""The walk of docs/structure.md from `linear(x, w)` to the instruction is true: the route, the files, the names in them."""

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import auraflux
from auraflux.ops.fake_gpu import use_fake_gpu
from auraflux.ops.routes import explain_call
from auraflux.quant import QTensor

ROOT = Path(auraflux.__file__).parent
WALK = (ROOT.parent / "docs" / "structure.md").read_text().partition("## A stranger's walk")[2].partition("\n## ")[0]
STEPS = re.split(r"^\d\. ", WALK, flags=re.M)[1:]


def names_in(path: Path) -> set[str]:
    """Return the names that a module defines at top level, and those it imports."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            found |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
    return found


def test_it_takes_at_most_four_files():
    assert 1 <= len(STEPS) <= 4


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.partition(":")[0].strip("*`"))
def test_a_file_has_the_names_that_the_walk_finds_in_it(step: str):
    file, *named = re.findall(r"`([^`]+)`", step)
    path = ROOT / file
    words = {name for name in named if re.fullmatch(r"_?[A-Za-z]\w+", name)}
    modules = {other.stem for other in path.parent.glob("*.py")}
    assert words - names_in(path) - modules == set()


def test_the_walk_takes_the_route_that_it_says():
    from auraflux.ops.linear.reference import linear

    rows, width = 8192, 8192
    scales = torch.empty(rows, width // 64, dtype=torch.bfloat16)
    weight = QTensor(torch.empty(rows, width // 8, dtype=torch.int32), scales, scales, 4, 64, (rows, width))
    with use_fake_gpu():
        verdict = explain_call(linear, "cuda", {"x": torch.empty(1, width, dtype=torch.bfloat16), "weight": weight})
    assert verdict is not None
    assert verdict.path == "matvec_int4"
    assert f"[1, {width}]" in WALK


def test_each_file_leads_to_the_next():
    files = [ROOT / re.findall(r"`([^`]+)`", step)[0] for step in STEPS]
    for here, there in pairwise(files):
        module = ".".join(there.relative_to(ROOT.parent).with_suffix("").parts)
        package, _, name = module.rpartition(".")
        text = here.read_text()
        assert f"from {module} import" in text or re.search(rf"from {re.escape(package)} import [^)]*\b{name}\b", text), module


def test_the_last_file_multiplies():
    from auraflux.ops.hopper import mma, mma_int4

    instruction = re.findall(r"`(mma\.[^`]+)`", STEPS[-1])
    assert instruction == [mma.MMA]
    assert all(f"{mma.MMA} " in text.value and "lop3.b32 " in text.value for text in (mma_int4.GROUP8, mma_int4.GROUP16))
