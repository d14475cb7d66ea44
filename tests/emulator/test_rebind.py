"""Kernels as Python: names resolve in any module, and the kernels themselves are not modified."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tests.emulator.rebind import rebound

TWO = gl.constexpr(2)
KINDS = gl.constexpr((gl.int32, gl.float32))


@gluon.constexpr_function
def half(n):
    return n // TWO.value


@gluon.jit
def fetched(x):
    return gl.taken(x)


@gluon.jit
def helper(x, times: gl.constexpr = TWO):
    return fetched(x) * times


@gluon.jit
def kernel(x):
    return helper(x) + half(10), KINDS


def language(**names: Any) -> Any:
    return SimpleNamespace(int32="an int32", float32="a float32", **names)


def test_a_kernel_and_all_it_calls_speak_another_language():
    found, kinds = rebound(kernel, language(taken=lambda x: x + 1))(3)
    assert found == (3 + 1) * 2 + 5
    assert kinds == ("an int32", "a float32")


def test_a_stand_in_is_taken_wherever_its_name_is_called():
    assert rebound(kernel, language(), fetched=lambda x: 100)(3)[0] == 205


def test_programs_have_separate_bindings():
    first, second = (rebound(kernel, language(taken=lambda x, n=n: n)) for n in (1, 2))
    assert [each(0)[0] for each in (first, second, first)] == [7, 9, 7]


def test_the_kernel_itself_is_not_modified():
    before = dict(kernel.fn.__globals__)
    rebound(kernel, language(taken=lambda x: x), helper=lambda x: 0)(1)
    assert kernel.fn.__globals__ == before
    assert kernel.fn.__globals__["gl"] is gl


def test_an_instruction_that_is_not_emulated_fails():
    with pytest.raises(AttributeError, match="taken"):
        rebound(kernel, language())(1)
