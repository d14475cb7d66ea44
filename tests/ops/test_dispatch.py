"""Dispatch of calls to kernels: by device or forced, with logged fallback, and never past a check."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from auraflux.errors import BackendError, InputError
from auraflux.ops import _dispatch, attention, clamped_swiglu, linears, rms_norm
from auraflux.ops._dispatch import Op, check_dense, check_dtype, check_shape, exact, is_exact, use_backend
from auraflux.ops.attention.pages import KVPages

KERNEL = "def double(x):\n    return x * 20\n"
DECLINING = """
from auraflux.ops._dispatch import Declined

def double(x):
    if len(x) > 2:
        raise Declined(f"{len(x)} elements are too many")
    return x * 20
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make an op `double` in a separate family, with kernels from source. The real ops do not see it.

    The reference returns 2x, a kernel 20x, so that a result shows which one ran.
    """
    monkeypatch.setattr(_dispatch, "OPS", {})
    (tmp_path / "toys").mkdir()
    (tmp_path / "toys" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def made(check: Callable[..., None] | None = None, **kernels: str) -> Op:
        for backend, source in kernels.items():
            (tmp_path / "toys" / f"{backend}.py").write_text(source)

        def double(x: Tensor) -> Tensor:
            """Twice."""
            return x * 2

        double.__module__ = "toys.reference"
        return _dispatch.op(origins=("twice",), check=check)(double)

    yield made
    for name in [name for name in sys.modules if name.partition(".")[0] == "toys"]:
        del sys.modules[name]


def factor(op: Op, n: int = 1) -> float:
    return op(torch.ones(n))[0].item()


def test_the_device_of_the_first_argument_chooses(make):
    op = make(cpu=KERNEL)
    assert factor(op) == 20
    assert op(x=torch.ones(1)).item() == 20
    assert op(torch.ones(3, device="meta")).shape == (3,)
    assert op.backends() == ["reference", "cpu"]


def test_a_block_forces_a_backend(make):
    op = make(cpu=KERNEL, cuda=KERNEL.replace("20", "200"))
    with use_backend("reference"):
        assert factor(op) == 2
        with use_backend("cuda"):
            assert factor(op) == 200
        assert factor(op) == 2
    assert factor(op) == 20


def test_a_block_left_by_an_error_forces_no_longer(make):
    op = make(cpu=KERNEL)
    with pytest.raises(KeyError), use_backend("reference"):
        raise KeyError
    assert factor(op) == 20


def test_an_unknown_backend_is_refused(make):
    op = make(cpu=KERNEL)
    message = "unknown backend 'metal'. Choose one of: reference, cpu, cuda"
    with pytest.raises(BackendError, match=message), use_backend("metal"):
        pytest.fail("the block ran")
    assert factor(op) == 20


def test_the_environment_forces_a_backend():
    # the refusal of other names is tested in tests/cli/test_main.py
    code = """if True:
        import sys, torch
        from auraflux.ops.norm.reference import rms_norm
        rms_norm(torch.ones(1, 4), torch.ones(4), 1e-6)
        print("auraflux.ops.norm.cpu" in sys.modules)
    """
    environment = {**_dispatch.os.environ, "AURAFLUX_BACKEND": "reference"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_a_kernel_that_declines_leaves_the_call_to_the_reference(make, caplog):
    op = make(cpu=DECLINING)
    with caplog.at_level(logging.WARNING, "auraflux"):
        assert [factor(op, n) for n in (2, 3, 3, 4, 3, 2)] == [20, 2, 2, 2, 2, 20]
    assert op.declined == {"cpu": {"3 elements are too many", "4 elements are too many"}}
    assert caplog.messages == [
        f"double: the cpu kernel declined ({n} elements are too many); the reference runs instead" for n in (3, 4)
    ]


def test_other_errors_of_a_kernel_are_not_hidden(make):
    op = make(cpu="def double(x):\n    raise RuntimeError('out of luck')\n")
    with pytest.raises(RuntimeError, match="out of luck"):
        factor(op)
    assert op.declined == {}


def test_no_kernel_file_means_the_reference(make, caplog):
    op = make()
    assert factor(op) == 2
    assert op.backends() == ["reference"]
    assert (op.declined, caplog.messages) == ({}, [])


def test_a_kernel_file_without_the_op_means_the_reference(make):
    op = make(cpu="def triple(x):\n    return x * 30\n")
    assert factor(op) == 2
    assert op.kernel("cpu") is None


@pytest.mark.parametrize("compiler", ["numba", "triton"])
def test_a_missing_compiler_means_the_reference_and_is_noted(make, caplog, monkeypatch, compiler):
    monkeypatch.setitem(sys.modules, compiler, None)
    op = make(cpu=f"import {compiler}\n{KERNEL}")
    with caplog.at_level(logging.WARNING, "auraflux"):
        assert [factor(op), factor(op)] == [2, 2]
    assert op.declined == {"cpu": {f"{compiler} is not installed"}}
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("import no_such_module\n", ModuleNotFoundError, "no_such_module"),
        ("import toys.missing\n", ModuleNotFoundError, "toys.missing"),
        ("from math import no_such_name\n", ImportError, "no_such_name"),
        ("import toys.cuda\n", ZeroDivisionError, "division by zero"),
        ("def double(x:\n", SyntaxError, "was never closed"),
    ],
)
def test_any_other_import_failure_raises_every_time(make, source, error, message):
    op = make(cpu=source + KERNEL, cuda="1 / 0\n")
    for _ in range(2):
        with pytest.raises(error, match=message):
            factor(op)


def test_a_kernel_is_looked_up_once(make, tmp_path):
    op = make(cpu=KERNEL)
    assert factor(op) == 20
    (tmp_path / "toys" / "cpu.py").unlink()
    del sys.modules["toys.cpu"]
    assert factor(op) == 20


def test_a_check_stands_before_every_backend(make):
    def check(x: Tensor) -> None:
        check_shape("x", x, 1)

    op = make(check, cpu=KERNEL)
    for backend in ("reference", "cpu"):
        with use_backend(backend):
            assert op(torch.ones(1)).item() in (2, 20)
            with pytest.raises(InputError, match=r"'x' has shape \[2\]; \[1\] is needed"):
                op(torch.ones(2))


def test_an_op_shows_what_it_is(make):
    op = make()
    assert repr(op) == "<op toys.double>"
    assert (op.name, op.family, op.origins, op.__doc__) == ("double", "toys", ("twice",), "Twice.")
    assert {"double": op} == _dispatch.OPS


def test_two_ops_of_one_name_are_refused(make):
    make()
    with pytest.raises(ValueError, match=r"two ops are named 'double': <op toys\.double> and <op toys\.double>"):
        make()


def test_exact_nests_and_ends_with_its_block():
    assert not is_exact()
    with exact():
        assert is_exact()
        with exact(False):
            assert not is_exact()
            with pytest.raises(KeyError), exact():
                raise KeyError
            assert not is_exact()
        assert is_exact()
    assert not is_exact()


def test_check_dense_names_the_tensor():
    x, absent = torch.ones(2, 3), None
    check_dense(x=x, bias=absent, y=x)
    with pytest.raises(InputError, match=r"'y' \(3, 2\) is not contiguous \(strides \(1, 3\)\)"):
        check_dense(x=x, y=x.T)
    with pytest.raises(InputError, match="'y' is on meta, the first argument on cpu"):
        check_dense(bias=absent, x=x, y=x.to("meta"))


def test_check_shape_names_the_tensor():
    x = torch.ones(2, 3)
    check_shape("x", x, 2, 3)
    check_shape("x", x, None, 3)
    with pytest.raises(InputError, match=r"'x' has shape \[2, 3\]; \[any, 4\] is needed"):
        check_shape("x", x, None, 4)
    with pytest.raises(InputError, match=r"'x' has shape \[2, 3\]; \[2\] is needed"):
        check_shape("x", x, 2)
    with pytest.raises(InputError, match=r"'x' has shape \[2, 3\]; \[\] is needed"):
        check_shape("x", x)


def test_check_dtype_names_the_tensor():
    x = torch.ones(2, dtype=torch.int64)
    check_dtype("x", x, torch.int32, torch.int64)
    with pytest.raises(InputError, match="'x' has dtype int64; int32 is needed"):
        check_dtype("x", x, torch.int32)
    with pytest.raises(InputError, match="'x' has dtype int64; float32 or bfloat16 is needed"):
        check_dtype("x", x, torch.float32, torch.bfloat16)


def test_arguments_of_another_kind_are_refused_before_the_check(make):
    def check(x: Tensor) -> None:
        check_shape("x", x, 1)

    op = make(check, cpu=KERNEL)
    for wrong, said in ((3, "'x' is 3"), ("a\n", r"'x' is 'a\\n'"), (None, "'x' is None"), ([1], "'x' is a list of 1")):
        for _ in range(2):
            with pytest.raises(InputError, match=f"^double: {said}; a tensor is needed"):
                op(wrong)
    with pytest.raises(InputError, match=r"double: too many positional arguments. Its arguments are: x\."):
        op(torch.ones(1), 2)
    with pytest.raises(InputError, match="missing a required argument: 'x'"):
        op()
    assert op(torch.ones(1)).item() == op(x=torch.ones(1)).item() == 20


def test_elements_of_lists_are_checked_too():
    x, weight = torch.ones(1, 8), torch.ones(4, 8)
    for _ in range(2):
        assert len(linears(x, [weight, weight])) == 2
        with pytest.raises(
            InputError, match=r"linears: 'weights' is a list of 2; a sequence, each QTensor or a tensor, is needed"
        ):
            linears(x, [weight, 2.0])
    for wrong in (True, "1", None, 2j):
        with pytest.raises(InputError, match=r"rms_norm: 'eps' is .*; a number is needed"):
            rms_norm(x, torch.ones(8), wrong)
    assert rms_norm(x, torch.ones(8), 0).shape == x.shape


def test_a_check_that_fails_and_a_number_without_room_are_one_sentence(make):
    with pytest.raises(InputError, match="double: inconsistent arguments: tuple index out of range"):
        make(lambda x: check_shape("x", x, x.shape[5]))(torch.ones(1))
    heads, index = torch.ones(1, 1, 8), torch.zeros(1, 1, dtype=torch.int32)
    pages = KVPages(heads[None], heads[None], index, index[0] + 1)
    with pytest.raises(InputError, match="attention: 'window' is an integer of 100 bits"):
        attention(heads, pages, torch.tensor([0, 1]).int(), 1.0, window=10**30)
    with use_backend("reference"), pytest.raises(InputError, match="clamped_swiglu: a number is too large: "):
        clamped_swiglu(heads, heads, 1.0, 1e300)
