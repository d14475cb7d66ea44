"""Kernel launches: `launch(kernel, grid)(*arguments, **options)` wherever Triton would have `kernel[grid](...)`.

Triton binds, types and specialises every argument of every call, which takes several times as long as the launch itself: short
prompts would wait for Python. Layers repeat each other, so a `Launcher` caches calls by a key at least as fine as Triton's
specialisation but quicker to compute, and passes addresses and numbers straight to the launch function of the compiled kernel.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.nvidia import compiler as nvidia_compiler
from triton.backends.nvidia.driver import CudaLauncher
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver
from triton.runtime.jit import DependenciesFinder, JITFunction

from auraflux.ops.gpu.device import launches_early
from auraflux.ops.gpu.dry_run import dry_run
from auraflux.ops.gpu.prebuilt import use_prebuilt

log = logging.getLogger("auraflux")

# version of Triton whose internals this module knows; with others, Triton launches
TRITON_VERSION = "3.6."
NUMBERS = {int, float, bool, str, type(None)}
Grid = tuple[int, ...]
NOTHING_CONSTANT: tuple[bool, ...] = ()  # for members of a tuple; looking up one that must be constant raises
MAX_CACHED = 4096  # cached calls per kernel


class Launch(NamedTuple):
    """A cached call: the function to call, its arguments between the stream and the kernel's own.

    retained  objects whose identity is part of the key
    """

    compiled: Any
    call: Any
    fixed: tuple[Any, ...]
    retained: list[Any]


def _print(*text: Any) -> None:
    """Log what Triton prints while it compiles: where ptxas fails, all of the kernel's PTX."""
    log.debug("%s", " ".join(str(each) for each in text))


nvidia_compiler.print = _print


def _hash_callees_first() -> None:
    """Make the key of a kernel in Triton's cache the same in all processes.

    Triton takes over the globals that a called function uses before it has looked for them, if it has not hashed that function
    earlier: the key of a kernel would depend on the kernels that were launched before it.
    """
    update = DependenciesFinder._update_hash

    def hashed_first(self: DependenciesFinder, func: Any) -> None:
        _ = func.cache_key
        update(self, func)

    DependenciesFinder._update_hash = hashed_first


_hash_callees_first()


def supported_options(named: dict[str, Any]) -> dict[str, Any]:
    """Return a launch's arguments and options without programmatic dependent launch where the GPU has none."""
    if "launch_pdl" in named and not _launches_early():
        del named["launch_pdl"]
    return named


@cache
def _launches_early() -> bool:
    # without a GPU nothing is launched
    gpus = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    return all(launches_early(gpu) for gpu in gpus)


class Launcher:
    """Launcher of one kernel, with a cache of calls."""

    def __init__(self, kernel: JITFunction):
        self._run, self._use_prebuilt = kernel.run, partial(use_prebuilt, kernel)
        self._names = [param.name for param in kernel.params]
        self._places = set(self._names)
        self._constant = [param.is_constexpr for param in kernel.params]
        self._defaults = {param.name: param.default for param in kernel.params if param.has_default}
        self._launches: dict[Any, Launch] = {}

    def __call__(self, grid: Grid, *args: Any, **named: Any) -> Any:
        active = driver.active
        device = active.get_current_device()
        named = supported_options(named)
        try:
            key, passed, retained = self._call(args, named, device)
            known = self._launches.get(key)
        except (IndexError, KeyError, TypeError):
            # Triton launches, or raises
            return self._run(*args, grid=grid, warmup=False, **named)
        if known is None or _profiled():
            self._use_prebuilt(device)
            compiled = self._run(*args, grid=grid, warmup=False, **named)
            if hasattr(compiled, "packed_metadata"):
                self._remember(key, Launch(compiled, *_launch_function(compiled), retained))
            return compiled
        x, y, z = (*grid, 1, 1)[:3]
        known.call(x, y, z, active.get_current_stream(device), *known.fixed, *passed)
        return known.compiled

    def _call(self, args: tuple[Any, ...], named: dict[str, Any], device: int) -> tuple[tuple[Any, ...], list[Any], list[Any]]:
        """Return the cache key of a call, never coarser than Triton's; the arguments passed on.

        Objects to retain for the key.
        """
        key: list[Any] = [device]
        retained: list[Any] = []
        rest = [named[name] if name in named else self._defaults[name] for name in self._names[len(args) :]]
        if len(args) + len(rest) > len(self._names):
            raise TypeError
        passed, pointers = _read((*args, *rest), self._constant, key, retained)
        # Triton specialises on addresses that are multiples of 16
        if pointers % 16:
            key += [each % 16 == 0 for each in _integers(passed)]
        for option in named.items():
            if option[0] not in self._places:
                key.append(option)
        return tuple(key), passed, retained

    def _remember(self, key: tuple[Any, ...], launch: Launch) -> None:
        if len(self._launches) == MAX_CACHED:
            self._launches.clear()
        self._launches[key] = launch


