"""Launching kernels: `launch(kernel, grid)(*arguments, **options)` wherever Triton would have `kernel[grid](...)`.

Triton binds, types and specialises every argument of every call, which takes several times as long as the launch itself: short
prompts would wait for Python. Layers repeat each other, so a `Launcher` remembers calls by what decides between builds and
more, in terms that are quick to ask for, and hands addresses and numbers straight to what Triton made to launch a build.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# of Triton: how a build is launched is its own affair, so that other versions launch in their own way
KNOWN = "3.6."
NUMBERS = {int, float, bool, str, type(None)}
Grid = tuple[int, ...]
NOTHING_CONSTANT: tuple[bool, ...] = ()  # of what is in a tuple; asked for something else, it raises
MOST = 4096  # calls of a kernel that are remembered


class Launch(NamedTuple):
    """How a call is made again: what is called, with what between grid and stream and the arguments.

    kept  what the call is told apart from others by the identity of
    """

    build: Any
    call: Any
    fixed: tuple[Any, ...]
    kept: list[Any]


class Launcher:
    """Launches one kernel."""

    def __init__(self, kernel: JITFunction):
        self._run = kernel.run
        self._names = [param.name for param in kernel.params]
        self._places = set(self._names)
        self._constant = [param.is_constexpr for param in kernel.params]
        self._defaults = {param.name: param.default for param in kernel.params if param.has_default}
        self._launches: dict[Any, Launch] = {}

    def __call__(self, grid: Grid, *args: Any, **named: Any) -> Any:
        active = driver.active
        device = active.get_current_device()
        try:
            key, passed, kept = self._call(args, named, device)
            known = self._launches.get(key)
        except (IndexError, KeyError, TypeError):
            # Triton knows what to do, or what to say
            return self._run(*args, grid=grid, warmup=False, **named)
        if known is None or _watched():
            build = self._run(*args, grid=grid, warmup=False, **named)
            if hasattr(build, "packed_metadata"):
                self._remember(key, Launch(build, *_way(build), kept))
            return build
        x, y, z = (*grid, 1, 1)[:3]
        known.call(x, y, z, active.get_current_stream(device), *known.fixed, *passed)
        return known.build

    def _call(self, args: tuple[Any, ...], named: dict[str, Any], device: int) -> tuple[tuple[Any, ...], list[Any], list[Any]]:
        """Make what tells calls apart, never less than Triton does; what is passed on; what must be kept for that."""
        key: list[Any] = [device]
        kept: list[Any] = []
        rest = [named[name] if name in named else self._defaults[name] for name in self._names[len(args) :]]
        if len(args) + len(rest) > len(self._names):
            raise TypeError
        passed, pointers = _read((*args, *rest), self._constant, key, kept)
        # Triton uses that addresses are multiples of 16
        if pointers % 16:
            key += [each % 16 == 0 for each in _integers(passed)]
        for option in named.items():
            if option[0] not in self._places:
                key.append(option)
        return tuple(key), passed, kept

    def _remember(self, key: tuple[Any, ...], launch: Launch) -> None:
        if len(self._launches) == MOST:
            self._launches.clear()
        self._launches[key] = launch


def _read(values: Sequence[Any], constant: Sequence[bool], key: list[Any], kept: list[Any]) -> tuple[list[Any], int]:
    """Add arguments to a key; give what is passed on, tuples as lists, and all addresses in one number."""
    passed: list[Any] = []
    add, give, pointers = key.append, passed.append, 0
    for each in values:
        kind = each.__class__
        if kind is Tensor:
            address = each.data_ptr()
            pointers |= address
            add(each.dtype)
            give(address)
        elif kind in NUMBERS:
            # 1, 1.0 and True are equal
            add(kind)
            add(each)
            give(each)
        elif kind is TensorDescriptor:
            key += each.base.dtype, *each.block_shape, id(each.layout), each.padding
            kept.append(each.layout)
            give(each)
        elif isinstance(each, tuple):
            add(kind)
            add(len(each))
            its, addresses = _read(each, NOTHING_CONSTANT, key, kept)
            pointers |= addresses
            give(its)
        elif constant[len(passed)]:
            add(id(each))
            kept.append(each)
            give(each)
        else:
            raise TypeError
    return passed, pointers


def _integers(passed: Sequence[Any]) -> Iterator[int]:
    """Addresses and whole numbers, also those in tuples."""
    for each in passed:
        if each.__class__ is int:
            yield each
        elif each.__class__ is list:
            yield from _integers(each)


_launchers: dict[int, Callable[..., Any]] = {}
_receiver: Callable[..., Any] | None = None


def launch(kernel: Any, grid: Grid) -> Callable[..., Any]:
    """Give what launches so many programs of a kernel, with the arguments and options of Triton."""
    if _receiver is not None:
        return partial(_receiver, kernel, grid)
    # found by its identity: a kernel's hash is that of its source
    found = _launchers.get(id(kernel))
    if found is None:
        found = _launchers[id(kernel)] = _launcher(kernel)
    return partial(found, grid)


@contextmanager
def diverted(receiver: Callable[..., Any]) -> Iterator[None]:
    """Have all launches inside the block go to a function of kernel, grid, arguments and options instead of a GPU."""
    global _receiver
    before, _receiver = _receiver, receiver
    try:
        yield
    finally:
        _receiver = before


def _launcher(kernel: Any) -> Callable[..., Any]:
    """A `Launcher`, or Triton's own way where the kernel is interpreted or the version of Triton is another."""
    if triton.__version__.startswith(KNOWN) and isinstance(kernel, JITFunction):
        return Launcher(kernel)
    return lambda grid, *args, **named: kernel.run(*args, grid=grid, warmup=False, **named)


_described: dict[Any, Any] = {}


def described(x: Tensor, block: list[int], layout: Any) -> TensorDescriptor:
    """Describe a tensor to TMA, in blocks. What Triton has found right once it does not look at again."""
    shape, strides = x.shape, x.stride()
    key = x.dtype, shape, strides, *block, id(layout)
    if key not in _described or x.data_ptr() % 16 or not triton.__version__.startswith(KNOWN):
        made = TensorDescriptor(x, list(shape), list(strides), block, layout)
        if len(_described) == MOST:
            _described.clear()
        # kept, so that no other has its identity
        _described[key] = layout
        return made
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides = x, shape, strides
    made.block_shape, made.layout, made.padding = block, layout, "zero"
    return made


def _way(build: Any) -> tuple[Any, tuple[Any, ...]]:
    """What launches a build, and what it takes before the kernel's arguments: a C function, unless Triton must find memory."""
    run, nobody = build.run, (None, None, None)
    if isinstance(run, CudaLauncher) and not run.global_scratch_size and not run.profile_scratch_size:
        options = run.launch_cooperative_grid, run.launch_pdl, None, None
        return run.launch, (build.function, *options, build.packed_metadata, *nobody)
    return run, (build.function, build.packed_metadata, *nobody)


def _watched() -> bool:
    """Whether a profiler wants to hear of launches."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)
