"""Launching a Triton kernel again without working out again which build of it is meant.

Triton binds, types and specialises every argument of every call, which takes several times as long as the launch itself: short
prompts would wait for Python. Layers repeat each other, so a `Launcher` keeps the builds of a kernel under what decides between
them, in terms that are quick to ask for, and hands the arguments straight to the build's own launcher.
"""

from typing import Any

import triton
from torch import Tensor
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# of Triton: how a build is launched is its own affair, so that other versions launch in their own way
KNOWN = "3.6."
# constants that are equal to others, and yet other constants
TRUTH = {True: "true", False: "false"}


class Unknown(Exception):
    """An argument of a type that is not looked for here."""


class Launcher:
    """Stands in for a kernel's `run`."""

    def __init__(self, kernel: JITFunction):
        self._run = kernel.run
        self._names = [param.name for param in kernel.params]
        self._places = set(self._names)
        self._constant = [param.is_constexpr for param in kernel.params]
        self._defaults = {param.name: param.default for param in kernel.params if param.has_default}
        self._builds: dict[Any, Any] = {}

    def __call__(self, *args: Any, grid: tuple[int, ...], warmup: bool, **named: Any) -> Any:
        device = driver.active.get_current_device()
        try:
            values = [*args, *[named[name] if name in named else self._defaults[name] for name in self._names[len(args) :]]]
            key = self._key(values, device, named)
            build = self._builds.get(key)
        except (KeyError, TypeError, ValueError, Unknown):
            # Triton knows what to do, or what to say
            return self._run(*args, grid=grid, warmup=warmup, **named)
        if build is None or warmup or _watched():
            build = self._run(*args, grid=grid, warmup=warmup, **named)
            if hasattr(build, "packed_metadata"):
                self._builds[key] = build
            return build
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        build.run(x, y, z, stream, build.function, build.packed_metadata, None, None, None, *values)
        return build

    def _key(self, values: list[Any], device: int, named: dict[str, Any]) -> tuple[Any, ...]:
        """Make what tells builds apart. It may tell apart more than Triton does, never less."""
        key: list[Any] = [device]
        add, pointers = key.append, 0
        for each, constant in zip(values, self._constant, strict=True):
            kind = each.__class__
            if constant:
                add(TRUTH[each] if kind is bool else (each,) if kind is float else each)
            elif kind is Tensor:
                add(each.dtype)
                pointers |= each.data_ptr()
            elif kind is int:
                add(_number(each))
            elif kind is TensorDescriptor:
                key += each.base.dtype, *each.block_shape, each.layout, each.padding
            elif each is None or kind is float or kind is bool:
                add(kind)
            else:
                raise Unknown
        if pointers % 16:
            key += [each.data_ptr() % 16 == 0 for each in values if each.__class__ is Tensor]
        for option in named.items():
            if option[0] not in self._places:
                add(option)
        return tuple(key)


def _number(n: int) -> str:
    """What Triton knows of an integer: it makes a constant of 1, and uses that others are multiples of 16."""
    if -(1 << 31) <= n < 1 << 31:
        return "16 n" if n % 16 == 0 else "1" if n == 1 else "n"
    return "wide 16 n" if n % 16 == 0 else "wide n"


def _watched() -> bool:
    """Whether a profiler wants to hear of launches."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


def quicken(kernel: Any) -> None:
    """Have a kernel launched by a `Launcher` from now on; interpreted ones stay as they are."""
    if triton.__version__.startswith(KNOWN) and isinstance(kernel, JITFunction) and not isinstance(kernel.run, Launcher):
        kernel.run = Launcher(kernel)
