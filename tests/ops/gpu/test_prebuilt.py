"""Prebuilt kernels: loaded instead of compiled if sources, Triton, GPU and variant are the same, and intact."""

from pathlib import Path
from typing import Any

import pytest

from tests.ops.gpu.test_capture import output_of

pytest.importorskip("triton")
# in a subprocess: this process has imported the kernels for the interpreter
PROGRAM = """
import json, os, sys, torch
from pathlib import Path
from triton import knobs
from triton.runtime import driver
from auraflux.ops import rms_norm
from auraflux.ops.fake_gpu import HOPPER, use_fake_gpu
from auraflux.ops.gpu import prebuilt
from auraflux.ops.gpu.ahead import load_prebuilt
from auraflux.ops.gpu.capture import CompileOnly, capture_variants
from auraflux.ops.gpu.launch import redirect_launches
from auraflux.ops.gpu.prebuilt import PACKAGE, Prebuilt, entry_name, folder_name, use_prebuilt

class Stub(CompileOnly):
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

prebuilt.SITE = Path(os.environ["SITE"])
driver.set_active(Stub())
norm = rms_norm.kernel("cuda")
compiled = []
knobs.compilation.listener = lambda **event: compiled.append(event["metadata"]["name"])


def norm_of(width):
    norm(torch.ones(4, width), torch.ones(width), 1e-6)


def launched(width):
    # as `Launcher` does; what Triton compiles, or finds in its own cache, is heard
    def receive(kernel, grid, *args, **named):
        use_prebuilt(kernel, 0)
        kernel.device_caches[0][0].clear()
        kernel.run(*args, grid=grid, warmup=True, **named)

    compiled.clear()
    with use_fake_gpu(HOPPER), redirect_launches(receive):
        norm_of(width)
    return list(compiled)


def again():
    for function in (prebuilt.installed_for, prebuilt._is_installed, prebuilt._sources_digest):
        function.cache_clear()


with capture_variants() as variants, use_fake_gpu(HOPPER):
    norm_of(128)
    norm_of(130)
found = {"not installed": launched(128)}
first, second = variants
folder = Prebuilt(prebuilt.SITE / PACKAGE / folder_name(90))
folder.save(first.source(), first.parsed_options(), first.compile())
again()
found["installed"] = launched(128)
found["another variant"] = launched(130)
found["loaded"] = load_prebuilt(first).asm["cubin"] == first.compile().asm["cubin"]
found["names"] = len({entry_name(each.source(), each.parsed_options()) for each in variants})
found["options"] = entry_name(first.source(), first.parsed_options() | {"num_warps": 16}) in os.listdir(folder.folder)
found["files"] = sorted(path.suffix for path in folder.folder.iterdir())

[code] = folder.folder.glob("*.cubin")
[metadata] = folder.folder.glob("*.json")
intact = code.read_bytes(), metadata.read_text()
found["paths"] = str(Path.home()) in intact[1] or "libdevice" in intact[1]
code.write_bytes(intact[0][:-1] + b"x")
found["other code"] = launched(128)
code.write_bytes(intact[0])
metadata.write_text("{")
found["other metadata"] = launched(128)
metadata.write_text(intact[1])
found["intact"] = launched(128)

os.environ["DISABLE_LLVM_OPT"] = "1"
again()
found["Triton is told how to compile"] = prebuilt.installed_for(90) is None
del os.environ["DISABLE_LLVM_OPT"]
again()
found["another architecture"] = prebuilt.installed_for(89) is None
before = folder_name(90)
prebuilt.triton.__version__ = "3.6.1"
again()
found["another Triton"] = prebuilt.installed_for(90) is None and folder_name(90) != before
prebuilt.triton.__version__ = "3.6.0"
source = Path(os.environ["SITE"], "ops")
source.mkdir()
(source / "cuda.py").write_text("x = 1")
prebuilt.OPS = source
again()
one = folder_name(90)
(source / "cuda.py").write_text("x = 2")
(source / "cases.py").write_text("")
again()
two = folder_name(90)
(source / "cases.py").write_text("y = 1")
again()
found["other sources"] = one != two and folder_name(90) == two and prebuilt.installed_for(90) is None
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    site: Path = tmp_path_factory.mktemp("site")
    return output_of(PROGRAM, SITE=str(site), TRITON_CACHE_DIR=str(site / "triton"))


def test_prebuilt_kernels_are_loaded_without_the_compiler(found: dict[str, Any]):
    assert found["not installed"] == ["_rms"]
    assert found["installed"] == []
    assert found["loaded"]


def test_other_variants_are_compiled(found: dict[str, Any]):
    assert found["another variant"] == ["_rms"]
    assert found["names"] == 2
    assert not found["options"]


@pytest.mark.parametrize("damage", ["other code", "other metadata"])
def test_a_corrupt_entry_is_compiled(found: dict[str, Any], damage: str):
    assert found[damage] == ["_rms"]
    assert found["intact"] == []


@pytest.mark.parametrize("case", ["another architecture", "another Triton", "other sources", "Triton is told how to compile"])
def test_kernels_of_other_origin_are_not_found(found: dict[str, Any], case: str):
    assert found[case]


def test_an_entry_names_nothing_of_the_machine_that_built_it(found: dict[str, Any]):
    assert found["files"] == [".cubin", ".json"]
    assert not found["paths"]