def _read(values: Sequence[Any], constant: Sequence[bool], key: list[Any], retained: list[Any]) -> tuple[list[Any], int]:
    """Add arguments to a key; return the arguments passed on, tuples as lists, and the bitwise or of all addresses."""
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
            retained.append(each.layout)
            give(each)
        elif isinstance(each, tuple):
            add(kind)
            add(len(each))
            its, addresses = _read(each, NOTHING_CONSTANT, key, retained)
            pointers |= addresses
            give(its)
        elif constant[len(passed)]:
            add(id(each))
            retained.append(each)
            give(each)
        else:
            raise TypeError
    return passed, pointers


def _integers(passed: Sequence[Any]) -> Iterator[int]:
    """Yield addresses and integers, including those in tuples."""
    for each in passed:
        if each.__class__ is int:
            yield each
        elif each.__class__ is list:
            yield from _integers(each)


_launchers: dict[int, Callable[..., Any]] = {}
_receiver: Callable[..., Any] | None = None


def launch(kernel: Any, grid: Grid) -> Callable[..., Any]:
    """Return a function that launches a grid of a kernel, with the arguments and options of Triton."""
    if _receiver is not None:
        return partial(_receiver, kernel, grid)
    # looked up by identity: a kernel's hash is that of its source
    found = _launchers.get(id(kernel))
    if found is None:
        found = _launchers[id(kernel)] = _launcher(kernel)
    return partial(found, grid)


@contextmanager
def redirect_launches(receiver: Callable[..., Any]) -> Iterator[None]:
    """Send all launches inside the block to a function of kernel, grid, arguments and options instead of a GPU."""
    global _receiver
    before, _receiver = _receiver, receiver
    try:
        with dry_run():
            yield
    finally:
        _receiver = before


def _launcher(kernel: Any) -> Callable[..., Any]:
    """Return a `Launcher`, or Triton's own launch where the kernel is interpreted or the version of Triton is unknown."""
    if triton.__version__.startswith(TRITON_VERSION) and isinstance(kernel, JITFunction):
        return Launcher(kernel)
    return lambda grid, *args, **named: kernel.run(*args, grid=grid, warmup=False, **supported_options(named))


_described: dict[Any, Any] = {}


def tensor_descriptor(x: Tensor, block: list[int], layout: Any) -> TensorDescriptor:
    """Return a TMA descriptor of a tensor in blocks; combinations that Triton has validated once are not validated again."""
    shape, strides = x.shape, x.stride()
    key = x.dtype, shape, strides, *block, id(layout)
    if key not in _described or x.data_ptr() % 16 or not triton.__version__.startswith(TRITON_VERSION):
        made = TensorDescriptor(x, list(shape), list(strides), block, layout)
        if len(_described) == MAX_CACHED:
            _described.clear()
        # retained, so that no other object gets its id
        _described[key] = layout
        return made
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides = x, shape, strides
    made.block_shape, made.layout, made.padding = block, layout, "zero"
    return made


def _launch_function(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the launch function of a compiled kernel and its leading arguments.

    The C function, unless Triton must allocate scratch.
    """
    run, nobody = compiled.run, (None, None, None)
    if isinstance(run, CudaLauncher) and not run.global_scratch_size and not run.profile_scratch_size:
        options = run.launch_cooperative_grid, run.launch_pdl, None, None
        return run.launch, (compiled.function, *options, compiled.packed_metadata, *nobody)
    return run, (compiled.function, compiled.packed_metadata, *nobody)


def _profiled() -> bool:
    """Return whether a profiler hooks launches."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)
